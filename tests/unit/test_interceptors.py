"""What the interceptor makes of a call's end: a status, a count, and nobody left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_server.call import Call, current_call
from dragoman_server.errors import NotFoundError
from dragoman_server.interceptors import CallInterceptor, OpenGate
from dragoman_server.metrics import Metrics
from dragoman_server.tracing import NoTracing

TRANSLATE = "/dragoman.v1.TranslationService/Translate"
STREAM = "/dragoman.v1.TranslationService/TranslateStream"


class AbortedError(Exception):
    """What `abort` raises."""


class Context:
    """As much of a call's context as the interceptor asks for."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-request-id", "seven"),)

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        assert metadata == (("x-request-id", "seven"),)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: object = ()) -> None:  # noqa: ARG002
        self.code = code
        raise AbortedError


class BrokenGate(OpenGate):
    """Cannot even tell who calls."""

    def admit(self, method: str, context: Any) -> str:  # noqa: ARG002
        raise KeyboardInterrupt


class Wrapped:
    """An interceptor around a behaviour."""

    def __init__(self, gate: OpenGate | None = None) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.interceptor = CallInterceptor(self.metrics, gate or OpenGate(), NoTracing())

    async def handler(self, path: str, behaviour: Callable[..., Any]) -> Any:
        make = grpc.unary_stream_rpc_method_handler if path == STREAM else grpc.unary_unary_rpc_method_handler

        async def continuation(_: object) -> Any:
            return make(behaviour, None, None)

        details: Any = type("Details", (), {"method": path})
        return await self.interceptor.intercept_service(continuation, details)

    def counted(self) -> dict[str, float]:
        """Calls by their codes and errors by their reasons, that are not 0."""
        samples = [sample for metric in self.metrics.registry.collect() for sample in metric.samples]
        labels = {"dragoman_requests_total": "code", "dragoman_errors_total": "reason"}
        return {s.labels[labels[s.name]]: s.value for s in samples if s.name in labels and s.value}

    async def is_idle(self) -> bool:
        begun = asyncio.get_running_loop().time()
        await self.interceptor.drain(0.5)
        return asyncio.get_running_loop().time() - begun < 0.4


def raising(error: BaseException) -> Callable[..., Awaitable[pb.TranslateResponse]]:
    async def behaviour(_request: object, _context: object) -> pb.TranslateResponse:
        raise error

    return behaviour


async def answering(_request: object, _context: object) -> pb.TranslateResponse:
    return pb.TranslateResponse(model="a")


@pytest.mark.parametrize(
    ("error", "raised", "code", "counted"),
    [
        (NotFoundError("no such model"), AbortedError, grpc.StatusCode.NOT_FOUND, {"NOT_FOUND": 1}),
        (ValueError("a bug"), AbortedError, grpc.StatusCode.INTERNAL, {"INTERNAL": 1, "BUG": 1}),
        (asyncio.CancelledError(), asyncio.CancelledError, None, {"CANCELLED": 1}),
    ],
)
async def test_every_end_is_counted_once(
    error: BaseException, raised: type[BaseException], code: grpc.StatusCode | None, counted: dict[str, float]
) -> None:
    wrapped, context = Wrapped(), Context()
    handler = await wrapped.handler(TRANSLATE, raising(error))
    with pytest.raises(raised):
        await handler.unary_unary(pb.TranslateRequest(), context)
    assert context.code is code
    assert {k: v for k, v in wrapped.counted().items() if k != "MODEL_NOT_FOUND"} == counted
    assert await wrapped.is_idle()


async def test_an_answer_is_counted_as_ok() -> None:
    wrapped = Wrapped()
    handler = await wrapped.handler(TRANSLATE, answering)
    assert (await handler.unary_unary(pb.TranslateRequest(), Context())).model == "a"
    assert wrapped.counted() == {"OK": 1}
    assert await wrapped.is_idle()


async def test_a_stream_that_is_left_is_cancelled() -> None:
    async def behaviour(_request: object, _context: object) -> AsyncGenerator[pb.TranslateStreamResponse]:
        while True:
            yield pb.TranslateStreamResponse()

    wrapped = Wrapped()
    handler = await wrapped.handler(STREAM, behaviour)
    stream = handler.unary_stream(pb.TranslateRequest(), Context())
    await anext(stream)
    await stream.aclose()
    assert wrapped.counted() == {"CANCELLED": 1}
    assert await wrapped.is_idle()


async def test_who_comes_while_the_server_stops_is_refused() -> None:
    wrapped, context = Wrapped(), Context()
    handler = await wrapped.handler(TRANSLATE, answering)
    await wrapped.interceptor.drain(0.1)
    with pytest.raises(AbortedError):
        await handler.unary_unary(pb.TranslateRequest(), context)
    assert context.code is grpc.StatusCode.UNAVAILABLE
    assert wrapped.counted()["UNAVAILABLE"] == 1
    assert await wrapped.is_idle()


async def test_nobody_is_left_running_whatever_a_gate_raises() -> None:
    wrapped = Wrapped(BrokenGate())
    handler = await wrapped.handler(TRANSLATE, answering)
    with pytest.raises(KeyboardInterrupt):
        await handler.unary_unary(pb.TranslateRequest(), Context())
    assert await wrapped.is_idle()


async def test_the_call_is_known_to_whoever_works_on_it() -> None:
    seen: list[Call] = []

    async def behaviour(_request: object, _context: object) -> pb.TranslateResponse:
        seen.append(current_call.get())
        return pb.TranslateResponse()

    handler = await Wrapped().handler(TRANSLATE, behaviour)
    await handler.unary_unary(pb.TranslateRequest(), Context())
    assert [(call.method, call.request_id) for call in seen] == [("Translate", "seven")]
