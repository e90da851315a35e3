"""Keys and values of every running sequence, allocated once; a sequence's place is its slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from dragoman_bundle import tensors
from dragoman_bundle.architecture import Architecture
from dragoman_bundle.tensors import DType

Array = npt.NDArray[Any]

_PAGE_BYTES = 4096


class KVCache:
    """Self- and cross-attention caches of shape [num_slots, num_heads, capacity, head_dim], per decoder layer.

    A decode step over n rows binds the first n slots, so running sequences must sit in slots 0..n-1. The graphs write
    new positions in place: the same memory is bound as input and as output.

    Args:
        arch: of the model.
        dtype: of keys and values.
        num_slots: sequences that can run side by side.
        capacity: most target positions of one sequence.
        source_capacity: most source positions of one sequence.
    """

    def __init__(self, arch: Architecture, dtype: DType, num_slots: int, capacity: int, source_capacity: int) -> None:
        self._own: dict[str, Array] = {}
        self._source: dict[str, Array] = {}
        for layer in range(arch.decoder_layers):
            for name in (tensors.self_key, tensors.self_value):
                self._own[name(layer)] = _allocate((num_slots, arch.num_heads, capacity, arch.head_dim), dtype)
            for name in (tensors.cross_key, tensors.cross_value):
                self._source[name(layer)] = _allocate(
                    (num_slots, arch.num_heads, source_capacity, arch.head_dim), dtype
                )

    @property
    def num_bytes(self) -> int:
        """Memory reserved; pages that no sequence has reached yet are not resident."""
        return sum(array.nbytes for array in (*self._own.values(), *self._source.values()))

    def bind(self, binding: onnxruntime.IOBinding, num_rows: int) -> None:
        """Bind the first `num_rows` slots of every cache as `past_key_values` and, in place, as `present`."""
        for name, array in (*self._own.items(), *self._source.items()):
            place = ("cpu", 0, array.dtype, (num_rows, *array.shape[1:]), array.ctypes.data)
            binding.bind_input(name, *place)
            binding.bind_output(name.replace("past_key_values", "present"), *place)

    def store_source(self, slot: int, encoded: Mapping[str, Array], row: int, length: int) -> None:
        """Keep what the encoder made of a sentence.

        Args:
            slot: of the sequence.
            encoded: the encoder's outputs by name, [batch, num_heads, src_len, head_dim].
            row: of the sentence in the encoder's batch.
            length: of the sentence, in tokens.
        """
        for name, array in self._source.items():
            array[slot, :, :length] = encoded[name.replace("past_key_values", "present")][row, :, :length]

    def move(self, source: int, target: int, past_len: int, source_len: int) -> None:
        """Copy the used part of a slot into another slot."""
        for arrays, length in ((self._own, past_len), (self._source, source_len)):
            for array in arrays.values():
                array[target, :, :length] = array[source, :, :length]


def _allocate(shape: tuple[int, ...], dtype: DType) -> Array:
    """Zeros that start on a page of their own; the system gives out pages when they are first written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + _PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % _PAGE_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)
