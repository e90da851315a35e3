"""The engine's thread, and the way in and out of it for asyncio."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dragoman_server.engine.engine import Engine
from dragoman_server.engine.request import DecodingOptions, FinishReason, Sequence, SequenceTimes
from dragoman_server.engine.scheduler import QueueFullError


class EngineDeadError(Exception):
    """The engine has stopped; `__cause__` says why, if it failed."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """A sequence and the future of whoever waits for it."""

    sequence: Sequence
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Sequence]

    def resolve(self, result: Sequence | Exception) -> None:
        """Deliver from the engine's thread; a caller that has gone is no error."""
        try:
            self.loop.call_soon_threadsafe(self._set, result)
        except RuntimeError:  # its loop is closed: nobody is left to tell
            return

    def _set(self, result: Sequence | Exception) -> None:
        if self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


@dataclass(frozen=True, slots=True)
class _Add:
    ticket: _Ticket


@dataclass(frozen=True, slots=True)
class _Cancel:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Add | _Cancel | _Stop


@dataclass(slots=True)
class AsyncEngine:
    """Owns the thread that steps an engine. Commands wait in an inbox and are applied between steps.

    If a step fails, everybody who waits gets the cause, later callers get it too, and `on_death` is called once: the
    process should then exit, because the engine's state is unknown.
    """

    engine: Engine
    name: str
    on_death: Callable[[BaseException], object] | None = None
    _inbox: queue.SimpleQueue[_Command] = field(default_factory=queue.SimpleQueue)
    _tickets: dict[int, _Ticket] = field(default_factory=dict)
    _num_sequences: int = 0
    _thread: threading.Thread | None = None
    _dead: EngineDeadError | None = None

    def start(self) -> None:
        """Start the thread."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name=f"engine-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step and wait for the thread; whoever still waits gets EngineDeadError."""
        self._inbox.put(_Stop())
        if self._thread is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether it decodes."""
        return self._thread is not None and self._thread.is_alive() and self._dead is None

    async def decode(self, source_ids: list[int], options: DecodingOptions, deadline: float | None = None) -> Sequence:
        """Decode one source and return it finished. Cancelling the task frees the slot before the next step.

        Args:
            source_ids: as the encoder wants them.
            options: of the decoding.
            deadline: moment of `time.monotonic` after which nobody waits.

        Raises:
            QueueFullError: the waiting line is full.
            EngineDeadError: the engine has failed or was stopped.
        """
        if self._dead is not None:
            raise self._dead
        loop = asyncio.get_running_loop()
        self._num_sequences += 1
        sequence = Sequence(
            sequence_id=self._num_sequences,
            source_ids=source_ids,
            options=options,
            times=SequenceTimes(arrived=time.monotonic()),
            deadline=deadline,
        )
        ticket = _Ticket(sequence, loop, loop.create_future())
        self._inbox.put(_Add(ticket))
        if self._dead is not None:  # it died since the check above, and may have emptied its inbox before the put
            raise self._dead
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._inbox.put(_Cancel(sequence))
            raise

    def _run(self) -> None:
        try:
            while self._obey():
                for sequence in self.engine.step().finished:
                    self._tickets.pop(sequence.sequence_id).resolve(sequence)
        except BaseException as error:  # noqa: BLE001 - whatever it was, nobody may be left waiting
            self._die(error)
        else:
            self._die(None)

    def _obey(self) -> bool:
        """Apply all commands, waiting for one if there is nothing to do; False to stop."""
        while True:
            try:
                command = self._inbox.get(block=self.engine.scheduler.is_idle)
            except queue.Empty:
                return True
            match command:
                case _Add(ticket):
                    self._add(ticket)
                case _Cancel(sequence) if sequence.sequence_id in self._tickets:
                    self.engine.drop(sequence, FinishReason.CANCELLED)
                case _Cancel():
                    pass  # it has ended, or was never accepted
                case _Stop():
                    return False
            if self.engine.scheduler.is_idle and self._tickets:
                return True  # what was just dropped is reported by the next step

    def _add(self, ticket: _Ticket) -> None:
        try:
            self.engine.add(ticket.sequence)
        except QueueFullError as error:
            ticket.resolve(error)
        else:
            self._tickets[ticket.sequence.sequence_id] = ticket

    def _die(self, cause: BaseException | None) -> None:
        self._dead = EngineDeadError(f"the engine of {self.name} has {'failed' if cause else 'stopped'}")
        self._dead.__cause__ = cause
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Add):
                command.ticket.resolve(self._dead)
        for ticket in self._tickets.values():
            ticket.resolve(self._dead)
        self._tickets.clear()
        if cause is not None and self.on_death is not None:
            self.on_death(cause)
