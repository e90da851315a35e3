"""What the engine needs of a model, and how that runs on the processor; `device_runner` is for GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import onnxruntime

from dragoman_bundle import tensors
from dragoman_bundle.bundle import Bundle
from dragoman_bundle.manifest import SpecialIds, Variant
from dragoman_server.engine.kv_cache import KVCache
from dragoman_server.engine.request import Row, Sequence
from dragoman_server.engine.sessions import open_session

Array = npt.NDArray[Any]

_LONGEST_RATIO, _LONGEST_EXTRA = 1.25, 2
"""Sources encoded together: the longest has at most so many times the tokens of the shortest, and so many more."""
_MAX_RUN_TOKENS = 128
"""Of several sources encoded together. Longer runs are no faster, and the encoder keeps the memory of its longest."""


class Candidates(NamedTuple):
    """What a row may produce next."""

    ids: list[int]
    """The most probable tokens, best first."""
    log_probs: list[float]
    """Theirs."""
    asked: float
    """Log-probability of the token that was asked for."""


class ModelRunner(Protocol):
    """What the engine needs of a model. After a decode step, `logits` and what is derived from them are its results."""

    is_alone: bool
    """Whether no other engine of the model is at work, so that this one may use their cores."""

    @property
    def logits(self) -> Array:
        """float32 [max_rows, vocab_size], by slot; may be changed before a token is chosen."""

    def encode(self, newcomers: Seq[Sequence]) -> int:
        """Encode sequences whose only row has just been given its slot; how many positions of padding that took.

        If it raises, no slot has been given anything.
        """

    def decode_step(self, rows: Seq[Row]) -> None:
        """Decode rows by one token; row i is in slot i."""

    def best(self, num_rows: int) -> list[int]:
        """The most probable token of every row."""

    def top(self, slots: Seq[int], count: int, asked_ids: Seq[int]) -> list[Candidates]:
        """The `count` most probable tokens of some rows, and the log-probability of one more token of each."""

    def attention(self, row: Row) -> Array:
        """Weights [src_len] with which a row has just looked at its source."""

    def fork(self, row: Row, source: int, target: int) -> None:
        """Give a row the state that is in slot `source`, in slot `target`, which is free."""

    def move(self, row: Row, slot: int) -> None:
        """Move a row's state into another slot, which is free."""

    def release(self, slot: int) -> None:
        """Forget the state in a slot."""


class _Sessions(NamedTuple):
    """A model's large graphs, opened for a number of threads."""

    encoder: onnxruntime.InferenceSession
    decoder: onnxruntime.InferenceSession

    @classmethod
    def open(cls, bundle: Bundle, variant: Variant, num_threads: int) -> Self:
        return cls(
            open_session(bundle, variant.encoder, num_threads), open_session(bundle, variant.decoder, num_threads)
        )


class OnnxModel:
    """A bundle's variant, opened on ONNX Runtime; several runners can share it.

    Args:
        bundle: verified.
        variant: of the bundle.
        num_threads: that one run of a graph uses.
        num_solo_threads: likewise, for a runner that is alone; more than `num_threads` opens encoder and decoder twice,
            with all their weights.
    """

    def __init__(self, bundle: Bundle, variant: Variant, num_threads: int, num_solo_threads: int = 0) -> None:
        self.manifest = bundle.manifest
        self.variant = variant
        self.shared = _Sessions.open(bundle, variant, num_threads)
        self.has_solo = num_solo_threads > num_threads
        self.solo = _Sessions.open(bundle, variant, num_solo_threads) if self.has_solo else self.shared
        self.search = open_session(bundle, variant.search, num_threads)


class OnnxModelRunner:
    """Rows, caches and buffers of one engine.

    Args:
        model: to run.
        num_slots: rows that can run side by side.
    """

    def __init__(self, model: OnnxModel, num_slots: int) -> None:
        manifest = model.manifest
        arch, limits = manifest.architecture, manifest.limits
        self._model = model
        self._ids: SpecialIds = manifest.special_ids
        self._alignment_layer = manifest.alignment_layer
        self.cache = KVCache(
            arch, model.variant.cache_dtype, num_slots, limits.max_target_tokens, limits.max_source_tokens
        )
        activations = tensors.activation_dtype(model.variant.cache_dtype)
        # Inputs and outputs of a step live at fixed addresses, so that a binding can be used again and again.
        self._last_ids = np.zeros(num_slots, np.int64)
        self._past_lengths = np.zeros(num_slots, np.int32)
        self._source_lengths = np.zeros(num_slots, np.int32)
        self._total_length = np.zeros((), np.int32)
        self._max_source_length = np.zeros((), np.int32)
        self.logits = np.zeros((num_slots, arch.vocab_size), np.float32)
        self._queries = {
            tensors.cross_query(layer): np.zeros((num_slots, 1, arch.d_attention), activations)
            for layer in range(arch.decoder_layers)
        }
        self._bindings: dict[tuple[bool, int, int], onnxruntime.IOBinding] = {}
        self.is_alone = False

    @property
    def _sessions(self) -> _Sessions:
        return self._model.solo if self.is_alone else self._model.shared

    def encode(self, newcomers: Seq[Sequence]) -> int:
        """See `ModelRunner`."""
        groups = [(group, *self._encode(group)) for group in of_similar_length(newcomers, _MAX_RUN_TOKENS)]
        stored: list[int] = []
        try:
            for group, encoded, _ in groups:
                for row, sequence in enumerate(group):
                    self.cache.store_source(sequence.rows[0].slot, encoded, row, len(sequence.source_ids))
                    stored.append(sequence.rows[0].slot)
        except BaseException:
            for slot in stored:
                self.cache.release(slot)
            raise
        return sum(num_padding for _, _, num_padding in groups)

    def _encode(self, group: Seq[Sequence]) -> tuple[Seq[Array], int]:
        """Keys and values of cross-attention for sources encoded together, and the padding that took."""
        lengths = np.array([len(sequence.source_ids) for sequence in group], np.int32)
        padded = np.full((len(group), lengths.max()), self._ids.padding, np.int64)
        for row, sequence in zip(padded, group, strict=True):
            row[: len(sequence.source_ids)] = sequence.source_ids
        feeds = {tensors.INPUT_IDS: padded, tensors.SOURCE_LENGTHS: lengths}
        encoded: list[Array] = self._sessions.encoder.run(self.cache.source_names, feeds)
        return encoded, padded.size - int(lengths.sum())

    def decode_step(self, rows: Seq[Row]) -> None:
        """See `ModelRunner`."""
        count = len(rows)
        start = self._ids.start
        self._last_ids[:count] = [row.ids[-1] if row.ids else start for row in rows]
        self._past_lengths[:count] = [len(row.ids) for row in rows]
        self._source_lengths[:count] = [len(row.sequence.source_ids) for row in rows]
        self._total_length[...] = self._past_lengths[:count].max() + 1
        self._max_source_length[...] = self._source_lengths[:count].max()
        self.cache.make_room(int(self._total_length))
        self._sessions.decoder.run_with_iobinding(self._binding(count))

    def best(self, num_rows: int) -> list[int]:
        """See `ModelRunner`."""
        best: list[int] = self.logits[:num_rows].argmax(1).tolist()
        return best

    def top(self, slots: Seq[int], count: int, asked_ids: Seq[int]) -> list[Candidates]:
        """See `ModelRunner`."""
        is_all = list(slots) == list(range(len(slots)))
        feeds = {
            tensors.LOGITS: self.logits[: len(slots)] if is_all else self.logits[slots],
            tensors.COUNT: np.array([min(count, self.logits.shape[1])], np.int64),
            tensors.ASKED_IDS: np.array(asked_ids, np.int64)[:, None],
        }
        names = [tensors.TOP_IDS, tensors.TOP_LOG_PROBS, tensors.ASKED_LOG_PROBS]
        ids, log_probs, asked = self._model.search.run(names, feeds)
        return [Candidates(*row) for row in zip(ids.tolist(), log_probs.tolist(), asked[:, 0].tolist(), strict=True)]

    def attention(self, row: Row) -> Array:
        """See `ModelRunner`; the mean over the heads of the model's alignment layer."""
        layer = self._alignment_layer
        keys = self.cache.cross_keys(layer, row.slot, len(row.sequence.source_ids))
        return mean_attention(self._queries[tensors.cross_query(layer)][row.slot], keys)

    def fork(self, row: Row, source: int, target: int) -> None:
        """See `ModelRunner`."""
        self.cache.fork(source, target, len(row.ids), len(row.sequence.source_ids))

    def move(self, row: Row, slot: int) -> None:
        """See `ModelRunner`."""
        self.cache.move(row.slot, slot, len(row.ids), len(row.sequence.source_ids))

    def release(self, slot: int) -> None:
        """See `ModelRunner`."""
        self.cache.release(slot)

    def _binding(self, num_rows: int) -> onnxruntime.IOBinding:
        key = (self.is_alone and self._model.has_solo, num_rows, self.cache.capacity)
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self._bind(num_rows)
        return binding

    def _bind(self, num_rows: int) -> onnxruntime.IOBinding:
        binding = self._sessions.decoder.io_binding()
        inputs: dict[str, Array] = {
            tensors.INPUT_IDS: self._last_ids[:num_rows],
            tensors.PAST_LENGTHS: self._past_lengths[:num_rows],
            tensors.TOTAL_SEQUENCE_LENGTH: self._total_length,
            tensors.SOURCE_LENGTHS: self._source_lengths[:num_rows],
            tensors.MAX_SOURCE_LENGTH: self._max_source_length,
        }
        outputs: dict[str, Array] = {
            tensors.LOGITS: self.logits[:num_rows],
            **{name: array[:num_rows] for name, array in self._queries.items()},
        }
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self.cache.bind(binding, num_rows)
        return binding


def mean_attention(query: Array, keys: Array) -> Array:
    """Attention weights [src_len] of a query [1, num_heads * head_dim] over keys [num_heads, src_len, head_dim].

    The mean over the heads, in float32.
    """
    heads, _, dim = keys.shape
    keys, query = keys.astype(np.float32), query.reshape(heads, dim).astype(np.float32)
    scores = np.einsum("hd,hsd->hs", query, keys) / np.sqrt(np.float32(dim))
    weights = np.exp(scores - scores.max(1, keepdims=True))
    mean: Array = (weights / weights.sum(1, keepdims=True)).mean(0)
    return mean


def of_similar_length(sequences: Seq[Sequence], max_tokens: float = math.inf) -> Iterator[list[Sequence]]:
    """Groups to be encoded together: one more run of the graph costs less than to pad a short source to a long one.

    Args:
        sequences: newcomers.
        max_tokens: of a group, padding included; a longer source is alone.
    """
    group: list[Sequence] = []
    for sequence in sorted(sequences, key=lambda sequence: len(sequence.source_ids)):
        length = len(sequence.source_ids)
        is_similar = group and length <= _LONGEST_RATIO * len(group[0].source_ids) + _LONGEST_EXTRA
        if group and (not is_similar or (len(group) + 1) * length > max_tokens):
            yield group
            group = []
        group.append(sequence)
    yield group
