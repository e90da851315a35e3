"""The synchronous engine: one thread calls it, and a step is a transaction."""

from __future__ import annotations

import time
from typing import Protocol

from dragoman_server.engine.model_runner import ModelRunner
from dragoman_server.engine.request import FinishReason, Sequence, StepOutput, StepPlan
from dragoman_server.engine.scheduler import Scheduler


class EngineObserver(Protocol):
    """Is told what the engine does; called on the engine's thread, so it must be quick."""

    def step_done(self, output: StepOutput, num_waiting: int, num_running: int) -> None:
        """A step has been committed; the counts are those after it."""


class Engine:
    """Decodes sequences side by side; each joins at any step and leaves at the step it ends.

    Args:
        runner: of the model.
        scheduler: decides who runs.
        start_id: first decoder input.
        end_id: token that ends a target.
        observer: for metrics; None watches nothing.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        start_id: int,
        end_id: int,
        observer: EngineObserver | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._start_id = start_id
        self._end_id = end_id
        self.observer = observer
        self._dropped: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line.

        Raises:
            QueueFullError: the line is full.
        """
        self.scheduler.add(sequence)

    def drop(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence early, wherever it is; its slot is free in the next plan. No effect once it has ended."""
        if self.scheduler.drop(reason, sequence, time.monotonic()):
            self._dropped.append(sequence)

    def step(self) -> StepOutput:
        """Decode every running row by one token: expire, retire, plan, encode, decode, commit, retire.

        An exception leaves the engine in an unknown state; it must not be stepped again.
        """
        self._expire()
        self._retire()
        plan = self.scheduler.plan()
        encode_s = self._encode(plan)
        decode_s = self._decode(plan)
        finished, self._dropped = self._dropped + [s for s in plan.rows if s.finish_reason], []
        self._retire()
        output = StepOutput(
            finished=finished,
            num_rows=len(plan.rows),
            num_encoded=len(plan.newcomers),
            encode_s=encode_s,
            decode_s=decode_s,
        )
        if self.observer is not None:
            self.observer.step_done(output, self.scheduler.num_waiting, len(self.scheduler.running))
        return output

    def _expire(self) -> None:
        for sequence in self.scheduler.overdue(time.monotonic()):
            self.drop(sequence, FinishReason.DEADLINE)

    def _encode(self, plan: StepPlan) -> float:
        if not plan.newcomers:
            return 0.0
        begun = time.monotonic()
        self._runner.encode(plan.newcomers)
        done = time.monotonic()
        for sequence in plan.newcomers:
            sequence.times.scheduled, sequence.times.encoded = begun, done
        return done - begun

    def _decode(self, plan: StepPlan) -> float:
        if not plan.rows:
            return 0.0
        begun = time.monotonic()
        tokens = self._runner.decode_step(plan.rows)
        done = time.monotonic()
        for sequence, token in zip(plan.rows, tokens, strict=True):
            sequence.accept(token, self._end_id, done)
        return done - begun

    def _retire(self) -> None:
        for finished, moved in self.scheduler.retire():
            if moved is not None:
                self._runner.move(moved, finished.slot)
