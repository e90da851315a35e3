"""A real server as its operators see it: overload, faults, versions, signals, logs."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman_bundle.bundle import Bundle
from dragoman_bundle.manifest import MANIFEST
from dragoman_client import (
    AsyncClient,
    DeadlineUnreachableError,
    DecodingOptions,
    DragomanError,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServerError,
)
from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from tests.e2e.server_process import ServerProcess, running_server
from tests.e2e.test_server import PAIR, a_request, endless_model, until_running
from tests.reversal import sentences

WHOLE = DecodingOptions(max_target_tokens=3000)


@pytest.fixture
def versions(reversal_models: Path, tmp_path: Path) -> Path:
    """A repository with two good versions, of which the first is stable, and one that answers wrongly."""
    for version in ("1", "2", "3"):
        shutil.copytree(reversal_models / "reversal" / "1", tmp_path / "reversal" / version)
    path = tmp_path / "reversal" / "3" / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["variants"][1]["goldens"][0]["token_ids"][0] += 1
    path.write_text(json.dumps(manifest), encoding="utf-8")
    (tmp_path / "reversal" / "routing.toml").write_text('stable = "1"\n')
    return tmp_path


async def test_one_callers_flood_does_not_starve_another(reversal_models: Path) -> None:
    options = ("--slots", "1", "--max-hypotheses", "1", "--max-waiting", "40")
    texts = sentences(200, seed=3, shortest=8, longest=12)
    with running_server(reversal_models, *options) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = pb_grpc.TranslationServiceStub(channel)

            async def call(text: str, caller: str) -> tuple[str, float]:
                begun = time.monotonic()
                try:
                    answer = await stub.Translate(a_request(text), metadata=(("x-dragoman-caller", caller),))
                    assert answer.translations[0].text
                except grpc.aio.AioRpcError as error:
                    return error.code().name, time.monotonic() - begun
                return "OK", time.monotonic() - begun

            async def flood() -> list[tuple[str, float]]:
                return [
                    outcome for _ in range(3) for outcome in await asyncio.gather(*(call(t, "flood") for t in texts))
                ]

            flooding = asyncio.create_task(flood())
            light = []
            while not flooding.done():
                light.append(await call(texts[0], "light"))
            flooded = Counter(code for code, _ in await flooding)
        page = server.metrics()
    assert {code for code, _ in light} == {"OK"}, "the light caller was refused"
    assert set(flooded) == {"OK", "RESOURCE_EXHAUSTED"}
    assert 'dragoman_errors_total{reason="QUEUE_FULL"}' in page


async def test_a_full_line_says_which_bound_it_was_and_when_to_come_again(
    reversal_bundle: Bundle, tmp_path: Path
) -> None:
    models = endless_model(reversal_bundle, tmp_path)
    with running_server(models, "--slots", "1", "--max-hypotheses", "1", "--max-waiting-tokens", "20") as server:
        async with AsyncClient(server.address) as client:
            long = asyncio.create_task(client.translate("ba be", options=WHOLE, **PAIR))
            await until_running(server)
            waiting = [asyncio.create_task(client.translate("ba be bi", options=WHOLE, **PAIR)) for _ in range(8)]
            done, _ = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            error = done.pop().exception()
            assert isinstance(error, OverloadedError)
            assert (error.reason, error.facts.quota) == ("QUEUE_FULL", "tokens")
            assert error.retry_after is not None
            with pytest.raises(OverloadedError, match="split it") as hopeless:
                await client.translate_batch(["ba be bi bo"] * 9, **PAIR)
            assert hopeless.value.retry_after is None
            for task in (long, *waiting):
                task.cancel()


async def test_a_deadline_that_the_queue_makes_impossible_is_refused_on_arrival(
    reversal_bundle: Bundle, tmp_path: Path
) -> None:
    models = endless_model(reversal_bundle, tmp_path)
    with running_server(models, "--slots", "1", "--max-hypotheses", "1") as server:
        async with AsyncClient(server.address) as client:
            # The pace is learnt: some texts, and others that have to wait.
            short = DecodingOptions(max_target_tokens=200)
            await asyncio.gather(*(client.translate("ba be", options=short, **PAIR) for _ in range(20)))
            crowd = [
                asyncio.create_task(client.translate("ba " * 15, options=WHOLE, timeout=60, **PAIR)) for _ in range(200)
            ]
            await until_running(server)
            await asyncio.sleep(0.3)
            begun = time.monotonic()
            with pytest.raises(DeadlineUnreachableError) as caught:
                await client.translate("ba be bi", timeout=0.4, **PAIR)
            assert time.monotonic() - begun < 0.4
            facts = {name: float(value) for name, value in caught.value.facts.metadata.items()}
            assert facts["wait_seconds"] + facts["decode_seconds"] > facts["remaining_seconds"]
            for task in crowd:
                task.cancel()


def answers_of(results: list[Any]) -> Counter[str]:
    return Counter(result if isinstance(result, str) else result.model_version for result in results)


async def test_versions_are_swapped_under_full_load_without_a_failed_request(versions: Path) -> None:
    texts = sentences(50, seed=5, shortest=1, longest=12)
    alone: dict[str, str] = {}
    results: list[Any] = []
    stop = asyncio.Event()

    async def caller(client: AsyncClient, number: int) -> None:
        while not stop.is_set():
            text = texts[(number + len(results)) % len(texts)]
            try:
                translation = await client.translate(text, **PAIR)
                assert translation.text == alone[text]
                results.append(translation)
            except DragomanError as error:
                results.append(f"{type(error).__name__}: {error}")

    with running_server(versions, "--admin") as server:
        async with AsyncClient(server.address, timeout=30) as client:
            alone |= {text: (await client.translate(text, **PAIR)).text for text in texts}
            callers = [asyncio.create_task(caller(client, number)) for number in range(32)]
            await asyncio.sleep(0.3)
            loaded = await client.admin.load("reversal", "2", make_stable=True)
            assert (loaded.labels, loaded.traffic_share) == (("stable",), 1.0)
            await client.admin.unload("reversal", "1")
            seen = len(results)
            await asyncio.sleep(0.3)
            stop.set()
            await asyncio.gather(*callers)
            assert [m.version for m in await client.models()] == ["2"]
        page = server.metrics()
    assert set(answers_of(results)) == {"1", "2"}
    assert set(answers_of(results[seen + 32 :])) == {"2"}
    assert 'version="2"' in page
    assert 'version="1"' not in page, "the series of an unloaded version must go"


async def test_a_canary_gets_its_share_and_who_names_a_version_gets_that(versions: Path) -> None:
    with running_server(versions, "--admin") as server:
        async with AsyncClient(server.address) as client:
            await client.admin.load("reversal", "2")
            assert (await client.translate("ba be", **PAIR)).model_version == "1"
            await client.admin.route("reversal", stable="1", canary="2", canary_share=0.25)
            results = await asyncio.gather(*(client.translate("ba be", **PAIR) for _ in range(400)))
            share = answers_of(list(results))["2"] / 400
            assert 0.15 < share < 0.35, "more than four standard deviations off"
            for version, expected in (("canary", "2"), ("stable", "1"), ("2", "2")):
                assert (await client.translate("ba", model=f"reversal@{version}", **PAIR)).model_version == expected
            described = {m.version: (m.labels, m.traffic_share) for m in await client.models()}
            assert described == {"1": (("stable",), 0.75), "2": (("canary",), 0.25)}
            with pytest.raises(NotFoundError, match="no version '9' loaded; it has 1, 2"):
                await client.translate("ba", model="reversal@9", **PAIR)


async def test_changes_that_make_no_sense_are_refused_and_change_nothing(versions: Path) -> None:
    with running_server(versions, "--admin") as server:
        async with AsyncClient(server.address) as client:
            with pytest.raises(FailedPreconditionError, match="golden request") as refused:
                await client.admin.load("reversal", "3", make_stable=True)
            assert refused.value.reason == "BUNDLE_REFUSED"
            with pytest.raises(FailedPreconditionError, match="loaded already"):
                await client.admin.load("reversal", "1")
            for name, version in (("reversal", "9"), ("other", ""), ("..", ".."), ("reversal/1", "")):
                with pytest.raises(NotFoundError, match="the repository has no version"):
                    await client.admin.load(name, version)
            with pytest.raises(InvalidRequestError) as caught:
                await client.admin.route("reversal", stable="9", canary="8", canary_share=2)
            assert len(caught.value.problems) == 3
            await client.admin.load("reversal", "2")
            with pytest.raises(FailedPreconditionError, match="the stable one"):
                await client.admin.unload("reversal", "1")
            entries = [(e.version, e.is_loaded) for e in await client.admin.repository()]
            assert entries == [("1", True), ("2", True), ("3", False)]
            assert (await client.translate("ba be", **PAIR)).model_version == "1"


async def test_the_last_version_can_go_and_come_back(versions: Path) -> None:
    with running_server(versions, "--admin") as server:
        async with AsyncClient(server.address) as client:
            await client.admin.unload("reversal", "1")
            with pytest.raises(NotFoundError, match="no model translates fwd→rev"):
                await client.translate("ba", **PAIR)
            await client.admin.load("reversal", "1")
            assert (await client.translate("ba be", **PAIR)).text == "be ba"


async def test_admin_calls_are_off_by_default(server: ServerProcess) -> None:
    async with AsyncClient(server.address) as client:
        with pytest.raises(ServerError) as caught:
            await client.admin.repository()
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


def test_a_routing_file_that_makes_no_sense_is_explained(versions: Path) -> None:
    (versions / "reversal" / "routing.toml").write_text('canary = 5\ncanary_share = "x"\nstabel = "1"\n')
    with pytest.raises(AssertionError) as caught, running_server(versions):
        pass
    for problem in ("stabel is not a setting", "canary has the wrong type", "canary_share has", "stable is missing"):
        assert problem in str(caught.value)


async def test_a_second_signal_stops_at_once(reversal_bundle: Bundle, tmp_path: Path) -> None:
    with running_server(endless_model(reversal_bundle, tmp_path)) as server:
        async with AsyncClient(server.address) as client:
            long = asyncio.create_task(
                client.translate("ba be", options=DecodingOptions(max_target_tokens=5000), **PAIR)
            )
            await until_running(server)
            server.process.send_signal(signal.SIGTERM)
            while "stopping" not in server.log():
                await asyncio.sleep(0.01)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait, 5) == 1
            with pytest.raises(DragomanError):
                await long


async def test_the_log_knows_calls_by_their_id_and_never_their_text(reversal_models: Path) -> None:
    with running_server(reversal_models, "--log-format", "json", "--log-requests") as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = pb_grpc.TranslationServiceStub(channel)
            call = stub.Translate(a_request("ba be bi"), metadata=(("x-request-id", "abc-1"),))
            await call
            assert dict(await call.trailing_metadata())["x-request-id"] == "abc-1"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Translate(
                    a_request("ba be bi", target_language="xx"), metadata=(("x-request-id", "bad id"),)
                )
            [made_up] = [value for key, value in caught.value.trailing_metadata() if key == "x-request-id"]
        server.stop()
        lines = [json.loads(line) for line in server.log().splitlines()]
    calls = [line for line in lines if "method" in line]
    assert [(line["request_id"], line["code"], line["model"]) for line in calls] == [
        ("abc-1", "OK", "reversal"),
        (made_up, "NOT_FOUND", ""),
    ]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert "ba be" not in server_log_text(lines)


def server_log_text(lines: list[dict[str, Any]]) -> str:
    return json.dumps(lines, ensure_ascii=False)


async def test_a_message_above_the_bound_is_refused_unread(reversal_models: Path) -> None:
    with running_server(reversal_models, "--max-message-bytes", "2000") as server:
        async with AsyncClient(server.address) as client:
            with pytest.raises(InvalidRequestError, match="larger than max"):
                await client.translate("ba " * 1000, **PAIR)
            assert (await client.translate("ba be", **PAIR)).text == "be ba"


async def test_a_client_that_never_reads_its_stream_hinders_nobody(reversal_bundle: Bundle, tmp_path: Path) -> None:
    with running_server(endless_model(reversal_bundle, tmp_path), "--instances", "1") as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = pb_grpc.TranslationServiceStub(channel)
            request = a_request(*["ba be"] * 8, options=pb.DecodingOptions(max_target_tokens=5000))
            silent = stub.TranslateStream(request, timeout=60)
            await silent.read()
            async with AsyncClient(server.address) as client:
                for _ in range(20):
                    await client.translate("da", options=DecodingOptions(max_target_tokens=1), timeout=10, **PAIR)
            silent.cancel()
            deadline = time.monotonic() + 20
            while 'dragoman_running_rows{engine="0",model="reversal",version="1"} 0.0' not in server.metrics():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
