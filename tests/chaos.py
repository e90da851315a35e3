"""Everything at once: requests of all kinds, cancels, deadlines, versions that come and go, kill -9 and restarts.

`python -m tests.chaos --requests 20000` runs it at length; a test runs it in short. Every request must be answered
exactly once and rightly, or fail with a code that says that another try may succeed; nothing may be left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman_client import (
    AsyncClient,
    BeamSearch,
    DeadlineExceededError,
    DecodingOptions,
    DragomanError,
    OverloadedError,
    Sampling,
    UnavailableError,
)
from tests.e2e.server_process import ServerProcess, running_server

_CONCURRENCY = 64
_MAX_TRIES = 60
_REQUESTS_PER_KILL = 2000
_PAIR: dict[str, Any] = {"source": "fwd", "target": "rev"}
_SEARCHES: tuple[DecodingOptions, ...] = (
    DecodingOptions(),
    DecodingOptions(search=BeamSearch(width=4)),
    DecodingOptions(search=Sampling(seed=7)),
    DecodingOptions(max_target_tokens=3),
)


@dataclass(slots=True)
class Chaos:
    """One run.

    Args:
        models: repository with one good version of the toy model.
        texts: to translate.
        num_requests: how many.
        seed: of everything random.
    """

    models: Path
    texts: list[str]
    num_requests: int
    seed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0
    num_swaps: int = 0
    _expected: dict[tuple[int, str], str] = field(default_factory=dict)

    async def run(self) -> str:
        """Run it; the metrics page of the server that is left, once it is idle."""
        with tempfile.TemporaryDirectory() as directory:
            repository = Path(directory)
            for version in ("1", "2"):
                shutil.copytree(self.models / "reversal" / "1", repository / "reversal" / version)
            (repository / "reversal" / "routing.toml").write_text('stable = "1"\n')
            async with _supervised(repository) as supervisor, AsyncClient(supervisor.address, timeout=60) as client:
                await self._learn(client)
                await self._disturb(client, supervisor)
                return await _idle_page(supervisor)

    async def _learn(self, client: AsyncClient) -> None:
        """What each text gives alone, before anything goes wrong."""
        for kind, options in enumerate(_SEARCHES):
            for text in self.texts:
                self._expected[kind, text] = (await client.translate(text, options=options, **_PAIR)).text

    async def _disturb(self, client: AsyncClient, supervisor: Supervisor) -> None:
        numbers = iter(range(self.num_requests))
        callers = [asyncio.create_task(self._caller(client, numbers)) for _ in range(_CONCURRENCY)]
        nuisances = [
            asyncio.create_task(self._swap_versions(client)),
            asyncio.create_task(self._kill(supervisor)),
        ]
        await asyncio.gather(*callers)
        for nuisance in nuisances:
            nuisance.cancel()
        await asyncio.gather(*nuisances, return_exceptions=True)

    async def _caller(self, client: AsyncClient, numbers: Any) -> None:
        for number in numbers:
            self.outcomes[await self._request(client, random.Random(f"{self.seed}-{number}"))] += 1

    async def _request(self, client: AsyncClient, rng: random.Random) -> str:
        kind, text = rng.randrange(len(_SEARCHES)), rng.choice(self.texts)
        fate = rng.choices(["wait", "cancel", "deadline"], [8, 1, 1])[0]
        timeout = rng.uniform(0.002, 0.05) if fate == "deadline" else None
        priority: Any = rng.choice(["interactive", "bulk"])
        for attempt in range(_MAX_TRIES):
            call = asyncio.create_task(
                client.translate(text, options=_SEARCHES[kind], priority=priority, timeout=timeout, **_PAIR)
            )
            if fate == "cancel":
                await asyncio.sleep(rng.uniform(0, 0.02))
                call.cancel()
            try:
                translation = await call
            except asyncio.CancelledError:
                return "cancelled"
            except UnavailableError:
                await asyncio.sleep(min(0.05 * 2**attempt, 0.5))
            except (OverloadedError, DeadlineExceededError) as error:
                return error.code.name
            except DragomanError as error:
                return f"unexpected {error.code.name}: {error}"
            else:
                return "answered" if translation.text == self._expected[kind, text] else "answered wrongly"
        return "UNAVAILABLE"

    async def _swap_versions(self, client: AsyncClient) -> None:
        current = "1"
        while True:
            await self._until(self.outcomes.total() + self.num_requests // 20)
            other = "2" if current == "1" else "1"
            # A killed server comes back with the version that its repository names.
            with contextlib.suppress(DragomanError):
                await client.admin.load("reversal", other, make_stable=True)
                await client.admin.unload("reversal", current)
                self.num_swaps += 1
            with contextlib.suppress(DragomanError):
                [current] = [m.version for m in await client.models() if "stable" in m.labels]

    async def _kill(self, supervisor: Supervisor) -> None:
        while True:
            await self._until(self.outcomes.total() + min(self.num_requests // 3, _REQUESTS_PER_KILL))
            await supervisor.kill()
            self.num_kills += 1

    async def _until(self, num_outcomes: int) -> None:
        while self.outcomes.total() < num_outcomes:
            await asyncio.sleep(0.01)


class Supervisor:
    """Keeps a server running on one port, as systemd or Kubernetes would."""

    def __init__(self, repository: Path, port: int) -> None:
        self._repository = repository
        self._port = port
        self._exit = contextlib.ExitStack()
        self.server: ServerProcess
        self.address = f"127.0.0.1:{port}"

    async def start(self) -> None:
        """Start the server."""
        options = ("--port", str(self._port), "--admin", "--max-waiting", "200")
        self.server = await asyncio.to_thread(self._exit.enter_context, running_server(self._repository, *options))

    async def kill(self) -> None:
        """kill -9, and a new server."""
        self.server.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._exit.close)
        await self.start()

    def close(self) -> None:
        """Stop it."""
        self._exit.close()


@asynccontextmanager
async def _supervised(repository: Path) -> AsyncIterator[Supervisor]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    supervisor = Supervisor(repository, port)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.close()


async def _idle_page(supervisor: Supervisor) -> str:
    """The metrics once nothing is left to do."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        page = supervisor.server.metrics()
        if not leftovers(page):
            break
        await asyncio.sleep(0.05)
    return page


def leftovers(page: str) -> list[str]:
    """Lines of a metrics page that show rows in slots or texts in line."""
    return re.findall(r"^dragoman_(?:running_rows|queue_depth|queue_tokens)\{.*\} [1-9].*$", page, re.MULTILINE)


def problems(chaos: Chaos, page: str) -> list[str]:
    """What must not be."""
    good = {"answered", "cancelled", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    found = [f"{count} times: {outcome}" for outcome, count in chaos.outcomes.items() if outcome not in good]
    if chaos.outcomes.total() != chaos.num_requests:
        found.append(f"{chaos.outcomes.total()} outcomes of {chaos.num_requests} requests")
    found += leftovers(page)
    found += [line for line in page.splitlines() if line.startswith("dragoman_errors") and "BUG" in line]
    return found


def main() -> None:
    """Run it at length."""
    from tests.reversal import export_reversal, sentences, train_reversal  # imports PyTorch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        models = export_reversal(train_reversal(root / "training"), root / "models")
        chaos = Chaos(models, sentences(40, seed=9, shortest=1, longest=12), arguments.requests, arguments.seed)
        page = asyncio.run(chaos.run())
    print(dict(chaos.outcomes), f"{chaos.num_kills} kills, {chaos.num_swaps} swaps of versions")
    for problem in (found := problems(chaos, page)):
        print(problem)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
