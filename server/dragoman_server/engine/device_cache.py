"""Keys and values of every running row in a device's memory, which only ONNX Runtime can reach."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime

from dragoman_bundle import tensors
from dragoman_server.engine.device_model import DeviceModel

Array = npt.NDArray[Any]

_SMALLEST_CAPACITY = 32
"""Target positions of the smallest bucket."""


class _Stored(NamedTuple):
    """Whose keys and values the cross-attention caches hold in a slot."""

    source_id: int
    """Counts the sources that were stored."""
    length: int
    """Source positions."""


class _Tensors:
    """Memory for tensors [num_slots, num_heads, positions, head_dim] of one shape, one for each name.

    The rows graph sees them as lines [head_dim], one for each row, head and position in this order.
    """

    def __init__(self, model: DeviceModel, names: Iterable[str], num_slots: int, positions: int) -> None:
        arch = model.manifest.architecture
        self.num_lines = num_slots * arch.num_heads * positions
        shape = (self.num_lines, arch.head_dim)
        self.values = {name: model.zeros(shape, model.variant.cache_dtype) for name in names}
        self.pointers = [value.data_ptr() for value in self.values.values()]


class DeviceCache:
    """Self- and cross-attention caches of shape [num_slots, num_heads, positions, head_dim], per decoder layer.

    As in `KVCache` all memory is allocated once, a decode step over n rows binds the first n slots, the graphs write in
    place, and self-attention caches are laid out in buckets that double. Unlike there, every row has a copy of its
    source's keys and values: a device's pages cannot be mapped twice.

    Rows are copied by the rows graph, many at once: forks and moves are remembered until `settle`, which reads all of
    them before it writes any.

    Args:
        model: that the caches are for.
        num_slots: rows that can run side by side.
    """

    def __init__(self, model: DeviceModel, num_slots: int) -> None:
        arch, limits = model.manifest.architecture, model.manifest.limits
        self._model, self._arch = model, arch
        self._dtype = np.dtype(model.variant.cache_dtype)
        self._max_capacity, self._source_capacity = limits.max_target_tokens, limits.max_source_tokens
        self.capacity = min(_SMALLEST_CAPACITY, self._max_capacity)
        layers = range(arch.decoder_layers)
        own = [name(layer) for layer in layers for name in (tensors.self_key, tensors.self_value)]
        source = [name(layer) for layer in layers for name in (tensors.cross_key, tensors.cross_value)]
        last = [name(layer) for layer in layers for name in (tensors.last_cross_key, tensors.last_cross_value)]
        self._own = _Tensors(model, own, num_slots, self._max_capacity)
        self._source = _Tensors(model, source, num_slots, self._source_capacity)
        self._last = _Tensors(model, last, num_slots, 1)
        self._in_use = [False] * num_slots
        self._stored = [_Stored(0, 0)] * num_slots
        self._num_stored = 0
        self._origins: dict[int, int] = {}  # per slot, which one holds what belongs there
        self._longest_past = 0  # of the rows in `_origins`
        self._is_sound = True

    @property
    def num_in_use(self) -> int:
        """Slots with a row."""
        return sum(self._in_use)

    @property
    def num_bytes(self) -> int:
        """Memory reserved on the device."""
        values = [value for block in (self._own, self._source, self._last) for value in block.values.values()]
        return sum(value.tensor_size_in_bytes() for value in values)

    def bind(self, binding: onnxruntime.IOBinding, num_rows: int) -> None:
        """Bind the first `num_rows` slots of every cache as `past_key_values` and, in place, as `present`."""
        heads, dim = self._arch.num_heads, self._arch.head_dim
        for block, positions in ((self._own, self.capacity), (self._source, self._source_capacity)):
            for name, value in block.values.items():
                place = self._place(value.data_ptr(), (num_rows, heads, positions, dim))
                binding.bind_input(name, *place)
                binding.bind_output(name.replace("past_key_values", "present"), *place)
        for name, value in self._last.values.items():
            binding.bind_input(name, *self._place(value.data_ptr(), (num_rows, 1, heads * dim)))

    def store_sources(self, slots: Seq[int], encoded: Seq[onnxruntime.OrtValue], lengths: Seq[int]) -> None:
        """Write what the encoder made of sources; their slots are taken only with `claim`.

        Args:
            slots: of the sources' first rows.
            encoded: the encoder's outputs in its order, [len(slots), num_heads, src_len, head_dim] on the device.
            lengths: of the sources, in tokens.
        """
        assert not any(self._in_use[slot] for slot in slots)
        self.settle()  # what is in these slots may belong to others
        src_len = encoded[0].shape()[2]
        num_lines = len(slots) * self._arch.num_heads * src_len
        pointers = [value.data_ptr() for value in encoded]
        batch, every = range(len(slots)), np.arange(src_len)
        last = np.array(lengths)[:, None, None] - 1
        for block, from_lines, to_lines in (
            (self._source, self._lines(batch, src_len, every), self._lines(slots, self._source_capacity, every)),
            (self._last, self._lines(batch, src_len, last), self._lines(slots, 1, np.arange(1))),
        ):
            self._copy(pointers, num_lines, block, from_lines, to_lines)
        for slot, length in zip(slots, lengths, strict=True):
            self._num_stored += 1
            self._stored[slot] = _Stored(self._num_stored, length)

    def claim(self, slot: int) -> None:
        """Take a free slot for a row."""
        assert not self._in_use[slot]
        self._in_use[slot] = True

    def fork(self, source: int, target: int, past_len: int) -> None:
        """Give slot `target`, which is free, the state of slot `source` as well."""
        self.claim(target)
        self._origins[target] = self._origins.get(source, source)
        self._longest_past = max(self._longest_past, past_len)

    def move(self, source: int, target: int, past_len: int) -> None:
        """Give slot `target`, which is free, the state of slot `source`, and release that."""
        self.fork(source, target, past_len)
        self.release(source)

    def release(self, slot: int) -> None:
        """Forget the row in a slot. When the last one has gone, the layout returns to the smallest bucket."""
        assert self._in_use[slot]
        self._in_use[slot] = False
        self._origins.pop(slot, None)
        if not any(self._in_use):
            self.capacity = min(_SMALLEST_CAPACITY, self._max_capacity)

    def settle(self) -> None:
        """Make all copies that are due."""
        pairs = [(origin, slot) for slot, origin in self._origins.items() if origin != slot]
        if pairs:
            self._copy_rows(self._own, self.capacity, pairs, self._longest_past)
        if foreign := [(a, b) for a, b in pairs if self._stored[a] != self._stored[b]]:
            stored = [self._stored[origin] for origin, _ in foreign]
            self._copy_rows(self._source, self._source_capacity, foreign, max(s.length for s in stored))
            self._copy_rows(self._last, 1, foreign, 1)
            for (_, slot), what in zip(foreign, stored, strict=True):
                self._stored[slot] = what
        self._origins.clear()
        self._longest_past = 0

    def make_room(self, longest: int) -> None:
        """See to it that rows of `longest` positions fit; the content of all slots in use survives."""
        assert not self._origins
        old = self.capacity
        while self.capacity < longest:
            self.capacity = min(2 * self.capacity, self._max_capacity)
        if self.capacity > old and any(self._in_use):
            slots, kept = np.flatnonzero(self._in_use), np.arange(old)
            from_lines, to_lines = self._lines(slots, old, kept), self._lines(slots, self.capacity, kept)
            self._copy(self._own.pointers, self._own.num_lines, self._own, from_lines, to_lines)

    def _copy_rows(self, block: _Tensors, positions: int, pairs: Seq[tuple[int, int]], count: int) -> None:
        """Copy the first `count` positions of rows, given as pairs of slots, from and to."""
        sources, targets = zip(*pairs, strict=True)
        kept = np.arange(count)
        from_lines, to_lines = self._lines(sources, positions, kept), self._lines(targets, positions, kept)
        self._copy(block.pointers, block.num_lines, block, from_lines, to_lines)

    def _lines(self, rows: Iterable[int], positions: int, chosen: Array) -> Array:
        """Numbers of lines in tensors [rows, num_heads, positions, head_dim].

        Args:
            rows: whose lines.
            positions: of every row.
            chosen: those that are meant, broadcast to [len(rows), num_heads, count].
        """
        heads = np.array(list(rows), np.int64)[:, None] * self._arch.num_heads + np.arange(self._arch.num_heads)
        lines: Array = (heads[:, :, None] * positions + chosen).ravel()
        return lines

    def _copy(self, pointers: Seq[int], num_lines: int, target: _Tensors, from_lines: Array, to_lines: Array) -> None:
        """Run the rows graph: target[to_lines] = source[from_lines], for tensors at `pointers` of `num_lines` lines."""
        if not self._is_sound:
            raise RuntimeError("rows were lost when an earlier copy between them failed")
        self._is_sound = False  # until it has been done
        graph, dim = self._model.rows, self._arch.head_dim
        binding = graph.io_binding()
        binding.bind_cpu_input(tensors.FROM_LINES, from_lines)
        binding.bind_cpu_input(tensors.TO_LINES, to_lines[:, None])
        for i, (source, pointer) in enumerate(zip(pointers, target.pointers, strict=True)):
            place = self._place(pointer, (target.num_lines, dim))
            binding.bind_input(tensors.copy_source(i), *self._place(source, (num_lines, dim)))
            binding.bind_input(tensors.copy_target(i), *place)
            binding.bind_output(tensors.copy_target(i, "after"), *place)
        graph.run_with_iobinding(binding, self._model.without_waiting)
        self._is_sound = True

    def _place(self, pointer: int, shape: tuple[int, ...]) -> tuple[str, int, Any, tuple[int, ...], int]:
        """Arguments that bind memory."""
        return self._model.device, 0, self._dtype, shape, pointer
