"""Names, types and axes of the tensors that cross a graph's boundary.

The names follow the ONNX community's export conventions, so that tools which know those find their way here.
Export writes graphs with them, the server binds them, and neither spells a name itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from dragoman_bundle.architecture import Architecture

INPUT_IDS: Final = "input_ids"
SOURCE_LENGTHS: Final = "source_lengths"
PAST_LENGTHS: Final = "past_lengths"
TOTAL_SEQUENCE_LENGTH: Final = "total_sequence_length"
MAX_SOURCE_LENGTH: Final = "max_source_length"
LOGITS: Final = "logits"
NEXT_IDS: Final = "next_ids"

DType = Literal["float32", "float16", "int32", "int64"]
Axis = str | int
"""A name for an axis whose size may differ between runs; a number for a fixed one."""


class TensorSpec(NamedTuple):
    """One input or output of a graph."""

    name: str
    dtype: DType
    axes: tuple[Axis, ...]


def self_key(layer: int, when: str = "past_key_values") -> str:
    """Self-attention keys of a decoder layer; `when` is "past_key_values" or "present"."""
    return f"{when}.{layer}.decoder.key"


def self_value(layer: int, when: str = "past_key_values") -> str:
    """Self-attention values of a decoder layer."""
    return f"{when}.{layer}.decoder.value"


def cross_key(layer: int, when: str = "past_key_values") -> str:
    """Cross-attention keys of a decoder layer: "present" leaves the encoder, "past_key_values" enters the step."""
    return f"{when}.{layer}.encoder.key"


def cross_value(layer: int, when: str = "past_key_values") -> str:
    """Cross-attention values of a decoder layer."""
    return f"{when}.{layer}.encoder.value"


def encoder_inputs() -> list[TensorSpec]:
    """What the encoder graph takes: token ids padded on the right, and each row's real length."""
    return [
        TensorSpec(INPUT_IDS, "int64", ("batch", "src_len")),
        TensorSpec(SOURCE_LENGTHS, "int32", ("batch",)),
    ]


def encoder_outputs(arch: Architecture, cache_dtype: DType) -> list[TensorSpec]:
    """What the encoder graph gives: the cross-attention keys and values of every decoder layer."""
    axes = ("batch", arch.num_heads, "src_len", arch.head_dim)
    return [
        TensorSpec(name(layer, "present"), cache_dtype, axes)
        for layer in range(arch.decoder_layers)
        for name in (cross_key, cross_value)
    ]


def decoder_inputs(arch: Architecture, cache_dtype: DType) -> list[TensorSpec]:
    """What the decode-step graph takes: one token per row, and every row's caches and lengths."""
    return [
        TensorSpec(INPUT_IDS, "int64", ("rows",)),
        TensorSpec(PAST_LENGTHS, "int32", ("rows",)),
        TensorSpec(TOTAL_SEQUENCE_LENGTH, "int32", ()),
        TensorSpec(SOURCE_LENGTHS, "int32", ("rows",)),
        TensorSpec(MAX_SOURCE_LENGTH, "int32", ()),
        *_caches(arch, cache_dtype, "past_key_values"),
    ]


def decoder_outputs(arch: Architecture, cache_dtype: DType) -> list[TensorSpec]:
    """What the decode-step graph gives; each `present` must be bound to the memory of its `past_key_values`."""
    return [
        TensorSpec(LOGITS, "float32", ("rows", arch.vocab_size)),
        TensorSpec(NEXT_IDS, "int64", ("rows",)),
        *_caches(arch, cache_dtype, "present"),
    ]


def _caches(arch: Architecture, dtype: DType, when: str) -> Iterator[TensorSpec]:
    for layer in range(arch.decoder_layers):
        own = ("rows", arch.num_heads, "capacity", arch.head_dim)
        source = ("rows", arch.num_heads, "source_capacity", arch.head_dim)
        yield TensorSpec(self_key(layer, when), dtype, own)
        yield TensorSpec(self_value(layer, when), dtype, own)
        yield TensorSpec(cross_key(layer, when), dtype, source)
        yield TensorSpec(cross_value(layer, when), dtype, source)
