"""Durations and their percentiles, exact: every value is kept, 8 bytes each.

A histogram with buckets would need less memory for hours of load, but this needs no package and has no precision to
choose, and a million requests are 8 MB.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

Curve = tuple[tuple[float, float], ...]
"""Pairs of a percentage below 100 and a duration in seconds, ascending."""

_POINTS_PER_DECADE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of durations, in seconds. Each one occurred: the least that so many percent of the values do not exceed."""

    count: int
    """Values that they were taken from."""
    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    max: float


class Distribution:
    """Durations in seconds.

    Args:
        values: to begin with.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values = array("d", values)
        self._is_sorted = False

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Count one more value."""
        self._values.append(value)
        self._is_sorted = False

    def percentile(self, percent: float) -> float:
        """The least value that at least `percent` of all values do not exceed (nearest rank); there must be one.

        Args:
            percent: above 0, at most 100, as it is written: 99.9 means exactly 999 of 1000.
        """
        rank = math.ceil(Fraction(str(percent)) * len(self) / 100)
        return self._sorted()[rank - 1]

    def percentiles(self) -> Percentiles | None:
        """The usual ones; None if there is no value."""
        if not len(self):
            return None
        p50, p90, p95, p99, p99_9, largest = map(self.percentile, (50, 90, 95, 99, 99.9, 100))
        return Percentiles(count=len(self), p50=p50, p90=p90, p95=p95, p99=p99, p99_9=p99_9, max=largest)

    def curve(self) -> Curve:
        """The whole distribution for a plot, with as many points from 90 to 99 % as from 99 to 99.9 %."""
        size, values = len(self), self._sorted()
        # The largest value is put in the middle of its step: a logarithmic axis has no 100 %.
        return tuple(
            (100 * min(rank, size - 0.5) / size, values[rank - 1]) for rank in sorted(set(self._curve_ranks()))
        )

    def _curve_ranks(self) -> Iterator[int]:
        size = len(self)
        decades = math.log10(size) if size else -1
        for step in range(math.ceil(decades * _POINTS_PER_DECADE) + 1):
            yield min(size, size - math.floor(size * 10 ** (-step / _POINTS_PER_DECADE)) + 1)

    def corrected(self, expected_interval_s: float) -> Distribution:
        """With the values that were never measured because a caller was waiting: coordinated omission, undone.

        Where a call took longer than the interval at which its caller would have sent, the calls that it held up are
        added: each of them would have waited one interval less. See Gil Tene, "How NOT to Measure Latency" (2013), and
        HdrHistogram's recordValueWithExpectedInterval.

        Args:
            expected_interval_s: between two calls of one caller if nothing stalls, in seconds, above 0.
        """
        corrected = Distribution(self._values)
        for value in self._values:
            for missed in range(1, int(value / expected_interval_s)):
                corrected.add(value - missed * expected_interval_s)
        return corrected

    def _sorted(self) -> array[float]:
        if not self._is_sorted:
            self._values = array("d", sorted(self._values))
            self._is_sorted = True
        return self._values
