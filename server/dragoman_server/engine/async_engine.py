"""The engines' threads, and the way in and out of them for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from dragoman_server.engine.engine import Engine
from dragoman_server.engine.request import DecodingOptions, FinishReason, Priority, Sequence, SequenceTimes
from dragoman_server.engine.waiting_line import WaitingLine

_NICENESS = 5
"""By which engines stand behind the event loop; measured in tests/benchmarks/NOTES.md."""


class EngineDeadError(Exception):
    """The engine has stopped; `__cause__` says why, if it failed."""


Work = tuple[Seq[int], DecodingOptions]
"""A source and how to decode it."""
Event = list[int] | Sequence
"""Tokens that have become certain, or the finished sequence."""
_News = tuple[Sequence, Event] | EngineDeadError
"""What has happened to a sequence; or why nothing will any more."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Where to tell what becomes of a sequence."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[_News]


@dataclass(slots=True)
class AsyncEngine:
    """Owns one thread per engine. All engines take from one waiting line; a sequence stays with the one that took it.

    Cancellations wait in an inbox and are applied between steps. If an engine dies, everybody who waits gets the cause,
    later callers get it too, and `on_death` is called once: the process should then exit, because the engine's state is
    unknown.
    """

    engines: Seq[Engine]
    line: WaitingLine
    name: str
    on_death: Callable[[BaseException], object] | None = None
    _inboxes: list[queue.SimpleQueue[Sequence]] = field(default_factory=list)
    _tickets: dict[int, _Ticket] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _step_began: dict[int, float] = field(default_factory=dict)  # by engine, while it makes a step
    _is_stopping: bool = False
    _dead: EngineDeadError | None = None

    def __post_init__(self) -> None:
        self._inboxes = [queue.SimpleQueue() for _ in self.engines]

    def start(self) -> None:
        """Start the threads."""
        assert not self._threads
        for index, (engine, inbox) in enumerate(zip(self.engines, self._inboxes, strict=True)):
            name = f"engine-{self.name}-{index}"
            self._threads.append(threading.Thread(target=self._run, args=(engine, inbox), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop after the current step and wait for the threads; whoever still waits gets EngineDeadError.

        Nobody waits for an engine that has been given up: its thread may never come back.
        """
        self._is_stopping = True
        self.line.wake()
        for thread in self._threads if self._dead is None else ():
            thread.join()
        if not self._threads:
            self._die(None)

    def longest_step(self) -> float:
        """Seconds since the oldest step began that has not ended yet; 0 if none is being made."""
        now = time.monotonic()
        return max((now - began for began in list(self._step_began.values())), default=0.0)

    def give_up(self, cause: Exception) -> None:
        """Treat the engines as dead: tell everybody who waits."""
        self._die(cause)

    @property
    def is_alive(self) -> bool:
        """Whether it decodes."""
        return bool(self._threads) and self._dead is None

    async def decode(
        self,
        source_ids: Seq[int],
        options: DecodingOptions,
        deadline: float | None = None,
        priority: Priority = Priority.INTERACTIVE,
        caller: str = "",
    ) -> Sequence:
        """Decode one source; see `decode_all`."""
        [sequence] = await self.decode_all([(source_ids, options)], deadline, priority, caller)
        return sequence

    async def decode_all(
        self,
        works: Seq[Work],
        deadline: float | None = None,
        priority: Priority = Priority.INTERACTIVE,
        caller: str = "",
    ) -> list[Sequence]:
        """Decode sources side by side and return them finished. Cancelling the task frees their rows within a step.

        Args:
            works: sources, as the encoder wants them, and how to decode each.
            deadline: moment of `time.monotonic` after which nobody waits.
            priority: of the work.
            caller: who wants it; callers take turns.

        Raises:
            QueueFullError: the waiting line has no room for all of them; none was taken.
            EngineDeadError: the engine has failed or was stopped.
        """
        sequences = [self._sequence(work, deadline, priority, caller) for work in works]
        with self._in_line(sequences) as events:
            for _ in sequences:
                _raise_if_error(await events.get())
        return sequences

    async def stream(
        self,
        source_ids: Seq[int],
        options: DecodingOptions,
        deadline: float | None = None,
        priority: Priority = Priority.INTERACTIVE,
        caller: str = "",
    ) -> AsyncIterator[Event]:
        """Decode one source; see `stream_all`."""
        async with aclosing(self.stream_all([(source_ids, options)], deadline, priority, caller)) as events:
            async for _, event in events:
                yield event

    async def stream_all(
        self,
        works: Seq[Work],
        deadline: float | None = None,
        priority: Priority = Priority.INTERACTIVE,
        caller: str = "",
    ) -> AsyncGenerator[tuple[int, Event]]:
        """Like `decode_all`, but hand out output tokens as soon as no later step can change them.

        Yields:
            Places of sources, each with tokens that have become certain; last of each, its finished sequence.
        """
        sequences = [self._sequence(work, deadline, priority, caller, streams=True) for work in works]
        places = {sequence.sequence_id: place for place, sequence in enumerate(sequences)}
        num_left = len(sequences)
        with self._in_line(sequences) as events:
            while num_left:
                sequence, event = _raise_if_error(await events.get())
                num_left -= isinstance(event, Sequence)
                yield places[sequence.sequence_id], event

    def _sequence(
        self, work: Work, deadline: float | None, priority: Priority, caller: str, *, streams: bool = False
    ) -> Sequence:
        source_ids, options = work
        return Sequence(
            sequence_id=next(self._ids),
            source_ids=source_ids,
            options=options,
            times=SequenceTimes(arrived=time.monotonic()),
            deadline=deadline,
            priority=priority,
            caller=caller,
            streams=streams,
        )

    @contextmanager
    def _in_line(self, sequences: Seq[Sequence]) -> Iterator[asyncio.Queue[_News]]:
        """Put sequences in line; what becomes of them. Those that have not finished at the end are cancelled."""
        ticket = _Ticket(asyncio.get_running_loop(), asyncio.Queue())
        with self._lock:
            if self._dead is not None:
                raise self._dead
            self._tickets.update({sequence.sequence_id: ticket for sequence in sequences})
        try:
            self.line.add(*sequences)
            yield ticket.events
        finally:
            self._cancel([s for s in sequences if self._tickets.pop(s.sequence_id, None) is not None])

    def _cancel(self, sequences: Seq[Sequence]) -> None:
        if not sequences:
            return
        for inbox in self._inboxes:  # whichever engine has it, if any
            for sequence in sequences:
                inbox.put(sequence)
        self.line.wake()

    def _run(self, engine: Engine, inbox: queue.SimpleQueue[Sequence]) -> None:
        # On Linux, a priority is a thread's own: where all cores are busy, calls are taken and answered first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        try:
            while not self._is_stopping:
                while not inbox.empty():
                    engine.drop(inbox.get(), FinishReason.CANCELLED)
                if engine.has_work:
                    self._deliver(engine)
                else:
                    self.line.wait(lambda: self._is_stopping or not inbox.empty())
        except BaseException as error:  # noqa: BLE001 - whatever it was, nobody may be left waiting
            self._die(error)
        else:
            self._die(None)

    def _deliver(self, engine: Engine) -> None:
        """Make a step and tell those whom it concerns."""
        self._step_began[id(engine)] = time.monotonic()
        try:
            output = engine.step()
        finally:
            del self._step_began[id(engine)]
        tickets = self._tickets
        found: list[tuple[_Ticket | None, _News]] = [
            (tickets.get(s.sequence_id), (s, ids)) for s, ids in output.progressed
        ]
        found += [(tickets.pop(s.sequence_id, None), (s, s)) for s in output.finished]
        _tell([(ticket, news) for ticket, news in found if ticket is not None])

    def _die(self, cause: BaseException | None) -> None:
        with self._lock:
            if self._dead is not None:
                return
            self._dead = EngineDeadError(f"the engine of {self.name} has {'failed' if cause else 'stopped'}")
            self._dead.__cause__ = cause
            tickets, self._tickets = set(self._tickets.values()), {}
        self._is_stopping = True
        self.line.wake()
        _tell([(ticket, self._dead) for ticket in tickets])
        if cause is not None and self.on_death is not None:
            self.on_death(cause)


def _raise_if_error(news: _News) -> tuple[Sequence, Event]:
    if isinstance(news, EngineDeadError):
        raise news
    return news


def _tell(news: Seq[tuple[_Ticket, _News]]) -> None:
    """Deliver news from an engine's thread, with one wake-up per event loop."""
    loops = {id(ticket.loop): ticket.loop for ticket, _ in news}
    for key, loop in loops.items():
        batch = [(ticket.events, item) for ticket, item in news if id(ticket.loop) == key]
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            continue


def _put_all(batch: Seq[tuple[asyncio.Queue[_News], _News]]) -> None:
    for events, item in batch:
        events.put_nowait(item)
