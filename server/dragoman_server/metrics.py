"""Prometheus metrics. Labels are bounded: model, method and status code, never anything that a caller sends."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dragoman_server.engine.request import Sequence, StepOutput

LATENCY_BUCKETS = (
    *(0.0005, 0.0007),
    *(base * scale for scale in (0.001, 0.01, 0.1, 1.0) for base in (1, 1.5, 2, 3, 4, 5, 7)),
    *(10.0, 15.0, 20.0, 30.0, 40.0, 60.0),
)
"""Seconds, from 0.5 ms to 60 s, seven a decade: a p99 of 3 ms reads as well as one of 3 s."""

_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

PHASES = ("queue", "encode", "first_token", "decode", "total")
"""Parts of a sequence's life: waiting; encoder; arrival to first token; after the encoder; all of it."""


class Metrics:
    """All collectors, in a registry of their own.

    Args:
        registry: where to register them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter("dragoman_requests", "Finished calls.", ["method", "code"], registry=registry)
        self.request_seconds = Histogram(
            "dragoman_request_seconds", "Duration of calls.", ["method"], buckets=LATENCY_BUCKETS, registry=registry
        )
        self.phase_seconds = Histogram(
            "dragoman_phase_seconds",
            f"Time of one text in each phase: {', '.join(PHASES)}.",
            ["model", "phase"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.source_tokens = Histogram(
            "dragoman_source_tokens", "Tokens of a source.", ["model"], buckets=_TOKEN_BUCKETS, registry=registry
        )
        self.target_tokens = Histogram(
            "dragoman_target_tokens", "Tokens of a translation.", ["model"], buckets=_TOKEN_BUCKETS, registry=registry
        )
        self.finished = Counter(
            "dragoman_sequences_finished", "Texts by how they ended.", ["model", "reason"], registry=registry
        )
        self._register_engines(registry)

    def _register_engines(self, registry: CollectorRegistry) -> None:
        self.step_seconds = Histogram(
            "dragoman_step_seconds", "Duration of a decode step.", ["model"], buckets=LATENCY_BUCKETS, registry=registry
        )
        self.step_rows = Histogram(
            "dragoman_step_rows", "Rows decoded in a step.", ["model"], buckets=_ROW_BUCKETS, registry=registry
        )
        self.queue_depth = Gauge("dragoman_queue_depth", "Texts waiting for a slot.", ["model"], registry=registry)
        self.running_rows = Gauge(
            "dragoman_running_rows",
            "Rows being decoded, paused ones included.",
            ["model", "instance"],
            registry=registry,
        )
        self.slots = Gauge("dragoman_slots", "Rows that can be decoded side by side.", ["model"], registry=registry)
        self.cache_bytes = Gauge(
            "dragoman_cache_reserved_bytes", "Memory reserved for keys and values.", ["model"], registry=registry
        )
        self.encode_seconds = Histogram(
            "dragoman_encode_stall_seconds",
            "How long an encoder pass held up running rows.",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.padding_tokens = Counter(
            "dragoman_padding_tokens", "Source positions encoded for nothing.", ["model"], registry=registry
        )
        self.saved_tokens = Counter(
            "dragoman_saved_tokens",
            "Target tokens not decoded since their caller had gone; an estimate.",
            ["model"],
            registry=registry,
        )
        self.preempted = Counter(
            "dragoman_sequences_preempted", "Bulk texts that had to start again.", ["model"], registry=registry
        )
        self.batch_invariant = Gauge(
            "dragoman_batch_invariant",
            "1 if results are bitwise the same whatever else is being decoded.",
            ["model"],
            registry=registry,
        )
        self.model_info = Gauge(
            "dragoman_model_info",
            "1 for every model that is served.",
            ["model", "version", "device", "precision"],
            registry=registry,
        )

    def observer(self, model: str, instance: int) -> EngineMetrics:
        """Metrics of one engine."""
        return EngineMetrics(self, model, instance)

    def call_done(self, method: str, code: str, seconds: float) -> None:
        """A call has been answered."""
        self.requests.labels(method, code).inc()
        self.request_seconds.labels(method).observe(seconds)


class EngineMetrics:
    """Watches one engine; an `EngineObserver`.

    Args:
        metrics: where to count.
        model: label of everything counted.
        instance: number of the engine, a label where engines differ.
    """

    def __init__(self, metrics: Metrics, model: str, instance: int) -> None:
        self._phases = {phase: metrics.phase_seconds.labels(model, phase) for phase in PHASES}
        self._source_tokens = metrics.source_tokens.labels(model)
        self._target_tokens = metrics.target_tokens.labels(model)
        self._finished = metrics.finished
        self._step_seconds = metrics.step_seconds.labels(model)
        self._step_rows = metrics.step_rows.labels(model)
        self._encode_seconds = metrics.encode_seconds.labels(model)
        self._padding_tokens = metrics.padding_tokens.labels(model)
        self._saved_tokens = metrics.saved_tokens.labels(model)
        self._preempted = metrics.preempted.labels(model)
        self._queue_depth = metrics.queue_depth.labels(model)
        self._running_rows = metrics.running_rows.labels(model, str(instance))
        self._model = model

    def step_done(self, output: StepOutput, num_waiting: int, num_rows: int) -> None:
        """See `EngineObserver`."""
        if output.num_rows:
            self._step_seconds.observe(output.decode_s)
            self._step_rows.observe(output.num_rows)
        if output.num_encoded:
            self._encode_seconds.observe(output.encode_s)
            self._padding_tokens.inc(output.num_padding_tokens)
        self._preempted.inc(output.num_preempted)
        self._saved_tokens.inc(output.num_saved_tokens)
        self._queue_depth.set(num_waiting)
        self._running_rows.set(num_rows)
        for sequence in output.finished:
            self._count_finished(sequence)

    def _count_finished(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None
        self._finished.labels(self._model, sequence.finish_reason.value).inc()
        times = sequence.times
        self._phases["total"].observe(times.finished - times.arrived)
        # One that was dropped in the queue has waited as well, or overload would look healthy.
        self._phases["queue"].observe((times.scheduled or times.finished) - times.arrived)
        if not times.first_token:
            return
        self._phases["encode"].observe(times.encoded - times.scheduled)
        self._phases["first_token"].observe(times.first_token - times.arrived)
        self._phases["decode"].observe(times.finished - times.encoded)
        self._source_tokens.observe(len(sequence.source_ids))
        self._target_tokens.observe(len(sequence.output_ids))
