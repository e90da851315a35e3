"""What a measurement says, and how it is written as JSON.

The JSON is one object. Fields are only ever added; `schema` rises if one changes its meaning. Times are in seconds,
rates per second, null where there is nothing to say.

    schema               1
    kind                 "run" or "knee"
    settings             what was asked for: server, source, target, model, input, num_texts, priority, beam, split,
                         timeout_s, duration_s, warmup_s, seed, bulk_concurrency, slo_s
    run                  kind "run" only: a run, see below
    knee                 kind "knee" only:
      rate               the highest rate that held; null if none did
      first_broken       the lowest rate above it that did not hold; null if every rate did
      limited_by_generator   whether the generator and not the server broke there: the server's knee is then higher
      run                the run at the knee; null if no rate held
      probes             the rates in the order of measuring: rate, held, problems (why it did not hold), run; a rate at
                         which only the generator broke is measured once more, and the second time counts

A run:

    loop                 "open": Poisson arrivals at a rate; "closed": callers back to back
    rate, concurrency    what was asked for; the other one is null
    duration_s           of the measured window, which follows the warm-up
    num_sent             requests scheduled in the window; all of them were waited for
    num_ok               of these, answered
    failures             of these, failed: gRPC status code to count
    offered_rate         num_sent / duration_s
    achieved_rate        answers that came within the window, whenever their requests were sent, per second
    target_tokens_per_s  of these answers; null if the server does not count them
    latency_s            of the answered requests, free of coordinated omission. Open loop: from the scheduled arrival
                         to the answer. Closed loop: see `Distribution.corrected`, with the median as interval
    uncorrected_latency_s    from sending to the answer, as the callers saw it
    server_queue_s, server_first_token_s, server_total_s
                         the server's own timings of the answered requests; null if it gives none
    lateness_s           how long after its scheduled arrival each request was sent; null in a closed loop
    generator_cpu        CPU seconds of the generator per second; 1 is all that it can use
    valid, generator_problems    whether the generator kept up, and if not, why the numbers are not the server's
    bulk                 null, or the background: concurrency, num_sent, num_ok, failures, achieved_rate,
                         target_tokens_per_s, all as above
    latency_curve, uncorrected_latency_curve    the whole distribution: pairs of percentage and seconds

Percentiles are objects: count (of values), p50, p90, p95, p99, p99_9, max.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dragoman_client.load.distribution import Curve, Percentiles
from dragoman_client.load.knee import Knee

SCHEMA = 1
_MIN_ACHIEVED = 0.95
"""Of the offered rate; below it, a server is not keeping up, whatever its latency."""
_MAX_FAILED = 0.001
"""Of all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Requests and their answers; see the module's docstring for every field."""

    num_sent: int
    num_ok: int
    failures: Mapping[str, int]
    achieved_rate: float
    target_tokens_per_s: float | None

    @property
    def num_failed(self) -> int:
        """Requests that failed."""
        return sum(self.failures.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkReport(Throughput):
    """The background traffic."""

    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport(Throughput):
    """One measurement; see the module's docstring for every field."""

    loop: Literal["open", "closed"]
    rate: float | None
    concurrency: int | None
    duration_s: float
    offered_rate: float
    latency_s: Percentiles | None
    uncorrected_latency_s: Percentiles | None
    server_queue_s: Percentiles | None
    server_first_token_s: Percentiles | None
    server_total_s: Percentiles | None
    lateness_s: Percentiles | None
    generator_cpu: float
    generator_problems: tuple[str, ...]
    bulk: BulkReport | None
    latency_curve: Curve
    uncorrected_latency_curve: Curve

    @property
    def valid(self) -> bool:
        """Whether the numbers are the server's."""
        return not self.generator_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """A measurement at one rate of a knee search."""

    rate: float
    server_problems: tuple[str, ...]
    run: RunReport

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it did not hold; empty if it did."""
        return self.server_problems + self.run.generator_problems

    @property
    def held(self) -> bool:
        """Whether the server sustained the rate."""
        return not self.problems


def judge(rate: float, run: RunReport, slo_s: float) -> ProbeReport:
    """Whether a server sustained a rate; it did not if the generator could not send at it.

    Args:
        rate: that was asked for.
        run: what was measured.
        slo_s: what the 99th percentile of the latency must not exceed, in seconds.
    """
    return ProbeReport(rate=rate, server_problems=tuple(_server_problems(run, slo_s)), run=run)


def _server_problems(run: RunReport, slo_s: float) -> Iterator[str]:
    if run.latency_s is None:
        yield "nothing was answered"
    elif run.latency_s.p99 > slo_s:
        yield f"p99 is {run.latency_s.p99 * 1000:.0f} ms, above {slo_s * 1000:g} ms"
    if run.achieved_rate < _MIN_ACHIEVED * run.offered_rate:
        yield f"{run.achieved_rate:.1f} of {run.offered_rate:.1f} requests/s were answered"
    if run.num_failed > _MAX_FAILED * run.num_sent:
        yield f"{run.num_failed} of {run.num_sent} requests failed"


def is_limited_by_generator(knee: Knee[ProbeReport]) -> bool:
    """Whether the generator broke before the server did."""
    return knee.first_broken is not None and not knee.probes[knee.first_broken].server_problems


def run_as_json(run: RunReport, settings: Mapping[str, object]) -> dict[str, Any]:
    """The whole JSON object of one run."""
    return {"schema": SCHEMA, "kind": "run", "settings": settings, "run": _run(run)}


def knee_as_json(knee: Knee[ProbeReport], settings: Mapping[str, object]) -> dict[str, Any]:
    """The whole JSON object of a knee search."""
    fields = {
        "rate": knee.rate,
        "first_broken": knee.first_broken,
        "limited_by_generator": is_limited_by_generator(knee),
        "run": None if knee.rate is None else _run(knee.probes[knee.rate].run),
        "probes": [
            {"rate": probe.rate, "held": probe.held, "problems": probe.problems, "run": _run(probe.run)}
            for probe in knee.probes.values()
        ],
    }
    return {"schema": SCHEMA, "kind": "knee", "settings": settings, "knee": fields}


def _run(run: RunReport) -> dict[str, Any]:
    return {**asdict(run), "valid": run.valid}
