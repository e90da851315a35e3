"""The engines' threads, and the way in and out of them for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field

from dragoman_server.engine.engine import Engine
from dragoman_server.engine.request import DecodingOptions, FinishReason, Priority, Sequence, SequenceTimes
from dragoman_server.engine.scheduler import WaitingLine


class EngineDeadError(Exception):
    """The engine has stopped; `__cause__` says why, if it failed."""


Event = list[int] | Sequence | Exception
"""Tokens that have become certain; the finished sequence; or why there will be none. The last two end a ticket."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """A sequence and the queue of whoever waits for it."""

    sequence: Sequence
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    async def next(self) -> list[int] | Sequence:
        """What happens next.

        Raises:
            EngineDeadError: nothing will.
        """
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event


@dataclass(slots=True)
class AsyncEngine:
    """Owns one thread per engine. All engines take from one waiting line; a sequence stays with the one that took it.

    Cancellations wait in an inbox and are applied between steps. If a step fails, everybody who waits gets the cause,
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
        """Stop after the current step and wait for the threads; whoever still waits gets EngineDeadError."""
        self._is_stopping = True
        self.line.wake()
        for thread in self._threads:
            thread.join()
        if not self._threads:
            self._die(None)

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
    ) -> Sequence:
        """Decode one source and return it finished. Cancelling the task frees its rows before the next step.

        Args:
            source_ids: as the encoder wants them.
            options: of the decoding.
            deadline: moment of `time.monotonic` after which nobody waits.
            priority: of the work.

        Raises:
            QueueFullError: the waiting line is full.
            EngineDeadError: the engine has failed or was stopped.
        """
        with self._ticket(source_ids, options, deadline, priority, streams=False) as ticket:
            event = await ticket.next()
        assert isinstance(event, Sequence)
        return event

    async def stream(
        self,
        source_ids: Seq[int],
        options: DecodingOptions,
        deadline: float | None = None,
        priority: Priority = Priority.INTERACTIVE,
    ) -> AsyncIterator[list[int] | Sequence]:
        """Like `decode`, but hand out output tokens as soon as no later step can change them, and the sequence last."""
        with self._ticket(source_ids, options, deadline, priority, streams=True) as ticket:
            while True:
                event = await ticket.next()
                yield event
                if isinstance(event, Sequence):
                    return

    @contextmanager
    def _ticket(
        self,
        source_ids: Seq[int],
        options: DecodingOptions,
        deadline: float | None,
        priority: Priority,
        *,
        streams: bool,
    ) -> Iterator[_Ticket]:
        """Put a sequence in line; whoever leaves before it has finished cancels it."""
        sequence = Sequence(
            sequence_id=next(self._ids),
            source_ids=source_ids,
            options=options,
            times=SequenceTimes(arrived=time.monotonic()),
            deadline=deadline,
            priority=priority,
            streams=streams,
        )
        ticket = _Ticket(sequence, asyncio.get_running_loop())
        with self._lock:
            if self._dead is not None:
                raise self._dead
            self._tickets[sequence.sequence_id] = ticket
        try:
            self.line.add(sequence)
            yield ticket
        finally:
            if self._tickets.pop(sequence.sequence_id, None) is not None:
                self._cancel(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        for inbox in self._inboxes:
            inbox.put(sequence)
        self.line.wake()

    def _run(self, engine: Engine, inbox: queue.SimpleQueue[Sequence]) -> None:
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
        output = engine.step()
        tickets = self._tickets
        news: list[tuple[_Ticket | None, Event]] = [(tickets.get(s.sequence_id), ids) for s, ids in output.progressed]
        news += [(tickets.pop(sequence.sequence_id, None), sequence) for sequence in output.finished]
        _tell([(ticket, event) for ticket, event in news if ticket is not None])

    def _die(self, cause: BaseException | None) -> None:
        with self._lock:
            if self._dead is not None:
                return
            self._dead = EngineDeadError(f"the engine of {self.name} has {'failed' if cause else 'stopped'}")
            self._dead.__cause__ = cause
            tickets, self._tickets = list(self._tickets.values()), {}
        self._is_stopping = True
        self.line.wake()
        _tell([(ticket, self._dead) for ticket in tickets])
        if cause is not None and self.on_death is not None:
            self.on_death(cause)


def _tell(news: Seq[tuple[_Ticket, Event]]) -> None:
    """Deliver events from an engine's thread, with one wake-up per event loop."""
    loops = {id(ticket.loop): ticket.loop for ticket, _ in news}
    for key, loop in loops.items():
        batch = [(ticket.events, event) for ticket, event in news if id(ticket.loop) == key]
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            continue


def _put_all(batch: Seq[tuple[asyncio.Queue[Event], Event]]) -> None:
    for events, event in batch:
        events.put_nowait(event)
