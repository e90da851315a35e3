"""The RPCs that callers use: wire messages in, domain calls, wire messages out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc

from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from dragoman_server.answers import description, target_score, timings, translation
from dragoman_server.call import Call, current_call
from dragoman_server.engine.async_engine import EngineDeadError, Work
from dragoman_server.engine.request import FinishReason, Priority, Sequence
from dragoman_server.engine.waiting_line import QueueFullError
from dragoman_server.errors import (
    DeadlineError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
    ServiceError,
    ShedError,
    ShuttingDownError,
    StepFailedError,
    UnreachableDeadlineError,
)
from dragoman_server.model import ServedModel
from dragoman_server.repository import ModelRepository
from dragoman_server.streaming import TextStream
from dragoman_server.validation import (
    RequestLimits,
    ValidRequest,
    check_scoring,
    check_translation,
    parse_scoring,
    parse_translation,
    unknown_fields,
)

_MANY_CHARACTERS = 20_000
"""Texts of more than this in a call are tokenised on a thread, so that other calls go on."""
_RESTART_S = 5.0
"""About how long a server takes to be replaced."""

Valid = TypeVar("Valid")


class TranslationServicer(pb_grpc.TranslationServiceServicer):
    """dragoman.v1.TranslationService.

    Args:
        repository: of loaded models, their engines running.
        limits: on every call.
    """

    def __init__(self, repository: ModelRepository, limits: RequestLimits) -> None:
        self._repository = repository
        self._limits = limits

    async def Translate(  # noqa: N802 - the name is the RPC's
        self, request: pb.TranslateRequest, context: grpc.aio.ServicerContext[pb.TranslateRequest, pb.TranslateResponse]
    ) -> pb.TranslateResponse:
        """See translation.proto."""
        check_translation(request, self._limits)
        with self._lease(request) as model:
            valid = await _parse(parse_translation, request, request.texts, model)
            works = [(part.source_ids, part.options) for text in valid.texts for part in text.segments]
            sequences = await _Decoding(model, valid.priority, context).decode_all(works)
            remaining = iter(sequences)
            watch = current_call.get().watch
            with watch.phase("detokenize"):
                done = [translation(valid, text, [next(remaining) for _ in text.segments]) for text in valid.texts]
            return pb.TranslateResponse(
                translations=done,
                model=model.name,
                model_version=model.version,
                timings=timings(sequences, watch),
                seed=valid.options.seed,
            )

    async def TranslateStream(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.TranslateRequest,
        context: grpc.aio.ServicerContext[pb.TranslateRequest, pb.TranslateStreamResponse],
    ) -> AsyncGenerator[pb.TranslateStreamResponse]:
        """See translation.proto."""
        check_translation(request, self._limits)
        with self._lease(request) as model:
            valid = await _parse(parse_translation, request, request.texts, model)
            finished: list[Sequence] = []
            async with aclosing(self._stream(valid, context, finished)) as events:
                async for event in events:
                    yield event
            summary = pb.TranslateStreamResponse.Summary(
                model=model.name,
                model_version=model.version,
                timings=timings(finished, current_call.get().watch),
                seed=valid.options.seed,
            )
            yield pb.TranslateStreamResponse(summary=summary)

    async def _stream(
        self, valid: ValidRequest, context: grpc.aio.ServicerContext[Any, Any], finished: list[Sequence]
    ) -> AsyncGenerator[pb.TranslateStreamResponse]:
        """Text as it becomes certain and translations as they end; `finished` collects all sequences."""
        watch = current_call.get().watch
        streams = [TextStream(valid, text) for text in valid.texts]
        places = [(i, j) for i, text in enumerate(valid.texts) for j in range(len(text.segments))]
        works = [(part.source_ids, part.options) for text in valid.texts for part in text.segments]
        async with aclosing(_Decoding(valid.model, valid.priority, context).stream_all(works)) as events:
            async for place, event in events:
                text_index, segment_index = places[place]
                stream = streams[text_index]
                with watch.phase("detokenize"):
                    ready = stream.accept(segment_index, event)
                if ready:
                    delta = pb.TranslateStreamResponse.Delta(text_index=text_index, text=ready)
                    yield pb.TranslateStreamResponse(delta=delta)
                if not isinstance(event, Sequence):
                    continue
                finished.append(event)
                if (sequences := stream.sequences) is not None:
                    whole = translation(valid, stream.text, sequences)
                    completion = pb.TranslateStreamResponse.Completion(text_index=text_index, translation=whole)
                    yield pb.TranslateStreamResponse(completion=completion)

    async def Score(  # noqa: N802 - the name is the RPC's
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[pb.ScoreRequest, pb.ScoreResponse]
    ) -> pb.ScoreResponse:
        """See translation.proto."""
        check_scoring(request, self._limits)
        with self._lease(request) as model:
            valid = await _parse(parse_scoring, request, [*request.sources, *request.targets], model)
            sequences = await _Decoding(model, valid.priority, context).decode_all(valid.pairs)
            watch = current_call.get().watch
            with watch.phase("detokenize"):
                scores = [target_score(model, sequence) for sequence in sequences]
            return pb.ScoreResponse(
                scores=scores, model=model.name, model_version=model.version, timings=timings(sequences, watch)
            )

    async def ListModels(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],  # noqa: ARG002
    ) -> pb.ListModelsResponse:
        """See translation.proto."""
        if problems := list(unknown_fields(request)):
            raise InvalidRequestError(problems)
        models = [description(model, self._repository) for model in self._repository]
        return pb.ListModelsResponse(models=models)

    async def GetModel(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.GetModelRequest,
        context: grpc.aio.ServicerContext[pb.GetModelRequest, pb.Model],  # noqa: ARG002
    ) -> pb.Model:
        """See translation.proto."""
        if problems := list(unknown_fields(request)):
            raise InvalidRequestError(problems)
        return description(self._repository.get(request.name, request.version), self._repository)

    def _lease(self, request: pb.TranslateRequest | pb.ScoreRequest) -> ServedModel:
        """The model for a request, to be entered until the call is over; noted on the call."""
        languages = request.source_language, request.target_language
        model = self._repository.lease(request.model, request.model_version, *languages)
        call = current_call.get()
        call.model, call.version = model.name, model.version
        return model


async def _parse(
    parse: Callable[[Any, ServedModel], Valid], request: Any, texts: Seq[str], model: ServedModel
) -> Valid:
    with current_call.get().watch.phase("tokenize"):
        if sum(map(len, texts)) > _MANY_CHARACTERS:
            return await asyncio.to_thread(parse, request, model)
        return parse(request, model)


class _Decoding:
    """One call's work for the engine: refused if it cannot be done in time, errors as callers are told of them.

    Args:
        model: that does it.
        priority: of the work.
        context: of the call, with its deadline.
    """

    def __init__(self, model: ServedModel, priority: Priority, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._model = model
        self._priority = priority
        self._call: Call = current_call.get()
        self._call.priority = priority.name.lower()
        remaining = context.time_remaining()
        self._deadline = None if remaining is None else time.monotonic() + remaining

    async def decode_all(self, works: Seq[Work]) -> list[Sequence]:
        """Sequences that have finished by themselves."""
        self._check_deadline(works)
        with self._errors():
            work = self._model.engine.decode_all(works, self._deadline, self._priority, self._call.caller)
            sequences = await work
            self._call.sequences += sequences
            for sequence in sequences:
                self._check(sequence)
        return sequences

    async def stream_all(self, works: Seq[Work]) -> AsyncGenerator[tuple[int, list[int] | Sequence]]:
        """See `AsyncEngine.stream_all`."""
        self._check_deadline(works)
        stream = self._model.engine.stream_all(works, self._deadline, self._priority, self._call.caller)
        async with aclosing(stream) as events:
            with self._errors():
                async for place, event in events:
                    if isinstance(event, Sequence):
                        self._call.sequences.append(event)
                        self._check(event)
                    yield place, event

    def _check_deadline(self, works: Seq[Work]) -> None:
        """Refuse work that cannot be done in time, before it takes anybody else's."""
        if self._deadline is None:
            return
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineError("the deadline had passed when the call arrived")
        wait = self._wait(sum(len(ids) * options.search.max_rows for ids, options in works))
        needed = self._model.pace.least_seconds([len(ids) for ids, _ in works])
        if wait + needed > remaining:
            raise UnreachableDeadlineError(remaining, wait, needed)

    def _wait(self, num_tokens: int) -> float:
        """Seconds until it is the turn of work of so many tokens, about."""
        engine = self._model.engine
        if not engine.line.num_waiting:
            return 0.0
        before = engine.line.tokens_before(self._priority, self._call.caller, num_tokens)
        return self._model.pace.wait_seconds(before, len(engine.engines))

    def _check(self, sequence: Sequence) -> None:
        """Raise if a sequence did not finish by itself."""
        if sequence.finish_reason is FinishReason.DEADLINE:
            raise DeadlineError("the deadline passed while the texts were being translated")
        if sequence.finish_reason is FinishReason.SHED:
            raise ShedError("too much is waiting, and most of it is yours", self._wait(0), "sequences")
        if sequence.finish_reason is FinishReason.ERROR:
            raise StepFailedError("the model failed; the server's log has the details") from sequence.error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except QueueFullError as error:
            retry_after = None if error.is_hopeless else self._wait(0)
            raise OverloadedError(str(error), retry_after, error.bound) from error
        except EngineDeadError as error:
            raise _as_service_error(error) from error


def _as_service_error(error: EngineDeadError) -> ServiceError:
    if error.__cause__ is None:
        return ShuttingDownError("the server is shutting down", _RESTART_S)
    return EngineFailedError("the engine has failed; the server is restarting", _RESTART_S)
