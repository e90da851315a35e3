"""The client for asyncio; `dragoman_client.sync` wraps it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import grpc

from dragoman_client.errors import DragomanError, InvalidRequestError, from_rpc_error
from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc

DEFAULT_SERVER = "localhost:50051"
DEFAULT_TIMEOUT_S = 30.0

FinishReason = Literal["eos", "length", "unknown"]
_FINISH_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_EOS: "eos", pb.FINISH_REASON_LENGTH: "length"}

_MAX_MESSAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A translated text."""

    text: str
    finish_reason: FinishReason
    """"eos": complete. "length": cut at the limit; text may be missing. "unknown": of a newer server."""
    source_tokens: int
    target_tokens: int
    model: str
    model_version: str

    @property
    def complete(self) -> bool:
        """Whether nothing was cut."""
        return self.finish_reason == "eos"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model that a server offers."""

    name: str
    version: str
    directions: tuple[tuple[str, str], ...]
    """Pairs of source and target language."""
    precision: str
    device: str
    max_source_tokens: int
    max_target_tokens: int


class AsyncClient:
    """A connection to a server; safe to share among tasks. Use it as an async context manager, or `close` it.

    Args:
        server: HOST:PORT.
        timeout: of each call, in seconds, unless the call says otherwise; None waits for ever.
    """

    def __init__(self, server: str = DEFAULT_SERVER, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        options = [
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ]
        self._channel = grpc.aio.insecure_channel(server, options=options)
        self._stub: Any = pb_grpc.TranslationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout = timeout

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
        max_target_tokens: int | None = None,
        timeout: float | None = None,
    ) -> Translation:
        """Translate a text.

        Args:
            text: neither empty nor white space only.
            source: language of the text, such as "zh".
            target: language to translate into, such as "en".
            model: name of a model; empty for whichever translates the pair.
            max_target_tokens: most tokens of the translation, its end not counted; None for the model's default.
            timeout: in seconds; None for the client's.

        Raises:
            DragomanError: one of its subclasses, see `dragoman_client.errors`.
        """
        [translation] = await self.translate_batch(
            [text], source=source, target=target, model=model, max_target_tokens=max_target_tokens, timeout=timeout
        )
        return translation

    async def translate_batch(
        self,
        texts: Sequence[str],
        *,
        source: str,
        target: str,
        model: str = "",
        max_target_tokens: int | None = None,
        timeout: float | None = None,
    ) -> list[Translation]:
        """Translate several texts in one call, which fails or succeeds as a whole.

        Arguments and errors are those of `translate`.

        Returns:
            The translations, in the order of the texts.
        """
        try:
            request = pb.TranslateRequest(
                texts=texts,
                source_language=source,
                target_language=target,
                model=model,
                options=pb.DecodingOptions(max_target_tokens=max_target_tokens),
            )
        except ValueError as error:  # a number out of range, or text with lone surrogates
            raise InvalidRequestError(str(error), grpc.StatusCode.INVALID_ARGUMENT) from error
        return _translations(await self._call(self._stub.Translate, request, timeout))

    async def translate_stream(
        self, texts: Iterable[str], *, source: str, target: str, model: str = "", concurrency: int = 64,
        timeout: float | None = None,
    ) -> AsyncGenerator[Translation | DragomanError]:  # fmt: skip
        """Translate any number of texts, many in flight at once; results come in the order of the texts.

        Args:
            texts: read as results are taken, never all at once.
            source: language of the texts.
            target: language to translate into.
            model: name of a model; empty for whichever translates the pair.
            concurrency: texts in flight at once, at least 1.
            timeout: of each text, in seconds; None for the client's.

        Yields:
            Per text its translation, or the error that it alone met.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        pending: asyncio.Queue[asyncio.Task[Translation] | None] = asyncio.Queue(concurrency)
        in_flight = asyncio.Semaphore(concurrency)

        async def feed() -> None:
            remaining = iter(texts)
            while True:
                await in_flight.acquire()
                # On a thread: texts may come from a pipe that is silent for minutes.
                text = await asyncio.to_thread(next, remaining, None)
                if text is None:
                    return await pending.put(None)
                call = self.translate(text, source=source, target=target, model=model, timeout=timeout)
                await pending.put(asyncio.create_task(call))

        feeder = asyncio.create_task(feed())
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
        """The models that the server offers, sorted by name."""
        response = await self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout)
        return [
            ModelDescription(
                name=model.name,
                version=model.version,
                directions=tuple((d.source_language, d.target_language) for d in model.directions),
                precision=model.precision,
                device=model.device,
                max_source_tokens=model.max_source_tokens,
                max_target_tokens=model.max_target_tokens,
            )
            for model in response.models
        ]

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=self._timeout if timeout is None else timeout)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


T = TypeVar("T")


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


def _translations(response: pb.TranslateResponse) -> list[Translation]:
    return [
        Translation(
            text=translation.text,
            finish_reason=_FINISH_REASONS.get(translation.finish_reason, "unknown"),
            source_tokens=translation.source_tokens,
            target_tokens=translation.target_tokens,
            model=response.model,
            model_version=response.model_version,
        )
        for translation in response.translations
    ]
