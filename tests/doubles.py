"""Models with a known answer, for tests of everything around the model."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from dragoman_server.engine.model_runner import Candidates
from dragoman_server.engine.request import DecodingOptions, Priority, Row, Sequence, SequenceTimes

START, END = 2, 3
VOCAB_SIZE = 100


class EchoRunner:
    """Gives back the source, token by token, then the end token; keeps state by slot, as real caches do.

    The runner-up of every token is the token after it, so that searches have something to choose from.

    Args:
        max_rows: slots.
        failing_steps: raise in these decode steps, counted from 1.
        failing_encodes: raise in these encoder passes, counted from 1.
    """

    def __init__(
        self, max_rows: int = 64, failing_steps: Container[int] = (), failing_encodes: Container[int] = ()
    ) -> None:
        self.failing_steps = failing_steps
        self.failing_encodes = failing_encodes
        self.is_alone = False
        self.num_encodes = 0
        self.num_steps = 0
        self.rows_per_step: list[int] = []
        self.encoded: list[Seq[int]] = []
        self.logits = np.zeros((max_rows, VOCAB_SIZE), np.float32)
        self._slots: dict[int, tuple[Seq[int], list[int]]] = {}
        """Per slot, the source and what the decoder has read."""

    def encode(self, newcomers: Seq[Sequence]) -> int:
        self.num_encodes += 1
        if self.num_encodes in self.failing_encodes:
            raise MemoryError("no memory for the encoder")
        for sequence in newcomers:
            [row] = sequence.rows
            self.encoded.append(sequence.source_ids)
            assert row.slot not in self._slots
            self._slots[row.slot] = (sequence.source_ids, [])
        return max(len(s.source_ids) for s in newcomers) * len(newcomers) - sum(len(s.source_ids) for s in newcomers)

    def decode_step(self, rows: Seq[Row]) -> None:
        self.num_steps += 1
        self.rows_per_step.append(len(rows))
        if self.num_steps in self.failing_steps:
            raise RuntimeError("the graph failed")
        for slot, row in enumerate(rows):
            assert row.slot == slot
            source, read = self._slots[slot]
            # Whatever is in the slot must be this row's: the engine's own records are checked, not consulted.
            assert len(read) == len(row.ids)
            assert read[-5:] == ([START] * (len(row.ids) < 6) + row.ids[-6:])[-6:-1]
            read.append(row.ids[-1] if row.ids else START)
            token = source[len(read) - 1] if len(read) <= len(source) else END
            self.logits[slot] = -10.0
            self.logits[slot, token] = 5.0
            self.logits[slot, (token + 1) % VOCAB_SIZE] = 4.0

    def best(self, num_rows: int) -> list[int]:
        best: list[int] = self.logits[:num_rows].argmax(1).tolist()
        return best

    def top(self, slots: Seq[int], count: int, asked_ids: Seq[int]) -> list[Candidates]:
        found = []
        for slot, asked in zip(slots, asked_ids, strict=True):
            log_probs = log_softmax(self.logits[slot])
            ids = np.argsort(-log_probs, kind="stable")[:count]
            found.append(Candidates(ids.tolist(), log_probs[ids].tolist(), float(log_probs[asked])))
        return found

    def attention(self, row: Row) -> npt.NDArray[Any]:
        weights = np.zeros(len(row.sequence.source_ids), np.float32)
        weights[min(len(row.ids), len(weights) - 1)] = 1.0
        return weights

    def fork(self, row: Row, source: int, target: int) -> None:
        assert target not in self._slots
        text, read = self._slots[source]
        assert len(read) == len(row.ids)
        self._slots[target] = (text, read.copy())

    def move(self, row: Row, slot: int) -> None:
        assert slot not in self._slots
        self._slots[slot] = self._slots.pop(row.slot)

    def release(self, slot: int) -> None:
        del self._slots[slot]

    @property
    def num_used_slots(self) -> int:
        return len(self._slots)


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """In float64, over the last axis."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def make_sequence(
    sequence_id: int,
    source: Seq[int],
    max_target_tokens: int = 1000,
    deadline: float | None = None,
    priority: Priority = Priority.INTERACTIVE,
    caller: str = "",
    **options: Any,
) -> Sequence:
    """A sequence that waits; further arguments are `DecodingOptions`."""
    return Sequence(
        sequence_id=sequence_id,
        source_ids=source,
        options=DecodingOptions(max_target_tokens=max_target_tokens, **options),
        times=SequenceTimes(arrived=0.0),
        deadline=deadline,
        priority=priority,
        caller=caller,
    )
