"""Traces: the caller's is continued, phases are its spans, histograms point to it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.exposition import generate_latest

from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from dragoman_server.grpc_server import Server
from dragoman_server.settings import ServerSettings
from dragoman_server.tracing import OpenTelemetry
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
