"""`make soak`: many mixed requests through the bundled model; memory must stay where it is.

Writes soak.json beside this file, and soak.png where there is matplotlib; fails if memory grew after the first tenth.
Ctrl-C ends it early, with a report of what has been done.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from dragoman_bundle.bundle import Samples
from dragoman_server.engine.request import (
    Alternatives,
    BeamSearch,
    DecodingOptions,
    FinishReason,
    GreedySearch,
    Priority,
    Sampling,
    Search,
)
from dragoman_server.model import ServedModel
from dragoman_server.settings import ServerSettings
from tests.benchmarks.results import current_commit
from tests.readme import bundled_models

RESULTS = Path(__file__).with_name("soak.json")
PLOT = RESULTS.with_suffix(".png")
_CONCURRENCY = 200
_TARGET_LIMITS = [5] * 4 + [20] * 4 + [60] * 3 + [250]
"""Most requests are short, as in life; hot samples reach even the longest limit."""
_WARM_REQUESTS = 3000
"""Until then, caches reach their pages for the first time."""
_GROWTH_MIB = 64
"""Allowed after the first tenth: allocators round, caches of bindings fill."""


def resident_mib() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def random_options(rng: random.Random) -> DecodingOptions:
    """Any search, any length."""
    searches: list[Search] = [
        GreedySearch(),
        GreedySearch(),
        BeamSearch(width=rng.randint(2, 8)),
        Sampling(seed=rng.randrange(100), temperature=rng.choice([0.7, 1.5]), num_hypotheses=rng.randint(1, 4)),
        Alternatives(count=rng.randint(1, 6)),
    ]
    return DecodingOptions(
        max_target_tokens=rng.choice(_TARGET_LIMITS),
        min_target_tokens=rng.choice([0, 0, 0, 5]),
        search=rng.choice(searches),
        no_repeat_ngram_size=rng.choice([0, 0, 3]),
        log_probs=rng.random() < 0.3,
        alignment=rng.random() < 0.1,
    )


def _nobody(*_: object) -> None:
    """Observes the engines."""


class Soak:
    """A model, and requests of all kinds for it."""

    def __init__(self, num_requests: int) -> None:
        [bundle] = bundled_models()
        settings = ServerSettings.model_validate({}).engine_settings(1)
        self.model = ServedModel("1", bundle, bundle.manifest.variants[0], settings, _nobody)
        pairs = Samples.load(bundle.file(bundle.manifest.samples)).parity
        direction = bundle.manifest.directions[0]
        self.sources = [self.model.source_ids(text, direction) for text, _ in pairs]
        self.num_requests = num_requests
        self.num_done = 0
        self.reasons: dict[str, int] = {}
        self.memory: list[tuple[int, float]] = []

    async def run(self) -> None:
        """All requests, many at once."""
        self.model.engine.start()
        interrupted = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
        numbers = itertools.takewhile(lambda _: not interrupted.is_set(), range(self.num_requests))
        await asyncio.gather(*(self._caller(numbers) for _ in range(_CONCURRENCY)))
        self.model.engine.stop()

    async def _caller(self, numbers: object) -> None:
        for number in numbers:  # type: ignore[attr-defined]
            await self._request(random.Random(number))
            self.num_done += 1
            if self.num_done % max(1, self.num_requests // 100) == 0:
                self.memory.append((self.num_done, resident_mib()))
                print(f"{self.num_done} requests, {self.memory[-1][1]:.0f} MiB", flush=True)

    async def _request(self, rng: random.Random) -> None:
        source = rng.choice(self.sources) * rng.choice([1, 1, 1, 4])
        deadline = time.monotonic() + rng.choice([0.05, 3600.0]) if rng.random() < 0.2 else None
        call = asyncio.create_task(
            self.model.engine.decode(source[:256], random_options(rng), deadline, rng.choice(list(Priority)))
        )
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random() * 0.05)
            call.cancel()
        try:
            reason = (await call).finish_reason
        except asyncio.CancelledError:
            reason = FinishReason.CANCELLED
        assert reason is not None
        self.reasons[reason.value] = self.reasons.get(reason.value, 0) + 1


def report(soak: Soak, seconds: float) -> None:
    """Print it, write it, draw it."""
    print(f"{soak.num_done} requests in {seconds:.0f} s: {soak.reasons}")
    fields = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": current_commit(),
        "requests": soak.num_done,
        "seconds": round(seconds),
        "finished": soak.reasons,
        "requests and resident MiB": [[count, round(mib, 1)] for count, mib in soak.memory],
    }
    RESULTS.write_text(json.dumps(fields) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib"):
        plot(soak.memory)


def plot(memory: Sequence[tuple[int, float]]) -> None:
    """Draw resident memory over requests. Imported only now, since it would take memory itself."""
    importlib.import_module("matplotlib").use("Agg")
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(figsize=(6, 3), layout="constrained")
    axes.plot(*zip(*memory, strict=True))
    axes.set(xlabel="requests", ylabel="resident MiB", ylim=(0, None))
    figure.savefig(PLOT, dpi=100)


def main() -> None:
    """Run, report, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    soak = Soak(parser.parse_args().requests)
    begun = time.monotonic()
    asyncio.run(soak.run())
    report(soak, time.monotonic() - begun)
    warm = max(soak.num_done // 10, _WARM_REQUESTS)
    if not any(count <= warm for count, _ in soak.memory):
        sys.exit("too few requests to judge by")
    early = max(mib for count, mib in soak.memory if count <= warm)
    last = max(mib for _, mib in soak.memory)
    print(f"resident: {early:.0f} MiB after {warm} requests, {last:.0f} MiB at most")
    if last > early + _GROWTH_MIB:
        sys.exit(f"memory grew by {last - early:.0f} MiB")


if __name__ == "__main__":
    main()
