"""The synchronous engine: one thread calls it, and a step is a transaction."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dragoman_server.engine.invariants import violations
from dragoman_server.engine.model_runner import Candidates, ModelRunner
from dragoman_server.engine.pace import Pace
from dragoman_server.engine.request import FinishReason, Row, Sampling, Sequence, StepOutput, StepPlan
from dragoman_server.engine.scheduler import RowTable, Scheduler, SchedulerLimits
from dragoman_server.engine.search import (
    Child,
    Growth,
    draw,
    edit_logits,
    extend,
    grow,
    grow_plain,
    num_candidates,
    ranked,
)
from dragoman_server.engine.waiting_line import WaitingLine

_MAX_FAILURES = 3
"""Failed steps in a row after which the engine is given up."""


class EngineObserver(Protocol):
    """Is told what an engine does; called on the engine's thread, so it must be quick."""

    def step_done(self, output: StepOutput, line: WaitingLine, num_rows: int) -> None:
        """A step has been committed; the line and the number of rows are as they are after it."""


class EngineStateError(Exception):
    """What must hold between steps does not."""


class _Choices(NamedTuple):
    """What the rows of a step may produce next."""

    best: Seq[int]
    """By slot, the most probable token; empty if all of them have candidates."""
    found: Mapping[int, Candidates]
    """By slot, of those that need more than that."""

    def of(self, row: Row) -> Candidates:
        """What a row may produce."""
        return self.found.get(row.slot) or Candidates([self.best[row.slot]], [math.nan], math.nan)


_NO_CHOICES = _Choices((), {})


@dataclass(frozen=True, slots=True)
class _Work:
    """What became of one phase of a step."""

    is_done: bool = False
    seconds: float = 0.0
    num_padding_tokens: int = 0
    choices: _Choices = _NO_CHOICES


class Engine:
    """Decodes sequences side by side; each joins at any step and leaves at the step it ends.

    Args:
        runner: of the model; no other engine's.
        limits: of this engine.
        line: where sequences wait; several engines may take from it.
        end_id: token that ends a target.
        pace: learns from every step; several engines may share it.
        observer: for metrics; None watches nothing.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: SchedulerLimits,
        line: WaitingLine,
        end_id: int,
        pace: Pace | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self._runner = runner
        self.table = RowTable(runner.fork, runner.move, runner.release)
        self.scheduler = Scheduler(limits, line, self.table)
        self._end_id = end_id
        self.pace = pace or Pace()
        self.observer = observer
        self._dropped: list[Sequence] = []
        self._num_failures = 0

    def drop(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence early, if it waits or runs here; its rows are free in the next plan."""
        if self.scheduler.drop(reason, sequence, time.monotonic()):
            self._dropped.append(sequence)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._dropped) or not self.scheduler.is_idle or self.scheduler.line.has_work

    def step(self) -> StepOutput:
        """Decode every running row by one token: expire, plan, encode, decode, commit.

        If the model fails, the sequences that it was working on end with the error and the others go on, as long as it
        is certain that nothing else has changed.

        Raises:
            Exception: the engine's state is unknown, or the model keeps failing; it must not be stepped again.
        """
        self._expire()
        plan, preempted = self.scheduler.plan(self.pace.encode_tokens_per_s)
        self._runner.is_alone = self.scheduler.is_alone
        encoding = self._encode(plan)
        decoding = self._decode(plan) if encoding.is_done else _Work()
        advanced = self._commit(plan, decoding)
        dropped, self._dropped = self._dropped, []
        output = StepOutput(
            finished=dropped + [s for s in advanced if s.finish_reason],
            progressed=[(s, new) for s in advanced if s.streams and not s.finish_reason and (new := _news(s))],
            num_rows=len(plan.rows) if decoding.is_done else 0,
            num_encoded=len(plan.newcomers) if encoding.is_done else 0,
            num_source_tokens=sum(len(s.source_ids) for s in plan.newcomers),
            num_padding_tokens=encoding.num_padding_tokens,
            num_preempted=len(preempted),
            num_saved_tokens=sum(self.pace.saved_tokens(sequence) for sequence in dropped),
            encode_s=encoding.seconds,
            decode_s=decoding.seconds,
        )
        self.pace.observe(output, is_saturated=self.scheduler.line.num_waiting > 0)
        if self.observer is not None:
            self.observer.step_done(output, self.scheduler.line, len(self.table.rows))
        return output

    def _expire(self) -> None:
        now = time.monotonic()
        for sequence, reason in self.scheduler.line.take_dropped(now):
            sequence.finish(reason, now)
            self._dropped.append(sequence)
        for sequence in self.scheduler.overdue(now):
            self.drop(sequence, FinishReason.DEADLINE)

    def _encode(self, plan: StepPlan) -> _Work:
        """Encode the newcomers. If that fails, they end; nothing has been stored of them."""
        if not plan.newcomers:
            return _Work(is_done=True)
        begun = time.monotonic()
        try:
            num_padding_tokens = self._runner.encode(plan.newcomers)
        except Exception as error:  # noqa: BLE001 - whatever the model raises, only those that it worked on end
            self._give_up(plan.newcomers, error, have_state=False)
            return _Work()
        done = time.monotonic()
        for sequence in plan.newcomers:
            sequence.times.scheduled, sequence.times.encoded = begun, done
        return _Work(is_done=True, seconds=done - begun, num_padding_tokens=num_padding_tokens)

    def _decode(self, plan: StepPlan) -> _Work:
        """Decode the planned rows and find what may follow. If that fails, they end; no output has grown yet."""
        if not plan.rows:
            return _Work()
        begun = time.monotonic()
        try:
            self._runner.decode_step(plan.rows)
            choices = self._choices(plan.rows)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(_sequences_of(plan.rows), error, have_state=True)
            return _Work()
        self._num_failures = 0
        return _Work(is_done=True, seconds=time.monotonic() - begun, choices=choices)

    def _give_up(self, sequences: Seq[Sequence], error: Exception, *, have_state: bool) -> None:
        self._num_failures += 1
        if self._num_failures > _MAX_FAILURES:
            raise error
        self.scheduler.fail(sequences, error, time.monotonic(), have_state=have_state)
        self._dropped += sequences
        if problems := list(violations(self.scheduler)):
            raise EngineStateError("; ".join(problems)) from error

    def _choices(self, rows: Seq[Row]) -> _Choices:
        runner, found = self._runner, {}
        wanted: dict[int, int] = {}
        for row in rows:
            if row.sequence.is_plain:
                continue
            options = row.sequence.options
            if options.needs_attention:
                row.attention.append(runner.attention(row))
            if options.edits_logits:
                edit_logits(row, runner.logits[row.slot], self._end_id)
            if isinstance(options.search, Sampling) and row.forced_id is None:
                found[row.slot] = draw(row, runner.logits[row.slot])
            elif count := num_candidates(row, [self._end_id]):
                wanted[row.slot] = count
        if wanted:
            asked = [self._end_id if (token := rows[slot].forced_id) is None else token for slot in wanted]
            tops = runner.top(list(wanted), max(wanted.values()), asked)
            for (slot, count), top in zip(wanted.items(), tops, strict=True):
                found[slot] = Candidates(top.ids[:count], top.log_probs[:count], top.asked)
        return _Choices(runner.best(len(rows)) if len(found) < len(rows) else (), found)

    def _commit(self, plan: StepPlan, work: _Work) -> list[Sequence]:
        """Let all outputs grow, and only then move rows: a row's cache is as long as its output says."""
        if not work.is_done:
            return []
        now, sequences = time.monotonic(), _sequences_of(plan.rows)
        growths = [self._grow(sequence, work.choices) for sequence in sequences]
        grown = [_extend(growth.live) for growth in growths]
        dead: list[Row] = []
        for sequence, growth, rows in zip(sequences, growths, grown, strict=True):
            sequence.num_steps += 1
            sequence.times.first_token = sequence.times.first_token or now
            sequence.hypotheses += growth.ended
            if growth.is_done:
                dead += self.scheduler.leave(sequence)
                sequence.hypotheses = ranked(sequence)
                sequence.finish(sequence.hypotheses[0].finish_reason, now)
            elif not sequence.is_plain:
                dead += self._place(sequence, rows)
        self.table.remove(dead)
        return sequences

    def _grow(self, sequence: Sequence, choices: _Choices) -> Growth:
        if sequence.is_plain:
            return grow_plain(sequence, choices.best[sequence.rows[0].slot], self._end_id)
        return grow(sequence, [choices.of(row) for row in sequence.rows], self._end_id)

    def _place(self, sequence: Sequence, rows: Seq[tuple[Row, Row]]) -> list[Row]:
        """Give forked rows a dead row's place or a new one; rows that are their own parent stay where they are.

        Args:
            sequence: that goes on.
            rows: its rows from now on, each with its parent.

        Returns:
            Dead rows that are left.
        """
        dead = [row for row in sequence.rows if all(row is not parent for _, parent in rows)]
        for row, parent in rows:
            if row is parent:
                continue
            if dead:
                self.table.replace(dead.pop(), row, parent)
            else:
                self.table.fork(row, parent)
        sequence.rows = [row for row, _ in rows]
        return dead


def _sequences_of(rows: Seq[Row]) -> list[Sequence]:
    return list({row.sequence.sequence_id: row.sequence for row in rows}.values())


def _extend(children: Seq[Child]) -> list[tuple[Row, Row]]:
    """The grown rows with their parents. The first child of a parent is the parent itself, grown."""
    if not children:
        return []
    parents: set[int] = set()
    rows = []
    for child in children:
        rows.append((child.parent.fork() if id(child.parent) in parents else child.parent, child.parent))
        parents.add(id(child.parent))
    for (row, _), child in zip(rows, children, strict=True):
        extend(row, child)
    return rows


def _news(sequence: Sequence) -> list[int]:
    """Output tokens that have become certain since the last step."""
    new = list(sequence.certain_ids()[sequence.num_certain :])
    sequence.num_certain += len(new)
    return new
