"""Decoding options: from the wire to what the engine takes, with every problem that they have."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_server.engine.request import (
    Alternatives,
    BeamSearch,
    DecodingOptions,
    GreedySearch,
    Sampling,
    Search,
)
from dragoman_server.model import ServedModel

_PATH = "options"


@dataclass(frozen=True, slots=True)
class OptionsTemplate:
    """Options of a request that fit its model; `for_source` completes them for one sequence."""

    wire: pb.DecodingOptions
    model: ServedModel
    search: Search
    end_ids: frozenset[int]
    suppressed: tuple[tuple[int, ...], ...]

    @property
    def seed(self) -> int | None:
        """Of the sampling, if there is any."""
        return self.search.seed if isinstance(self.search, Sampling) else None

    @property
    def wants_hypotheses(self) -> bool:
        """Whether the response shall list hypotheses."""
        wire = self.wire
        return (self.search.max_rows > 1 and (wire.num_hypotheses > 1 or isinstance(self.search, Alternatives))) or any(
            (wire.return_scores, wire.return_tokens, wire.return_alignment)
        )

    def _least(self, num_source_tokens: int) -> int:
        wire = self.wire
        relative = math.floor(wire.min_target_ratio * num_source_tokens) if wire.HasField("min_target_ratio") else 0
        return max(wire.min_target_tokens, relative)

    def _most(self, num_source_tokens: int) -> int | None:
        """The limit that the request itself sets; None if it sets none."""
        wire = self.wire
        limits = [wire.max_target_tokens] if wire.HasField("max_target_tokens") else []
        if wire.HasField("max_target_ratio"):
            limits.append(max(1, math.ceil(wire.max_target_ratio * num_source_tokens)))
        return min(limits, default=None)

    def length_problem(self, num_source_tokens: int) -> str:
        """What is contradictory about the lengths of one sequence's output; empty if nothing is."""
        least, most = self._least(num_source_tokens), self._most(num_source_tokens)
        limit = self.model.manifest.limits.max_target_tokens
        if least > (limit if most is None else min(most, limit)):
            return (
                f"for {num_source_tokens} source tokens the options demand at least {least} target tokens and allow "
                f"{min(most, limit) if most is not None else limit}"
            )
        return ""

    def for_source(self, num_source_tokens: int, target_prefix: tuple[int, ...] = ()) -> DecodingOptions:
        """Options for one sequence."""
        wire = self.wire
        least, most = self._least(num_source_tokens), self._most(num_source_tokens)
        if most is None:
            most = max(least, self.model.default_max_target_tokens(num_source_tokens) + len(target_prefix))
        most = min(most, self.model.manifest.limits.max_target_tokens)
        return DecodingOptions(
            max_target_tokens=most,
            min_target_tokens=least,
            search=self.search,
            target_prefix=target_prefix,
            end_ids=self.end_ids,
            suppressed=self.suppressed,
            repetition_penalty=wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0,
            no_repeat_ngram_size=wire.no_repeat_ngram_size,
            log_probs=self.wants_hypotheses,
            alignment=wire.return_alignment,
        )


def parse_options(wire: pb.DecodingOptions, model: ServedModel, problems: list[str]) -> OptionsTemplate | None:
    """Check a request's options.

    Args:
        wire: as they came.
        model: that is to use them.
        problems: is told every problem.

    Returns:
        None if there is any problem.
    """
    found = [
        *_length_problems(wire, model),
        *_search_problems(wire, model),
        *_constraint_problems(wire, model),
    ]
    problems += found
    if found:
        return None
    suppressed = [tuple(model.tokenizer.encode(text)) for text in wire.suppressed_texts]
    if wire.suppress_unknown:
        suppressed.append((model.manifest.special_ids.unknown,))
    end_ids = frozenset(token for piece in wire.end_pieces if (token := model.tokenizer.find_piece(piece)) is not None)
    return OptionsTemplate(wire, model, _search(wire), end_ids, tuple(suppressed))


def _search(wire: pb.DecodingOptions) -> Search:
    count = wire.num_hypotheses or 1
    match wire.WhichOneof("search"):
        case "beam":
            beam = wire.beam
            return BeamSearch(
                width=beam.width,
                num_hypotheses=count,
                length_penalty=beam.length_penalty if beam.HasField("length_penalty") else 1.0,
                coverage_penalty=beam.coverage_penalty,
                patience=beam.patience if beam.HasField("patience") else 1.0,
                early_stopping=not beam.exhaustive,
            )
        case "sampling":
            sampling = wire.sampling
            return Sampling(
                seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(32),
                temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
                top_k=sampling.top_k,
                top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
                num_hypotheses=count,
            )
        case "alternatives":
            return Alternatives(count=wire.alternatives.count, min_probability=wire.alternatives.min_probability)
    return GreedySearch()


def _length_problems(wire: pb.DecodingOptions, model: ServedModel) -> Iterator[str]:
    limit = model.manifest.limits.max_target_tokens
    if wire.HasField("max_target_tokens") and wire.max_target_tokens < 1:
        yield f"{_PATH}.max_target_tokens must be at least 1; leave it out for the model's default"
    for field in ("max_target_tokens", "min_target_tokens"):
        if (value := getattr(wire, field)) > limit:
            yield f"{_PATH}.{field} is {value}, {model.name} gives at most {limit}"
    for field in ("max_target_ratio", "min_target_ratio"):
        if wire.HasField(field) and not 0 < getattr(wire, field) < math.inf:
            yield f"{_PATH}.{field} is {getattr(wire, field):g}, it must be above 0; leave it out for no such limit"
    if wire.HasField("max_target_tokens") and wire.min_target_tokens > wire.max_target_tokens > 0:
        yield (
            f"{_PATH}.min_target_tokens is {wire.min_target_tokens}, above max_target_tokens, {wire.max_target_tokens}"
        )
    if wire.HasField("max_target_ratio") and wire.min_target_ratio > wire.max_target_ratio > 0:
        least, most = wire.min_target_ratio, wire.max_target_ratio
        yield f"{_PATH}.min_target_ratio is {least:g}, above max_target_ratio, {most:g}"


def _search_problems(wire: pb.DecodingOptions, model: ServedModel) -> Iterator[str]:
    bound, count = model.max_hypotheses, wire.num_hypotheses
    if wire.HasField("num_hypotheses") and not count:
        yield f"{_PATH}.num_hypotheses must be at least 1; leave it out for 1"
    match wire.WhichOneof("search"):
        case "beam":
            yield from _beam_problems(wire.beam, count, bound)
        case "sampling":
            if count > bound:
                yield f"{_PATH}.num_hypotheses is {count}, at most {bound} are allowed"
            yield from _sampling_problems(wire.sampling)
        case "alternatives":
            if not 1 <= wire.alternatives.count <= bound:
                yield f"{_PATH}.alternatives.count is {wire.alternatives.count}, it must be 1 to {bound}"
            if not 0 <= (least := wire.alternatives.min_probability) <= 1:
                yield f"{_PATH}.alternatives.min_probability is {least:g}, it must be 0 to 1"
            if count > 1:
                yield f"{_PATH}.num_hypotheses is for beam and sampling; alternatives.count says how many there may be"
        case None if count > 1:
            yield f"{_PATH}.num_hypotheses is {count}, but greedy search has one result; set beam or sampling as well"


def _beam_problems(beam: pb.BeamSearch, num_hypotheses: int, bound: int) -> Iterator[str]:
    if not 1 <= beam.width <= bound:
        yield f"{_PATH}.beam.width is {beam.width}, it must be 1 to {bound}"
    elif num_hypotheses > beam.width:
        yield f"{_PATH}.num_hypotheses is {num_hypotheses}, more than beam.width, {beam.width}; widen the beam"
    for field in ("length_penalty", "coverage_penalty"):
        if not 0 <= (value := getattr(beam, field)) < math.inf:
            yield f"{_PATH}.beam.{field} is {value:g}, it must be at least 0"
    if beam.HasField("patience") and not 0 < beam.patience < math.inf:
        yield f"{_PATH}.beam.patience is {beam.patience:g}, it must be above 0; leave it out for 1"


def _sampling_problems(sampling: pb.Sampling) -> Iterator[str]:
    if sampling.HasField("temperature") and not 0 < sampling.temperature < math.inf:
        yield f"{_PATH}.sampling.temperature is {sampling.temperature:g}, it must be above 0; for 0 use greedy search"
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        yield f"{_PATH}.sampling.top_p is {sampling.top_p:g}, it must be above 0 and at most 1; 1 is off"


def _constraint_problems(wire: pb.DecodingOptions, model: ServedModel) -> Iterator[str]:
    if wire.HasField("repetition_penalty") and not 1 <= wire.repetition_penalty < math.inf:
        yield f"{_PATH}.repetition_penalty is {wire.repetition_penalty:g}, it must be at least 1; 1 is off"
    for index, text in enumerate(wire.suppressed_texts):
        if not model.tokenizer.encode(text):
            yield f"{_PATH}.suppressed_texts[{index}] has no visible character; leave it out"
    for index, piece in enumerate(wire.end_pieces):
        if model.tokenizer.find_piece(piece) is None:
            yield f"{_PATH}.end_pieces[{index}] is {piece!r}, which is not in the vocabulary of {model.name}"
