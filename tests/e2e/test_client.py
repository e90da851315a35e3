"""The command line and the clients, as a user's scripts call them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dragoman_client import AsyncClient, Client, DragomanError, Translation
from tests.e2e.server_process import ServerProcess
from tests.reversal import reverse, sentences

PAIR: dict[str, Any] = {"source": "fwd", "target": "rev"}


def dragoman(server: ServerProcess, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dragoman_client", "translate", "--source", "fwd", "--target", "rev"]
    return subprocess.run(
        [*command, "--server", server.address, *arguments],
        input=text, capture_output=True, text=True, encoding="utf-8", timeout=60, check=False,
    )  # fmt: skip


def test_texts_on_the_command_line(server: ServerProcess) -> None:
    result = dragoman(server, "ba be", "da")
    assert (result.returncode, result.stdout, result.stderr) == (0, "be ba\nda\n", "")


def test_a_pipe_gives_a_line_for_every_line(server: ServerProcess) -> None:
    texts = sentences(300, seed=51)
    lines = [text for group in zip(texts, ["", " "] * 150, strict=True) for text in group]
    result = dragoman(server, text="\n".join(lines) + "\n")
    assert result.returncode == 0
    expected = subprocess_free_reference(server, texts)
    assert result.stdout.split("\n") == [line for text in expected for line in (text, "")] + [""]


def subprocess_free_reference(server: ServerProcess, texts: list[str]) -> list[str]:
    with Client(server.address) as client:
        return [translation.text for translation in client.translate_batch(texts, **PAIR)]


def test_a_file_becomes_a_file(server: ServerProcess, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("ba be\r\nda\n", encoding="utf-8")
    result = dragoman(server, "--input", str(source), "--output", str(target))
    assert (result.returncode, result.stdout) == (0, "")
    assert target.read_text(encoding="utf-8") == "be ba\nda\n"


def test_json_says_everything_and_errors_keep_their_line(server: ServerProcess) -> None:
    result = dragoman(server, "--json", "--no-split", text="ba be\n\n" + "ba " * 100 + "\nda\n")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 1
    assert [row["line"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["text"] == "be ba"
    assert rows[0]["finish_reason"] == "eos"
    assert (rows[0]["model"], rows[0]["model_version"]) == ("reversal", "1")
    assert rows[2]["code"] == "INVALID_ARGUMENT"
    assert "line 3: texts[0] has more than 64 tokens" in result.stderr
    assert rows[3]["text"] == "da"


def test_exit_codes(server: ServerProcess, tmp_path: Path) -> None:
    assert dragoman(server, "--input", str(tmp_path / "missing")).returncode == 2
    assert dragoman(server, "ba", "--input", __file__).returncode == 2
    unreachable = dragoman(server, "--server", "localhost:1", "ba")
    assert unreachable.returncode == 1
    assert unreachable.stderr.startswith("line 1: ")


def test_bytes_that_are_not_utf8_are_an_error(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"ba\ncaf\xe9\n")
    result = dragoman(server, "--input", str(path))
    assert result.returncode == 1
    assert "not UTF-8" in result.stderr


def test_the_input_is_never_overwritten(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("ba be\n", encoding="utf-8")
    assert dragoman(server, "--input", str(path), "--output", str(path)).returncode == 2
    assert path.read_text(encoding="utf-8") == "ba be\n"


def test_a_silent_pipe_does_not_hold_back_what_was_read(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "dragoman_client", "translate", "--source", "fwd", "--target", "rev"]
    with subprocess.Popen(
        [*command, "--server", server.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in ("ba be", "da du"):
            process.stdin.write(text + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == reverse(text) + "\n"
        process.stdin.close()
        assert process.wait(timeout=10) == 0


def test_models_command(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "dragoman_client", "models", "--server", server.address]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    assert result.stdout == "reversal\tversion 1\tfwd→rev\tcpu-int8\tstable\n"


async def test_a_stream_reads_no_further_ahead_than_its_concurrency(server: ServerProcess) -> None:
    taken = 0

    def texts() -> Iterator[str]:
        nonlocal taken
        for text in sentences(100, seed=61):
            taken += 1
            yield text

    async with AsyncClient(server.address) as client:
        results: list[Translation | DragomanError] = []
        async for result in client.translate_many(texts(), concurrency=8, **PAIR):
            results.append(result)
            assert taken <= len(results) + 8
    assert len(results) == 100


async def test_leaving_a_stream_early_cancels_the_rest(server: ServerProcess) -> None:
    async with AsyncClient(server.address) as client:
        stream = client.translate_many(sentences(50, seed=71), concurrency=50, **PAIR)
        first = await anext(stream)
        await stream.aclose()
        assert isinstance(first, Translation)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


def test_the_sync_client_is_shared_by_threads(server: ServerProcess) -> None:
    texts = ["ba be", "da", "ki ko ka"] * 20
    with Client(server.address) as client, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda text: client.translate(text, **PAIR).text, texts))
    assert results == [reverse(text) for text in texts]


@pytest.mark.parametrize("command", ["dragoman_client", "dragoman_export", "dragoman_server"])
def test_help_shows_defaults_and_a_wrong_flag_is_exit_code_2(command: str) -> None:
    call = [sys.executable, "-m", command]
    assert subprocess.run([*call, "--help"], capture_output=True, check=True).stdout
    assert subprocess.run([*call, "--no-such-flag"], capture_output=True, check=False).returncode == 2


@pytest.mark.parametrize("command", ["train", "evaluate", "export", "quantize", "verify"])
def test_every_export_command_has_help(command: str) -> None:
    call = [sys.executable, "-m", "dragoman_export", command, "--help"]
    assert subprocess.run(call, capture_output=True, check=True).stdout


def test_export_commands_fail_with_1_and_a_message(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "dragoman_export", "verify", str(tmp_path)]
    result = subprocess.run(call, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "manifest.json cannot be read" in result.stderr
