"""Who comes in, as the interceptor asks for it: by key, or by client certificate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from dragoman_server.access import (
    AccessError,
    ExhaustedError,
    KeyRing,
    MissingRightError,
    caller_from_auth_context,
    required_right,
)
from dragoman_server.errors import NotAllowedError, RateLimitedError, ServiceError, UnauthenticatedError

Context = grpc.aio.ServicerContext[Any, Any]


class KeyGate:
    """Lets in who brings a key; see `dragoman_server.interceptors.Gate`.

    Args:
        ring: of keys.
    """

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def admit(self, method: str, context: Context) -> str:
        """See `Gate`."""
        with _service_errors():
            caller = self._ring.authenticate(context.invocation_metadata())
            caller.require(required_right(method))
            return caller.name

    def charge(self, caller: str, num_characters: int) -> None:
        """See `Gate`."""
        with _service_errors():
            self._ring.charge(caller, num_characters)


class CertificateGate:
    """Lets in whom TLS has let in, and names them by their certificate: they may translate, without limits."""

    def admit(self, method: str, context: Context) -> str:
        """See `Gate`."""
        caller = caller_from_auth_context(context.auth_context())
        if caller is None:
            raise UnauthenticatedError("a client certificate with a common name is needed")
        with _service_errors():
            caller.require(required_right(method))
        return caller.name

    def charge(self, caller: str, num_characters: int) -> None:
        """See `Gate`."""


@contextmanager
def _service_errors() -> Iterator[None]:
    try:
        yield
    except AccessError as error:
        raise _as_service_error(error) from error


def _as_service_error(error: AccessError) -> ServiceError:
    if isinstance(error, ExhaustedError):
        return RateLimitedError(str(error), error.retry_after_s, error.which)
    if isinstance(error, MissingRightError):
        return NotAllowedError(str(error))
    return UnauthenticatedError(str(error))
