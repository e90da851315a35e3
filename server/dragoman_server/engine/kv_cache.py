"""Keys and values of every running row, allocated once; a row's place is its slot."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from dragoman_bundle import tensors
from dragoman_bundle.architecture import Architecture
from dragoman_bundle.tensors import DType

Array = npt.NDArray[Any]

_SMALLEST_CAPACITY = 32
"""Target positions of the smallest bucket."""
_LONGEST_COPY_BYTES = 256 * 1024
"""Of what the encoder made of one sentence. Up to here a copy takes less time than to map pages; see NOTES.md of the
benchmarks."""


class KVCache:
    """Self- and cross-attention caches of shape [num_slots, num_heads, capacity, head_dim], per decoder layer.

    A decode step over n rows binds the first n slots, so running rows must sit in slots 0..n-1. The graphs write new
    positions in place: the same memory is bound as input and as output.

    All memory is reserved at the start. Self-attention caches are laid out for the longest running row, in buckets that
    double, so that short rows lie close together. Cross-attention caches are stored once per sentence: the slots of a
    sentence's rows are mapped to the same physical pages, unless the sentence is so short that copies are cheaper.

    Args:
        arch: of the model.
        dtype: of keys and values.
        num_slots: rows that can run side by side.
        max_target_tokens: most target positions of one row.
        max_source_tokens: most source positions of one row.
    """

    def __init__(
        self, arch: Architecture, dtype: DType, num_slots: int, max_target_tokens: int, max_source_tokens: int
    ) -> None:
        self._arch, self._dtype, self._num_slots = arch, np.dtype(dtype), num_slots
        self._max_capacity = max_target_tokens
        layers = range(arch.decoder_layers)
        shape = (num_slots, arch.num_heads, max_target_tokens, arch.head_dim)
        own_names = [name(layer) for layer in layers for name in (tensors.self_key, tensors.self_value)]
        self._own_memory = {name: _allocate(shape, self._dtype) for name in own_names}
        self._lay_out(min(_SMALLEST_CAPACITY, max_target_tokens))
        names = [name(layer) for layer in layers for name in (tensors.cross_key, tensors.cross_value)]
        positions = _whole_pages(max_source_tokens, arch.num_heads * arch.head_dim * self._dtype.itemsize)
        self._shared = SharedSlots(len(names), num_slots, positions * self._position_bytes)
        source_shape = (num_slots, arch.num_heads, positions, arch.head_dim)
        self.source_names = [name.replace("past_key_values", "present") for name in names]
        """What the encoder calls keys and values of cross-attention, in our order."""
        self._source = {
            name: self._shared.memory[i].view(self._dtype).reshape(source_shape) for i, name in enumerate(names)
        }
        self._longest_copy = _LONGEST_COPY_BYTES // (len(names) * self._position_bytes)
        self._sentence = [0] * num_slots  # by block, of which sentence it has what the encoder made
        self._sentences = itertools.count(1)
        # [layers * 2, num_slots, 1, d_attention]: together, so that a row's are copied at once.
        self._last = np.zeros((len(names), num_slots, 1, arch.d_attention), tensors.activation_dtype(dtype))
        last_names = [name(layer) for layer in layers for name in (tensors.last_cross_key, tensors.last_cross_value)]
        self._last_by_name = dict(zip(last_names, self._last, strict=True))

    @property
    def _position_bytes(self) -> int:
        return self._arch.num_heads * self._arch.head_dim * self._dtype.itemsize

    @staticmethod
    def slot_bytes(arch: Architecture, dtype: DType, max_target_tokens: int, max_source_tokens: int) -> int:
        """Memory that one slot takes."""
        position = arch.num_heads * arch.head_dim * np.dtype(dtype).itemsize
        positions = max_target_tokens + _whole_pages(max_source_tokens, position)
        last = arch.d_attention * np.dtype(tensors.activation_dtype(dtype)).itemsize
        return 2 * arch.decoder_layers * (positions * position + last)

    @property
    def num_bytes(self) -> int:
        """Memory reserved; pages that no row has reached yet are not resident."""
        own = 2 * self._arch.decoder_layers * self._num_slots * self._max_capacity * self._position_bytes
        return own + int(self._shared.memory.nbytes) + self._last.nbytes

    def bind(self, binding: onnxruntime.IOBinding, num_rows: int) -> None:
        """Bind the first `num_rows` slots of every cache as `past_key_values` and, in place, as `present`."""
        for name, array in (*self._own.items(), *self._source.items()):
            place = ("cpu", 0, array.dtype, (num_rows, *array.shape[1:]), array.ctypes.data)
            binding.bind_input(name, *place)
            binding.bind_output(name.replace("past_key_values", "present"), *place)
        for name, array in self._last_by_name.items():
            binding.bind_input(name, "cpu", 0, array.dtype, (num_rows, *array.shape[1:]), array.ctypes.data)

    def _lay_out(self, capacity: int) -> None:
        """Show self-attention memory as rows of `capacity` positions."""
        self.capacity = capacity
        self._own = {name: self._view(memory, capacity) for name, memory in self._own_memory.items()}

    def _view(self, memory: Array, capacity: int) -> Array:
        """Self-attention memory [all elements] as [num_slots, num_heads, capacity, head_dim]."""
        shape = (self._num_slots, self._arch.num_heads, capacity, self._arch.head_dim)
        view: Array = memory[: int(np.prod(shape))].reshape(shape)
        return view

    def make_room(self, longest: int) -> None:
        """See to it that rows of `longest` positions fit; the content of all slots in use survives."""
        capacity = self.capacity
        while capacity < longest:
            capacity = min(2 * capacity, self._max_capacity)
        if capacity == self.capacity:
            return
        old_views = self._own
        old_capacity = self.capacity
        self._lay_out(capacity)
        for name, new in self._own.items():
            old = old_views[name]
            for slot in range(self._shared.num_in_use - 1, -1, -1):  # from the end, since rows move away from the start
                new[slot, :, :old_capacity] = old[slot].copy()

    def store_source(self, slot: int, encoded: Seq[Array], row: int, length: int) -> None:
        """Keep what the encoder made of a sentence.

        Args:
            slot: of the sentence's first row.
            encoded: the encoder's outputs as `source_names` says, [batch, num_heads, src_len, head_dim].
            row: of the sentence in the encoder's batch.
            length: of the sentence, in tokens.
        """
        self._shared.claim(slot)
        self._sentence[self._shared.block(slot)] = next(self._sentences)
        for array, last, made in zip(self._source.values(), self._last, encoded, strict=True):
            array[slot, :, :length] = made[row, :, :length]
            last[slot, 0] = made[row, :, length - 1].reshape(-1)

    def fork(self, source: int, target: int, past_len: int, source_len: int) -> None:
        """Give slot `target` the state of slot `source` as well; what the encoder made of a long sentence is shared."""
        self._copy_own(source, target, past_len)
        if source_len > self._longest_copy:
            self._shared.share(source, target)
        else:
            self._copy_source(source, target, source_len)

    def move(self, source: int, target: int, past_len: int, source_len: int) -> None:
        """Give slot `target` the state of slot `source`, and release that."""
        self._copy_own(source, target, past_len)
        if self._shared.is_shared(source):
            self._shared.share(source, target)
        else:
            self._copy_source(source, target, source_len)
        self.release(source)

    def _copy_source(self, source: int, target: int, source_len: int) -> None:
        """Copy what the encoder made, unless the slot's own memory still has it of another row of the sentence."""
        self._shared.claim(target)
        sentence, block = self._sentence[self._shared.block(source)], self._shared.block(target)
        if self._sentence[block] != sentence:
            self._sentence[block] = sentence
            for array in self._source.values():
                array[target, :, :source_len] = array[source, :, :source_len]

    def _copy_own(self, source: int, target: int, past_len: int) -> None:
        for array in self._own.values():
            array[target, :, :past_len] = array[source, :, :past_len]
        self._last[:, target] = self._last[:, source]

    def release(self, slot: int) -> None:
        """Forget the row in a slot. When the last one has gone, the layout returns to the smallest bucket."""
        self._shared.release(slot)
        if not self._shared.num_in_use and self.capacity > _SMALLEST_CAPACITY:
            self._lay_out(_SMALLEST_CAPACITY)

    def cross_keys(self, layer: int, slot: int, length: int) -> Array:
        """Cross-attention keys of a row, [num_heads, length, head_dim]."""
        keys: Array = self._source[tensors.cross_key(layer)][slot, :, :length]
        return keys


class SharedSlots:
    """Arrays of slots, of which several may be the same physical memory.

    Memory comes as blocks; a slot shows one block, in every array. Linux's page tables do the rest, so readers that
    know nothing of it see an ordinary contiguous array.

    Args:
        num_arrays: that have the same slots.
        num_slots: per array.
        slot_bytes: a multiple of the page size.
    """

    def __init__(self, num_arrays: int, num_slots: int, slot_bytes: int) -> None:
        assert slot_bytes % mmap.PAGESIZE == 0
        self._slot_bytes = slot_bytes
        self._array_bytes = num_slots * slot_bytes
        self._file = os.memfd_create("dragoman-cross-attention")
        os.ftruncate(self._file, num_arrays * self._array_bytes)
        self._mapping = mmap.mmap(self._file, num_arrays * self._array_bytes)
        self.memory = np.frombuffer(self._mapping, np.uint8).reshape(num_arrays, self._array_bytes)
        self._block = list(range(num_slots))  # that each slot shows
        self._num_users = [0] * num_slots  # of each block
        self._in_use = [False] * num_slots  # whether a row is in the slot
        self.num_in_use = 0

    def claim(self, slot: int) -> None:
        """Give a free slot a block of its own."""
        assert not self._in_use[slot]
        if self._num_users[self._block[slot]]:
            self._show(slot, self._num_users.index(0))
        self._enter(slot)

    def share(self, source: int, target: int) -> None:
        """Let a free slot show what another one shows."""
        assert not self._in_use[target]
        if self._block[target] != self._block[source]:
            self._show(target, self._block[source])
        self._enter(target)

    def block(self, slot: int) -> int:
        """That a slot shows."""
        return self._block[slot]

    def is_shared(self, slot: int) -> bool:
        """Whether another slot in use shows the same block."""
        return self._num_users[self._block[slot]] > 1

    def release(self, slot: int) -> None:
        """Make a slot free; its block is free once no slot uses it."""
        assert self._in_use[slot]
        self._in_use[slot] = False
        self.num_in_use -= 1
        self._num_users[self._block[slot]] -= 1

    def _enter(self, slot: int) -> None:
        self._in_use[slot] = True
        self.num_in_use += 1
        self._num_users[self._block[slot]] += 1

    def _show(self, slot: int, block: int) -> None:
        start = self.memory.ctypes.data
        for array in range(len(self.memory)):
            first = array * self._array_bytes
            _map_at(
                start + first + slot * self._slot_bytes, self._slot_bytes, self._file, first + block * self._slot_bytes
            )
        self._block[slot] = block

    def __del__(self) -> None:
        os.close(self._file)


_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
]  # fmt: skip


def _map_at(address: int, size: int, file: int, offset: int) -> None:
    """Show a part of a file at an address that is mapped already; Python's mmap leaves the address to the system."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, size, access, mmap.MAP_SHARED | _MAP_FIXED, file, offset) != address:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot share a cache slot: {os.strerror(error)}")


def _whole_pages(positions: int, position_bytes: int) -> int:
    """The least number of positions, `positions` or more, that fills whole pages."""
    while positions * position_bytes % mmap.PAGESIZE:
        positions += 1
    return positions


def _allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros, flat, that start on a page of their own; the system gives out pages when they are first written."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + mmap.PAGESIZE, np.uint8)
    start = -raw.ctypes.data % mmap.PAGESIZE
    return raw[start : start + size].view(dtype)
