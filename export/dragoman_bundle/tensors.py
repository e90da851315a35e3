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
COUNT: Final = "count"
ASKED_IDS: Final = "asked_ids"
TOP_IDS: Final = "top_ids"
TOP_LOG_PROBS: Final = "top_log_probs"
ASKED_LOG_PROBS: Final = "asked_log_probs"
FROM_LINES: Final = "from_lines"
TO_LINES: Final = "to_lines"

DType = Literal["float32", "float16", "int8", "int32", "int64"]
Axis = str | int
"""A name for an axis whose size may differ between runs; a number for a fixed one."""


class TensorSpec(NamedTuple):
    """One input or output of a graph."""

    name: str
    dtype: DType
    axes: tuple[Axis, ...]


def activation_dtype(cache_dtype: DType) -> DType:
    """Of queries, keys and values outside the caches; caches in int8 hold them rounded to whole numbers."""
    return "float32" if cache_dtype == "int8" else cache_dtype


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


def last_cross_key(layer: int) -> str:
    """The cross-attention key of each row's last source position."""
    return f"past_key_values.{layer}.encoder.last_key"


def last_cross_value(layer: int) -> str:
    """The cross-attention value of each row's last source position."""
    return f"past_key_values.{layer}.encoder.last_value"


def cross_query(layer: int) -> str:
    """What a decoder layer asks of the source; with the cached keys it gives the attention weights."""
    return f"cross_attention.{layer}.query"


def copy_source(index: int) -> str:
    """Where the rows graph copies lines from, for one of a decoder's keys and values."""
    return f"source.{index}"


def copy_target(index: int, when: str = "before") -> str:
    """Where it copies them to; the target "after" must be bound to the memory of the one "before"."""
    return f"target.{index}.{when}"


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
        *(
            TensorSpec(name(layer), activation_dtype(cache_dtype), ("rows", 1, arch.d_attention))
            for layer in range(arch.decoder_layers)
            for name in (last_cross_key, last_cross_value)
        ),
    ]


def decoder_outputs(arch: Architecture, cache_dtype: DType) -> list[TensorSpec]:
    """What the decode-step graph gives; each `present` must be bound to the memory of its `past_key_values`."""
    return [
        TensorSpec(LOGITS, "float32", ("rows", arch.vocab_size)),
        *_caches(arch, cache_dtype, "present"),
        *(
            TensorSpec(cross_query(layer), activation_dtype(cache_dtype), ("rows", 1, arch.d_attention))
            for layer in range(arch.decoder_layers)
        ),
    ]


def search_inputs(arch: Architecture) -> list[TensorSpec]:
    """What the search graph takes: logits, how many candidates are wanted, and one more token of each row."""
    return [
        TensorSpec(LOGITS, "float32", ("rows", arch.vocab_size)),
        TensorSpec(COUNT, "int64", (1,)),
        TensorSpec(ASKED_IDS, "int64", ("rows", 1)),
    ]


def search_outputs() -> list[TensorSpec]:
    """What the search graph gives: the most probable tokens, best first, and the log-probabilities."""
    return [
        TensorSpec(TOP_IDS, "int64", ("rows", "count")),
        TensorSpec(TOP_LOG_PROBS, "float32", ("rows", "count")),
        TensorSpec(ASKED_LOG_PROBS, "float32", ("rows", 1)),
    ]


def rows_inputs(arch: Architecture, cache_dtype: DType) -> list[TensorSpec]:
    """What the rows graph takes: caches as lines, one of [head_dim] per row, head and position; and which go where."""
    indices = range(2 * arch.decoder_layers)
    return [
        TensorSpec(FROM_LINES, "int64", ("lines",)),
        TensorSpec(TO_LINES, "int64", ("lines", 1)),
        *(TensorSpec(copy_source(i), cache_dtype, ("source_lines", arch.head_dim)) for i in indices),
        *(TensorSpec(copy_target(i), cache_dtype, ("target_lines", arch.head_dim)) for i in indices),
    ]


def rows_outputs(arch: Architecture, cache_dtype: DType) -> list[TensorSpec]:
    """What the rows graph gives: its targets, in place."""
    axes = ("target_lines", arch.head_dim)
    return [TensorSpec(copy_target(i, "after"), cache_dtype, axes) for i in range(2 * arch.decoder_layers)]


def _caches(arch: Architecture, dtype: DType, when: str) -> Iterator[TensorSpec]:
    for layer in range(arch.decoder_layers):
        own = ("rows", arch.num_heads, "capacity", arch.head_dim)
        source = ("rows", arch.num_heads, "source_capacity", arch.head_dim)
        yield TensorSpec(self_key(layer, when), dtype, own)
        yield TensorSpec(self_value(layer, when), dtype, own)
        yield TensorSpec(cross_key(layer, when), dtype, source)
        yield TensorSpec(cross_value(layer, when), dtype, source)
