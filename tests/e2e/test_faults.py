"""What breaks must break cleanly: engines that fail or hang, disks that are full, ports that are taken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dragoman_client import AsyncClient, ServerError, UnavailableError
from dragoman_server.grpc_server import Server
from dragoman_server.settings import ServerSettings
from tests.e2e.server_process import ServerProcess, running_server
from tests.e2e.test_server import PAIR, refused_start

SERVICE = "dragoman.v1.TranslationService"


@dataclass(slots=True)
class Inside:
    """A server in this process, whose model can be broken."""

    server: Server
    running: asyncio.Task[int]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def sabotage(self, method: str, replacement: Any) -> None:
        """Replace a method of every engine's model runner."""
        for model in self.server.repository:
            for engine in model.engine.engines:
                setattr(engine._runner, method, replacement)


@asynccontextmanager
async def inside(models: Path, *options: str) -> AsyncIterator[Inside]:
    settings = ServerSettings.load(["--models", str(models), "--port", "0", "--metrics-port", "-1", *options])
    server = Server(settings)
    running = asyncio.create_task(server.run())
    while not server.port:
        await asyncio.sleep(0.01)
    try:
        yield Inside(server, running)
    finally:
        server.stop()
        with contextlib.suppress(Exception):
            await running


async def health_after(address: str, status: str) -> None:
    """Wait until health says something else than `status`, or the server has gone."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in watch:
                if health_pb2.HealthCheckResponse.ServingStatus.Name(response.status) != status:
                    return


async def test_one_failed_step_fails_its_calls_and_no_others(reversal_models: Path) -> None:
    async with inside(reversal_models, "--instances", "1") as started, AsyncClient(started.address) as client:
        assert (await client.translate("ba be", **PAIR)).text == "be ba"
        [model] = started.server.repository
        runner: Any = model.engine.engines[0]._runner
        intact = runner.decode_step

        def fail_once(rows: Any) -> None:  # noqa: ARG001
            runner.decode_step = intact
            raise RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : bad allocation")

        runner.decode_step = fail_once
        with pytest.raises(ServerError) as caught:
            await client.translate("ba be", **PAIR)
        assert caught.value.reason == "STEP_FAILED"
        assert "ONNXRuntimeError" not in str(caught.value), "the log has it; callers need not know"
        assert (await client.translate("ba be", **PAIR)).text == "be ba"
        assert not started.running.done()


async def test_an_engine_that_keeps_failing_ends_the_process_for_its_supervisor(reversal_models: Path) -> None:
    def fail(rows: Any) -> None:  # noqa: ARG001
        raise MemoryError("no memory")

    async with inside(reversal_models, "--instances", "1") as started:
        health = asyncio.create_task(health_after(started.address, "SERVING"))
        async with AsyncClient(started.address) as client:
            await client.translate("ba be", **PAIR)
            started.sabotage("decode_step", fail)
            outcomes = await asyncio.gather(
                *(client.translate("ba be", **PAIR) for _ in range(40)), return_exceptions=True
            )
            assert {type(outcome) for outcome in outcomes} <= {ServerError, UnavailableError}
            for _ in range(20):
                if started.running.done():
                    break
                with contextlib.suppress(ServerError, UnavailableError):
                    await client.translate("ba be", **PAIR)
            assert await asyncio.wait_for(started.running, 20) == 1
        await asyncio.wait_for(health, 5)


async def test_a_stuck_step_is_noticed_and_ends_the_process(
    reversal_models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def hang(rows: Any) -> None:  # noqa: ARG001
        time.sleep(4)

    options = ("--watchdog-seconds", "0.5", "--instances", "1", "--drain-seconds", "1")
    async with inside(reversal_models, *options) as started:
        async with AsyncClient(started.address) as client:
            await client.translate("ba be", **PAIR)
            started.sabotage("decode_step", hang)
            begun = time.monotonic()
            with pytest.raises(UnavailableError):
                await client.translate("ba be", timeout=20, **PAIR)
            assert time.monotonic() - begun < 10
        assert await asyncio.wait_for(started.running, 10) == 1
    assert "in hang" in capfd.readouterr().err, "the log must show where the step hangs"
    await asyncio.sleep(4)


def test_a_log_that_cannot_be_written_stops_nobody(reversal_models: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "dragoman_server", "--models", str(reversal_models), "--port", port]
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen([*command, "--metrics-port", "-1", "--log-requests"], stderr=full)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=30)

        async def translate() -> str:
            async with AsyncClient(f"127.0.0.1:{port}") as client:
                return (await client.translate("ba be", **PAIR)).text

        assert asyncio.run(translate()) == "be ba"
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()


def test_a_full_disk_is_told_and_loses_the_exit_code_not_the_input(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "dragoman_client", "translate", "--server", server.address]
    command += ["--source", "fwd", "--target", "rev", "ba be"]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_taken_metrics_port_is_an_error(server: ServerProcess, reversal_models: Path) -> None:
    port = server.metrics_address.rpartition(":")[2]
    code, message = refused_start("--models", str(reversal_models), "--metrics-port", port)
    assert code == 1
    assert "metrics" in message.lower()
    assert port in message


async def test_calls_go_to_every_healthy_server_and_past_a_dead_one(reversal_models: Path) -> None:
    with running_server(reversal_models) as first, running_server(reversal_models) as second:
        async with AsyncClient(f"ipv4:{first.address},{second.address}") as client:
            for _ in range(20):
                await client.translate("ba be", **PAIR)
            for server in (first, second):
                assert 'dragoman_sequences_finished_total{model="reversal"' in server.metrics(), "round robin"
            first.process.kill()
            for _ in range(20):
                assert (await client.translate("ba be", **PAIR)).text == "be ba"
