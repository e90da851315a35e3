"""From finished sequences to messages on the wire."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_server.call import Stopwatch
from dragoman_server.engine.request import FinishReason, Hypothesis, Sequence
from dragoman_server.model import ServedModel
from dragoman_server.repository import ModelRepository
from dragoman_server.segmentation import join, trimmed
from dragoman_server.tokenizer import Span
from dragoman_server.validation import ValidRequest, ValidSegment, ValidText

_FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def translation(request: ValidRequest, text: ValidText, sequences: Seq[Sequence]) -> pb.Translation:
    """One text's translation.

    Args:
        request: that it belongs to.
        text: that was translated.
        sequences: one per segment, finished by themselves.
    """
    decode = request.model.tokenizer.decode
    parts = [decode(sequence.hypotheses[0].ids) for sequence in sequences]
    joined, spans = join(text.text, [valid.segment for valid in text.segments], parts, request.direction.target)
    rows = zip(text.segments, sequences, spans, strict=True)
    reasons = [_reason(sequence.hypotheses[0]) for sequence in sequences]
    return pb.Translation(
        text=joined,
        finish_reason=pb.FINISH_REASON_LENGTH if pb.FINISH_REASON_LENGTH in reasons else reasons[-1],
        source_tokens=sum(len(sequence.source_ids) for sequence in sequences),
        target_tokens=sum(len(sequence.hypotheses[0].ids) for sequence in sequences),
        segments=[_segment(request, text, valid, sequence, span) for valid, sequence, span in rows],
    )


def _segment(request: ValidRequest, text: ValidText, valid: ValidSegment, sequence: Sequence, span: Span) -> pb.Segment:
    source = valid.segment.span
    message = pb.Segment(
        source_start=source.start,
        source_end=source.end,
        target_start=span.start,
        target_end=span.end,
        divided=valid.segment.divided,
        finish_reason=_reason(sequence.hypotheses[0]),
    )
    if request.options.wants_hypotheses:
        origins = _origins(request, text, valid) if valid.options.alignment else []
        wants_tokens = request.options.wire.return_tokens or valid.options.alignment
        for hypothesis in sequence.hypotheses:
            tokens = _tokens(request.model, hypothesis, valid, origins) if wants_tokens else ()
            message.hypotheses.add(
                text=request.model.tokenizer.decode(hypothesis.ids),
                finish_reason=_reason(hypothesis),
                score=hypothesis.score,
                log_prob=hypothesis.log_prob,
                tokens=tokens,
                target_tokens=len(hypothesis.ids),
            )
    return message


def _reason(hypothesis: Hypothesis) -> pb.FinishReason:
    return _FINISH_REASONS[hypothesis.finish_reason]


def _origins(request: ValidRequest, text: ValidText, valid: ValidSegment) -> list[Span]:
    """Per source token of a segment, its place in the text; empty for the tags and the end token."""
    start = valid.segment.span.start
    spans = request.model.tokenizer.encode_with_spans(text.text[slice(*valid.segment.span)])
    nothing = Span(0, 0)
    prefix = [nothing] * len(request.direction.source_prefix)
    return [*prefix, *(trimmed(text.text, Span(start + span.start, start + span.end)) for span in spans), nothing]


def _tokens(model: ServedModel, hypothesis: Hypothesis, valid: ValidSegment, origins: Seq[Span]) -> Iterator[pb.Token]:
    """A hypothesis's tokens, and the one that ended it if its log-probability is known."""
    num_given = len(valid.options.target_prefix)
    for index, token in enumerate(hypothesis.ids):
        message = pb.Token(piece=model.tokenizer.piece(token))
        if index >= num_given:
            message.log_prob = hypothesis.token_log_probs[index - num_given]
        if hypothesis.attention is not None:
            weights = hypothesis.attention[index]
            best = int(weights.argmax())
            message.alignment.source_start, message.alignment.source_end = origins[best]
            message.alignment.weight = float(weights[best])
        yield message
    if hypothesis.finish_reason is FinishReason.EOS:
        end = model.tokenizer.piece(model.manifest.special_ids.end)
        yield pb.Token(piece=end, log_prob=hypothesis.token_log_probs[-1])


def target_score(model: ServedModel, sequence: Sequence) -> pb.TargetScore:
    """How probable a given target is."""
    [hypothesis] = sequence.hypotheses
    ids = [*hypothesis.ids, model.manifest.special_ids.end]
    assert not math.isnan(hypothesis.score)
    return pb.TargetScore(
        log_prob=hypothesis.log_prob,
        score=hypothesis.score,
        tokens=[
            pb.Token(piece=model.tokenizer.piece(token), log_prob=log_prob)
            for token, log_prob in zip(ids, hypothesis.token_log_probs, strict=True)
        ],
    )


def timings(sequences: Seq[Sequence], watch: Stopwatch) -> pb.Timings:
    """Where the time of a call went."""
    times = [sequence.times for sequence in sequences]
    return pb.Timings(
        tokenize_seconds=watch.phases["tokenize"],
        queue_seconds=max(t.scheduled - t.arrived for t in times),
        encode_seconds=max(t.encoded - t.scheduled for t in times),
        decode_seconds=max(t.finished - t.encoded for t in times),
        detokenize_seconds=watch.phases["detokenize"],
        first_token_seconds=max(t.first_token for t in times) - watch.arrived,
        total_seconds=time.monotonic() - watch.arrived,
    )


def description(model: ServedModel, repository: ModelRepository) -> pb.Model:
    """A loaded model as callers see it."""
    manifest = model.manifest
    return pb.Model(
        name=model.name,
        version=model.version,
        directions=[pb.Direction(source_language=d.source, target_language=d.target) for d in manifest.directions],
        precision=model.variant.precision,
        device=model.variant.device,
        max_source_tokens=manifest.limits.max_source_tokens,
        max_target_tokens=manifest.limits.max_target_tokens,
        batch_invariant=model.variant.parity.batch_invariant,
        max_hypotheses=model.max_hypotheses,
        labels=repository.labels(model),
        traffic_share=repository.traffic_share(model),
    )
