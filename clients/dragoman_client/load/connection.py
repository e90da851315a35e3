"""The way to the server: one call, one attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from dragoman_client.channel import OPTIONS
from dragoman_client.credentials import Credentials, Security
from dragoman_client.errors import DragomanError, from_rpc_error
from dragoman_client.types import PRIORITIES, DecodingOptions, Priority
from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc

# The other clients try again where no server has taken a call. Here that would hide failures, and add to the load.
_OPTIONS = [*OPTIONS, ("grpc.enable_retries", 0)]

Result = pb.TranslateResponse | DragomanError
"""What becomes of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to send, and what to ask for."""

    server: str
    """HOST:PORT."""
    source: str
    target: str
    model: str
    """NAME or NAME@VERSION; empty: whichever translates the pair."""
    decoding: DecodingOptions
    split: bool
    """Whether the server may cut texts into sentences."""
    timeout_s: float
    """Of each call."""
    security: Security = field(default_factory=Security, repr=False)


class Connection:
    """A channel to the server. Use it as an async context manager.

    Args:
        target: of every call.

    Raises:
        CredentialsError: see `Credentials.check`.
        OSError: a certificate's file cannot be read.
    """

    def __init__(self, target: Target) -> None:
        credentials = Credentials.check(target.server, **target.security)
        self._target = target
        self._metadata = credentials.metadata
        self._channel = credentials.open_channel(target.server, _OPTIONS)
        self._stub: Any = pb_grpc.TranslationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._decoding = target.decoding.to_wire()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def translate(self, text: str, priority: Priority) -> pb.TranslateResponse:
        """Translate a text.

        Raises:
            DragomanError: one of its subclasses, see `dragoman_client.errors`.
        """
        target = self._target
        name, _, version = target.model.partition("@")
        request = pb.TranslateRequest(
            texts=[text],
            source_language=target.source,
            target_language=target.target,
            model=name,
            model_version=version,
            options=self._decoding,
            splitting=pb.SPLITTING_SENTENCES if target.split else pb.SPLITTING_NONE,
            priority=PRIORITIES[priority],
        )
        try:
            response: pb.TranslateResponse = await self._stub.Translate(
                request, timeout=target.timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return response
