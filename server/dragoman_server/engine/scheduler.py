"""Which sequences wait, which run, and who joins next. Pure policy: no tensors, no clock of its own."""

from __future__ import annotations

from collections import deque
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
        self._waiting: deque[Sequence] = deque()
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
        self._waiting.append(sequence)

    def plan(self) -> StepPlan:
        """Let newcomers join while slots and the encoding budget allow, and say what the step does."""
        newcomers = list(self._admit())
        return StepPlan(newcomers, list(self._running))

    def _admit(self) -> Iterator[Sequence]:
        longest, count = 0, 0
        while self._waiting and len(self._running) < self.limits.max_rows:
            longest = max(longest, len(self._waiting[0].source_ids))
            count += 1
            if count > 1 and count * longest > self.limits.max_encode_tokens:
                return
            sequence = self._waiting.popleft()
            sequence.slot = len(self._running)
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            yield sequence

    def drop(self, reason: FinishReason, sequence: Sequence, now: float) -> bool:
        """End a sequence early; a running one keeps its slot until `retire`. False if it has ended already."""
        if sequence.status is SequenceStatus.FINISHED:
            return False
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        sequence.finish(reason, now)
        return True

    def overdue(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed."""
        everyone = (*self._waiting, *self._running)
        return [s for s in everyone if s.deadline is not None and s.deadline <= now and s.finish_reason is None]

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
