"""Which sequences run, in which slots, and who joins next. Pure policy: no tensors, no clock of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from dragoman_server.engine.request import FinishReason, Priority, Row, Sequence, SequenceStatus, StepPlan
from dragoman_server.engine.waiting_line import WaitingLine


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds on what is admitted."""

    max_rows: int
    """Rows that run side by side: the slots of a cache."""
    max_encode_tokens: int
    """Source tokens encoded between two decode steps; a longer single source is encoded alone."""
    max_encode_s: float = 0.0
    """Seconds that it may take to encode newcomers while others run; lowers `max_encode_tokens`. 0 is no limit."""
    max_bulk_rows: int = 0
    """Rows of bulk work that may go along while interactive work runs; the others pause where they are."""


@dataclass(slots=True)
class RowTable:
    """Which row is in which slot: interactive rows first, bulk rows behind them, no gaps.

    A decode step over n rows covers slots 0..n-1, so rows move when a gap has to be closed.
    """

    fork_state: Callable[[Row, int, int], None]
    """Gives a row the state that is in a slot, in another slot: row, from, to."""
    move_state: Callable[[Row, int], None]
    """Moves a row's state into another slot, which is free; `row.slot` is the old one still."""
    release: Callable[[int], None]
    """Forgets the state in a slot."""
    rows: list[Row] = field(default_factory=list)
    num_interactive: int = 0

    def add(self, row: Row) -> None:
        """Give a new row a slot; there is nothing in it yet."""
        self.rows.append(row)
        row.slot = len(self.rows) - 1
        if row.sequence.priority is Priority.INTERACTIVE:
            boundary = self.num_interactive
            self.num_interactive += 1
            if boundary != row.slot:
                self._move(self.rows[boundary], row.slot)
                self._put(row, boundary)

    def fork(self, row: Row, parent: Row) -> None:
        """Give a row a slot of its own with its parent's state."""
        self.add(row)
        self.fork_state(row, parent.slot, row.slot)

    def replace(self, dead: Row, row: Row, parent: Row) -> None:
        """Put a row where another one was, with its parent's state."""
        slot, dead.slot = dead.slot, -1
        self.release(slot)
        self.fork_state(row, parent.slot, slot)
        self._put(row, slot)

    def remove(self, rows: Iterable[Row], *, have_state: bool = True) -> None:
        """Free rows' slots and close the gaps, from the end, so that none of them is moved first.

        Args:
            rows: to be removed.
            have_state: False if nothing has been put into their slots yet.
        """
        for row in sorted(rows, key=lambda row: row.slot, reverse=True):
            if have_state:
                self.release(row.slot)
            self._close(row)

    def _close(self, row: Row) -> None:
        gap = row.slot
        if gap < self.num_interactive:
            self.num_interactive -= 1
            gap = self._fill(gap, self.num_interactive)
        self._fill(gap, len(self.rows) - 1)
        self.rows.pop()
        row.slot = -1

    def _fill(self, gap: int, last: int) -> int:
        """Move the row in slot `last` into the gap; the new gap."""
        if gap != last:
            self._move(self.rows[last], gap)
        return last

    def _move(self, row: Row, slot: int) -> None:
        self.move_state(row, slot)
        self._put(row, slot)

    def _put(self, row: Row, slot: int) -> None:
        row.slot = slot
        self.rows[slot] = row


class _Admission:
    """Asked of one sequence after the other whether it may join in this step.

    Args:
        limits: of the engine.
        table: of its rows.
        num_reserved: rows that are taken.
        share: rows after which the other engines shall go first.
        encode_budget: source tokens that newcomers may have; a longer single source is encoded alone.
    """

    def __init__(
        self, limits: SchedulerLimits, table: RowTable, num_reserved: int, share: int, encode_budget: float
    ) -> None:
        self._limits = limits
        self._num_reserved = num_reserved
        self._share = share
        self._encode_budget = encode_budget
        self._num_interactive = table.num_interactive
        self._num_bulk = len(table.rows) - table.num_interactive
        self._num_tokens = 0

    def fits(self, sequence: Sequence) -> bool:
        """Whether there is room for it; if so, it counts as admitted."""
        num_tokens = self._num_tokens + len(sequence.source_ids)
        within_rows = self._num_reserved + sequence.max_rows <= self._limits.max_rows
        within_share = self._num_reserved < self._share
        within_budget = not self._num_tokens or num_tokens <= self._encode_budget
        if not (within_rows and within_share and within_budget and self._would_run(sequence)):
            return False
        self._num_tokens = num_tokens
        self._num_reserved += sequence.max_rows
        if sequence.priority is Priority.INTERACTIVE:
            self._num_interactive += 1
        else:
            self._num_bulk += 1
        return True

    def _would_run(self, sequence: Sequence) -> bool:
        """Bulk work that would have to pause at once had better not delay the others by its encoding."""
        if sequence.priority is Priority.INTERACTIVE or not self._num_interactive:
            return True
        return self._num_bulk < self._limits.max_bulk_rows


def _num_whole(rows: Seq[Row]) -> int:
    """Of the first rows, how many can be decoded without the others: all rows of a sequence step together."""
    missing: dict[int, int] = {}  # rows still to come, of sequences that have begun
    num_whole = 0
    for count, row in enumerate(rows, start=1):
        sequence = row.sequence
        left = missing.pop(sequence.sequence_id, len(sequence.rows)) - 1
        if left:
            missing[sequence.sequence_id] = left
        if not missing:
            num_whole = count
    return num_whole


class Scheduler:
    """Decides what one engine decodes.

    Args:
        limits: of the engine.
        line: that it takes from.
        table: of its rows.
    """

    def __init__(self, limits: SchedulerLimits, line: WaitingLine, table: RowTable) -> None:
        self.limits = limits
        self.line = line
        self.table = table
        self.running: dict[int, Sequence] = {}  # by id, in order of arrival
        self.num_reserved = 0
        """Rows that running sequences occupy or may come to need."""
        line.loads.append(lambda: self.num_reserved)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs here."""
        return not self.running

    @property
    def is_alone(self) -> bool:
        """Whether no other engine that takes from the same line has rows, or is about to."""
        return not self.line.num_waiting and sum(load() for load in self.line.loads) == self.num_reserved

    def plan(self, encode_tokens_per_s: float = math.inf) -> tuple[StepPlan, list[Sequence]]:
        """Let newcomers join while rows and the encoding budget allow, and say what the step does.

        Args:
            encode_tokens_per_s: how fast source tokens have been encoded lately.

        Returns:
            The plan, and the bulk sequences that had to give their rows back for it.
        """
        preempted = list(self._make_room())
        newcomers = list(self._admit(self._encode_budget(encode_tokens_per_s)))
        num_rows = len(self.table.rows)
        if self.table.num_interactive:
            bulk = self.table.rows[self.table.num_interactive :][: self.limits.max_bulk_rows]
            num_rows = self.table.num_interactive + _num_whole(bulk)
        return StepPlan(newcomers, self.table.rows[:num_rows]), preempted

    def _encode_budget(self, encode_tokens_per_s: float) -> float:
        """Source tokens that newcomers may have; time matters only if somebody is stalled meanwhile."""
        limits = self.limits
        if not limits.max_encode_s or not self.running:
            return limits.max_encode_tokens
        return min(limits.max_encode_tokens, limits.max_encode_s * encode_tokens_per_s)

    def _admit(self, encode_budget: float) -> Iterator[Sequence]:
        if not self.line.num_waiting:
            return
        share = max(self.line.fair_share(), 1)
        admission = _Admission(self.limits, self.table, self.num_reserved, share, encode_budget)
        for sequence in self.line.take(admission.fits):
            sequence.status = SequenceStatus.RUNNING
            self.num_reserved += sequence.max_rows
            self.running[sequence.sequence_id] = sequence
            row = Row(sequence=sequence)
            sequence.rows = [row]
            self.table.add(row)
            yield sequence

    def _make_room(self) -> Iterator[Sequence]:
        """Take bulk sequences off their rows while interactive ones wait; those that lose least work go first."""
        needed = -(-self.line.num_waiting_rows(Priority.INTERACTIVE) // len(self.line.loads))
        if not needed:
            return
        bulk = [s for s in self.running.values() if s.priority is Priority.BULK]
        for sequence in sorted(bulk, key=lambda s: len(s.rows[0].ids)):
            if self.limits.max_rows - self.num_reserved >= needed:
                return
            self.vacate(sequence)
            sequence.restart()
            self.line.put_back(sequence)
            yield sequence

    def vacate(self, sequence: Sequence) -> None:
        """Free all rows of a running sequence."""
        self.table.remove(self.leave(sequence))

    def fail(self, sequences: Iterable[Sequence], error: Exception, now: float, *, have_state: bool) -> None:
        """End running sequences that an error has hit.

        Args:
            sequences: running here.
            error: what happened.
            now: of `time.monotonic`.
            have_state: whether anything is in their slots.
        """
        self.table.remove([row for s in sequences for row in self.leave(s)], have_state=have_state)
        for sequence in sequences:
            sequence.error = error
            sequence.finish(FinishReason.ERROR, now)

    def leave(self, sequence: Sequence) -> list[Row]:
        """Take a sequence off the running ones; the rows that are to be removed from the table."""
        rows, sequence.rows = sequence.rows, []
        self.num_reserved -= sequence.max_rows
        del self.running[sequence.sequence_id]
        return rows

    def drop(self, reason: FinishReason, sequence: Sequence, now: float) -> bool:
        """End a sequence early; False if it is neither in line nor running here."""
        if sequence.sequence_id in self.running:
            self.vacate(sequence)
        elif not self.line.remove(sequence):
            return False
        sequence.finish(reason, now)
        return True

    def overdue(self, now: float) -> list[Sequence]:
        """Running sequences whose deadline has passed."""
        return [s for s in self.running.values() if s.deadline is not None and s.deadline <= now]
