"""Runs a model whose caches and logits stay on a device: per step only a few candidates of each row come back."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime

from dragoman_bundle import tensors
from dragoman_server.engine.device_cache import DeviceCache
from dragoman_server.engine.device_model import DeviceModel
from dragoman_server.engine.model_runner import Candidates, mean_attention, of_similar_length
from dragoman_server.engine.request import Row, Sequence

Array = npt.NDArray[Any]


class _Encoded(NamedTuple):
    """What the encoder made of a few sources."""

    sequences: Seq[Sequence]
    outputs: list[onnxruntime.OrtValue]
    """In the encoder's order, [len(sequences), num_heads, src_len, head_dim], on the device."""
    num_padding: int


class _Found(NamedTuple):
    """Results of the search graph over all rows of a step."""

    ids: list[list[int]]
    """[rows, count], best first."""
    log_probs: list[list[float]]
    asked: list[list[float]]
    """[rows, 1]"""


class _StepInputs:
    """What a decode step is told of each row: one piece of memory on the host and one on the device."""

    def __init__(self, model: DeviceModel, num_slots: int) -> None:
        self._device = model.device
        self._host = np.zeros(3 * num_slots, np.int64)
        self._there = model.zeros((3 * num_slots,), "int64")
        self.last_ids, self.asked_ids, lengths = self._host.reshape(3, num_slots)
        self.past_lengths, self.source_lengths = lengths.view(np.int32).reshape(2, num_slots)

    def send(self) -> None:
        """Copy all of it to the device."""
        self._there.update_inplace(self._host)

    def bind(self, binding: onnxruntime.IOBinding, name: str, part: Array, shape: tuple[int, ...]) -> None:
        """Bind the beginning of one of the parts, as it is on the device, to a graph's input."""
        offset = part.ctypes.data - self._host.ctypes.data
        binding.bind_input(name, self._device, 0, part.dtype, shape, self._there.data_ptr() + offset)


class DeviceModelRunner:
    """Rows, caches and buffers of one engine on a device; a `ModelRunner`.

    The decode step is started and not waited for. The host waits once, for the candidates that the search graph finds;
    or, when a row's logits have to be changed or drawn from, for the logits of all rows before that.

    Args:
        model: to run; no other runner's, as its graphs share a stream.
        num_slots: rows that can run side by side.
    """

    def __init__(self, model: DeviceModel, num_slots: int) -> None:
        manifest, arch = model.manifest, model.manifest.architecture
        self.is_alone = False
        self._model, self._ids, self._vocab_size = model, manifest.special_ids, arch.vocab_size
        self._query_name = tensors.cross_query(manifest.alignment_layer)
        self._key_index = model.encoder_outputs.index(tensors.cross_key(manifest.alignment_layer, "present"))
        self.cache = DeviceCache(model, num_slots)
        self._inputs = _StepInputs(model, num_slots)
        self._total_length = np.zeros((), np.int32)  # these two GroupQueryAttention reads on the host
        self._max_source_length = np.zeros((), np.int32)
        self._queries = model.zeros((num_slots, 1, arch.d_attention), model.variant.cache_dtype)
        self._keys: list[Array | None] = [None] * num_slots
        """Of rows whose attention is wanted, [num_heads, src_len, head_dim]: on the host, since they never change."""
        self._bindings: dict[tuple[int, int], onnxruntime.IOBinding] = {}
        self._searching = model.search.io_binding()
        self._last: onnxruntime.IOBinding | None = None
        self._num_rows = 0
        self._forget()

    def _forget(self) -> None:
        """Drop the last step's results."""
        if self._last is not None:  # otherwise the binding would keep its logits, and there is one per number of rows
            self._last.bind_output(tensors.LOGITS, self._model.device, 0)
        self._fetched_logits: Array | None = None
        self._fetched_queries: Array | None = None
        self._found: _Found | None = None

    @property
    def logits(self) -> Array:
        """float32 [rows of this step, vocab_size], by slot; may be changed before a token is chosen."""
        self._found = None
        if self._fetched_logits is None:
            self._fetched_logits = np.array(self._logits.numpy())
        return self._fetched_logits

    @property
    def _logits(self) -> onnxruntime.OrtValue:
        """As they are on the device."""
        assert self._last is not None
        return onnxruntime.OrtValue(self._last.get_outputs_as_ortvaluevector()[0])

    def encode(self, newcomers: Seq[Sequence]) -> int:
        """See `ModelRunner`."""
        groups = [self._encode(group) for group in of_similar_length(newcomers)]
        for group in groups:
            slots = [sequence.rows[0].slot for sequence in group.sequences]
            lengths = [len(sequence.source_ids) for sequence in group.sequences]
            self.cache.store_sources(slots, group.outputs, lengths)
        for group in groups:
            self._keep_keys(group)
        for sequence in newcomers:
            self.cache.claim(sequence.rows[0].slot)
        return sum(group.num_padding for group in groups)

    def _encode(self, group: Seq[Sequence]) -> _Encoded:
        lengths = np.array([len(sequence.source_ids) for sequence in group], np.int32)
        padded = np.full((len(group), lengths.max()), self._ids.padding, np.int64)
        for row, sequence in zip(padded, group, strict=True):
            row[: len(sequence.source_ids)] = sequence.source_ids
        binding = self._model.encoder.io_binding()
        binding.bind_cpu_input(tensors.INPUT_IDS, padded)
        binding.bind_cpu_input(tensors.SOURCE_LENGTHS, lengths)
        for name in self._model.encoder_outputs:
            binding.bind_output(name, self._model.device, 0)
        self._model.encoder.run_with_iobinding(binding)
        return _Encoded(group, binding.get_outputs(), padded.size - int(lengths.sum()))

    def _keep_keys(self, group: _Encoded) -> None:
        """Fetch the keys of the alignment layer, for rows whose attention is wanted."""
        if any(sequence.options.needs_attention for sequence in group.sequences):
            keys = np.array(group.outputs[self._key_index].numpy())
            for sequence, own in zip(group.sequences, keys, strict=True):
                if sequence.options.needs_attention:
                    self._keys[sequence.rows[0].slot] = own[:, : len(sequence.source_ids)].copy()

    def decode_step(self, rows: Seq[Row]) -> None:
        """See `ModelRunner`."""
        self._forget()
        count, inputs, ids = len(rows), self._inputs, self._ids
        inputs.last_ids[:count] = [row.ids[-1] if row.ids else ids.start for row in rows]
        inputs.past_lengths[:count] = [len(row.ids) for row in rows]
        inputs.source_lengths[:count] = [len(row.sequence.source_ids) for row in rows]
        # What `top` will ask for, most likely; sent along, as it could not be sent later without waiting for the step.
        inputs.asked_ids[:count] = [ids.end if row.forced_id is None else row.forced_id for row in rows]
        inputs.send()
        self._total_length[...] = inputs.past_lengths[:count].max() + 1
        self._max_source_length[...] = inputs.source_lengths[:count].max()
        self.cache.settle()
        self.cache.make_room(int(self._total_length))
        self._num_rows, self._last = count, self._binding(count)
        self._model.decoder.run_with_iobinding(self._last, self._model.without_waiting)

    def best(self, num_rows: int) -> list[int]:
        """See `ModelRunner`."""
        assert num_rows == self._num_rows
        return [ids[0] for ids in (self._found or self._search(1)).ids]

    def top(self, slots: Seq[int], count: int, asked_ids: Seq[int]) -> list[Candidates]:
        """See `ModelRunner`."""
        asked = self._inputs.asked_ids
        if any(asked[slot] != token for slot, token in zip(slots, asked_ids, strict=True)):
            asked[list(slots)] = asked_ids
            self._inputs.send()
        found = self._search(count)
        return [Candidates(found.ids[slot], found.log_probs[slot], found.asked[slot][0]) for slot in slots]

    def _search(self, count: int) -> _Found:
        """Find the `count` most probable tokens of every row; this is where the host waits."""
        if self._fetched_logits is not None:
            self._logits.update_inplace(self._fetched_logits)
        binding = self._searching
        binding.bind_ortvalue_input(tensors.LOGITS, self._logits)
        binding.bind_cpu_input(tensors.COUNT, np.array([min(count, self._vocab_size)], np.int64))
        self._inputs.bind(binding, tensors.ASKED_IDS, self._inputs.asked_ids, (self._num_rows, 1))
        for name in (tensors.TOP_IDS, tensors.TOP_LOG_PROBS, tensors.ASKED_LOG_PROBS):
            binding.bind_output(name, "cpu", 0)
        self._model.search.run_with_iobinding(binding)
        self._found = _Found(*(value.numpy().tolist() for value in binding.get_outputs()))
        binding.clear_binding_inputs()  # it would keep the logits
        return self._found

    def attention(self, row: Row) -> Array:
        """See `ModelRunner`; the mean over the heads of the model's alignment layer."""
        keys = self._keys[row.slot]
        assert keys is not None
        if self._fetched_queries is None:
            self._fetched_queries = np.array(self._queries.numpy())
        return mean_attention(self._fetched_queries[row.slot], keys)

    def fork(self, row: Row, source: int, target: int) -> None:
        """See `ModelRunner`."""
        self.cache.fork(source, target, len(row.ids))
        self._keys[target] = self._keys[source]

    def move(self, row: Row, slot: int) -> None:
        """See `ModelRunner`."""
        self.cache.move(row.slot, slot, len(row.ids))
        self._keys[slot], self._keys[row.slot] = self._keys[row.slot], None

    def release(self, slot: int) -> None:
        """See `ModelRunner`."""
        self.cache.release(slot)
        self._keys[slot] = None

    def _binding(self, num_rows: int) -> onnxruntime.IOBinding:
        key = (num_rows, self.cache.capacity)
        if key not in self._bindings:
            self._bindings[key] = self._bind(num_rows)
        return self._bindings[key]

    def _bind(self, num_rows: int) -> onnxruntime.IOBinding:
        binding, inputs, device = self._model.decoder.io_binding(), self._inputs, self._model.device
        for name, part in (
            (tensors.INPUT_IDS, inputs.last_ids),
            (tensors.PAST_LENGTHS, inputs.past_lengths),
            (tensors.SOURCE_LENGTHS, inputs.source_lengths),
        ):
            inputs.bind(binding, name, part, (num_rows,))
        for name, scalar in (
            (tensors.TOTAL_SEQUENCE_LENGTH, self._total_length),
            (tensors.MAX_SOURCE_LENGTH, self._max_source_length),
        ):
            binding.bind_input(name, "cpu", 0, scalar.dtype, (), scalar.ctypes.data)
        binding.bind_output(tensors.LOGITS, device, 0)
        shape = (num_rows, *self._queries.shape()[1:])
        dtype = np.dtype(self._model.variant.cache_dtype)
        binding.bind_output(self._query_name, device, 0, dtype, shape, self._queries.data_ptr())
        self.cache.bind(binding, num_rows)
        return binding
