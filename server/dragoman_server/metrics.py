"""Prometheus metrics.

Every label has a small, known set of values: names and versions of loaded models, priorities, methods, codes, reasons
and phases of ours. Nothing that a caller sends becomes one. The series of an unloaded version go with it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase

from dragoman_server.call import Call
from dragoman_server.engine.request import Priority, Sequence, StepOutput
from dragoman_server.engine.waiting_line import WaitingLine

LATENCY_BUCKETS = (
    *(0.0005, 0.0007),
    *(round(base * scale, 4) for scale in (0.001, 0.01, 0.1, 1.0) for base in (1, 1.5, 2, 3, 4, 5, 7)),
    *(10.0, 15.0, 20.0, 30.0, 40.0, 60.0),
)
"""Seconds, from 0.5 ms to 60 s, seven a decade: a p99 of 3 ms reads as well as one of 3 s."""

_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

PHASES = {
    "tokenize": "splitting and tokenising",
    "queue": "waiting for a slot",
    "encode": "the encoder",
    "first_token": "arrival to first token",
    "inter_token": "mean time between two tokens",
    "decode": "after the encoder",
    "detokenize": "tokens to text",
    "total": "arrival to last token",
}
"""Parts of a text's life; of a call's for tokenize and detokenize."""

_MODEL = ("model", "version")

Metric = TypeVar("Metric", bound=MetricWrapperBase)


class Metrics:
    """All collectors, in a registry of their own.

    Args:
        registry: where to register them.
        latency_buckets: upper bounds, in seconds, of the histograms of times.
    """

    def __init__(self, registry: CollectorRegistry, latency_buckets: Seq[float] = LATENCY_BUCKETS) -> None:
        self.registry = registry
        self._latency_buckets = latency_buckets
        self._of_models: list[MetricWrapperBase] = []
        ProcessCollector(registry=registry)
        self.requests = self._counter("requests", "Finished calls.", "method", *_MODEL, "priority", "code")
        self.request_seconds = self._latency("request_seconds", "Duration of calls.", "method", "priority")
        self.errors = self._counter("errors", "Calls that failed, by the reason callers are told.", "reason")
        self._register_texts()
        self._register_engines()
        self._register_models()

    def _register_texts(self) -> None:
        phases = "; ".join(f"{name}: {meaning}" for name, meaning in PHASES.items())
        self.phase_seconds = self._latency(
            "phase_seconds", f"Time of one text, by phase. {phases}.", *_MODEL, "priority", "phase"
        )
        self.source_tokens = self._histogram("source_tokens", "Tokens of a source.", _TOKEN_BUCKETS, *_MODEL)
        self.target_tokens = self._histogram("target_tokens", "Tokens of a translation.", _TOKEN_BUCKETS, *_MODEL)
        self.finished = self._counter("sequences_finished", "Texts by how they ended.", *_MODEL, "priority", "reason")
        self.preempted = self._counter("sequences_preempted", "Bulk texts that had to start again.", *_MODEL)
        self.saved_tokens = self._counter(
            "saved_tokens", "Target tokens not decoded since their caller had gone; an estimate.", *_MODEL
        )

    def _register_engines(self) -> None:
        self.step_seconds = self._latency("step_seconds", "Duration of a decode step.", *_MODEL)
        self.step_rows = self._histogram("step_rows", "Rows, that is tokens, of a decode step.", _ROW_BUCKETS, *_MODEL)
        self.stall_seconds = self._latency(
            "encode_stall_seconds", "How long an encoder pass held up running rows.", *_MODEL
        )
        self.padding_tokens = self._counter("padding_tokens", "Source positions encoded for nothing.", *_MODEL)
        self.encoded_tokens = self._counter("encoded_tokens", "Source positions encoded, padding included.", *_MODEL)
        self.running_rows = self._gauge("running_rows", "Rows being decoded, paused ones included.", *_MODEL, "engine")
        self.queue_depth = self._gauge("queue_depth", "Texts waiting for a slot.", *_MODEL, "priority")
        self.queue_tokens = self._gauge(
            "queue_tokens", "Their source tokens, once for every row of a beam.", *_MODEL, "priority"
        )

    def _register_models(self) -> None:
        self.slots = self._gauge("slots", "Rows that can be decoded side by side.", *_MODEL)
        self.queue_limit = self._gauge("queue_limit", "Texts of each priority that may wait.", *_MODEL)
        self.cache_bytes = self._gauge("cache_reserved_bytes", "Memory reserved for keys and values.", *_MODEL)
        self.batch_invariant = self._gauge(
            "batch_invariant", "1 if results are bitwise the same whatever else is being decoded.", *_MODEL
        )
        self.model_info = self._gauge("model_info", "1 for every loaded version.", *_MODEL, "device", "precision")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._of(Counter(f"dragoman_{name}", text, labels, registry=self.registry), labels)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return self._of(Gauge(f"dragoman_{name}", text, labels, registry=self.registry), labels)

    def _histogram(self, name: str, text: str, buckets: Seq[float], *labels: str) -> Histogram:
        return self._of(Histogram(f"dragoman_{name}", text, labels, buckets=buckets, registry=self.registry), labels)

    def _latency(self, name: str, text: str, *labels: str) -> Histogram:
        return self._histogram(name, text, self._latency_buckets, *labels)

    def _of(self, metric: Metric, labels: Seq[str]) -> Metric:
        if "model" in labels:
            self._of_models.append(metric)
        return metric

    def forget(self, model: str, version: str) -> None:
        """Drop all series of a version that is not loaded any more."""
        for metric in self._of_models:
            metric.remove_by_labels({"model": model, "version": version})

    def observer(self, model: str, version: str, instance: int) -> EngineMetrics:
        """Metrics of one engine."""
        return EngineMetrics(self, model, version, instance)

    def call_done(self, call: Call, code: str, seconds: float, exemplar: dict[str, str] | None) -> None:
        """A call has been answered.

        Args:
            call: that it was.
            code: of its status.
            seconds: that it took.
            exemplar: names its trace, if it is traced.
        """
        self.requests.labels(call.method, call.model, call.version, call.priority, code).inc()
        self.request_seconds.labels(call.method, call.priority).observe(seconds, exemplar)
        if not call.model:
            return
        for phase, spent in call.watch.phases.items():
            self.phase_seconds.labels(call.model, call.version, call.priority, phase).observe(spent, exemplar)


class EngineMetrics:
    """Watches one engine; an `EngineObserver`.

    Args:
        metrics: where to count.
        model: label of everything counted.
        version: likewise.
        instance: number of the engine, a label where engines differ.
    """

    def __init__(self, metrics: Metrics, model: str, version: str, instance: int) -> None:
        of = (model, version)
        self._of = of
        self._metrics = metrics
        self._phases = {
            priority: {phase: metrics.phase_seconds.labels(*of, priority.name.lower(), phase) for phase in PHASES}
            for priority in Priority
        }
        self._source_tokens = metrics.source_tokens.labels(*of)
        self._target_tokens = metrics.target_tokens.labels(*of)
        self._step_seconds = metrics.step_seconds.labels(*of)
        self._step_rows = metrics.step_rows.labels(*of)
        self._stall_seconds = metrics.stall_seconds.labels(*of)
        self._padding_tokens = metrics.padding_tokens.labels(*of)
        self._encoded_tokens = metrics.encoded_tokens.labels(*of)
        self._saved_tokens = metrics.saved_tokens.labels(*of)
        self._preempted = metrics.preempted.labels(*of)
        self._running_rows = metrics.running_rows.labels(*of, str(instance))
        self._queue_depth = {p: metrics.queue_depth.labels(*of, p.name.lower()) for p in Priority}
        self._queue_tokens = {p: metrics.queue_tokens.labels(*of, p.name.lower()) for p in Priority}

    def step_done(self, output: StepOutput, line: WaitingLine, num_rows: int) -> None:
        """See `EngineObserver`."""
        if output.num_rows:
            self._step_seconds.observe(output.decode_s)
            self._step_rows.observe(output.num_rows)
        if output.num_encoded:
            self._stall_seconds.observe(output.encode_s)
            self._padding_tokens.inc(output.num_padding_tokens)
            self._encoded_tokens.inc(output.num_source_tokens + output.num_padding_tokens)
        if output.num_preempted:
            self._preempted.inc(output.num_preempted)
        if output.num_saved_tokens:
            self._saved_tokens.inc(output.num_saved_tokens)
        self._running_rows.set(num_rows)
        for priority in Priority:
            num_sequences, num_tokens = line.size(priority)
            self._queue_depth[priority].set(num_sequences)
            self._queue_tokens[priority].set(num_tokens)
        for sequence in output.finished:
            self._count_finished(sequence)

    def _count_finished(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None
        priority, reason = sequence.priority.name.lower(), sequence.finish_reason.value
        self._metrics.finished.labels(*self._of, priority, reason).inc()
        times, phases = sequence.times, self._phases[sequence.priority]
        phases["total"].observe(times.finished - times.arrived)
        # One that was dropped in the queue has waited as well, or overload would look healthy.
        phases["queue"].observe((times.scheduled or times.finished) - times.arrived)
        if not times.first_token:
            return
        phases["encode"].observe(times.encoded - times.scheduled)
        phases["first_token"].observe(times.first_token - times.arrived)
        phases["decode"].observe(times.finished - times.encoded)
        num_tokens = len(sequence.output_ids)
        if num_tokens > 1:
            phases["inter_token"].observe((times.finished - times.first_token) / (num_tokens - 1))
        self._source_tokens.observe(len(sequence.source_ids))
        self._target_tokens.observe(num_tokens)
