"""A model with a known answer, for tests of everything around the model."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from dragoman_server.engine.request import DecodingOptions, Sequence, SequenceTimes

START, END = 2, 3


class EchoRunner:
    """Gives back the source, token by token, then the end token; keeps state by slot, as real caches do.

    Args:
        fail_at_step: raise in this decode step, counted from 1; 0 never.
    """

    def __init__(self, fail_at_step: int = 0) -> None:
        self.fail_at_step = fail_at_step
        self.num_steps = 0
        self.rows_per_step: list[int] = []
        self._slots: dict[int, tuple[list[int], int]] = {}

    def encode(self, newcomers: Seq[Sequence]) -> None:
        for sequence in newcomers:
            self._slots[sequence.slot] = (sequence.source_ids, 0)

    def decode_step(self, rows: Seq[Sequence]) -> list[int]:
        self.num_steps += 1
        self.rows_per_step.append(len(rows))
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("the graph failed")
        return [self._next(slot, sequence) for slot, sequence in enumerate(rows)]

    def _next(self, slot: int, sequence: Sequence) -> int:
        source, position = self._slots[slot]
        # Whatever is in the slot must be this sequence's: the engine's own records are not consulted.
        assert sequence.past_len == position
        assert sequence.last_id(START) == (source[position - 1] if position else START)
        self._slots[slot] = (source, position + 1)
        return source[position] if position < len(source) else END

    def move(self, sequence: Sequence, slot: int) -> None:
        self._slots[slot] = self._slots.pop(sequence.slot)


def make_sequence(
    sequence_id: int, source: list[int], max_target_tokens: int = 1000, deadline: float | None = None
) -> Sequence:
    """A sequence that waits."""
    return Sequence(
        sequence_id=sequence_id,
        source_ids=source,
        options=DecodingOptions(max_target_tokens=max_target_tokens),
        times=SequenceTimes(arrived=0.0),
        deadline=deadline,
    )
