"""What a call can fail with.

DragomanError
├── InvalidRequestError        INVALID_ARGUMENT      change the request; `problems` says how
├── NotFoundError              NOT_FOUND             no such model, version or language pair
├── FailedPreconditionError    FAILED_PRECONDITION   the server's models are not in a state that allows it
├── UnauthenticatedError       UNAUTHENTICATED       no valid key was sent
├── PermissionDeniedError      PERMISSION_DENIED     the key has not the right
├── OverloadedError            RESOURCE_EXHAUSTED    try again after `retry_after` seconds
│   └── RateLimitedError       RESOURCE_EXHAUSTED    the same; the key's own rate is used up
├── DeadlineExceededError      DEADLINE_EXCEEDED     the timeout passed
│   └── DeadlineUnreachableError                     it cannot be met, so nothing was begun
├── UnavailableError           UNAVAILABLE           no server there, or it is stopping (CANCELLED: it has stopped)
└── ServerError                anything else         a fault of the server
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

_STATUS_DETAILS = "grpc-status-details-bin"
_TOO_LARGE = "larger than max"
"""How gRPC itself says that a message exceeds a size limit, for which it has no code of its own."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """What a server says of an error besides its message (google.rpc error details)."""

    reason: str = ""
    """A constant such as QUEUE_FULL; empty if the error did not come from a Dragoman server."""
    retry_after: float | None = None
    """Seconds to wait before another try; None if the server does not say."""
    problems: tuple[tuple[str, str], ...] = ()
    """Of a request: the path of a field (empty: the whole request), and what is wrong with it."""
    quota: str = ""
    """The bound that was met."""
    metadata: dict[str, str] = field(default_factory=dict)


class DragomanError(Exception):
    """Base class.

    Args:
        message: from the server, or from the transport.
        code: the gRPC status.
        facts: what else the server said.
    """

    def __init__(self, message: str, code: grpc.StatusCode, facts: ErrorFacts | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.facts = facts or ErrorFacts()

    @property
    def reason(self) -> str:
        """See `ErrorFacts.reason`."""
        return self.facts.reason

    @property
    def retry_after(self) -> float | None:
        """See `ErrorFacts.retry_after`."""
        return self.facts.retry_after

    @property
    def problems(self) -> tuple[tuple[str, str], ...]:
        """See `ErrorFacts.problems`."""
        return self.facts.problems


class InvalidRequestError(DragomanError):
    """The request must be changed."""


class NotFoundError(DragomanError):
    """The server has no such model, or none for the language pair."""


class FailedPreconditionError(DragomanError):
    """The server's models are not in a state that allows it."""


class UnauthenticatedError(DragomanError):
    """The server wants a key and got none that it knows."""


class PermissionDeniedError(DragomanError):
    """The key has not the right to do this."""


class OverloadedError(DragomanError):
    """Too much is waiting at the server."""


class RateLimitedError(OverloadedError):
    """The key's rate is used up."""


class DeadlineExceededError(DragomanError):
    """The timeout passed before the answer came."""


class DeadlineUnreachableError(DeadlineExceededError):
    """The server expects the timeout to pass, and has not begun."""


class UnavailableError(DragomanError):
    """There is no server at the address, or it is shutting down."""


class ServerError(DragomanError):
    """The server failed."""


_CLASSES: dict[grpc.StatusCode, type[DragomanError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    # A call that the caller cancels raises asyncio.CancelledError; as a status, it comes from a server that stopped.
    grpc.StatusCode.CANCELLED: UnavailableError,
}
_CLASSES_BY_REASON: dict[str, type[DragomanError]] = {
    "RATE_LIMITED": RateLimitedError,
    "DEADLINE_UNREACHABLE": DeadlineUnreachableError,
}


def from_rpc_error(error: grpc.aio.AioRpcError) -> DragomanError:
    """The typed exception for a failed call."""
    code, message, facts = error.code(), error.details() or error.code().name, _facts_of(error)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not facts.reason and _TOO_LARGE in message:
        return InvalidRequestError(f"{message}; split the call", code)
    kind = _CLASSES_BY_REASON.get(facts.reason) or _CLASSES.get(code, ServerError)
    return kind(message, code, facts)


def _facts_of(error: grpc.aio.AioRpcError) -> ErrorFacts:
    packed = next((value for key, value in error.trailing_metadata() or () if key == _STATUS_DETAILS), b"")
    status = status_pb2.Status()
    try:
        status.ParseFromString(packed if isinstance(packed, bytes) else packed.encode())
    except DecodeError:  # not a server of ours
        return ErrorFacts()
    info = _find(status, error_details_pb2.ErrorInfo())
    retry = _find(status, error_details_pb2.RetryInfo())
    bad = _find(status, error_details_pb2.BadRequest())
    quota = _find(status, error_details_pb2.QuotaFailure())
    return ErrorFacts(
        reason=info.reason,
        retry_after=retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
        problems=tuple((violation.field, violation.description) for violation in bad.field_violations),
        quota=quota.violations[0].subject if quota.violations else "",
        metadata=dict(info.metadata),
    )


def _find(status: status_pb2.Status, into: M) -> M:
    """The detail of one kind; empty if there is none."""
    for detail in status.details:
        if detail.Unpack(into):
            break
    return into
