"""OpenTelemetry traces: a span per call by the standard gRPC instrumentation, and one per phase inside it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import grpc

from dragoman_server.call import Call

_PHASES = (("queue", "arrived", "scheduled"), ("encode", "scheduled", "encoded"), ("decode", "encoded", "finished"))
"""Spans of a text: name, and the moments at which it begins and ends."""
_MAX_TEXTS = 16
"""Of a call, whose phases become spans."""


class Tracing(Protocol):
    """Follows calls."""

    def record(self, call: Call) -> None:
        """Add a call's phases to its trace; called before its span ends."""

    def exemplar(self) -> dict[str, str] | None:
        """Names the current trace in a histogram; None if it is not sampled."""


class NoTracing:
    """Follows nothing."""

    def record(self, call: Call) -> None:
        """See `Tracing`."""

    def exemplar(self) -> None:
        """See `Tracing`."""
        return


class OpenTelemetry:
    """Sends spans over OTLP, as the OTEL_* environment variables say.

    Args:
        provider: of tracers; None for one that exports over OTLP.

    Raises:
        ImportError: the extra `tracing` is not installed.
    """

    def __init__(self, provider: Any = None) -> None:
        from opentelemetry import trace

        self._trace = trace
        self._provider = provider or _otlp_provider()
        self._tracer = self._provider.get_tracer("dragoman_server")

    def interceptor(self) -> grpc.aio.ServerInterceptor:
        """Gives every call a span that continues the caller's trace (W3C trace context)."""
        from opentelemetry.instrumentation.grpc import aio_server_interceptor

        interceptor: grpc.aio.ServerInterceptor = aio_server_interceptor(  # type: ignore[no-untyped-call]
            tracer_provider=self._provider
        )
        return interceptor

    def record(self, call: Call) -> None:
        """See `Tracing`."""
        span = self._trace.get_current_span()
        if not span.is_recording():
            return
        span.set_attributes({"dragoman.model": call.model, "dragoman.version": call.version})
        span.set_attributes({"dragoman.priority": call.priority, "dragoman.request_id": call.request_id})
        epoch = time.time() - time.monotonic()
        for index, sequence in enumerate(call.sequences[:_MAX_TEXTS]):
            for name, begin, end in _PHASES:
                begun, ended = getattr(sequence.times, begin), getattr(sequence.times, end)
                if begun and ended:
                    self._span(name, epoch + begun, epoch + ended, {"dragoman.text": index})

    def _span(self, name: str, begun: float, ended: float, attributes: dict[str, int]) -> None:
        span = self._tracer.start_span(name, start_time=int(begun * 1e9), attributes=attributes)
        span.end(int(ended * 1e9))

    def exemplar(self) -> dict[str, str] | None:
        """See `Tracing`."""
        context = self._trace.get_current_span().get_span_context()
        if not context.trace_flags.sampled:
            return None
        return {"trace_id": f"{context.trace_id:032x}"}

    def stop(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def _otlp_provider() -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "dragoman"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
