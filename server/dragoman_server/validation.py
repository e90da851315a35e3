"""From a request on the wire to one that can be decoded: every problem is found before any work starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_server.errors import InvalidRequestError
from dragoman_server.model import ServedModel
from dragoman_server.repository import ModelRepository

_MAX_CHARACTERS_PER_TOKEN = 64
"""Far more than any piece of a vocabulary spells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidText:
    """A text that its model can translate."""

    source_ids: list[int]
    max_target_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A translation request that can be decoded; `parse_request` alone makes one."""

    model: ServedModel
    texts: list[ValidText]


def parse_request(request: pb.TranslateRequest, repository: ModelRepository, max_texts: int) -> ValidRequest:
    """Check a request and tokenise its texts.

    Args:
        request: as it came.
        repository: to find its model in.
        max_texts: most texts of one call.

    Raises:
        InvalidRequestError: listing every problem.
        NotFoundError: no model translates the pair.
    """
    problems = [*unknown_fields(request), *_problems(request, max_texts)]
    if problems:
        raise InvalidRequestError(problems)
    model = repository.find(request.model, request.source_language, request.target_language)
    texts = [_parse_text(index, request, model, problems) for index in range(len(request.texts))]
    if problems:
        raise InvalidRequestError(problems)
    return ValidRequest(model=model, texts=texts)


def _problems(request: pb.TranslateRequest, max_texts: int) -> Iterator[str]:
    if not request.texts:
        yield "texts is empty; give at least one text"
    if len(request.texts) > max_texts:
        yield f"texts has {len(request.texts)} entries, at most {max_texts} are allowed; split the call"
    for index, text in enumerate(request.texts):
        if not text.strip():
            yield f"texts[{index}] is empty; leave it out"
    for field in ("source_language", "target_language"):
        if not getattr(request, field):
            yield f"{field} is not set; give a language tag such as 'en'"
    if request.options.HasField("max_target_tokens") and request.options.max_target_tokens < 1:
        yield "options.max_target_tokens must be at least 1; leave it out for the model's default"


def _parse_text(index: int, request: pb.TranslateRequest, model: ServedModel, problems: list[str]) -> ValidText:
    direction = model.direction(request.source_language, request.target_language)
    assert direction is not None
    text, limits = request.texts[index], model.manifest.limits
    longest = _MAX_CHARACTERS_PER_TOKEN * limits.max_source_tokens
    if len(text) > longest:  # tokenising megabytes would hold everybody up
        problems.append(
            f"texts[{index}] has {len(text)} characters, at most {longest} are read; split it into sentences"
        )
        text = text[:longest]
    ids = model.source_ids(text, direction)
    if len(ids) == len(direction.source_prefix) + 1:
        problems.append(f"texts[{index}] has no visible character; leave it out")
    if len(ids) > limits.max_source_tokens:
        problems.append(
            f"texts[{index}] has {len(ids)} tokens, {model.name} takes at most {limits.max_source_tokens}; "
            "split it into sentences"
        )
    wanted = request.options.max_target_tokens
    if wanted > limits.max_target_tokens and not index:
        problems.append(f"options.max_target_tokens is {wanted}, {model.name} gives at most {limits.max_target_tokens}")
    return ValidText(source_ids=ids, max_target_tokens=wanted or model.default_max_target_tokens(len(ids)))


def unknown_fields(message: Message, path: str = "") -> Iterator[str]:
    """Describe every field of a message, at any depth, that this server's version of the interface does not have."""
    name = path or message.DESCRIPTOR.name
    unknown: Any = UnknownFieldSet(message)  # iterable, whatever its stub says
    for field in unknown:
        yield f"{name} has an unknown field, number {field.field_number}: this server is older than your client"
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        children = value if descriptor.is_repeated else [value]
        for child in children:
            yield from unknown_fields(child, f"{path}.{descriptor.name}".lstrip("."))
