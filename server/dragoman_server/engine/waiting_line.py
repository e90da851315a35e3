"""Where sequences wait for rows: bounded, and fair between callers. Pure policy: no tensors, no clock of its own."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from dragoman_server.engine.request import FinishReason, Priority, Sequence

_MAX_STALE_ENTRIES = 1000
"""Entries of a heap that may belong to sequences which have left, before it is rebuilt."""
_UNBOUNDED = 2**62


class QueueFullError(Exception):
    """The waiting line is at its bound.

    Args:
        message: which bound.
        bound: "sequences" or "tokens".
        is_hopeless: whether not even an empty line would have room.
    """

    def __init__(self, message: str, bound: str, *, is_hopeless: bool) -> None:
        super().__init__(message)
        self.bound = bound
        self.is_hopeless = is_hopeless


@dataclass(slots=True)
class _Caller:
    """What one caller has in line."""

    waiting: dict[int, Sequence] = field(default_factory=dict)  # by id, in order of arrival
    num_tokens: int = 0
    next_turn: float = 0.0
    """The turn that its next sequence gets, unless the line has moved past it."""


class _FairQueue:
    """Sequences of one priority. Callers take turns by the tokens that they ask for; each one's own keep their order.

    This is start-time fair queuing (Goyal et al., 1996): a sequence's turn is the virtual time at which its caller's
    earlier ones are over; virtual time is the turn of whoever was served last. A caller that has little in line is
    served next, however much others have piled up.

    Args:
        max_sequences: bound.
        max_tokens: bound on source tokens, each row of a search counted.
    """

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._callers: dict[str, _Caller] = {}
        self._heap: list[tuple[float, int, Sequence]] = []
        self._now = 0.0
        self.num_sequences = 0
        self.num_tokens = 0
        self.num_rows = 0
        """Rows that those in line may come to need."""

    def __iter__(self) -> Iterator[Sequence]:
        for turn, _, sequence in sorted(self._heap, key=lambda entry: entry[:2]):
            if self._has(sequence) and sequence.turn == turn:
                yield sequence

    def _has(self, sequence: Sequence) -> bool:
        caller = self._callers.get(sequence.caller)
        return caller is not None and sequence.sequence_id in caller.waiting

    def victims(self, caller: str, sequences: Seq[Sequence]) -> list[Sequence]:
        """Whose places newcomers take: the newest of those that have more in line than the newcomers' caller will.

        Raises:
            QueueFullError: the bound would be exceeded, and nobody has more in line.
        """
        num_sequences = self.num_sequences + len(sequences)
        num_tokens = self.num_tokens + sum(map(cost, sequences))
        if num_sequences <= self._max_sequences and num_tokens <= self._max_tokens:
            return []
        own = self._callers.get(caller, _Caller()).num_tokens + sum(map(cost, sequences))
        held = {name: other.num_tokens for name, other in self._callers.items()}
        newest = {name: list(other.waiting.values()) for name, other in self._callers.items()}
        found: list[Sequence] = []
        while num_sequences > self._max_sequences or num_tokens > self._max_tokens:
            heaviest = max(held, key=held.__getitem__, default=caller)
            if heaviest == caller or held[heaviest] <= own:
                raise self._full(sequences)
            victim = newest[heaviest].pop()
            found.append(victim)
            num_sequences, num_tokens = num_sequences - 1, num_tokens - cost(victim)
            held[heaviest] -= cost(victim)
        return found

    def _full(self, sequences: Seq[Sequence]) -> QueueFullError:
        num_tokens = sum(map(cost, sequences))
        for bound, limit, asked, waiting in (
            ("sequences", self._max_sequences, len(sequences), self.num_sequences),
            ("tokens", self._max_tokens, num_tokens, self.num_tokens),
        ):
            setting = "--max-waiting" if bound == "sequences" else "--max-waiting-tokens"
            if asked > limit:
                message = f"the call makes {asked} {bound}, more may not wait than {limit} ({setting}); split it"
                return QueueFullError(message, bound, is_hopeless=True)
            if waiting + asked > limit:
                message = f"{waiting} {bound} are waiting, {asked} more exceed {limit} ({setting})"
                return QueueFullError(message, bound, is_hopeless=False)
        raise AssertionError("there is room")

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line."""
        caller = self._callers.setdefault(sequence.caller, _Caller())
        sequence.turn = max(self._now, caller.next_turn)
        caller.next_turn = sequence.turn + cost(sequence)
        self._enter(sequence, caller)

    def put_back(self, sequence: Sequence) -> None:
        """Put a sequence in line again; its turn has come already."""
        self._enter(sequence, self._callers.setdefault(sequence.caller, _Caller()))

    def _enter(self, sequence: Sequence, caller: _Caller) -> None:
        heapq.heappush(self._heap, (sequence.turn, sequence.sequence_id, sequence))
        caller.waiting[sequence.sequence_id] = sequence
        caller.num_tokens += cost(sequence)
        self.num_sequences += 1
        self.num_tokens += cost(sequence)
        self.num_rows += sequence.max_rows

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False if it is not in line."""
        if not self._has(sequence):
            return False
        caller = self._callers[sequence.caller]
        del caller.waiting[sequence.sequence_id]
        caller.num_tokens -= cost(sequence)
        if not caller.waiting:
            del self._callers[sequence.caller]
        self.num_sequences -= 1
        self.num_tokens -= cost(sequence)
        self.num_rows -= sequence.max_rows
        if len(self._heap) > 2 * self.num_sequences + _MAX_STALE_ENTRIES:
            self._heap = [(s.turn, s.sequence_id, s) for c in self._callers.values() for s in c.waiting.values()]
            heapq.heapify(self._heap)
        return True

    def first(self) -> Sequence | None:
        """Whose turn it is."""
        while self._heap:
            turn, _, sequence = self._heap[0]
            if self._has(sequence) and sequence.turn == turn:
                return sequence
            heapq.heappop(self._heap)
        return None

    def serve(self, sequence: Sequence) -> None:
        """Take out whose turn it is."""
        self.remove(sequence)
        self._now = max(self._now, sequence.turn)

    def tokens_before(self, caller: str, num_tokens: int) -> int:
        """How much is served before a newcomer, about: all of its caller's, and of every other's no more than that."""
        own = self._callers.get(caller, _Caller()).num_tokens
        others = sum(min(c.num_tokens, own + num_tokens) for name, c in self._callers.items() if name != caller)
        return own + others


def cost(sequence: Sequence) -> int:
    """What a sequence weighs in line: its source tokens, once for every row that it may need."""
    return len(sequence.source_ids) * sequence.max_rows


class WaitingLine:
    """Sequences that wait for rows, shared by all engines of a model: interactive ones first, then bulk.

    Within a priority callers take turns. When a line is full, newcomers take the places of the newest sequences of
    whoever has most in line, as long as that is more than their own caller will have; else they are refused.

    Safe to use from any thread.

    Args:
        max_waiting: sequences of each priority.
        max_tokens: source tokens of each priority, each row of a search counted.
    """

    def __init__(self, max_waiting: int, max_tokens: int = _UNBOUNDED) -> None:
        self.max_waiting = max_waiting
        self.max_tokens = max_tokens
        self._condition = threading.Condition()
        self._queues = {priority: _FairQueue(max_waiting, max_tokens) for priority in Priority}
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap
        self._shed: list[Sequence] = []
        self.loads: list[Callable[[], int]] = []
        """Of every engine that takes from this line, the rows that it has reserved."""

    @property
    def num_waiting(self) -> int:
        """Sequences in line."""
        return sum(queue.num_sequences for queue in self._queues.values())

    @property
    def has_work(self) -> bool:
        """Whether an engine would find anything to do here."""
        return bool(self._shed) or self.num_waiting > 0

    def __iter__(self) -> Iterator[Sequence]:
        with self._condition:
            return iter([sequence for queue in self._queues.values() for sequence in queue])

    def size(self, priority: Priority) -> tuple[int, int]:
        """Sequences and tokens of one priority."""
        queue = self._queues[priority]
        return queue.num_sequences, queue.num_tokens

    def num_waiting_rows(self, priority: Priority) -> int:
        """Rows that sequences of one priority may come to need."""
        return self._queues[priority].num_rows

    def tokens_before(self, priority: Priority, caller: str, num_tokens: int) -> int:
        """Tokens that will be served before those of a newcomer, about.

        Args:
            priority: of the newcomer.
            caller: whose it is.
            num_tokens: that it asks for.
        """
        with self._condition:
            ahead = sum(queue.num_tokens for other, queue in self._queues.items() if other < priority)
            return ahead + self._queues[priority].tokens_before(caller, num_tokens)

    def add(self, *sequences: Sequence) -> None:
        """Put sequences of one call in line, all of them or none, and wake as many idle engines as can use it.

        Raises:
            QueueFullError: the line has no room for all of them.
        """
        queue = self._queues[sequences[0].priority]
        with self._condition:
            for victim in queue.victims(sequences[0].caller, sequences):
                queue.remove(victim)
                self._shed.append(victim)
            for sequence in sequences:
                queue.add(sequence)
                if sequence.deadline is not None:
                    heapq.heappush(self._deadlines, (sequence.deadline, sequence.sequence_id, sequence))
            self._forget_deadlines()
            self._condition.notify(len(sequences))

    def _forget_deadlines(self) -> None:
        """Keep the heap from growing with sequences that ended long before their deadlines."""
        if len(self._deadlines) > 2 * self.num_waiting + _MAX_STALE_ENTRIES:
            waiting = [sequence for queue in self._queues.values() for sequence in queue]
            self._deadlines = [(s.deadline, s.sequence_id, s) for s in waiting if s.deadline is not None]
            heapq.heapify(self._deadlines)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence in line again, whatever the bound."""
        with self._condition:
            self._queues[sequence.priority].put_back(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False if it is not in line."""
        with self._condition:
            return self._queues[sequence.priority].remove(sequence)

    def take(self, fits: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take sequences whose turn it is, the more urgent priority first, as long as they fit."""
        taken: list[Sequence] = []
        with self._condition:
            for queue in self._queues.values():
                while (sequence := queue.first()) is not None:
                    if not fits(sequence):
                        return taken
                    queue.serve(sequence)
                    taken.append(sequence)
        return taken

    def take_dropped(self, now: float) -> list[tuple[Sequence, FinishReason]]:
        """Take out the sequences that will not be served, with the reason: overdue, or shed for another caller."""
        with self._condition:
            dropped = [(sequence, FinishReason.SHED) for sequence in self._shed]
            self._shed = []
            while self._deadlines and self._deadlines[0][0] <= now:
                _, _, sequence = heapq.heappop(self._deadlines)
                if self._queues[sequence.priority].remove(sequence):
                    dropped.append((sequence, FinishReason.DEADLINE))
        return dropped

    def fair_share(self) -> int:
        """Rows that every engine would have if all waiting ones were spread evenly."""
        with self._condition:
            waiting = sum(queue.num_rows for queue in self._queues.values())
            engines = max(1, len(self.loads))
            return -(-(waiting + sum(load() for load in self.loads)) // engines)

    def wait(self, is_needed: Callable[[], bool]) -> None:
        """Sleep until there is work or `is_needed`."""
        with self._condition:
            self._condition.wait_for(lambda: self.has_work or is_needed())

    def wake(self) -> None:
        """Make every sleeper look again."""
        with self._condition:
            self._condition.notify_all()
