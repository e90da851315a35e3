"""Around every unary call: a readable request, an error that maps to one status code, a count and a duration."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
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
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the project's own unary RPCs; the standard services (health, reflection) pass through.

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
        return grpc.unary_unary_rpc_method_handler(
            self._wrap(cast("Behaviour", handler.unary_unary), method.rpartition("/")[2]),
            request_deserializer=tolerant_parser(self._inputs[method]),
            response_serializer=handler.response_serializer,
        )

    def _wrap(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def call(request: Message | Malformed, context: Context) -> Any:
            begun, code = time.monotonic(), grpc.StatusCode.OK
            self._enter()
            try:
                if self._draining:
                    raise ShuttingDownError("the server is shutting down")  # noqa: TRY301 - counted like any other
                return await behaviour(_well_formed(request), context)
            except ServiceError as error:
                code = error.code
                await context.abort(code, str(error))
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except Exception:  # noqa: BLE001 - logged with its traceback; the caller must not see it
                code = grpc.StatusCode.INTERNAL
                _LOG.exception("%s failed", method)
                await context.abort(code, "internal error; the server's log has the details")
            finally:
                self._leave()
                self._metrics.call_done(method, code.name, time.monotonic() - begun)

        return call

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
