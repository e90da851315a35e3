"""Sends the requests and takes the times."""

from __future__ import annotations

import asyncio
import gc
import selectors
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from dragoman_client.errors import DragomanError
from dragoman_client.load.connection import Connection, Result, Target
from dragoman_client.load.distribution import Distribution
from dragoman_client.load.report import BulkReport, RunReport, Throughput
from dragoman_client.load.schedule import poisson_arrivals, shuffled_texts
from dragoman_client.types import Priority

_MAX_LATENESS = 0.1
"""Of sending, relative to the latency that it is a part of; both at their 99th percentiles."""
_TOLERATED_LATENESS_S = 0.01
"""Lateness up to this is what any operating system does to a process on a busy machine."""
_MAX_CPU = 0.95
"""Share of a core: a generator that uses more is the bottleneck itself."""
_PAUSE_S = 0.1
"""Of a caller in a closed loop whose request failed: retrying at once would only measure refusals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is sent, and for how long."""

    target: Target
    texts: tuple[str, ...]
    priority: Priority
    duration_s: float
    """Of the measured window."""
    warmup_s: float
    """Before it; what is sent then does not count."""
    seed: int
    bulk_concurrency: int
    """Callers of background traffic; 0 is off."""

    @property
    def end_s(self) -> float:
        """When sending ends, counted from the start of the warm-up."""
        return self.warmup_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Moments are seconds since the start of the warm-up."""

    scheduled: float
    sent: float
    ended: float
    result: Result


@dataclass(slots=True)
class Recorder:
    """Counts outcomes of the measured window.

    Args:
        start_s: of the window, in seconds since the start of the warm-up.
        end_s: of the window.
    """

    start_s: float
    end_s: float
    num_sent: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    latency: Distribution = field(default_factory=Distribution)
    uncorrected: Distribution = field(default_factory=Distribution)
    lateness: Distribution = field(default_factory=Distribution)
    queue: Distribution = field(default_factory=Distribution)
    first_token: Distribution = field(default_factory=Distribution)
    total: Distribution = field(default_factory=Distribution)
    num_in_window: int = 0
    """Answers that came in the window, whenever their requests were sent."""
    num_target_tokens: int = 0
    """Of these answers."""

    def add(self, outcome: Outcome) -> None:
        """Count an outcome, as far as it falls into the window."""
        if self._contains(outcome.ended) and not isinstance(outcome.result, DragomanError):
            self.num_in_window += 1
            self.num_target_tokens += sum(text.target_tokens for text in outcome.result.translations)
        if self._contains(outcome.scheduled):
            self._add_measured(outcome)

    def _contains(self, moment: float) -> bool:
        return self.start_s <= moment < self.end_s

    def _add_measured(self, outcome: Outcome) -> None:
        self.num_sent += 1
        self.lateness.add(outcome.sent - outcome.scheduled)
        if isinstance(outcome.result, DragomanError):
            self.failures[outcome.result.code.name] += 1
            return
        self.latency.add(outcome.ended - outcome.scheduled)
        self.uncorrected.add(outcome.ended - outcome.sent)
        timings = outcome.result.timings
        # On the wire, 0 is what a server that does not measure a phase leaves there.
        if timings.first_token_seconds:
            self.first_token.add(timings.first_token_seconds)
        if timings.total_seconds:
            self.total.add(timings.total_seconds)
            self.queue.add(timings.queue_seconds)

    def throughput(self) -> Throughput:
        """What was sent and what came back."""
        duration_s = self.end_s - self.start_s
        return Throughput(
            num_sent=self.num_sent,
            num_ok=self.num_sent - self.failures.total(),
            failures=dict(self.failures),
            achieved_rate=self.num_in_window / duration_s,
            target_tokens_per_s=self.num_target_tokens / duration_s if self.num_target_tokens else None,
        )


class LoadGenerator:
    """One measurement.

    Args:
        connection: open.
        traffic: to send.
    """

    def __init__(self, connection: Connection, traffic: Traffic) -> None:
        self._connection = connection
        self._traffic = traffic
        self._start = time.perf_counter()
        self._recorder = Recorder(traffic.warmup_s, traffic.end_s)
        self._bulk_recorder = Recorder(traffic.warmup_s, traffic.end_s)
        self._texts = shuffled_texts(traffic.texts, traffic.seed)
        self._bulk_texts = shuffled_texts(traffic.texts, traffic.seed + 1)

    async def open_loop(self, rate: float) -> RunReport:
        """Send at Poisson arrivals, however many requests are in flight, and wait for all of them."""
        traffic = self._traffic
        arrivals = poisson_arrivals(rate, traffic.end_s, traffic.seed)
        cpu = self._begin()
        async with asyncio.TaskGroup() as tasks:
            self._start_bulk(tasks)
            for moment, text in zip(arrivals, self._texts, strict=False):
                await asyncio.sleep(moment - self._now())
                tasks.create_task(self._send(text, traffic.priority, self._recorder, moment))
            await asyncio.sleep(traffic.end_s - self._now())
            cpu = time.process_time() - cpu
        return self._report(cpu, rate=rate)

    async def closed_loop(self, num_callers: int) -> RunReport:
        """Send with callers that each wait for an answer before they send again."""
        traffic = self._traffic
        cpu = self._begin()
        async with asyncio.TaskGroup() as tasks:
            self._start_bulk(tasks)
            for _ in range(num_callers):
                tasks.create_task(self._call_on(self._texts, traffic.priority, self._recorder))
            await asyncio.sleep(traffic.end_s - self._now())
            cpu = time.process_time() - cpu
        return self._report(cpu, concurrency=num_callers)

    def _begin(self) -> float:
        """Start the clock; the CPU time so far."""
        # What is left after a collection lives on; leaving it out makes the ones to come shorter by milliseconds.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._start = time.perf_counter()
        return time.process_time()

    def _now(self) -> float:
        """Seconds since the start of the warm-up."""
        return time.perf_counter() - self._start

    def _start_bulk(self, tasks: asyncio.TaskGroup) -> None:
        for _ in range(self._traffic.bulk_concurrency):
            tasks.create_task(self._call_on(self._bulk_texts, "bulk", self._bulk_recorder))

    async def _call_on(self, texts: Iterator[str], priority: Priority, recorder: Recorder) -> None:
        """One caller of a closed loop."""
        while (now := self._now()) < self._traffic.end_s:
            if not await self._send(next(texts), priority, recorder, now):
                await asyncio.sleep(_PAUSE_S)

    async def _send(self, text: str, priority: Priority, recorder: Recorder, scheduled: float) -> bool:
        """Send one request and record what becomes of it; whether it succeeded."""
        sent = self._now()
        result: Result
        try:
            result = await self._connection.translate(text, priority)
        except DragomanError as error:
            result = error
        recorder.add(Outcome(scheduled, sent, self._now(), result))
        return not isinstance(result, DragomanError)

    def _report(self, cpu_s: float, *, rate: float | None = None, concurrency: int | None = None) -> RunReport:
        recorder, traffic = self._recorder, self._traffic
        is_open = rate is not None
        latency = recorder.latency if is_open else _corrected(recorder.latency)
        lateness = recorder.lateness.percentiles() if is_open else None
        generator_cpu = cpu_s / traffic.end_s
        throughput = recorder.throughput()
        return RunReport(
            loop="open" if is_open else "closed",
            rate=rate,
            concurrency=concurrency,
            duration_s=traffic.duration_s,
            num_sent=throughput.num_sent,
            num_ok=throughput.num_ok,
            failures=throughput.failures,
            offered_rate=throughput.num_sent / traffic.duration_s,
            achieved_rate=throughput.achieved_rate,
            target_tokens_per_s=throughput.target_tokens_per_s,
            latency_s=latency.percentiles(),
            uncorrected_latency_s=recorder.uncorrected.percentiles(),
            server_queue_s=recorder.queue.percentiles(),
            server_first_token_s=recorder.first_token.percentiles(),
            server_total_s=recorder.total.percentiles(),
            lateness_s=lateness,
            generator_cpu=generator_cpu,
            generator_problems=tuple(_generator_problems(recorder, generator_cpu)),
            bulk=self._bulk_report(),
            latency_curve=latency.curve(),
            uncorrected_latency_curve=recorder.uncorrected.curve(),
        )

    def _bulk_report(self) -> BulkReport | None:
        if not self._traffic.bulk_concurrency:
            return None
        throughput = self._bulk_recorder.throughput()
        return BulkReport(
            concurrency=self._traffic.bulk_concurrency,
            num_sent=throughput.num_sent,
            num_ok=throughput.num_ok,
            failures=throughput.failures,
            achieved_rate=throughput.achieved_rate,
            target_tokens_per_s=throughput.target_tokens_per_s,
        )


def _corrected(latency: Distribution) -> Distribution:
    return latency.corrected(latency.percentile(50)) if len(latency) else latency


def _generator_problems(recorder: Recorder, cpu: float) -> Iterator[str]:
    if len(recorder.latency):
        limit_s = max(_TOLERATED_LATENESS_S, _MAX_LATENESS * recorder.latency.percentile(99))
        lateness_s = recorder.lateness.percentile(99)
        if lateness_s > limit_s:
            yield (
                f"the generator fell behind: 1 % of the requests were sent {lateness_s * 1000:.0f} ms late or later,"
                f" more than {limit_s * 1000:.0f} ms; the latest {recorder.lateness.percentile(100) * 1000:.0f} ms"
            )
    if cpu > _MAX_CPU:
        yield f"the generator used {cpu:.0%} of a core, all that it can"


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop that sleeps to within 0.1 ms; epoll, the default on Linux, rounds up to whole milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
