"""Greedy and beam search, written for clarity: the reference that the server's engine is held against.

They run over a `StepModel`, so the same search decodes a PyTorch model and an exported graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dragoman_export.batching import Ids
from dragoman_export.model import DecoderState, KeyValue, Transformer
from dragoman_export.tokenization import END_ID, PADDING_ID, START_ID

Logits = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


class StepModel(Protocol):
    """A model that decodes one token per row and step."""

    def start(self, sources: Sequence[Ids]) -> Any:
        """Encode sources; the state before the first step, one row per source."""

    def step(self, state: Any, last_ids: Rows) -> tuple[Logits, Any]:
        """Logits [rows, vocab_size] of the token after `last_ids` [rows], and the state after it."""

    def select(self, state: Any, rows: Rows) -> Any:
        """The state of the given rows, in that order; rows may repeat."""


class TorchStepModel:
    """A PyTorch model as a `StepModel`."""

    def __init__(self, model: Transformer, autocast: torch.dtype | None = None) -> None:
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._autocast = autocast

    @torch.inference_mode()
    def start(self, sources: Sequence[Ids]) -> DecoderState:
        """Encode a padded batch."""
        ids = [torch.from_numpy(np.asarray(source, np.int64)) for source in sources]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PADDING_ID)
        lengths = torch.tensor([len(source) for source in sources])
        with self._precision():
            return self._model.start(padded.to(self._device), lengths.to(self._device))

    @torch.inference_mode()
    def step(self, state: DecoderState, last_ids: Rows) -> tuple[Logits, DecoderState]:
        """One decoder step over all rows."""
        with self._precision():
            logits, state = self._model.step(state, torch.from_numpy(last_ids).to(self._device))
        return logits.float().cpu().numpy(), state

    @torch.inference_mode()
    def select(self, state: DecoderState, rows: Rows) -> DecoderState:
        """Gather every cache."""
        index = torch.from_numpy(rows).to(self._device)

        def gather(layers: list[KeyValue]) -> list[KeyValue]:
            return [KeyValue(key[index], value[index]) for key, value in layers]

        past = None if state.past is None else gather(state.past)
        return DecoderState(gather(state.cross), state.source_mask[index], past)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None)


class LengthLimit(NamedTuple):
    """Most tokens of a target, the end token not counted: factor * source tokens + extra, at most `maximum`."""

    factor: float = 2.0
    extra: int = 20
    maximum: int = 256

    def __call__(self, source_len: int) -> int:
        """The limit for one source."""
        return min(self.maximum, int(self.factor * source_len) + self.extra)


def greedy_search(model: StepModel, sources: Sequence[Ids], limit: LengthLimit | None = None) -> list[list[int]]:
    """The most probable token at every step, until the end token or the limit; the end token is left out."""
    limit = limit or LengthLimit()
    outputs: list[list[int]] = [[] for _ in sources]
    alive = np.arange(len(sources))
    state, last_ids = model.start(sources), np.full(len(sources), START_ID, np.int64)
    while True:
        logits, state = model.step(state, last_ids)
        last_ids = logits.argmax(1).astype(np.int64)
        for sentence, token in zip(alive, last_ids, strict=True):
            if token != END_ID:
                outputs[sentence].append(int(token))
        running = np.array(
            [
                token != END_ID and len(outputs[sentence]) < limit(len(sources[int(sentence)]))
                for sentence, token in zip(alive, last_ids, strict=True)
            ]
        )
        if not running.any():
            return outputs
        if not running.all():
            rows = np.flatnonzero(running)
            alive, last_ids, state = alive[rows], last_ids[rows], model.select(state, rows)


@dataclass(slots=True)
class _Beam:
    """The live and finished hypotheses of one sentence."""

    limit: int
    live: list[tuple[float, list[int]]] = field(default_factory=lambda: [(0.0, [])])
    finished: list[tuple[float, list[int]]] = field(default_factory=list)


def beam_search(
    model: StepModel,
    sources: Sequence[Ids],
    width: int = 4,
    length_penalty: float = 1.0,
    limit: LengthLimit | None = None,
) -> list[list[int]]:
    """Beam search; the score of a hypothesis is its log-probability / length ** length_penalty.

    A sentence ends when `width` hypotheses have ended, or at the limit. The length counts the end token.

    Args:
        model: what to decode with.
        sources: token ids, end token included.
        width: hypotheses kept per sentence.
        length_penalty: 0 does not normalise; larger values favour longer outputs.
        limit: on the target's length.

    Returns:
        The best hypothesis of each source, without the end token.
    """
    limit = limit or LengthLimit()
    beams = [_Beam(limit(len(source))) for source in sources]
    state = model.start(sources)
    while open_beams := [beam for beam in beams if beam.live]:
        last_ids = np.array([ids[-1] if ids else START_ID for beam in open_beams for _, ids in beam.live], np.int64)
        logits, state = model.step(state, last_ids)
        log_probs, first_row, parents = _log_softmax(logits), 0, []
        for beam in open_beams:
            rows = log_probs[first_row : first_row + len(beam.live)]
            parents += [first_row + parent for parent in _extend(beam, rows, width, length_penalty)]
            first_row += len(rows)
        state = model.select(state, np.array(parents, np.int64))
    return [max(beam.finished, key=lambda scored: scored[0])[1] for beam in beams]


def _extend(beam: _Beam, log_probs: Logits, width: int, length_penalty: float) -> list[int]:
    """Grow a beam by one token; the parent row (within the beam) of each hypothesis that lives on."""
    vocab_size = log_probs.shape[1]
    totals = (log_probs + np.array([[score] for score, _ in beam.live], np.float32)).ravel()
    count = min(2 * width, totals.size)
    best = np.argpartition(-totals, count - 1)[:count]
    live: list[tuple[float, list[int]]] = []
    parents = []
    for rank, flat in enumerate(best[np.argsort(-totals[best], kind="stable")]):
        parent, token = divmod(int(flat), vocab_size)
        ids, score = beam.live[parent][1], float(totals[flat])
        if token == END_ID:
            if rank < width:  # an ending that would not have survived as a hypothesis does not count either
                beam.finished.append((_normalise(score, len(ids) + 1, length_penalty), ids))
        elif len(live) < width:
            live.append((score, [*ids, token]))
            parents.append(parent)
    at_limit = len(live[0][1]) >= beam.limit
    if at_limit:
        beam.finished += [(_normalise(score, len(ids), length_penalty), ids) for score, ids in live]
    beam.live = [] if at_limit or len(beam.finished) >= width else live
    return parents if beam.live else []


def _normalise(score: float, length: int, length_penalty: float) -> float:
    return score / float(max(length, 1) ** length_penalty)


def _log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(1, keepdims=True)
    log_probs: Logits = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return log_probs


Search = Callable[[StepModel, Sequence[Ids]], list[list[int]]]
"""A search with its options bound."""


def decode_corpus(model: StepModel, sources: Sequence[Ids], search: Search, batch_rows: int = 64) -> list[list[int]]:
    """Decode many sources, sorted by length and in batches; results in the order of `sources`."""
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    outputs: list[list[int]] = [[] for _ in sources]
    for start in range(0, len(order), batch_rows):
        rows = order[start : start + batch_rows]
        for index, ids in zip(rows, search(model, [sources[i] for i in rows]), strict=True):
            outputs[index] = ids
    return outputs
