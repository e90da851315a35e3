"""The client for asyncio; `dragoman_client.sync` wraps it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from dragoman_client.admin import AsyncAdmin
from dragoman_client.channel import OPTIONS
from dragoman_client.credentials import Credentials, Security
from dragoman_client.errors import DragomanError, InvalidRequestError, from_rpc_error
from dragoman_client.types import (
    PRIORITIES,
    DecodingOptions,
    ModelDescription,
    Priority,
    TargetScore,
    Translation,
    model_from,
    score_from,
    translation_from,
)
from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc

DEFAULT_SERVER = "localhost:50051"
DEFAULT_TIMEOUT_S = 30.0


class AsyncClient:
    """A connection to a server; safe to share among tasks. Use it as an async context manager, or `close` it.

    Args:
        server: HOST:PORT.
        timeout: of each call, in seconds, unless the call says otherwise; None waits for ever.
        security: TLS, certificates and API key; see `Security`.

    Raises:
        CredentialsError: a key would travel in plain text, or the credentials do not go together.
        OSError: a certificate's file cannot be read.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **security: Unpack[Security],
    ) -> None:
        credentials = Credentials.check(server, **security)
        self._channel = credentials.open_channel(server, OPTIONS)
        self._metadata = credentials.metadata
        self._stub: Any = pb_grpc.TranslationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout = timeout
        self.admin = AsyncAdmin(self._channel, self._call)
        """Loads, unloads and routes models."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        await self._channel.close()

    async def translate(
        self,
        text: str,
        *,
        source: str,
        target: str,
        model: str = "",
        options: DecodingOptions | None = None,
        split: bool = True,
        target_prefix: str = "",
        priority: Priority = "interactive",
        timeout: float | None = None,
    ) -> Translation:
        """Translate a text.

        Args:
            text: neither empty nor white space only.
            source: language of the text, such as "zh".
            target: language to translate into, such as "en".
            model: NAME, or NAME@VERSION where VERSION may be a label; empty for whichever translates the pair.
            options: how to decode; None for the server's defaults.
            split: whether the server may cut the text into sentences.
            target_prefix: what the translation begins with; such a text is not split.
            priority: "bulk" uses what interactive work leaves idle.
            timeout: in seconds; None for the client's.

        Raises:
            DragomanError: one of its subclasses, see `dragoman_client.errors`.
        """
        [translation] = await self.translate_batch(
            [text],
            source=source,
            target=target,
            model=model,
            options=options,
            split=split,
            target_prefixes=[target_prefix] if target_prefix else (),
            priority=priority,
            timeout=timeout,
        )
        return translation

    async def translate_batch(
        self,
        texts: Sequence[str],
        *,
        source: str,
        target: str,
        model: str = "",
        options: DecodingOptions | None = None,
        split: bool = True,
        target_prefixes: Sequence[str] = (),
        priority: Priority = "interactive",
        timeout: float | None = None,
    ) -> list[Translation]:
        """Translate several texts in one call, which fails or succeeds as a whole.

        Arguments and errors are those of `translate`; there are as many target prefixes as texts, or none.

        Returns:
            The translations, in the order of the texts.
        """
        request = _request(texts, source, target, model, options, split, target_prefixes, priority)
        response = await self._call(self._stub.Translate, request, timeout)
        return [translation_from(translation, response) for translation in response.translations]

    async def stream(
        self,
        text: str,
        *,
        source: str,
        target: str,
        model: str = "",
        options: DecodingOptions | None = None,
        split: bool = True,
        target_prefix: str = "",
        priority: Priority = "interactive",
        timeout: float | None = None,
    ) -> AsyncGenerator[str | Translation]:
        """Translate a text and get it piece by piece, as soon as no later step can change it.

        Arguments and errors are those of `translate`.

        Yields:
            Pieces of text, to be put one after the other; last, the whole translation.
        """
        prefixes = [target_prefix] if target_prefix else ()
        request = _request([text], source, target, model, options, split, prefixes, priority)
        timeout = self._timeout if timeout is None else timeout
        call = self._stub.TranslateStream(request, timeout=timeout, metadata=self._metadata)
        whole: pb.Translation | None = None
        try:
            async for event in call:
                match event.WhichOneof("event"):
                    case "delta":
                        yield event.delta.text
                    case "completion":
                        whole = event.completion.translation
                    case "summary" if whole is not None:
                        yield translation_from(whole, event.summary)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        source: str,
        target: str,
        model: str = "",
        priority: Priority = "interactive",
        timeout: float | None = None,
    ) -> list[TargetScore]:
        """Say how probable translations are.

        Args:
            sources: texts, each scored as one sequence.
            targets: a translation of each.
            source: language of the sources.
            target: language of the targets.
            model: NAME, or NAME@VERSION where VERSION may be a label; empty for whichever translates the pair.
            priority: "bulk" uses what interactive work leaves idle.
            timeout: in seconds; None for the client's.
        """
        name, _, version = model.partition("@")
        with _argument_errors():
            request = pb.ScoreRequest(
                sources=sources,
                targets=targets,
                source_language=source,
                target_language=target,
                model=name,
                model_version=version,
                priority=PRIORITIES[priority],
            )
        response = await self._call(self._stub.Score, request, timeout)
        return [score_from(score) for score in response.scores]

    async def translate_many(
        self,
        texts: Iterable[str],
        *,
        source: str,
        target: str,
        model: str = "",
        options: DecodingOptions | None = None,
        split: bool = True,
        priority: Priority = "interactive",
        concurrency: int = 64,
        timeout: float | None = None,
    ) -> AsyncGenerator[Translation | DragomanError]:
        """Translate any number of texts, many in flight at once; results come in the order of the texts.

        Args:
            texts: read as results are taken, never all at once.
            source: language of the texts.
            target: language to translate into.
            model: NAME, or NAME@VERSION where VERSION may be a label; empty for whichever translates the pair.
            options: how to decode; None for the server's defaults.
            split: whether the server may cut texts into sentences.
            priority: "bulk" uses what interactive work leaves idle.
            concurrency: texts in flight at once, at least 1.
            timeout: of each text, in seconds; None for the client's.

        Yields:
            Per text its translation, or the error that it alone met.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        pending: asyncio.Queue[asyncio.Task[Translation] | None] = asyncio.Queue(concurrency)
        in_flight = asyncio.Semaphore(concurrency)

        def call(text: str) -> Coroutine[Any, Any, Translation]:
            return self.translate(
                text,
                source=source,
                target=target,
                model=model,
                options=options,
                split=split,
                priority=priority,
                timeout=timeout,
            )

        feeder = asyncio.create_task(_feed(texts, call, pending, in_flight))
        try:
            while (task := await _next_of(pending, feeder)) is not None:
                result = await _outcome(task)
                in_flight.release()
                yield result
        finally:
            left = [task for task in (pending.get_nowait() for _ in range(pending.qsize())) if task is not None]
            for abandoned in (feeder, *left):
                abandoned.cancel()
            await asyncio.gather(feeder, *left, return_exceptions=True)

    async def models(self, timeout: float | None = None) -> list[ModelDescription]:
        """The models that the server has loaded, sorted by name and version."""
        response = await self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout)
        return [model_from(model) for model in response.models]

    async def model(self, name: str, timeout: float | None = None) -> ModelDescription:
        """One model.

        Args:
            name: NAME, or NAME@VERSION where VERSION may be a label; without, the stable one.
            timeout: in seconds; None for the client's.

        Raises:
            NotFoundError: there is none of this name.
        """
        name, _, version = name.partition("@")
        return model_from(
            await self._call(self._stub.GetModel, pb.GetModelRequest(name=name, version=version), timeout)
        )

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            timeout = self._timeout if timeout is None else timeout
            return await method(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


T = TypeVar("T")


async def _feed(
    texts: Iterable[str],
    call: Callable[[str], Coroutine[Any, Any, Translation]],
    pending: asyncio.Queue[asyncio.Task[Translation] | None],
    in_flight: asyncio.Semaphore,
) -> None:
    """Start a call for every text as soon as there is room for it; None ends the queue."""
    remaining = iter(texts)
    while True:
        await in_flight.acquire()
        # On a thread: texts may come from a pipe that is silent for minutes.
        text = await asyncio.to_thread(next, remaining, None)
        if text is None:
            return await pending.put(None)
        await pending.put(asyncio.create_task(call(text)))


async def _next_of(pending: asyncio.Queue[T], feeder: asyncio.Task[None]) -> T:
    """The next item; if the feeder fails instead of giving one, its error."""
    getter = asyncio.create_task(pending.get())
    try:
        await asyncio.wait([getter, feeder], return_when=asyncio.FIRST_COMPLETED)
        if not getter.done() and feeder.done() and feeder.exception() is not None:
            feeder.result()
        return await getter
    finally:
        getter.cancel()


async def _outcome(task: asyncio.Task[Translation]) -> Translation | DragomanError:
    try:
        return await task
    except DragomanError as error:
        return error


def _request(
    texts: Sequence[str],
    source: str,
    target: str,
    model: str,
    options: DecodingOptions | None,
    split: bool,
    target_prefixes: Sequence[str],
    priority: Priority,
) -> pb.TranslateRequest:
    name, _, version = model.partition("@")
    with _argument_errors():
        return pb.TranslateRequest(
            texts=texts,
            source_language=source,
            target_language=target,
            model=name,
            model_version=version,
            options=None if options is None else options.to_wire(),
            splitting=pb.SPLITTING_SENTENCES if split else pb.SPLITTING_NONE,
            target_prefixes=target_prefixes,
            priority=PRIORITIES[priority],
        )


@contextmanager
def _argument_errors() -> Iterator[None]:
    """A number out of range, or text with lone surrogates, is a request that is not valid."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequestError(str(error), grpc.StatusCode.INVALID_ARGUMENT) from error
