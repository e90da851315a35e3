"""What goes into a call and what comes out of it, without a trace of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dragoman_protos.v1 import translation_pb2 as pb

FinishReason = Literal["eos", "stop", "length", "unknown"]
_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_EOS: "eos",
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}
Priority = Literal["interactive", "bulk"]
PRIORITIES = {"interactive": pb.PRIORITY_INTERACTIVE, "bulk": pb.PRIORITY_BULK}


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """Keep several hypotheses side by side; see `BeamSearch` in translation.proto for the score."""

    width: int
    length_penalty: float | None = None
    """None is 1; 0 does not normalise."""
    coverage_penalty: float | None = None
    """None or 0 is off."""
    patience: float | None = None
    """None is 1."""
    exhaustive: bool = False
    """Go on until no live hypothesis can still reach the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Draw tokens at random; equal seeds give equal translations."""

    temperature: float | None = None
    """None is 1."""
    top_k: int | None = None
    """None or 0 is off."""
    top_p: float | None = None
    """None or 1 is off."""
    seed: int | None = None
    """None lets the server choose; `Translation.seed` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """Continue each of the most probable tokens after the target prefix."""

    count: int
    min_probability: float | None = None
    """None or 0 is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """How to decode. Whatever is left out takes the server's default; see translation.proto."""

    max_target_tokens: int | None = None
    min_target_tokens: int | None = None
    max_target_ratio: float | None = None
    min_target_ratio: float | None = None
    search: BeamSearch | Sampling | Alternatives | None = None
    """None is greedy search."""
    num_hypotheses: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    suppressed_texts: Sequence[str] = ()
    suppress_unknown: bool = False
    end_pieces: Sequence[str] = ()
    return_scores: bool = False
    return_tokens: bool = False
    return_alignment: bool = False

    def to_wire(self) -> pb.DecodingOptions:
        """As a message.

        Raises:
            ValueError: a number does not fit its field.
        """
        wire = pb.DecodingOptions(
            max_target_tokens=self.max_target_tokens,
            min_target_tokens=self.min_target_tokens,
            max_target_ratio=self.max_target_ratio,
            min_target_ratio=self.min_target_ratio,
            num_hypotheses=self.num_hypotheses,
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            suppressed_texts=self.suppressed_texts,
            suppress_unknown=self.suppress_unknown,
            end_pieces=self.end_pieces,
            return_scores=self.return_scores,
            return_tokens=self.return_tokens,
            return_alignment=self.return_alignment,
        )
        match self.search:
            case BeamSearch() as beam:
                wire.beam.CopyFrom(
                    pb.BeamSearch(
                        width=beam.width,
                        length_penalty=beam.length_penalty,
                        coverage_penalty=beam.coverage_penalty,
                        patience=beam.patience,
                        exhaustive=beam.exhaustive,
                    )
                )
            case Sampling() as sampling:
                wire.sampling.CopyFrom(
                    pb.Sampling(
                        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed
                    )
                )
            case Alternatives() as alternatives:
                wire.alternatives.CopyFrom(
                    pb.Alternatives(count=alternatives.count, min_probability=alternatives.min_probability)
                )
        return wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The stretch of source that a token looked at most, in code points of the text."""

    start: int
    end: int
    weight: float
    """Share of the attention, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of a hypothesis; the one that ended it comes last."""

    piece: str
    log_prob: float | None
    """None for a token of the target prefix."""
    alignment: Alignment | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One of several translations of a segment."""

    text: str
    finish_reason: FinishReason
    score: float
    log_prob: float
    tokens: tuple[Token, ...]
    target_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What was translated as one sequence; offsets in code points, ends exclusive."""

    source_start: int
    source_end: int
    target_start: int
    target_end: int
    divided: bool
    """Whether a sentence had to be divided here because it was too long for the model."""
    finish_reason: FinishReason
    hypotheses: tuple[Hypothesis, ...]
    """Best first; empty if they were not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a call's time went in the server, in seconds."""

    tokenize: float
    queue: float
    encode: float
    decode: float
    detokenize: float
    first_token: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A translated text."""

    text: str
    finish_reason: FinishReason
    """"eos": complete. "stop": ended by an end piece. "length": cut at the limit. "unknown": of a newer server."""
    source_tokens: int
    target_tokens: int
    segments: tuple[Segment, ...]
    model: str
    model_version: str
    timings: Timings
    """Of the call that it was part of."""
    seed: int | None
    """Of the sampling, if there was any."""

    @property
    def complete(self) -> bool:
        """Whether nothing was cut."""
        return self.finish_reason in ("eos", "stop")

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """Of the only segment; empty if the text was split."""
        return self.segments[0].hypotheses if len(self.segments) == 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetScore:
    """How probable a given translation is."""

    log_prob: float
    """Sum over its tokens and the end token."""
    score: float
    """Per token."""
    tokens: tuple[Token, ...]


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
    batch_invariant: bool
    max_hypotheses: int
    labels: tuple[str, ...]
    """"stable" or "canary", or none."""
    traffic_share: float
    """Of the calls that name no version, 0 to 1."""


def translation_from(
    wire: pb.Translation, call: pb.TranslateResponse | pb.TranslateStreamResponse.Summary
) -> Translation:
    """A translation, with what its call says of all of them."""
    return Translation(
        text=wire.text,
        finish_reason=_reason(wire.finish_reason),
        source_tokens=wire.source_tokens,
        target_tokens=wire.target_tokens,
        segments=tuple(_segment(segment) for segment in wire.segments),
        model=call.model,
        model_version=call.model_version,
        timings=Timings(
            tokenize=call.timings.tokenize_seconds,
            queue=call.timings.queue_seconds,
            encode=call.timings.encode_seconds,
            decode=call.timings.decode_seconds,
            detokenize=call.timings.detokenize_seconds,
            first_token=call.timings.first_token_seconds,
            total=call.timings.total_seconds,
        ),
        seed=call.seed if call.HasField("seed") else None,
    )


def _reason(wire: int) -> FinishReason:
    return _FINISH_REASONS.get(wire, "unknown")


def _segment(wire: pb.Segment) -> Segment:
    return Segment(
        source_start=wire.source_start,
        source_end=wire.source_end,
        target_start=wire.target_start,
        target_end=wire.target_end,
        divided=wire.divided,
        finish_reason=_reason(wire.finish_reason),
        hypotheses=tuple(
            Hypothesis(
                text=hypothesis.text,
                finish_reason=_reason(hypothesis.finish_reason),
                score=hypothesis.score,
                log_prob=hypothesis.log_prob,
                tokens=tuple(_token(token) for token in hypothesis.tokens),
                target_tokens=hypothesis.target_tokens,
            )
            for hypothesis in wire.hypotheses
        ),
    )


def _token(wire: pb.Token) -> Token:
    alignment = wire.alignment
    return Token(
        piece=wire.piece,
        log_prob=wire.log_prob if wire.HasField("log_prob") else None,
        alignment=Alignment(start=alignment.source_start, end=alignment.source_end, weight=alignment.weight)
        if wire.HasField("alignment")
        else None,
    )


def score_from(wire: pb.TargetScore) -> TargetScore:
    """A score."""
    return TargetScore(log_prob=wire.log_prob, score=wire.score, tokens=tuple(_token(token) for token in wire.tokens))


def model_from(wire: pb.Model) -> ModelDescription:
    """A model's description."""
    return ModelDescription(
        name=wire.name,
        version=wire.version,
        directions=tuple((d.source_language, d.target_language) for d in wire.directions),
        precision=wire.precision,
        device=wire.device,
        max_source_tokens=wire.max_source_tokens,
        max_target_tokens=wire.max_target_tokens,
        batch_invariant=wire.batch_invariant,
        max_hypotheses=wire.max_hypotheses,
        labels=tuple(wire.labels),
        traffic_share=wire.traffic_share,
    )
