"""Traces: the caller's is continued, phases are its spans, histograms point to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.exposition import generate_latest

from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from dragoman_server.grpc_server import Server
from dragoman_server.settings import ServerSettings
from dragoman_server.tracing import OpenTelemetry
from tests.e2e.server_process import running_server
from tests.e2e.test_server import a_request

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


async def test_a_trace_goes_on_through_the_server(reversal_models: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = ServerSettings.load(["--models", str(reversal_models), "--port", "0", "--metrics-port", "-1"])
    server = Server(settings, OpenTelemetry(provider))
    running = asyncio.create_task(server.run())
    while not server.port:
        await asyncio.sleep(0.01)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = pb_grpc.TranslationServiceStub(channel)
        sampled = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        await stub.Translate(a_request("ba be", "bi"), metadata=sampled, wait_for_ready=True)
    page = generate_latest(server.metrics.registry).decode()
    server.stop()
    assert await running == 0
    spans = exporter.get_finished_spans()
    [call] = [span for span in spans if span.parent is not None and span.parent.span_id == int(PARENT, 16)]
    assert {span.context.trace_id for span in spans if span.context} == {int(TRACE, 16)}
    assert call.attributes is not None
    assert call.attributes["dragoman.model"] == "reversal"
    phases = [span for span in spans if span.parent == call.context]
    assert sorted(span.name for span in phases) == ["decode", "decode", "encode", "encode", "queue", "queue"]
    for span in phases:
        assert call.start_time is not None
        assert span.start_time is not None
        assert span.end_time is not None
        assert call.start_time - 1e6 <= span.start_time <= span.end_time
    assert f'# {{trace_id="{TRACE}"}}' in page


class Collector(otlp_grpc.TraceServiceServicer):
    """Takes what exporters send over OTLP."""

    def __init__(self) -> None:
        self.resources: list[dict[str, str]] = []
        self.spans: list[Any] = []

    def Export(  # noqa: N802 - the name is the RPC's
        self,
        request: otlp.ExportTraceServiceRequest,
        context: Any,  # noqa: ARG002
    ) -> otlp.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            self.resources.append({pair.key: pair.value.string_value for pair in resource.resource.attributes})
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return otlp.ExportTraceServiceResponse()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that the environment tells exporters of."""
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    yield collector
    server.stop(None)


def test_spans_reach_a_collector_before_the_server_ends(reversal_models: Path, collector: Collector) -> None:
    with running_server(reversal_models, "--tracing") as server, grpc.insecure_channel(server.address) as channel:
        sampled = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        pb_grpc.TranslationServiceStub(channel).Translate(a_request("ba be"), metadata=sampled)
        assert server.stop() == 0
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    [call] = [span for span in collector.spans if span.parent_span_id.hex() == PARENT]
    assert call.name == "/dragoman.v1.TranslationService/Translate"
    phases = {span.name for span in collector.spans if span.parent_span_id == call.span_id}
    assert phases == {"queue", "encode", "decode"}
    assert {resource["service.name"] for resource in collector.resources} == {"dragoman"}
