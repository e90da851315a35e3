"""What a call can fail with.

DragomanError
├── InvalidRequestError      INVALID_ARGUMENT     change the request; the message says how
├── NotFoundError            NOT_FOUND            no such model or language pair
├── OverloadedError          RESOURCE_EXHAUSTED   try again later
├── DeadlineExceededError    DEADLINE_EXCEEDED    the timeout passed
├── UnavailableError         UNAVAILABLE          no server there, or it is stopping (CANCELLED: it has stopped)
└── ServerError              anything else        a fault of the server
"""

from __future__ import annotations

import grpc


class DragomanError(Exception):
    """Base class.

    Args:
        message: from the server, or from the transport.
        code: the gRPC status.
    """

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


class InvalidRequestError(DragomanError):
    """The request must be changed."""


class NotFoundError(DragomanError):
    """The server has no such model, or none for the language pair."""


class OverloadedError(DragomanError):
    """Too much is waiting at the server."""


class DeadlineExceededError(DragomanError):
    """The timeout passed before the answer came."""


class UnavailableError(DragomanError):
    """There is no server at the address, or it is shutting down."""


class ServerError(DragomanError):
    """The server failed."""


_CLASSES: dict[grpc.StatusCode, type[DragomanError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    # A call that the caller cancels raises asyncio.CancelledError; as a status, it comes from a server that stopped.
    grpc.StatusCode.CANCELLED: UnavailableError,
}


def from_rpc_error(error: grpc.aio.AioRpcError) -> DragomanError:
    """The typed exception for a failed call."""
    code = error.code()
    return _CLASSES.get(code, ServerError)(error.details() or code.name, code)
