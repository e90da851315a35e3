"""From a request on the wire to one that can be decoded: every problem is found before any work starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from dragoman_bundle.manifest import DirectionSpec
from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_server.engine.request import DecodingOptions, Priority, Scoring
from dragoman_server.errors import InvalidRequestError
from dragoman_server.model import ServedModel
from dragoman_server.options import OptionsTemplate, parse_options
from dragoman_server.segmentation import Segment, split, whole

_MAX_CHARACTERS_PER_TOKEN = 64
"""Far more than any piece of a vocabulary spells."""
_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: Priority.INTERACTIVE,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    pb.PRIORITY_BULK: Priority.BULK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidSegment:
    """A part of a text that is one sequence."""

    segment: Segment
    source_ids: list[int]
    options: DecodingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidText:
    """A text that its model can translate."""

    text: str
    segments: list[ValidSegment]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A translation request that can be decoded; `parse_translation` alone makes one."""

    model: ServedModel
    direction: DirectionSpec
    priority: Priority
    options: OptionsTemplate
    texts: list[ValidText]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidScoring:
    """A scoring request that can be decoded; `parse_scoring` alone makes one."""

    model: ServedModel
    priority: Priority
    pairs: list[tuple[list[int], DecodingOptions]]
    """Source ids, and options that hold the target."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one call."""

    max_texts: int
    max_characters: int
    """Of all texts together."""


def check_translation(request: pb.TranslateRequest, limits: RequestLimits) -> None:
    """Check what can be checked of a request before its model is known.

    Raises:
        InvalidRequestError: listing every problem.
    """
    if problems := [*unknown_fields(request), *_translation_problems(request, limits)]:
        raise InvalidRequestError(problems)


def parse_translation(request: pb.TranslateRequest, model: ServedModel) -> ValidRequest:
    """Check the rest of a request, split and tokenise its texts.

    Args:
        request: that `check_translation` has nothing against.
        model: that translates its pair.

    Raises:
        InvalidRequestError: listing every problem.
    """
    problems: list[str] = []
    direction = model.direction(request.source_language, request.target_language)
    assert direction is not None
    options = parse_options(request.options, model, problems)
    texts = [
        ValidText(text=text, segments=_segments(index, request, model, direction, options, problems))
        for index, text in enumerate(request.texts)
    ]
    if problems or options is None:
        raise InvalidRequestError(problems)
    return ValidRequest(
        model=model, direction=direction, priority=_PRIORITIES[request.priority], options=options, texts=texts
    )


def _translation_problems(request: pb.TranslateRequest, limits: RequestLimits) -> Iterator[str]:
    yield from _text_problems("texts", request.texts, limits)
    yield from _common_problems(request)
    if request.target_prefixes and len(request.target_prefixes) != len(request.texts):
        yield (
            f"target_prefixes has {len(request.target_prefixes)} entries for {len(request.texts)} texts; give one each,"
            " empty where the translation is free, or none"
        )
    if request.splitting not in pb.Splitting.values():
        yield f"splitting is {request.splitting}, which this server does not know"


def _text_problems(field: str, texts: Sequence[str], limits: RequestLimits) -> Iterator[str]:
    if not texts:
        yield f"{field} is empty; give at least one text"
    if len(texts) > limits.max_texts:
        yield f"{field} has {len(texts)} entries, at most {limits.max_texts} are allowed; split the call"
    if (size := sum(map(len, texts))) > limits.max_characters:
        yield f"{field} has {size} characters, at most {limits.max_characters} are allowed; split the call"
    for index, text in enumerate(texts):
        if not text.strip():
            yield f"{field}[{index}] is empty; leave it out"


def _common_problems(request: pb.TranslateRequest | pb.ScoreRequest) -> Iterator[str]:
    for field in ("source_language", "target_language"):
        if not getattr(request, field):
            yield f"{field} is not set; give a language tag such as 'en'"
    if request.priority not in _PRIORITIES:
        yield f"priority is {request.priority}, which this server does not know"


def _segments(
    index: int,
    request: pb.TranslateRequest,
    model: ServedModel,
    direction: DirectionSpec,
    options: OptionsTemplate | None,
    problems: list[str],
) -> list[ValidSegment]:
    text = request.texts[index]
    prefix = request.target_prefixes[index] if request.target_prefixes else ""
    prefix_ids = tuple(model.tokenizer.encode(prefix)) if prefix else ()
    if options is not None and prefix_ids and len(prefix_ids) >= options.for_source(1, prefix_ids).max_target_tokens:
        problems.append(
            f"target_prefixes[{index}] has {len(prefix_ids)} tokens, which leaves no room for a translation"
        )
        return []
    tokenised: dict[str, list[int]] = {}

    def source_ids(part: str) -> list[int]:
        if part not in tokenised:
            tokenised[part] = model.source_ids(part, direction)
        return tokenised[part]

    def fits(part: str) -> bool:
        return not _is_far_too_long(part, model) and len(source_ids(part)) <= model.manifest.limits.max_source_tokens

    if request.splitting == pb.SPLITTING_NONE or prefix:
        segments = whole(text)
        if not fits(text[slice(*segments[0].span)]):
            problems.append(_too_long(f"texts[{index}]", text, model))
            return []
    else:
        segments = split(text, direction.source, fits)
    ids = [(segment, source_ids(text[slice(*segment.span)])) for segment in segments]
    # What has no token is not for the model: like white space, it comes back as it was.
    ids = [(segment, part) for segment, part in ids if len(part) > len(direction.source_prefix) + 1]
    if not ids:
        problems.append(f"texts[{index}] has no visible character; leave it out")
    if options is None:
        return []
    problems += [f"texts[{index}]: {p}" for _, part in ids if (p := options.length_problem(len(part)))][:1]
    return [
        ValidSegment(segment=segment, source_ids=part, options=options.for_source(len(part), prefix_ids))
        for segment, part in ids
    ]


def _is_far_too_long(text: str, model: ServedModel) -> bool:
    """Whether a text need not be tokenised to know; tokenising megabytes would hold everybody up."""
    return len(text) > _MAX_CHARACTERS_PER_TOKEN * model.manifest.limits.max_source_tokens


def _too_long(name: str, text: str, model: ServedModel) -> str:
    limit = model.manifest.limits.max_source_tokens
    size = f"{len(text)} characters" if _is_far_too_long(text, model) else f"more than {limit} tokens"
    return f"{name} has {size}, {model.name} takes at most {limit} tokens in one piece; let the server split it"


def check_scoring(request: pb.ScoreRequest, limits: RequestLimits) -> None:
    """Check what can be checked of a scoring request before its model is known.

    Raises:
        InvalidRequestError: listing every problem.
    """
    problems = [
        *unknown_fields(request),
        *_text_problems("sources", request.sources, limits),
        *_text_problems("targets", request.targets, limits),
        *_common_problems(request),
    ]
    if len(request.sources) != len(request.targets):
        problems.append(
            f"there are {len(request.sources)} sources and {len(request.targets)} targets; give each source one target"
        )
    if problems:
        raise InvalidRequestError(problems)


def parse_scoring(request: pb.ScoreRequest, model: ServedModel) -> ValidScoring:
    """Check the rest of a scoring request and tokenise its texts.

    Args:
        request: that `check_scoring` has nothing against.
        model: that translates its pair.

    Raises:
        InvalidRequestError: listing every problem.
    """
    problems: list[str] = []
    direction = model.direction(request.source_language, request.target_language)
    assert direction is not None
    pairs = [
        _pair(index, model, direction, source.strip(), target.strip(), problems)
        for index, (source, target) in enumerate(zip(request.sources, request.targets, strict=True))
    ]
    if problems:
        raise InvalidRequestError(problems)
    return ValidScoring(model=model, priority=_PRIORITIES[request.priority], pairs=pairs)


def _pair(
    index: int, model: ServedModel, direction: DirectionSpec, source: str, target: str, problems: list[str]
) -> tuple[list[int], DecodingOptions]:
    # The end token is scored as well and needs a place.
    longest = model.manifest.limits.max_target_tokens - 1
    source_ids = [] if _is_far_too_long(source, model) else model.source_ids(source, direction)
    target_ids = [] if _is_far_too_long(target, model) else model.tokenizer.encode(target)
    if not source_ids or len(source_ids) > model.manifest.limits.max_source_tokens:
        problems.append(
            f"sources[{index}] is too long: {model.name} takes at most {model.manifest.limits.max_source_tokens} tokens"
        )
    if not target_ids or len(target_ids) > longest:
        problems.append(f"targets[{index}] is too long, or blank: {model.name} scores 1 to {longest} tokens")
    options = DecodingOptions(
        max_target_tokens=longest + 1, search=Scoring(), target_prefix=tuple(target_ids), log_probs=True
    )
    return source_ids, options


def unknown_fields(message: Message, path: str = "") -> Iterator[str]:
    """Describe every field of a message, at any depth, that this server's version of the interface does not have."""
    name = path or message.DESCRIPTOR.name
    unknown: Any = UnknownFieldSet(message)  # iterable, whatever its stub says
    for field in unknown:
        yield f"{name} has an unknown field, number {field.field_number}: this server is older than your client"
    for field_name, is_repeated in _message_fields(message.DESCRIPTOR):
        if is_repeated or message.HasField(field_name):
            value = getattr(message, field_name)
            for child in value if is_repeated else [value]:
                yield from unknown_fields(child, f"{path}.{field_name}".lstrip("."))


@cache
def _message_fields(descriptor: Descriptor) -> list[tuple[str, bool]]:
    """Fields that hold messages, and whether each is repeated."""
    return [(field.name, field.is_repeated) for field in descriptor.fields if field.message_type is not None]
