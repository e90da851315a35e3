"""What a graph file refers to: read from its bytes, before ONNX Runtime opens it and what it names.

An ONNX file is a protobuf message. Its tensors may lie in other files, at places that the graph itself names; and not
only its initializers: attributes of nodes, subgraphs, sparse tensors, functions and training graphs hold tensors too.
This walks all of them with a table of field numbers, since a server has neither onnx nor its classes. It is stricter
than a protobuf parser (no groups, no known field of another type), so that nothing is read here in one way and there
in another; and its work is bounded whatever the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
"""Wire types of protobuf; the two others, groups, no ONNX message has."""

_TENSORS_BELOW: Final[dict[str, dict[int, str]]] = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
}
"""Per message of onnx.proto, the fields whose messages are, or hold, tensors; a test compares it with onnx itself."""

_OP_TYPE, _DOMAIN = 4, 7
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
_KEY, _VALUE = 1, 2
_KNOWN_KEYS = {"location", "offset", "length", "checksum"}

MAX_DEPTH: Final = 100
"""Messages in messages; protobuf's own parsers stop there too."""
MAX_FIELDS: Final = 1_000_000
"""Fields in all that are looked at: a graph of 6 + 3 layers has 6,000; a million take about a second."""


class GraphFileError(ValueError):
    """Bytes that are not an ONNX graph, or one that no exporter writes."""


@dataclass(frozen=True, slots=True, order=True)
class ExternalTensor:
    """Where a tensor's bytes are."""

    location: str
    """Path of the file, as the graph gives it."""
    offset: int
    """First byte."""
    length: int | None
    """Bytes; None for all that follow."""


@dataclass(frozen=True, slots=True)
class GraphReferences:
    """What a graph needs besides its own bytes."""

    tensors: frozenset[ExternalTensor]
    operators: frozenset[tuple[str, str]]
    """Domain and type of every operator."""


class _Field(NamedTuple):
    number: int
    wire_type: int
    start: int
    stop: int


def read_references(content: bytes) -> GraphReferences:
    """Find every file and every operator that a graph needs.

    Args:
        content: of an ONNX file.

    Raises:
        GraphFileError: these bytes are not an ONNX graph.
    """
    return _Walk(content).run()


class _Walk:
    """One pass over a file, without recursion: messages that wait to be looked at are on a stack."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._num_fields = 0
        self._pending = [("Model", 0, len(content), 0)]
        self._tensors: set[ExternalTensor] = set()
        self._operators: set[tuple[str, str]] = set()
        self._has_graph = False

    def run(self) -> GraphReferences:
        while self._pending:
            kind, start, stop, depth = self._pending.pop()
            if depth > MAX_DEPTH:
                raise GraphFileError(f"messages are nested more than {MAX_DEPTH} deep")
            fields = list(self._fields(start, stop))
            self._has_graph |= kind == "Graph"
            if kind == "Tensor":
                self._read_tensor(fields)
            elif kind == "Node":
                self._operators.add((self._last_text(fields, _DOMAIN), self._last_text(fields, _OP_TYPE)))
            for number, message in _TENSORS_BELOW.get(kind, {}).items():
                below = self._messages(fields, number)
                self._pending += [(message, field.start, field.stop, depth + 1) for field in below]
        if not self._has_graph:
            raise GraphFileError("there is no graph in it")
        return GraphReferences(frozenset(self._tensors), frozenset(self._operators))

    def _read_tensor(self, fields: list[_Field]) -> None:
        """Note where a tensor is, if it says that it is elsewhere or just names a place."""
        entries = [self._entry(field) for field in self._messages(fields, _EXTERNAL_DATA)]
        elsewhere = [self._varint(field.start, field.stop)[0] for field in self._of(fields, _DATA_LOCATION, _VARINT)]
        if not entries and not any(elsewhere):
            return
        known = dict(entries)
        if len(known) != len(entries) or not known.keys() <= _KNOWN_KEYS or "location" not in known:
            raise GraphFileError(f"a tensor's external data has the keys {sorted(key for key, _ in entries)}")
        length = _size(known["length"]) if "length" in known else None
        self._tensors.add(ExternalTensor(known["location"], _size(known.get("offset", "0")), length))

    def _entry(self, field: _Field) -> tuple[str, str]:
        fields = list(self._fields(field.start, field.stop))
        return self._last_text(fields, _KEY), self._last_text(fields, _VALUE)

    def _last_text(self, fields: list[_Field], number: int) -> str:
        """A string field; where it is repeated the last one counts, as in every protobuf parser."""
        found = self._messages(fields, number)
        try:
            return self._content[found[-1].start : found[-1].stop].decode() if found else ""
        except UnicodeDecodeError as error:
            raise GraphFileError("a name is not UTF-8") from error

    def _messages(self, fields: list[_Field], number: int) -> list[_Field]:
        return self._of(fields, number, _BYTES)

    @staticmethod
    def _of(fields: list[_Field], number: int, wire_type: int) -> list[_Field]:
        found = [field for field in fields if field.number == number]
        if any(field.wire_type != wire_type for field in found):
            raise GraphFileError(f"field {number} is of another type than ONNX gives it")
        return found

    def _fields(self, position: int, stop: int) -> Iterator[_Field]:
        """The fields of the message between two positions."""
        while position < stop:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise GraphFileError(f"there are more than {MAX_FIELDS} fields in it")
            tag, position = self._varint(position, stop)
            number, wire_type = tag >> 3, tag & 7
            start, end = self._extent(wire_type, position, stop)
            if number == 0 or end > stop:
                raise GraphFileError(f"it breaks off, or is no protobuf message, at byte {position}")
            yield _Field(number, wire_type, start, end)
            position = end

    def _extent(self, wire_type: int, position: int, stop: int) -> tuple[int, int]:
        """Where a field's value begins and ends."""
        if wire_type == _BYTES:
            size, position = self._varint(position, stop)
            return position, position + size
        if wire_type == _VARINT:
            return position, self._varint(position, stop)[1]
        if wire_type in (_FIXED_64, _FIXED_32):
            return position, position + (8 if wire_type == _FIXED_64 else 4)
        raise GraphFileError(f"it has a field of wire type {wire_type} before byte {position}")

    def _varint(self, position: int, stop: int) -> tuple[int, int]:
        """A number, and the position after it."""
        if position < stop and self._content[position] < 0x80:  # most are one byte
            return self._content[position], position + 1
        value = 0
        for shift, byte in zip(range(0, 70, 7), self._content[position : min(stop, position + 10)], strict=False):
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position + shift // 7 + 1
        raise GraphFileError(f"it breaks off, or is no protobuf message, at byte {position}")


def _size(text: str) -> int:
    # int() would take signs, spaces, underscores and digits of other scripts, and time without end for long numbers.
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise GraphFileError(f"{text[:40]!r} is not a place in a file")
    return int(text)
