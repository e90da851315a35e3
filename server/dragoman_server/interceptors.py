"""Around every call: who calls, a readable request, an error that maps to one status, a count, a duration, a trace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from dragoman_protos.v1 import admin_pb2, translation_pb2
from dragoman_server.call import CALLER, REQUEST_ID, Call, current_call, metadata_value, new_request_id
from dragoman_server.errors import STATUS_DETAILS, InvalidRequestError, ServiceError, ShuttingDownError
from dragoman_server.logs import log_call
from dragoman_server.metrics import Metrics
from dragoman_server.tracing import Tracing
from dragoman_server.wire import Malformed, tolerant_parser

_LOG = logging.getLogger(__name__)
_ELSEWHERE_S = 1.0
"""After which a client may try again: another server is up already."""

Context = grpc.aio.ServicerContext[Any, Any]
Unary = Callable[[Any, Context], Awaitable[Any]]
Streaming = Callable[[Any, Context], AsyncGenerator[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Gate(Protocol):
    """Decides who may do what."""

    def admit(self, method: str, context: Context) -> str:
        """Let a call in, and name its caller.

        Raises:
            ServiceError: it may not come in.
        """

    def charge(self, caller: str, num_characters: int) -> None:
        """Take a call's texts off its caller's allowance.

        Raises:
            ServiceError: the allowance is used up.
        """


class OpenGate:
    """Lets everybody in; callers say themselves who they are, so that they share the server fairly."""

    def admit(self, method: str, context: Context) -> str:  # noqa: ARG002 - everybody may do everything
        """See `Gate`."""
        return metadata_value(context.invocation_metadata(), CALLER)

    def charge(self, caller: str, num_characters: int) -> None:
        """See `Gate`."""


@dataclass(slots=True)
class _Method:
    """One of the project's own RPCs."""

    path: str
    request_class: type[Message]
    handler: Handler | None = None
    """With everything around it, once it has been called."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the project's own RPCs; the standard services (health, reflection) pass through.

    Args:
        metrics: where calls are counted.
        gate: that lets them in.
        tracing: that follows them.
        logs_calls: whether each gets a line in the log.
    """

    def __init__(self, metrics: Metrics, gate: Gate, tracing: Tracing, *, logs_calls: bool = False) -> None:
        self._metrics = metrics
        self._gate = gate
        self._tracing = tracing
        self._logs_calls = logs_calls
        self._num_running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._methods: dict[str, _Method] = {}
        for file in (translation_pb2, admin_pb2):
            for service in file.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    path = f"/{service.full_name}/{method.name}"
                    self._methods[path] = _Method(path, GetMessageClass(method.input_type))

    async def drain(self, timeout: float) -> None:
        """Refuse new calls from now on, and wait for the running ones, at most `timeout` seconds."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See `grpc.aio.ServerInterceptor`."""
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return await continuation(handler_call_details)
        if method.handler is None and (handler := await continuation(handler_call_details)) is not None:
            method.handler = self._wrap(handler, method)
        return method.handler

    def _wrap(self, handler: Handler, method: _Method) -> Handler:
        parse = tolerant_parser(method.request_class)
        serialise = handler.response_serializer
        if handler.response_streaming:
            streaming = self._wrap_streaming(cast("Streaming", handler.unary_stream), method)
            return grpc.unary_stream_rpc_method_handler(streaming, parse, serialise)
        unary = self._wrap_unary(cast("Unary", handler.unary_unary), method)
        return grpc.unary_unary_rpc_method_handler(unary, parse, serialise)

    def _wrap_unary(self, behaviour: Unary, method: _Method) -> Unary:
        async def call(request: Message | Malformed, context: Context) -> Any:
            async with _Accounted(self, method, request, context):
                return await behaviour(request, context)

        return call

    def _wrap_streaming(self, behaviour: Streaming, method: _Method) -> Streaming:
        async def call(request: Message | Malformed, context: Context) -> AsyncGenerator[Any]:
            async with (
                _Accounted(self, method, request, context),
                aclosing(behaviour(request, context)) as answers,
            ):
                async for answer in answers:
                    yield answer

        return call

    def begin(self) -> None:
        """A call has come; `finish` must follow, whether it is let in or not."""
        self._num_running += 1
        self._idle.clear()

    def admit(self, call: Call, method: _Method, request: Message | Malformed, context: Context) -> None:
        """Let a call in.

        Raises:
            ServiceError: it may not come in.
        """
        if self._draining:
            raise ShuttingDownError("the server is shutting down", _ELSEWHERE_S)
        call.caller = self._gate.admit(method.path, context)
        if isinstance(request, Malformed):
            raise InvalidRequestError(request.problems)
        self._gate.charge(call.caller, _num_characters(request))

    def count_error(self, reason: str) -> None:
        """A call has failed."""
        self._metrics.errors.labels(reason).inc()

    def finish(self, call: Call, code: str) -> None:
        """A call is over: count it, and log it if that is wanted."""
        self._num_running -= 1
        if not self._num_running:
            self._idle.set()
        seconds = time.monotonic() - call.watch.arrived
        self._tracing.record(call)
        self._metrics.call_done(call, code, seconds, self._tracing.exemplar())
        if self._logs_calls:
            log_call(_LOG, call, code, seconds)


class _Accounted:
    """Around the work on one call: let it in or refuse it, turn errors into statuses, count it.

    Args:
        interceptor: that wraps it.
        method: that was called.
        request: as it was read.
        context: of the call.
    """

    __slots__ = ("_call", "_context", "_interceptor", "_method", "_request")

    def __init__(
        self, interceptor: CallInterceptor, method: _Method, request: Message | Malformed, context: Context
    ) -> None:
        self._interceptor, self._method, self._request, self._context = interceptor, method, request, context
        given = metadata_value(context.invocation_metadata(), REQUEST_ID)
        self._call = Call(method.name, given or new_request_id(), "")

    async def __aenter__(self) -> None:
        current_call.set(self._call)
        self._context.set_trailing_metadata(((REQUEST_ID, self._call.request_id),))
        self._interceptor.begin()
        try:
            self._interceptor.admit(self._call, self._method, self._request, self._context)
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        code = _code_of(error)
        try:
            if isinstance(error, ServiceError):
                self._interceptor.count_error(error.reason)
                await _abort(self._context, self._call, error)
            elif code is grpc.StatusCode.INTERNAL:
                self._interceptor.count_error("BUG")
                _LOG.error("%s failed", self._call.method, exc_info=error)
                await self._context.abort(code, "internal error; the server's log has the details")
        finally:
            self._interceptor.finish(self._call, code.name)


def _code_of(error: BaseException | None) -> grpc.StatusCode:
    """How a call ends that has raised an error, or none."""
    if error is None:
        return grpc.StatusCode.OK
    if isinstance(error, ServiceError):
        return error.code
    return grpc.StatusCode.INTERNAL if isinstance(error, Exception) else grpc.StatusCode.CANCELLED


async def _abort(context: Context, call: Call, error: ServiceError) -> None:
    details = (STATUS_DETAILS, error.status().SerializeToString())
    await context.abort(error.code, str(error), ((REQUEST_ID, call.request_id), details))


def _num_characters(request: Message) -> int:
    """Of all texts of a request."""
    if isinstance(request, translation_pb2.TranslateRequest):
        return sum(map(len, request.texts)) + sum(map(len, request.target_prefixes))
    if isinstance(request, translation_pb2.ScoreRequest):
        return sum(map(len, request.sources)) + sum(map(len, request.targets))
    return 0
