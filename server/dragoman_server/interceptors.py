"""Around every call: a readable request, an error that maps to one status code, a count and a duration."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_server.errors import InvalidRequestError, ServiceError, ShuttingDownError
from dragoman_server.metrics import Metrics
from dragoman_server.wire import Malformed, tolerant_parser

_LOG = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Unary = Callable[[Any, Context], Awaitable[Any]]
Streaming = Callable[[Any, Context], AsyncGenerator[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the project's own RPCs; the standard services (health, reflection) pass through.

    Args:
        metrics: where calls are counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._num_running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._inputs: dict[str, type[Message]] = {
            f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
            for service in pb.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        }

    async def drain(self, timeout: float) -> None:
        """Refuse new calls from now on, and wait for the running ones, at most `timeout` seconds."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method not in self._inputs:
            return handler
        name = method.rpartition("/")[2]
        parse = tolerant_parser(self._inputs[method])
        serialise = handler.response_serializer
        if handler.response_streaming:
            streaming = self._wrap_streaming(cast("Streaming", handler.unary_stream), name)
            return grpc.unary_stream_rpc_method_handler(streaming, parse, serialise)
        unary = self._wrap_unary(cast("Unary", handler.unary_unary), name)
        return grpc.unary_unary_rpc_method_handler(unary, parse, serialise)

    def _wrap_unary(self, behaviour: Unary, method: str) -> Unary:
        async def call(request: Message | Malformed, context: Context) -> Any:
            async with self._accounted(method, context):
                return await behaviour(_well_formed(request), context)

        return call

    def _wrap_streaming(self, behaviour: Streaming, method: str) -> Streaming:
        async def call(request: Message | Malformed, context: Context) -> AsyncGenerator[Any]:
            async with self._accounted(method, context), aclosing(behaviour(_well_formed(request), context)) as answers:
                async for answer in answers:
                    yield answer

        return call

    @asynccontextmanager
    async def _accounted(self, method: str, context: Context) -> AsyncIterator[None]:
        """Around the work on one call: refuse it while draining, turn errors into codes, count it."""
        begun, code = time.monotonic(), grpc.StatusCode.OK
        self._enter()
        try:
            if self._draining:
                raise ShuttingDownError("the server is shutting down")  # noqa: TRY301 - counted like any other
            yield
        except ServiceError as error:
            code = error.code
            await context.abort(code, str(error))
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:  # noqa: BLE001 - logged with its traceback; the caller must not see it
            code = grpc.StatusCode.INTERNAL
            _LOG.exception("%s failed", method)
            await context.abort(code, "internal error; the server's log has the details")
        finally:
            self._leave()
            self._metrics.call_done(method, code.name, time.monotonic() - begun)

    def _enter(self) -> None:
        self._num_running += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._idle.set()


def _well_formed(request: Message | Malformed) -> Message:
    if isinstance(request, Malformed):
        raise InvalidRequestError(request.problems)
    return request
