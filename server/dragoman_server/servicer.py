"""The RPCs: wire messages in, domain calls, wire messages out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Seq

import grpc

from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from dragoman_server.engine.async_engine import EngineDeadError
from dragoman_server.engine.request import FinishReason, Sequence
from dragoman_server.engine.scheduler import QueueFullError
from dragoman_server.errors import (
    DeadlineError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
    ServiceError,
    ShuttingDownError,
)
from dragoman_server.model import ServedModel
from dragoman_server.repository import ModelRepository
from dragoman_server.validation import ValidRequest, parse_request, unknown_fields

_FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class TranslationServicer(pb_grpc.TranslationServiceServicer):
    """dragoman.v1.TranslationService.

    Args:
        repository: of loaded models, their engines running.
        max_texts: most texts of one call.
    """

    def __init__(self, repository: ModelRepository, max_texts: int) -> None:
        self._repository = repository
        self._max_texts = max_texts

    async def Translate(  # noqa: N802 - the name is the RPC's
        self, request: pb.TranslateRequest, context: grpc.aio.ServicerContext[pb.TranslateRequest, pb.TranslateResponse]
    ) -> pb.TranslateResponse:
        """See translation.proto."""
        arrived, remaining = time.monotonic(), context.time_remaining()
        valid = parse_request(request, self._repository, self._max_texts)
        sequences = await _decode_all(valid, None if remaining is None else arrived + remaining)
        if any(sequence.finish_reason is FinishReason.DEADLINE for sequence in sequences):
            raise DeadlineError("the deadline passed while the texts were being translated")
        return pb.TranslateResponse(
            translations=[_translation(valid.model, sequence) for sequence in sequences],
            model=valid.model.name,
            model_version=valid.model.version,
            timings=_timings(sequences, arrived),
        )

    async def ListModels(  # noqa: N802 - the name is the RPC's
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],  # noqa: ARG002
    ) -> pb.ListModelsResponse:
        """See translation.proto."""
        if problems := list(unknown_fields(request)):
            raise InvalidRequestError(problems)
        return pb.ListModelsResponse(models=[_description(model) for model in self._repository.models.values()])


async def _decode_all(valid: ValidRequest, deadline: float | None) -> list[Sequence]:
    """Decode all texts side by side; if one fails, or the caller goes away, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(valid.model.decode(text.source_ids, text.max_target_tokens, deadline))
                for text in valid.texts
            ]
    except* (QueueFullError, EngineDeadError) as errors:
        raise _as_service_error(errors.exceptions[0]) from errors
    return [task.result() for task in tasks]


def _as_service_error(error: Exception) -> ServiceError:
    if isinstance(error, QueueFullError):
        return OverloadedError(str(error))
    if error.__cause__ is None:
        return ShuttingDownError("the server is shutting down")
    return EngineFailedError("the engine has failed; the server is restarting")


def _translation(model: ServedModel, sequence: Sequence) -> pb.Translation:
    assert sequence.finish_reason is not None
    return pb.Translation(
        text=model.tokenizer.decode(sequence.output_ids),
        finish_reason=_FINISH_REASONS[sequence.finish_reason],
        source_tokens=len(sequence.source_ids),
        target_tokens=len(sequence.output_ids),
    )


def _timings(sequences: Seq[Sequence], arrived: float) -> pb.Timings:
    times = [sequence.times for sequence in sequences]
    return pb.Timings(
        queue_seconds=max(t.scheduled - t.arrived for t in times),
        encode_seconds=max(t.encoded - t.scheduled for t in times),
        decode_seconds=max(t.finished - t.encoded for t in times),
        total_seconds=time.monotonic() - arrived,
    )


def _description(model: ServedModel) -> pb.Model:
    manifest = model.manifest
    return pb.Model(
        name=model.name,
        version=model.version,
        directions=[pb.Direction(source_language=d.source, target_language=d.target) for d in manifest.directions],
        precision=model.variant.precision,
        device=model.variant.device,
        max_source_tokens=manifest.limits.max_source_tokens,
        max_target_tokens=manifest.limits.max_target_tokens,
    )
