"""What a caller can be told has gone wrong.

    ServiceError
    ├── InvalidRequestError     INVALID_ARGUMENT     the request must be changed; lists every problem
    ├── NotFoundError           NOT_FOUND            no such model or language pair
    ├── OverloadedError         RESOURCE_EXHAUSTED   the waiting line is full
    ├── DeadlineError           DEADLINE_EXCEEDED    the caller's deadline passed while it was worked on
    ├── ShuttingDownError       UNAVAILABLE          the server is stopping
    └── EngineFailedError       INTERNAL             the engine has failed; the server is about to exit

Anything else that escapes a handler is a bug, and reported as INTERNAL without its details.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import grpc


class ServiceError(Exception):
    """Base class; the message is for the caller and says what to change."""

    code: ClassVar[grpc.StatusCode]


class InvalidRequestError(ServiceError):
    """A request that no server could answer."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


class NotFoundError(ServiceError):
    """A model or a language pair that this server does not have."""

    code = grpc.StatusCode.NOT_FOUND


class OverloadedError(ServiceError):
    """More is waiting than the server accepts."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineError(ServiceError):
    """The caller's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class ShuttingDownError(ServiceError):
    """The server is stopping."""

    code = grpc.StatusCode.UNAVAILABLE


class EngineFailedError(ServiceError):
    """The engine has failed."""

    code = grpc.StatusCode.INTERNAL
