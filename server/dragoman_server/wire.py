"""Reading requests off the wire: bytes that are not a request get an explanation instead of a lost connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

_FieldProto = descriptor_pb2.FieldDescriptorProto
_Descriptor = Any
"""google.protobuf.descriptor.Descriptor, or the C implementation's class that stands in for it."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Takes the place of a request that could not be read."""

    problems: tuple[str, ...]


def tolerant_parser(message_class: type[Message]) -> Callable[[bytes], Message | Malformed]:
    """A deserialiser that never raises."""

    def parse(serialised: bytes) -> Message | Malformed:
        message = message_class()
        try:
            message.ParseFromString(serialised)
        except DecodeError:
            return Malformed(tuple(_explain(serialised, message_class.DESCRIPTOR)))
        return message

    return parse


def _explain(serialised: bytes, descriptor: _Descriptor) -> Iterator[str]:
    """Why bytes are not a message: text that is not UTF-8, by field, or a broken encoding."""
    lenient = _with_bytes_for_strings(descriptor)()
    try:
        lenient.ParseFromString(serialised)
    except DecodeError:
        yield f"the request is not an encoded {descriptor.full_name}"
        return
    yield from _not_utf8(lenient, descriptor, "")


def _not_utf8(message: Message, original: _Descriptor, path: str) -> Iterator[str]:
    for field, value in message.ListFields():
        values = list(value) if field.is_repeated else [value]
        for index, item in enumerate(values):
            place = f"{path}{field.name}[{index}]" if field.is_repeated else f"{path}{field.name}"
            declared = original.fields_by_name[field.name]
            if declared.type == FieldDescriptor.TYPE_STRING:
                yield from _utf8_problem(item, place)
            elif declared.message_type is not None:
                yield from _not_utf8(item, declared.message_type, f"{place}.")


def _utf8_problem(value: bytes, place: str) -> Iterator[str]:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError as error:
        yield f"{place} is not valid UTF-8: {error.reason} at byte {error.start}; send text encoded as UTF-8"


@cache
def _with_bytes_for_strings(descriptor: _Descriptor) -> type[Message]:
    """The same message with `bytes` where it has `string`, which every parser accepts."""
    pool = descriptor_pool.DescriptorPool()
    _add_with_bytes(pool, descriptor.file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _add_with_bytes(pool: descriptor_pool.DescriptorPool, original: Any) -> None:
    """Add a file to a pool, after those that it imports."""
    for imported in original.dependencies:
        _add_with_bytes(pool, imported)
    file = descriptor_pb2.FileDescriptorProto()
    original.CopyToProto(file)
    for message in file.message_type:
        for field in message.field:
            if field.type == _FieldProto.TYPE_STRING:
                field.type = _FieldProto.TYPE_BYTES
    pool.Add(file)
