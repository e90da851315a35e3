"""Runs a bundle's graphs: the only file, with the caches, that knows ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime

from dragoman_bundle import tensors
from dragoman_bundle.bundle import Bundle
from dragoman_bundle.manifest import BundleError, Variant
from dragoman_server.engine.kv_cache import KVCache
from dragoman_server.engine.request import Sequence

Array = npt.NDArray[Any]


class ModelRunner(Protocol):
    """What the engine needs of a model."""

    def encode(self, newcomers: Seq[Sequence]) -> None:
        """Encode sequences that have just been given their slots."""

    def decode_step(self, rows: Seq[Sequence]) -> list[int]:
        """The most probable next token of every row; rows are in slot order, without gaps."""

    def move(self, sequence: Sequence, slot: int) -> None:
        """Copy a sequence's state from its slot into another."""


class OnnxModelRunner:
    """A bundle's variant on ONNX Runtime.

    Args:
        bundle: verified.
        variant: of the bundle.
        num_slots: rows that can run side by side.
        num_threads: of each graph; at least 1.
    """

    def __init__(self, bundle: Bundle, variant: Variant, num_slots: int, num_threads: int) -> None:
        manifest = bundle.manifest
        arch, limits = manifest.architecture, manifest.limits
        self._ids = manifest.special_ids
        self._encoder = _open(bundle, variant.encoder, num_threads)
        self._decoder = _open(bundle, variant.decoder, num_threads)
        self._encoder_outputs = [output.name for output in self._encoder.get_outputs()]
        self.cache = KVCache(arch, variant.cache_dtype, num_slots, limits.max_target_tokens, limits.max_source_tokens)
        # Inputs and outputs of a step live at fixed addresses, so that a binding can be used again and again.
        self._last_ids = np.zeros(num_slots, np.int64)
        self._past_lengths = np.zeros(num_slots, np.int32)
        self._source_lengths = np.zeros(num_slots, np.int32)
        self._total_length = np.zeros((), np.int32)
        self._max_source_length = np.zeros((), np.int32)
        self._next_ids = np.zeros(num_slots, np.int64)
        self._logits = np.zeros((num_slots, arch.vocab_size), np.float32)
        self._bindings: dict[int, onnxruntime.IOBinding] = {}

    def encode(self, newcomers: Seq[Sequence]) -> None:
        """See `ModelRunner`."""
        lengths = np.array([len(sequence.source_ids) for sequence in newcomers], np.int32)
        padded = np.full((len(newcomers), lengths.max()), self._ids.padding, np.int64)
        for row, sequence in zip(padded, newcomers, strict=True):
            row[: len(sequence.source_ids)] = sequence.source_ids
        feeds = {tensors.INPUT_IDS: padded, tensors.SOURCE_LENGTHS: lengths}
        encoded = dict(zip(self._encoder_outputs, self._encoder.run(self._encoder_outputs, feeds), strict=True))
        for row, sequence in enumerate(newcomers):
            self.cache.store_source(sequence.slot, encoded, row, len(sequence.source_ids))

    def decode_step(self, rows: Seq[Sequence]) -> list[int]:
        """See `ModelRunner`."""
        count = len(rows)
        for slot, sequence in enumerate(rows):
            assert sequence.slot == slot
            self._last_ids[slot] = sequence.last_id(self._ids.start)
            self._past_lengths[slot] = sequence.past_len
            self._source_lengths[slot] = len(sequence.source_ids)
        self._total_length[...] = self._past_lengths[:count].max() + 1
        self._max_source_length[...] = self._source_lengths[:count].max()
        self._decoder.run_with_iobinding(self._binding(count))
        next_ids: list[int] = self._next_ids[:count].tolist()
        return next_ids

    def move(self, sequence: Sequence, slot: int) -> None:
        """See `ModelRunner`."""
        self.cache.move(sequence.slot, slot, sequence.past_len, len(sequence.source_ids))

    def _binding(self, num_rows: int) -> onnxruntime.IOBinding:
        binding = self._bindings.get(num_rows)
        if binding is None:
            binding = self._bindings[num_rows] = self._bind(num_rows)
        return binding

    def _bind(self, num_rows: int) -> onnxruntime.IOBinding:
        binding = self._decoder.io_binding()
        inputs: dict[str, Array] = {
            tensors.INPUT_IDS: self._last_ids[:num_rows],
            tensors.PAST_LENGTHS: self._past_lengths[:num_rows],
            tensors.TOTAL_SEQUENCE_LENGTH: self._total_length,
            tensors.SOURCE_LENGTHS: self._source_lengths[:num_rows],
            tensors.MAX_SOURCE_LENGTH: self._max_source_length,
        }
        outputs: dict[str, Array] = {
            tensors.NEXT_IDS: self._next_ids[:num_rows],
            tensors.LOGITS: self._logits[:num_rows],
        }
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self.cache.bind(binding, num_rows)
        return binding


def _open(bundle: Bundle, graph: str, num_threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(bundle.file(graph)), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors have no base class of their own
        raise BundleError(bundle.path, [f"ONNX Runtime cannot load {graph}: {error}"]) from error
