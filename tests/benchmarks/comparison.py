"""Decoding the same by everybody, in turn."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tests.benchmarks.results import OURS

REST_S = 0.25
"""Between two contenders: threads that spin after their work have come to rest."""

Batch = Sequence[Sequence[int]]


class Decoder(Protocol):
    """What is asked of a contender; see `contenders.Worker`."""

    name: str

    def decode(self, batches: Sequence[Batch], width: int, max_tokens: int) -> tuple[float, list[list[list[int]]]]:
        """Seconds for all batches, one after the other, and their outputs."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one comparison."""

    tokens_per_s: dict[str, float]
    """The median of every contender."""
    our_outputs: list[list[list[int]]]
    """Of every batch."""


def measure(opened: Sequence[Decoder], batches: Sequence[Batch], width: int, max_tokens: int, rounds: int) -> Measured:
    """Decode the same batches by everybody in turn, several times; a first round does not count."""
    speeds: dict[str, list[float]] = defaultdict(list)
    outputs: dict[str, list[list[list[int]]]] = {}
    for round_ in range(rounds + 1):
        for worker in opened:
            time.sleep(REST_S)
            seconds, outputs[worker.name] = worker.decode(batches, width, max_tokens)
            if round_:
                tokens = sum(len(ids) for batch in outputs[worker.name] for ids in batch)
                speeds[worker.name].append(tokens / seconds)
    [mine] = (name for name in outputs if name.startswith(OURS))
    return Measured({name: statistics.median(values) for name, values in speeds.items()}, outputs[mine])
