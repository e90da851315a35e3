"""Which sequences wait, which run, and who joins next. Pure policy: no tensors, no clock of its own."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from dragoman_server.engine.request import FinishReason, Sequence, SequenceStatus, StepPlan


class QueueFullError(Exception):
    """The waiting line is at its bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds on what is admitted."""

    max_rows: int
    """Sequences that run side by side: the slots of the cache."""
    max_encode_tokens: int
    """Padded source tokens encoded between two decode steps; a longer single source is encoded alone."""
    max_waiting: int
    """Sequences that may wait; more are refused."""


class Scheduler:
    """First come, first served, within the limits.

    Slots are always 0..n-1 for n running sequences, so that a step covers exactly the first n rows of the caches.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._waiting: dict[int, Sequence] = {}  # by id, in order of arrival
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap
        self._running: list[Sequence] = []  # the sequence in slot i at index i

    @property
    def num_waiting(self) -> int:
        """Sequences in line."""
        return len(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Running sequences, in slot order."""
        return tuple(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line.

        Raises:
            QueueFullError: the line is full.
        """
        if len(self._waiting) >= self.limits.max_waiting:
            raise QueueFullError(
                f"{self.limits.max_waiting} texts are waiting already, which is this server's bound (--max-waiting)"
            )
        self._waiting[sequence.sequence_id] = sequence
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.sequence_id, sequence))

    def plan(self) -> StepPlan:
        """Let newcomers join while slots and the encoding budget allow, and say what the step does."""
        newcomers = list(self._admit())
        return StepPlan(newcomers, list(self._running))

    def _admit(self) -> Iterator[Sequence]:
        longest, count = 0, 0
        while self._waiting and len(self._running) < self.limits.max_rows:
            sequence = next(iter(self._waiting.values()))
            longest = max(longest, len(sequence.source_ids))
            count += 1
            if count > 1 and count * longest > self.limits.max_encode_tokens:
                return
            del self._waiting[sequence.sequence_id]
            sequence.slot = len(self._running)
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            yield sequence

    def drop(self, reason: FinishReason, sequence: Sequence, now: float) -> bool:
        """End a sequence early; a running one keeps its slot until `retire`. False if it has ended already."""
        if sequence.status is SequenceStatus.FINISHED:
            return False
        if sequence.status is SequenceStatus.WAITING:
            del self._waiting[sequence.sequence_id]
        sequence.finish(reason, now)
        return True

    def overdue(self, now: float) -> Iterator[Sequence]:
        """Sequences whose deadline has passed, each once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.status is not SequenceStatus.FINISHED:
                yield sequence

    def retire(self) -> Iterator[tuple[Sequence, Sequence | None]]:
        """Free the slots of finished sequences and close the gaps.

        Yields:
            Each finished sequence, and the sequence that moves into its slot, if any: `moved.slot` is the old slot
            still when it is yielded, and the new one afterwards.
        """
        for slot in range(len(self._running) - 1, -1, -1):
            finished = self._running[slot]
            if finished.status is not SequenceStatus.FINISHED:
                continue
            last = self._running.pop()
            moved = None if last is finished else last
            yield finished, moved
            if moved is not None:
                moved.slot = slot
                self._running[slot] = moved
            finished.slot = -1
