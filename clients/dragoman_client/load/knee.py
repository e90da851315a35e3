"""The highest rate that a server sustains: found by doubling, then by bisection. Pure: somebody else measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

TOLERANCE = 0.05
"""How far above the knee, relative to it, a rate that did not hold lies."""


class Probe(Protocol):
    """What a measurement at one rate says."""

    @property
    def held(self) -> bool:
        """Whether the server kept what was asked of it."""


P = TypeVar("P", bound=Probe)


@dataclass(frozen=True, slots=True)
class Knee(Generic[P]):
    """What a search found."""

    rate: float | None
    """The highest rate that held; None if not even the least did."""
    first_broken: float | None
    """The lowest rate above it that did not hold; None if every rate up to the bound did."""
    probes: dict[float, P]
    """By rate, in the order of measuring."""


class _Search(Generic[P]):
    def __init__(self, measure: Callable[[float], P]) -> None:
        self._measure = measure
        self.probes: dict[float, P] = {}

    def holds(self, rate: float) -> bool:
        self.probes[rate] = self._measure(rate)
        return self.probes[rate].held

    def highest(self, start_rate: float, min_rate: float, max_rate: float) -> float | None:
        """Double while the rate holds; if already the first does not, halve until one does."""
        rate = start_rate
        if self.holds(rate):
            while rate * 2 <= max_rate and self.holds(rate * 2):
                rate *= 2
            return rate
        while rate / 2 >= min_rate:
            rate /= 2
            if self.holds(rate):
                return rate
        return None


def find_knee(measure: Callable[[float], P], *, start_rate: float, min_rate: float, max_rate: float = 1e6) -> Knee[P]:
    """Find the highest rate that holds, to within `TOLERANCE`, on a server that holds no rate above one it breaks at.

    Args:
        measure: measures at a rate, in requests per second; called once per rate.
        start_rate: measured first.
        min_rate: below it the search gives up.
        max_rate: above it the search does not go.
    """
    search = _Search(measure)
    low = search.highest(start_rate, min_rate, max_rate)
    high = min((rate for rate, probe in search.probes.items() if not probe.held), default=None)
    while low is not None and high is not None and high > low * (1 + TOLERANCE):
        middle = math.sqrt(low * high)
        if search.holds(middle):
            low = middle
        else:
            high = middle
    return Knee(low, high, search.probes)
