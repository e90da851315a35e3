"""When requests come, and with which text: drawn ahead of time, so that the server cannot change it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> list[float]:
    """Moments of a Poisson process: callers who know nothing of each other.

    Args:
        rate: mean arrivals per second, above 0.
        duration_s: of the process, in seconds.
        seed: equal seeds give equal moments; at another rate, the same ones stretched.

    Returns:
        Seconds since the start, ascending, all below `duration_s`.
    """
    rng = random.Random(f"arrivals {seed}")  # noqa: S311 - chance, not secrecy
    arrivals = []
    moment = rng.expovariate(1.0) / rate
    while moment < duration_s:
        arrivals.append(moment)
        moment += rng.expovariate(1.0) / rate
    return arrivals


def shuffled_texts(texts: Sequence[str], seed: int) -> Iterator[str]:
    """Texts without end, the whole file in a new order each time: any stretch of them has about the file's lengths.

    Args:
        texts: at least one.
        seed: equal seeds give equal orders.
    """
    rng = random.Random(f"texts {seed}")  # noqa: S311 - chance, not secrecy
    while True:
        yield from rng.sample(texts, len(texts))
