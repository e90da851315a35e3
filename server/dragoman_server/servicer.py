"""The RPCs: wire messages in, domain calls, wire messages out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import grpc

from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from dragoman_server.answers import description, target_score, timings, translation
from dragoman_server.engine.async_engine import EngineDeadError
from dragoman_server.engine.request import FinishReason, Sequence
from dragoman_server.engine.waiting_line import QueueFullError
from dragoman_server.errors import (
    DeadlineError,
    EngineFailedError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServiceError,
    ShuttingDownError,
)
from dragoman_server.model import ServedModel
from dragoman_server.repository import ModelRepository
from dragoman_server.streaming import TextStream, merge
from dragoman_server.validation import RequestLimits, parse_scoring, parse_translation, unknown_fields

_MANY_CHARACTERS = 20_000
"""Texts of more than this in a call are tokenised on a thread, so that other calls go on."""


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
        arrived, deadline = _clock(context)
        valid = await _parse(parse_translation, request, request.texts, self._repository, self._limits)
        parts = [part for text in valid.texts for part in text.segments]
        _check_deadline(valid.model, [len(part.source_ids) for part in parts], deadline)
        works = [(part.source_ids, part.options) for part in parts]
        sequences = await _decode_all(valid.model.engine.decode_all(works, deadline, valid.priority))
        remaining = iter(sequences)
        return pb.TranslateResponse(
            translations=[translation(valid, text, [next(remaining) for _ in text.segments]) for text in valid.texts],
            model=valid.model.name,
            model_version=valid.model.version,
            timings=timings(sequences, arrived),
            seed=valid.options.seed,
        )

    async def TranslateStream(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.TranslateRequest,
        context: grpc.aio.ServicerContext[pb.TranslateRequest, pb.TranslateStreamResponse],
    ) -> AsyncGenerator[pb.TranslateStreamResponse]:
        """See translation.proto."""
        arrived, deadline = _clock(context)
        valid = await _parse(parse_translation, request, request.texts, self._repository, self._limits)
        _check_deadline(valid.model, [len(p.source_ids) for text in valid.texts for p in text.segments], deadline)
        streams = [TextStream(valid, text) for text in valid.texts]
        finished: list[Sequence] = []
        with _engine_errors():
            async for text_index, segment_index, event in merge(valid, deadline):
                if isinstance(event, Sequence):
                    _check_finished([event])
                    finished.append(event)
                stream = streams[text_index]
                if ready := stream.accept(segment_index, event):
                    yield pb.TranslateStreamResponse(
                        delta=pb.TranslateStreamResponse.Delta(text_index=text_index, text=ready)
                    )
                if isinstance(event, Sequence) and (sequences := stream.sequences) is not None:
                    whole = translation(valid, stream.text, sequences)
                    yield pb.TranslateStreamResponse(
                        completion=pb.TranslateStreamResponse.Completion(text_index=text_index, translation=whole)
                    )
        summary = pb.TranslateStreamResponse.Summary(
            model=valid.model.name,
            model_version=valid.model.version,
            timings=timings(finished, arrived),
            seed=valid.options.seed,
        )
        yield pb.TranslateStreamResponse(summary=summary)

    async def Score(  # noqa: N802 - the name is the RPC's
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[pb.ScoreRequest, pb.ScoreResponse]
    ) -> pb.ScoreResponse:
        """See translation.proto."""
        arrived, deadline = _clock(context)
        texts = [*request.sources, *request.targets]
        valid = await _parse(parse_scoring, request, texts, self._repository, self._limits)
        _check_deadline(valid.model, [len(source_ids) for source_ids, _ in valid.pairs], deadline)
        sequences = await _decode_all(valid.model.engine.decode_all(valid.pairs, deadline, valid.priority))
        return pb.ScoreResponse(
            scores=[target_score(valid.model, sequence) for sequence in sequences],
            model=valid.model.name,
            model_version=valid.model.version,
            timings=timings(sequences, arrived),
        )

    async def ListModels(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],  # noqa: ARG002
    ) -> pb.ListModelsResponse:
        """See translation.proto."""
        if problems := list(unknown_fields(request)):
            raise InvalidRequestError(problems)
        return pb.ListModelsResponse(models=[description(model) for model in self._repository.models.values()])

    async def GetModel(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.GetModelRequest,
        context: grpc.aio.ServicerContext[pb.GetModelRequest, pb.Model],  # noqa: ARG002
    ) -> pb.Model:
        """See translation.proto."""
        if problems := list(unknown_fields(request)):
            raise InvalidRequestError(problems)
        models = self._repository.models
        if request.name not in models:
            raise NotFoundError(f"there is no model {request.name!r}; there is {', '.join(models)}")
        return description(models[request.name])


def _clock(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[float, float | None]:
    """Now and the call's deadline, as moments of `time.monotonic`."""
    arrived, remaining = time.monotonic(), context.time_remaining()
    return arrived, None if remaining is None else arrived + remaining


async def _parse(parse: Any, request: Any, texts: Seq[str], repository: ModelRepository, limits: RequestLimits) -> Any:
    if sum(map(len, texts)) > _MANY_CHARACTERS:
        return await asyncio.to_thread(parse, request, repository, limits)
    return parse(request, repository, limits)


def _check_deadline(model: ServedModel, source_lengths: Seq[int], deadline: float | None) -> None:
    """Refuse work that cannot be done in time, before it takes anybody else's."""
    if deadline is None:
        return
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise DeadlineError("the deadline had passed when the call arrived")
    needed = model.pace.least_seconds(source_lengths)
    if needed > remaining:
        raise DeadlineError(f"{remaining:.3f} s are left, at least {needed:.3f} s are needed; nothing was begun")


async def _decode_all(work: Awaitable[list[Sequence]]) -> list[Sequence]:
    """Sequences that have finished by themselves."""
    with _engine_errors():
        sequences = await work
    _check_finished(sequences)
    return sequences


def _check_finished(sequences: Seq[Sequence]) -> None:
    if any(sequence.finish_reason is FinishReason.DEADLINE for sequence in sequences):
        raise DeadlineError("the deadline passed while the texts were being translated")


@contextmanager
def _engine_errors() -> Iterator[None]:
    """Turns what engines raise, alone or in a group, into what callers are told."""
    try:
        yield
    except* (QueueFullError, EngineDeadError) as errors:
        raise _as_service_error(errors.exceptions[0]) from errors
    except* ServiceError as errors:
        raise errors.exceptions[0] from errors


def _as_service_error(error: BaseException) -> ServiceError:
    if isinstance(error, QueueFullError):
        return OverloadedError(str(error))
    if error.__cause__ is None:
        return ShuttingDownError("the server is shutting down")
    return EngineFailedError("the engine has failed; the server is restarting")
