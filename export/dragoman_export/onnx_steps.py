"""Exported graphs as a `StepModel`: how parity and evaluation run them.

Deliberately plain and independent of the server's engine, which is held against it in tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from dragoman_bundle import tensors
from dragoman_bundle.architecture import Architecture
from dragoman_bundle.runtime import session_config
from dragoman_export.batching import Ids
from dragoman_export.decoding import Logits, Rows
from dragoman_export.tokenization import PADDING_ID

Array = npt.NDArray[Any]

_FIRST_CAPACITY = 32
"""Target positions of a new cache; short ones are cheap to copy when rows are selected."""


@dataclass(frozen=True, slots=True)
class OnnxState:
    """Caches and lengths of the rows being decoded."""

    caches: dict[str, Array]
    source_lengths: npt.NDArray[np.int32]
    past_len: int


class OnnxStepModel:
    """A variant's graphs on ONNX Runtime, on the CPU whatever device they are for.

    Args:
        directory: where the graphs are.
        encoder: file name of the encoder graph.
        decoder: file name of the decode-step graph.
        search: file name of the search graph.
        arch: of the model.
        num_threads: of each graph; 0 lets ONNX Runtime choose.
        rows: file name of the rows graph; None if the variant needs none.
    """

    def __init__(
        self,
        directory: Path,
        encoder: str,
        decoder: str,
        search: str,
        arch: Architecture,
        num_threads: int = 0,
        rows: str | None = None,
    ) -> None:
        self.encoder = open_session(directory / encoder, num_threads)
        self.decoder = open_session(directory / decoder, num_threads)
        self.search = open_session(directory / search, num_threads)
        self.rows = open_session(directory / rows, num_threads) if rows else None
        self._arch = arch

    def start(self, sources: Sequence[Ids]) -> OnnxState:
        """Encode a padded batch and make empty self-attention caches."""
        lengths = np.array([len(source) for source in sources], np.int32)
        padded = np.full((len(sources), lengths.max()), PADDING_ID, np.int64)
        for row, source in zip(padded, sources, strict=True):
            row[: len(source)] = source
        names = [output.name for output in self.encoder.get_outputs()]
        feeds = {tensors.INPUT_IDS: padded, tensors.SOURCE_LENGTHS: lengths}
        cross = dict(zip(names, self.encoder.run(names, feeds), strict=True))
        caches = {}
        shape = (len(sources), self._arch.num_heads, _FIRST_CAPACITY, self._arch.head_dim)
        for layer in range(self._arch.decoder_layers):
            for name in (tensors.cross_key, tensors.cross_value):
                caches[name(layer)] = cross[name(layer, "present")]
            for name in (tensors.self_key, tensors.self_value):
                caches[name(layer)] = np.zeros(shape, cross[tensors.cross_key(layer, "present")].dtype)
        return OnnxState(caches, lengths, 0)

    def step(self, state: OnnxState, last_ids: Rows) -> tuple[Logits, OnnxState]:
        """One decode step over all rows; the caches are updated in place."""
        state = _with_room(state)
        num_rows = len(last_ids)
        feeds: dict[str, Array] = {
            tensors.INPUT_IDS: last_ids,
            tensors.PAST_LENGTHS: np.full(num_rows, state.past_len, np.int32),
            tensors.TOTAL_SEQUENCE_LENGTH: np.array(state.past_len + 1, np.int32),
            tensors.SOURCE_LENGTHS: state.source_lengths,
            tensors.MAX_SOURCE_LENGTH: state.source_lengths.max(),
        }
        binding = self.decoder.io_binding()
        binding.bind_output(tensors.LOGITS, "cpu")
        for name, value in feeds.items():
            binding.bind_cpu_input(name, np.asarray(value))
        for layer in range(self._arch.decoder_layers):
            for name, whole in (
                (tensors.last_cross_key(layer), tensors.cross_key(layer)),
                (tensors.last_cross_value(layer), tensors.cross_value(layer)),
            ):
                last = state.caches[whole][np.arange(num_rows), :, state.source_lengths - 1]
                floats = last.astype(np.float32) if last.dtype == np.int8 else last
                binding.bind_cpu_input(name, floats.reshape(num_rows, 1, -1))
        for name, cache in state.caches.items():
            place = ("cpu", 0, cache.dtype, cache.shape, cache.ctypes.data)
            binding.bind_input(name, *place)
            binding.bind_output(name.replace("past_key_values", "present"), *place)
        for layer in range(self._arch.decoder_layers):
            binding.bind_output(tensors.cross_query(layer), "cpu")
        self.decoder.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy(), dataclasses.replace(state, past_len=state.past_len + 1)

    def select(self, state: OnnxState, rows: Rows) -> OnnxState:
        """Copy the caches of the given rows."""
        caches = {name: np.ascontiguousarray(cache[rows]) for name, cache in state.caches.items()}
        return OnnxState(caches, state.source_lengths[rows], state.past_len)


def _with_room(state: OnnxState) -> OnnxState:
    """The same state, with self-attention caches twice as long if they are full."""
    own = {name: cache for name, cache in state.caches.items() if ".decoder." in name}
    if any(cache.shape[2] > state.past_len for cache in own.values()):
        return state
    longer = {name: np.concatenate([cache, np.zeros_like(cache)], axis=2) for name, cache in own.items()}
    return dataclasses.replace(state, caches=state.caches | longer)


def open_session(path: Path, num_threads: int = 0) -> onnxruntime.InferenceSession:
    """A graph on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    for key, value in session_config("cpu").items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
