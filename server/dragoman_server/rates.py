"""How much a caller may have per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """An allowance that refills as time passes.

    Args:
        per_second: units that come back every second, above 0.
        burst_seconds: it holds as much as comes back in so many seconds, above 0.
    """

    per_second: float
    burst_seconds: float

    @property
    def burst_ns(self) -> int:
        """Time in which an empty allowance fills up, in nanoseconds."""
        return int(self.burst_seconds * _NS)

    def cost_ns(self, units: int) -> int:
        """Time in which so many units come back, in nanoseconds; rounded up, so that never too much is given."""
        return math.ceil(units * _NS / self.per_second)


@dataclass(slots=True)
class TokenBucket:
    """The state of one allowance: a single moment, at which it will be full if nothing more is taken.

    Time is counted in whole nanoseconds, so that what is given and when is exact. Over any stretch of t seconds it
    gives at most `per_second * (t + burst_seconds)` units. Only a request that is larger than the whole allowance may
    exceed that, for it could never be let through otherwise: it is let through once the allowance is full, and takes it
    into debt, which time pays back before anything else is let through.
    """

    full_at_ns: int = 0
    """By the caller's clock."""

    def wait_ns(self, rate: Rate, units: int, now_ns: int) -> int:
        """Nanoseconds until so many units can be taken, if nobody takes any meanwhile; 0 if they can be taken now."""
        needed_ns = min(rate.cost_ns(units), rate.burst_ns)
        return max(0, self.full_at_ns - rate.burst_ns + needed_ns - now_ns)

    def take(self, rate: Rate, units: int, now_ns: int) -> None:
        """Take units that `wait_ns` says can be taken now."""
        self.full_at_ns = max(self.full_at_ns, now_ns) + rate.cost_ns(units)
