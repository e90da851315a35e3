"""Which sequences wait, which run, and who joins next. Pure policy: no tensors, no clock of its own."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from dragoman_server.engine.request import FinishReason, Priority, Row, Sequence, SequenceStatus, StepPlan

_MAX_STALE_DEADLINES = 1000


class QueueFullError(Exception):
    """The waiting line is at its bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds on what is admitted."""

    max_rows: int
    """Rows that run side by side: the slots of a cache."""
    max_encode_tokens: int
    """Source tokens encoded between two decode steps; a longer single source is encoded alone."""
    max_bulk_rows: int = 0
    """Rows of bulk work that may go along while interactive work runs; the others pause where they are."""


class WaitingLine:
    """Sequences that wait for rows, first come first served within their priority; shared by all engines of a model.

    Safe to use from any thread.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._condition = threading.Condition()
        self._by_priority: dict[Priority, dict[int, Sequence]] = {priority: {} for priority in Priority}
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap
        self.loads: list[Callable[[], int]] = []
        """Of every engine that takes from this line, the rows that it has reserved."""

    @property
    def num_waiting(self) -> int:
        """Sequences in line."""
        return sum(len(line) for line in self._by_priority.values())

    def __iter__(self) -> Iterator[Sequence]:
        with self._condition:
            return iter([sequence for line in self._by_priority.values() for sequence in line.values()])

    def add(self, *sequences: Sequence) -> None:
        """Put sequences in line, all of them or none, and wake as many idle engines as can use it.

        Raises:
            QueueFullError: the line has no room for all of them.
        """
        with self._condition:
            if self.num_waiting + len(sequences) > self.max_waiting:
                bound = f"{self.max_waiting} (--max-waiting)"
                if len(sequences) > self.max_waiting:
                    raise QueueFullError(f"the call makes {len(sequences)} sequences, more may not wait than {bound}")
                raise QueueFullError(f"{self.num_waiting} texts are waiting, {len(sequences)} more exceed {bound}")
            for sequence in sequences:
                self._by_priority[sequence.priority][sequence.sequence_id] = sequence
                if sequence.deadline is not None:
                    heapq.heappush(self._deadlines, (sequence.deadline, sequence.sequence_id, sequence))
            self._forget_deadlines()
            self._condition.notify(len(sequences))

    def _forget_deadlines(self) -> None:
        """Keep the heap from growing with sequences that ended long before their deadlines."""
        if len(self._deadlines) > 2 * self.num_waiting + _MAX_STALE_DEADLINES:
            waiting = [sequence for line in self._by_priority.values() for sequence in line.values()]
            self._deadlines = [(s.deadline, s.sequence_id, s) for s in waiting if s.deadline is not None]
            heapq.heapify(self._deadlines)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence at the head of its line, whatever the bound."""
        with self._condition:
            line = self._by_priority[sequence.priority]
            others = list(line.items())
            line.clear()
            line[sequence.sequence_id] = sequence
            line.update(others)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False if it is not in line."""
        with self._condition:
            return self._by_priority[sequence.priority].pop(sequence.sequence_id, None) is not None

    def take(self, fits: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take sequences from the head, the more urgent line first, as long as they fit."""
        taken: list[Sequence] = []
        with self._condition:
            for line in self._by_priority.values():
                while line:
                    sequence = next(iter(line.values()))
                    if not fits(sequence):
                        return taken
                    taken.append(line.pop(sequence.sequence_id))
        return taken

    def take_overdue(self, now: float) -> list[Sequence]:
        """Take out the sequences whose deadline has passed."""
        overdue: list[Sequence] = []
        with self._condition:
            while self._deadlines and self._deadlines[0][0] <= now:
                _, _, sequence = heapq.heappop(self._deadlines)
                if self._by_priority[sequence.priority].pop(sequence.sequence_id, None) is not None:
                    overdue.append(sequence)
        return overdue

    def fair_share(self) -> int:
        """Rows that every engine would have if all waiting ones were spread evenly."""
        with self._condition:
            waiting = sum(sequence.max_rows for line in self._by_priority.values() for sequence in line.values())
            engines = max(1, len(self.loads))
            return -(-(waiting + sum(load() for load in self.loads)) // engines)

    def wait(self, is_needed: Callable[[], bool]) -> None:
        """Sleep until somebody waits or `is_needed`."""
        with self._condition:
            self._condition.wait_for(lambda: self.num_waiting > 0 or is_needed())

    def wake(self) -> None:
        """Make every sleeper look again."""
        with self._condition:
            self._condition.notify_all()


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

    def remove(self, rows: Iterable[Row]) -> None:
        """Free rows' slots and close the gaps, from the end, so that none of them is moved first."""
        for row in sorted(rows, key=lambda row: row.slot, reverse=True):
            self._remove(row)

    def _remove(self, row: Row) -> None:
        gap = row.slot
        self.release(gap)
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
    """

    def __init__(self, limits: SchedulerLimits, table: RowTable, num_reserved: int, share: int) -> None:
        self._limits = limits
        self._num_reserved = num_reserved
        self._share = share
        self._num_interactive = table.num_interactive
        self._num_bulk = len(table.rows) - table.num_interactive
        self._num_tokens = 0

    def fits(self, sequence: Sequence) -> bool:
        """Whether there is room for it; if so, it counts as admitted."""
        num_tokens = self._num_tokens + len(sequence.source_ids)
        within_rows = self._num_reserved + sequence.max_rows <= self._limits.max_rows
        within_share = self._num_reserved < self._share
        within_budget = not self._num_tokens or num_tokens <= self._limits.max_encode_tokens
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

    def plan(self) -> tuple[StepPlan, list[Sequence]]:
        """Let newcomers join while rows and the encoding budget allow, and say what the step does.

        Returns:
            The plan, and the bulk sequences that had to give their rows back for it.
        """
        preempted = list(self._make_room())
        newcomers = list(self._admit())
        num_rows = len(self.table.rows)
        if self.table.num_interactive:
            bulk = self.table.rows[self.table.num_interactive :][: self.limits.max_bulk_rows]
            num_rows = self.table.num_interactive + _num_whole(bulk)
        return StepPlan(newcomers, self.table.rows[:num_rows]), preempted

    def _admit(self) -> Iterator[Sequence]:
        admission = _Admission(self.limits, self.table, self.num_reserved, max(self.line.fair_share(), 1))
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
        waiting = sum(s.max_rows for s in self.line if s.priority is Priority.INTERACTIVE)
        needed = -(-waiting // len(self.line.loads))
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
