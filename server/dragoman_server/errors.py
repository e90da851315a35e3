"""What a caller can be told has gone wrong.

    ServiceError
    ├── InvalidRequestError       INVALID_ARGUMENT      the request must be changed; lists every problem
    ├── NotFoundError             NOT_FOUND             no such model, version or language pair
    ├── FailedPreconditionError   FAILED_PRECONDITION   the models are not in a state that allows it
    ├── RefusedBundleError        FAILED_PRECONDITION   the bundle must not be served
    ├── UnauthenticatedError      UNAUTHENTICATED       no valid key
    ├── NotAllowedError           PERMISSION_DENIED     the key has not the right
    ├── OverloadedError           RESOURCE_EXHAUSTED    the waiting line is full
    ├── ShedError                 RESOURCE_EXHAUSTED    it was, and other callers had less in it
    ├── RateLimitedError          RESOURCE_EXHAUSTED    the key's rate is used up
    ├── DeadlineError             DEADLINE_EXCEEDED     the caller's deadline passed while it was worked on
    ├── UnreachableDeadlineError  DEADLINE_EXCEEDED     it cannot be met, so nothing was begun
    ├── ShuttingDownError         UNAVAILABLE           the server is stopping
    ├── EngineFailedError         UNAVAILABLE           the engine has failed; the server is about to exit
    └── StepFailedError           INTERNAL              the model failed on this request, or on its neighbours

Every error carries google.rpc details: an ErrorInfo with its reason always, BadRequest with a violation per problem,
RetryInfo where it makes sense to try again, QuotaFailure where a bound was met. Anything else that escapes a handler is
a bug, and reported as INTERNAL without its details.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from dragoman_protos.v1 import translation_pb2 as pb

DOMAIN = "dragoman"
"""Of every ErrorInfo."""
STATUS_DETAILS = "grpc-status-details-bin"
"""Trailing metadata that carries google.rpc.Status, by gRPC's convention."""

_FIELD = re.compile(r"([a-z_0-9]+)(\[\d+\])?(\.[a-z_0-9]+(\[\d+\])?)*")


class ServiceError(Exception):
    """Base class; the message is for the caller and says what to change."""

    code: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]
    """Constant that programs can rely on."""

    def details(self) -> Iterator[Message]:
        """google.rpc details beside ErrorInfo."""
        yield from ()

    def metadata(self) -> Mapping[str, str]:
        """Facts for ErrorInfo."""
        return {}

    def status(self) -> status_pb2.Status:
        """All of it, as google.rpc.Status."""
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata())
        status = status_pb2.Status(code=self.code.value[0], message=str(self))
        for detail in (info, *self.details()):
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        return status


class InvalidRequestError(ServiceError):
    """A request that no server could answer."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))

    def details(self) -> Iterator[Message]:
        """A violation per problem."""
        violation = error_details_pb2.BadRequest.FieldViolation
        problems = [violation(field=_field_of(problem), description=problem) for problem in self.problems]
        yield error_details_pb2.BadRequest(field_violations=problems)


class NotFoundError(ServiceError):
    """A model, a version or a language pair that this server does not have."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class FailedPreconditionError(ServiceError):
    """What is asked for is not possible as things are."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FAILED_PRECONDITION"


class RefusedBundleError(ServiceError):
    """A bundle that must not be served: damaged, or it does not answer as it should."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "BUNDLE_REFUSED"


class UnauthenticatedError(ServiceError):
    """No key, or none that is known."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class NotAllowedError(ServiceError):
    """The caller has not the right."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "NOT_ALLOWED"


class _RetryableError(ServiceError):
    """Worth another try, some time later.

    Args:
        message: for the caller.
        retry_after_s: seconds to wait; None if it is not worth it.
        quota: the bound that was met, if one was.
    """

    def __init__(self, message: str, retry_after_s: float | None = None, quota: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.quota = quota

    def details(self) -> Iterator[Message]:
        """When to try again, and which bound it was."""
        if self.retry_after_s is not None:
            delay = Duration()
            delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            yield error_details_pb2.RetryInfo(retry_delay=delay)
        if self.quota:
            violation = error_details_pb2.QuotaFailure.Violation(subject=self.quota, description=str(self))
            yield error_details_pb2.QuotaFailure(violations=[violation])


class OverloadedError(_RetryableError):
    """More is waiting than the server accepts."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class ShedError(_RetryableError):
    """The line was full, and other callers had less in it."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SHED"


class RateLimitedError(_RetryableError):
    """The caller's rate is used up."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "RATE_LIMITED"


class DeadlineError(ServiceError):
    """The caller's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_PASSED"


class UnreachableDeadlineError(ServiceError):
    """The caller's deadline cannot be met.

    Args:
        remaining_s: seconds that are left.
        wait_s: seconds until it would be its turn.
        decode_s: seconds that it needs from then on, at the least.
    """

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_UNREACHABLE"

    def __init__(self, remaining_s: float, wait_s: float, decode_s: float) -> None:
        self._facts = {"remaining_seconds": remaining_s, "wait_seconds": wait_s, "decode_seconds": decode_s}
        super().__init__(
            f"{remaining_s:.3f} s are left, but the wait is about {wait_s:.3f} s and decoding takes at least "
            f"{decode_s:.3f} s; nothing was begun"
        )

    def metadata(self) -> Mapping[str, str]:
        """The estimate."""
        return {name: f"{seconds:.6f}" for name, seconds in self._facts.items()}


class ShuttingDownError(_RetryableError):
    """The server is stopping."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class EngineFailedError(_RetryableError):
    """The engine has failed."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "ENGINE_FAILED"


class StepFailedError(ServiceError):
    """The model failed while it worked on this request."""

    code = grpc.StatusCode.INTERNAL
    reason = "STEP_FAILED"


def _field_names(descriptor: Descriptor) -> Iterator[str]:
    for field in descriptor.fields:
        yield field.name


_REQUEST_FIELDS = frozenset(
    name
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    for name in _field_names(method.input_type)
)


def _field_of(problem: str) -> str:
    """The path with which a problem begins; "" if it is of the whole request."""
    match = _FIELD.match(problem)
    return match.group() if match is not None and match.group(1) in _REQUEST_FIELDS else ""
