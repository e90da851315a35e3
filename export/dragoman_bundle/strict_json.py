"""JSON to frozen dataclasses, strictly: unknown, missing and mistyped fields are collected, all of them."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""A surrogate without its other half: no encoding can write it, no tokenizer can read it."""


def read(kind: type[T], value: object, where: str, problems: list[str]) -> T | None:
    """Build `kind` from parsed JSON.

    Args:
        kind: a dataclass; or str, int, float, bool, tuple[X, ...], dict[str, X] or X | None of these.
        value: what json.loads gave.
        where: path of the value in the file, for messages.
        problems: everything that does not fit is appended here.

    Returns:
        The object; None if it could not be built (then `problems` has grown).
    """
    reader = _READERS.get(typing.get_origin(kind) or kind)
    if reader is not None:
        return typing.cast("T | None", reader(kind, value, where, problems))
    if dataclasses.is_dataclass(kind):
        return typing.cast("T | None", _read_dataclass(kind, value, where, problems))
    return typing.cast("T | None", _read_scalar(kind, value, where, problems))


def _read_dataclass(kind: Any, value: object, where: str, problems: list[str]) -> object:
    if not isinstance(value, Mapping):
        problems.append(f"{where} must be an object, not {_shown(value)}")
        return None
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    problems += [f"{where}.{name} is not a known field" for name in sorted(set(value) - set(fields))]
    hints = typing.get_type_hints(kind)
    found: dict[str, object] = {}
    before = len(problems)
    for name, field in fields.items():
        if name in value:
            found[name] = read(hints[name], value[name], f"{where}.{name}", problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{where}.{name} is missing")
    if len(problems) > before:
        return None
    try:
        return typing.cast("object", kind(**found))
    except ValueError as error:
        problems.append(f"{where}: {error}")
        return None


def _read_scalar(kind: Any, value: object, where: str, problems: list[str]) -> object:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        problems.append(f"{where} must be a {kind.__name__}, not {_shown(value)}")
        return None
    if not _is_sound(value):
        problems.append(f"{where} must be {'text' if kind is str else 'a finite number'}, not {_shown(value)}")
        return None
    return value


def _is_sound(value: str | float) -> bool:
    """Neither infinite, nor NaN, nor half of a character: Python's JSON reads all of these."""
    if isinstance(value, str):
        return _HALF_CHARACTER.search(value) is None
    return isinstance(value, int) or math.isfinite(value)


def _read_tuple(kind: Any, value: object, where: str, problems: list[str]) -> object:
    if not isinstance(value, list):
        problems.append(f"{where} must be a list, not {_shown(value)}")
        return None
    element = typing.get_args(kind)[0]
    return tuple(read(element, item, f"{where}[{i}]", problems) for i, item in enumerate(value))


def _read_dict(kind: Any, value: object, where: str, problems: list[str]) -> object:
    if not isinstance(value, Mapping):
        problems.append(f"{where} must be an object, not {_shown(value)}")
        return None
    element = typing.get_args(kind)[1]
    return {str(key): read(element, item, f"{where}.{key}", problems) for key, item in value.items()}


def _read_union(kind: Any, value: object, where: str, problems: list[str]) -> object:
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    if value is None:
        return None
    if len(members) == 1:
        return read(members[0], value, where, problems)
    if not isinstance(value, tuple(members)):
        problems.append(f"{where} must be one of {', '.join(m.__name__ for m in members)}, not {_shown(value)}")
    return value


def _read_literal(kind: Any, value: object, where: str, problems: list[str]) -> object:
    if value not in typing.get_args(kind):
        problems.append(f"{where} must be one of {list(typing.get_args(kind))}, not {_shown(value)}")
    return value


def _read_any(_kind: Any, value: object, _where: str, _problems: list[str]) -> object:
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_READERS: dict[Any, Any] = {
    tuple: _read_tuple,
    dict: _read_dict,
    typing.Union: _read_union,
    types.UnionType: _read_union,
    typing.Literal: _read_literal,
    Any: _read_any,
}
