"""`dragoman load` against servers whose behaviour is known, over real gRPC."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman_client import DecodingOptions
from dragoman_client.load.connection import Connection, Target
from dragoman_client.load.generator import LoadGenerator, Traffic
from dragoman_client.load.report import RunReport
from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from tests.e2e.server_process import ServerProcess

Behaviour = Callable[[pb.TranslateRequest, Any], Awaitable[None]]


class FakeService(pb_grpc.TranslationServiceServicer):
    """Answers once its behaviour has run."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour

    async def Translate(self, request: pb.TranslateRequest, context: Any) -> pb.TranslateResponse:  # noqa: N802
        await self._behaviour(request, context)
        return pb.TranslateResponse(translations=[pb.Translation(text=text, target_tokens=2) for text in request.texts])


@asynccontextmanager
async def fake_server(behaviour: Behaviour) -> AsyncIterator[str]:
    """The address of a server that behaves so."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_TranslationServiceServicer_to_server(FakeService(behaviour), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def stalling(start_s: float, length_s: float) -> Behaviour:
    """5 ms a request; but whatever comes during a stall waits for its end. Seconds since the first request."""
    begun: list[float] = []

    async def behave(_request: pb.TranslateRequest, _context: Any) -> None:
        now = time.monotonic()
        begun.append(now)
        left = begun[0] + start_s + length_s - now
        await asyncio.sleep(left if 0 < left < length_s else 0.005)

    return behave


def traffic(server: str, **changes: Any) -> Traffic:
    target = Target(
        server=server, source="fwd", target="rev", model="", decoding=DecodingOptions(), split=True, timeout_s=10.0
    )
    fields: dict[str, Any] = {
        "target": target,
        "texts": ("ba be", "da"),
        "priority": "interactive",
        "duration_s": 2.0,
        "warmup_s": 0.0,
        "seed": 1,
        "bulk_concurrency": 0,
    }
    return Traffic(**(fields | changes))


async def open_loop(rate: float, traffic: Traffic) -> RunReport:
    async with Connection(traffic.target) as connection:
        return await LoadGenerator(connection, traffic).open_loop(rate)


async def closed_loop(num_callers: int, traffic: Traffic) -> RunReport:
    async with Connection(traffic.target) as connection:
        return await LoadGenerator(connection, traffic).closed_loop(num_callers)


async def test_a_stall_shows_in_an_open_loop() -> None:
    async with fake_server(stalling(0.5, 1.0)) as address:
        run = await open_loop(100.0, traffic(address))
    assert run.latency_s is not None
    assert run.num_ok == run.num_sent == run.latency_s.count
    # Half of the arrivals fall into the stall and wait for half of it on average.
    assert run.latency_s.p99 > 0.9
    assert run.latency_s.p90 > 0.5
    assert run.target_tokens_per_s == pytest.approx(2 * run.achieved_rate)


async def test_a_closed_loop_hides_a_stall_unless_it_is_corrected() -> None:
    async with fake_server(stalling(0.5, 1.0)) as address:
        run = await closed_loop(2, traffic(address))
    assert run.latency_s is not None
    assert run.uncorrected_latency_s is not None
    assert run.uncorrected_latency_s.max > 0.9
    assert run.uncorrected_latency_s.p95 < 0.5  # two requests of hundreds
    assert run.latency_s.p95 > 0.5
    assert run.lateness_s is None


async def test_requests_in_flight_are_not_bounded() -> None:
    in_flight, most = 0, 0

    async def behave(_request: pb.TranslateRequest, _context: Any) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.5)
        in_flight -= 1

    async with fake_server(behave) as address:
        await open_loop(400.0, traffic(address, duration_s=0.4))
    assert most > 100


async def test_failures_are_counted_by_status_not_retried_and_callers_do_not_hammer() -> None:
    num_calls = 0

    async def behave(request: pb.TranslateRequest, context: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if request.texts[0] == "da":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "going away")

    async with fake_server(behave) as address:
        run = await open_loop(100.0, traffic(address, duration_s=0.3))
        closed = await closed_loop(4, traffic(address, duration_s=0.5, texts=("da",)))
    assert set(run.failures) == {"UNAVAILABLE"}
    assert num_calls == run.num_sent + closed.num_sent
    assert run.num_ok + run.num_failed == run.num_sent
    assert 0 < run.num_ok < run.num_sent
    assert closed.latency_s is None
    assert 4 <= closed.num_failed <= 4 * 6


async def test_bulk_traffic_fills_the_background_and_is_told_apart() -> None:
    priorities: list[int] = []

    async def behave(request: pb.TranslateRequest, _context: Any) -> None:
        priorities.append(request.priority)
        await asyncio.sleep(0.005)

    async with fake_server(behave) as address:
        run = await open_loop(50.0, traffic(address, duration_s=0.5, bulk_concurrency=3))
    assert run.bulk is not None
    assert priorities.count(pb.PRIORITY_INTERACTIVE) == run.num_sent
    assert priorities.count(pb.PRIORITY_BULK) == run.bulk.num_ok > run.num_sent
    assert run.bulk.concurrency == 3


async def load(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `dragoman load`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dragoman_client", "load", "--source", "fwd", "--target", "rev", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts"
    path.write_text("ba be\n\nda du di\n", encoding="utf-8")
    return path


async def test_the_command_measures_a_server(server: ServerProcess, texts: Path, tmp_path: Path) -> None:
    outputs = ("--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png"))
    code, out, _ = await load(
        "--input", str(texts), "--server", server.address, "--rate", "40", "--duration", "1", "--warmup", "0.2",
        "--beam", "2", "--bulk-concurrency", "2", *outputs,
    )  # fmt: skip
    assert code == 0
    assert "Open loop, 40 requests/s for 1 s" in out
    report = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    run = report["run"]
    assert report["settings"]["num_texts"] == 2
    assert run["num_ok"] == run["num_sent"] == run["server_first_token_s"]["count"] > 0
    # The server's own times lie within the client's.
    assert run["server_first_token_s"]["p50"] <= run["server_total_s"]["p50"] < run["latency_s"]["p50"]
    assert run["bulk"]["num_ok"] > 0
    assert (tmp_path / "run.png").stat().st_size > 10_000


async def test_the_command_finds_a_knee(texts: Path, tmp_path: Path) -> None:
    turn = asyncio.Lock()

    async def behave(_request: pb.TranslateRequest, _context: Any) -> None:
        async with turn:  # one after the other: at most 100 requests/s
            await asyncio.sleep(0.01)

    async with fake_server(behave) as address:
        code, out, err = await load(
            "--input", str(texts), "--server", address, "--find-knee", "--slo-ms", "200", "--start-rate", "64",
            "--duration", "0.5", "--warmup", "0", "--json", str(tmp_path / "knee.json"),
        )  # fmt: skip
    knee = json.loads((tmp_path / "knee.json").read_text(encoding="utf-8"))["knee"]
    held = [probe["rate"] for probe in knee["probes"] if probe["held"]]
    # On a machine that is busy with something else, even the lowest rate may not hold.
    assert code == (0 if held else 1)
    assert knee["rate"] == max(held, default=None)
    assert knee["first_broken"] < 200
    assert "p99 ≤ 200 ms" in out
    assert err.count("requests/s: ") >= len(knee["probes"])


async def test_exit_codes(texts: Path) -> None:
    async def behave(request: pb.TranslateRequest, context: Any) -> None:
        if request.texts[0] == "da du di":
            await context.abort(grpc.StatusCode.INTERNAL, "broken")

    call = ("--input", str(texts), "--concurrency", "2", "--duration", "0.3", "--warmup", "0")
    async with fake_server(behave) as address:
        failing, unreachable, wrong = await asyncio.gather(
            load(*call, "--server", address),
            load(*call, "--server", "localhost:1"),
            load("--rate", "0", "--priority", "urgent"),
        )
    assert (failing[0], "INTERNAL" in failing[2]) == (1, True)
    assert (unreachable[0], unreachable[2].startswith("error: ")) == (1, True)
    assert (wrong[0], wrong[2].count("\n- ")) == (2, 3)
