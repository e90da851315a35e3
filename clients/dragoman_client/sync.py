"""The client for code without asyncio: drives an `AsyncClient` on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, NotRequired, Required, Self, TypedDict, TypeVar, Unpack

from dragoman_client.aio import DEFAULT_SERVER, DEFAULT_TIMEOUT_S, AsyncClient
from dragoman_client.credentials import Security
from dragoman_client.types import DecodingOptions, ModelDescription, Priority, TargetScore, Translation

T = TypeVar("T")


class CallOptions(TypedDict):
    """Keyword arguments of a translation; see `AsyncClient.translate`."""

    source: Required[str]
    target: Required[str]
    model: NotRequired[str]
    options: NotRequired[DecodingOptions | None]
    split: NotRequired[bool]
    priority: NotRequired[Priority]
    timeout: NotRequired[float | None]


class Client:
    """A connection to a server; safe to share among threads. Use it as a context manager, or `close` it.

    Arguments, results and errors are those of `AsyncClient`.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **security: Unpack[Security],
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dragoman-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_connect(server, timeout, security))
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def translate(self, text: str, *, target_prefix: str = "", **options: Unpack[CallOptions]) -> Translation:
        """See `AsyncClient.translate`."""
        return self._run(self._client.translate(text, target_prefix=target_prefix, **options))

    def translate_batch(
        self, texts: Sequence[str], *, target_prefixes: Sequence[str] = (), **options: Unpack[CallOptions]
    ) -> list[Translation]:
        """See `AsyncClient.translate_batch`."""
        return self._run(self._client.translate_batch(texts, target_prefixes=target_prefixes, **options))

    def stream(
        self, text: str, *, target_prefix: str = "", **options: Unpack[CallOptions]
    ) -> Iterator[str | Translation]:
        """See `AsyncClient.stream`; closing the iterator cancels the call."""
        events = self._client.stream(text, target_prefix=target_prefix, **options)
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            self._run(events.aclose())

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        source: str,
        target: str,
        model: str = "",
        timeout: float | None = None,
    ) -> list[TargetScore]:
        """See `AsyncClient.score`."""
        return self._run(
            self._client.score(sources, targets, source=source, target=target, model=model, timeout=timeout)
        )

    def models(self, timeout: float | None = None) -> list[ModelDescription]:
        """See `AsyncClient.models`."""
        return self._run(self._client.models(timeout))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _next(events: AsyncGenerator[str | Translation]) -> str | Translation | None:
    return await anext(events, None)


async def _connect(server: str, timeout: float | None, security: Security) -> AsyncClient:
    # grpc.aio binds a channel to the event loop it is made on.
    return AsyncClient(server, timeout, **security)
