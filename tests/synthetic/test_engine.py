"""The engine with a model whose answer is known."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence as Seq

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from dragoman_server.engine.async_engine import AsyncEngine, EngineDeadError
from dragoman_server.engine.engine import Engine
from dragoman_server.engine.invariants import violations
from dragoman_server.engine.request import (
    BeamSearch,
    DecodingOptions,
    FinishReason,
    GreedySearch,
    Priority,
    Row,
    Search,
    Sequence,
    SequenceStatus,
    StepOutput,
)
from dragoman_server.engine.scheduler import SchedulerLimits
from dragoman_server.engine.waiting_line import QueueFullError, WaitingLine, cost
from tests.doubles import END, EchoRunner, make_sequence

OPTIONS = DecodingOptions(max_target_tokens=1000)


def make_engine(
    runner: EchoRunner | None = None,
    max_rows: int = 4,
    max_waiting: int = 1000,
    max_encode_tokens: int = 64,
    max_bulk_rows: int = 0,
    line: WaitingLine | None = None,
) -> Engine:
    limits = SchedulerLimits(max_rows=max_rows, max_encode_tokens=max_encode_tokens, max_bulk_rows=max_bulk_rows)
    return Engine(runner or EchoRunner(max_rows), limits, line or WaitingLine(max_waiting), END)


def make_async(*engines: Engine) -> AsyncEngine:
    return AsyncEngine(engines, engines[0].scheduler.line, "echo")


class EngineMachine(RuleBasedStateMachine):
    """Any order of arrivals, cancellations and steps: nothing is lost, mixed up or left behind."""

    sequences: Bundle[Sequence] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine(5, max_tokens=100)
        self.runners = [EchoRunner(4), EchoRunner(4)]
        self.engines = [make_engine(runner, 4, max_bulk_rows=1, line=self.line) for runner in self.runners]
        self.accepted: list[Sequence] = []
        self.cancelled: set[int] = set()
        self.shed: set[int] = set()
        self.reported: list[Sequence] = []
        self.count = 0

    @rule(
        target=sequences,
        source=st.lists(st.integers(4, 97), min_size=1, max_size=12),
        limit=st.integers(1, 9),
        search=st.sampled_from([GreedySearch(), BeamSearch(width=3), BeamSearch(width=4, num_hypotheses=2)]),
        priority=st.sampled_from(Priority),
        caller=st.sampled_from("abc"),
    )
    def add(self, source: list[int], limit: int, search: Search, priority: Priority, caller: str) -> Sequence:
        self.count += 1
        sequence = make_sequence(self.count, source, limit, search=search, priority=priority, caller=caller)
        before = list(self.line)
        try:
            self.line.add(sequence)
        except QueueFullError:
            assert list(self.line) == before
            num_waiting, num_tokens = self.line.size(priority)
            assert num_waiting >= 5 or num_tokens + cost(sequence) > 100
        else:
            self.accepted.append(sequence)
            self.shed |= {other.sequence_id for other in set(before) - set(self.line)}
        return sequence

    @rule(sequence=consumes(sequences))
    def cancel(self, sequence: Sequence) -> None:
        if sequence in self.accepted:
            if sequence.status is not SequenceStatus.FINISHED:
                self.cancelled.add(sequence.sequence_id)
            for engine in self.engines:
                engine.drop(sequence, FinishReason.CANCELLED)

    @precondition(lambda self: any(engine.has_work for engine in self.engines))
    @rule(which=st.integers(0, 1))
    def step(self, which: int) -> None:
        self.reported += self.engines[which].step().finished

    @invariant()
    def nothing_is_violated(self) -> None:
        for engine, runner in zip(self.engines, self.runners, strict=True):
            assert list(violations(engine.scheduler)) == []
            assert runner.num_used_slots == len(engine.table.rows)

    def teardown(self) -> None:
        while any(engine.has_work for engine in self.engines):
            for engine in self.engines:
                self.reported += engine.step().finished
        assert sorted(s.sequence_id for s in self.reported) == sorted(s.sequence_id for s in self.accepted)
        assert all(runner.num_used_slots == 0 for runner in self.runners)
        for sequence in self.accepted:
            assert sequence.rows == []
            limit = sequence.options.max_target_tokens
            if sequence.sequence_id in self.shed:
                assert sequence.finish_reason is FinishReason.SHED
            elif sequence.sequence_id in self.cancelled:
                assert sequence.finish_reason is FinishReason.CANCELLED
            elif len(sequence.source_ids) < limit:
                assert sequence.finish_reason is FinishReason.EOS
                assert sequence.output_ids == sequence.source_ids
            else:
                assert sequence.finish_reason is FinishReason.LENGTH
                assert sequence.output_ids == list(sequence.source_ids)[:limit]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def add(engine: Engine, *sequences: Sequence) -> None:
    for sequence in sequences:
        engine.scheduler.line.add(sequence)


def test_a_newcomer_joins_a_running_batch_and_leaves_before_it() -> None:
    engine = make_engine()
    long, short = make_sequence(1, list(range(10, 40))), make_sequence(2, [7, 8])
    add(engine, long)
    for _ in range(5):
        engine.step()
    add(engine, short)
    finished: list[Sequence] = []
    while short not in finished:
        finished += engine.step().finished
    assert finished == [short]
    assert short.output_ids == [7, 8]
    assert len(long.output_ids) == 8


def test_a_beam_joins_a_running_batch_with_as_many_rows_as_it_has_hypotheses() -> None:
    runner = EchoRunner(8)
    engine = make_engine(runner, max_rows=8)
    add(engine, make_sequence(1, [10] * 9))
    engine.step()
    beam = make_sequence(2, [20, 30, 40], search=BeamSearch(width=4, num_hypotheses=4))
    add(engine, beam)
    while not beam.finish_reason:
        engine.step()
    assert runner.rows_per_step[:4] == [1, 2, 5, 5]
    assert beam.hypotheses[0].ids == (20, 30, 40)
    assert len(engine.table.rows) == 1


def test_a_beam_waits_until_all_its_rows_are_free() -> None:
    engine = make_engine(max_rows=4)
    greedy = make_sequence(1, [10] * 3)
    beam = make_sequence(2, [20, 30], search=BeamSearch(width=4))
    add(engine, greedy, beam)
    while not greedy.finish_reason:
        engine.step()
        assert beam.status is SequenceStatus.WAITING
    engine.step()
    assert beam.status is SequenceStatus.RUNNING


def test_only_rows_whose_parent_changed_are_copied() -> None:
    copied: list[tuple[int, int]] = []

    class CountingRunner(EchoRunner):
        def fork(self, row: Row, source: int, target: int) -> None:
            copied.append((source, target))
            super().fork(row, source, target)

        def move(self, row: Row, slot: int) -> None:
            raise AssertionError(f"{row} has to move to {slot}")

    engine = make_engine(CountingRunner(4), max_rows=4)
    beam = make_sequence(1, [20, 30, 40, 50, 60], search=BeamSearch(width=4))
    add(engine, beam)
    engine.step()
    assert len(beam.rows) == 4
    assert copied == [(0, 1), (0, 2), (0, 3)]
    while not beam.finish_reason:
        before = {id(row) for row in beam.rows}
        copied.clear()
        engine.step()
        assert len(copied) == sum(id(row) not in before for row in beam.rows)


def test_newcomers_are_encoded_within_the_token_budget() -> None:
    engine = make_engine(max_rows=10, max_encode_tokens=12)
    lengths = [5, 6, 4, 30, 2]
    for i, length in enumerate(lengths):
        add(engine, make_sequence(i, list(range(4, 4 + length))))
    outputs = []
    while engine.scheduler.line.num_waiting:
        outputs.append(engine.step())
    # 5 and 6 make 11, 4 more would be too many; 30 is over the budget and goes alone.
    assert [output.num_encoded for output in outputs] == [2, 1, 1, 1]
    assert [output.num_padding_tokens for output in outputs] == [1, 0, 0, 0]
    assert [output.num_source_tokens for output in outputs] == [11, 4, 30, 2]


def test_a_deadline_ends_a_running_and_a_waiting_sequence() -> None:
    engine = make_engine(max_rows=1)
    soon = time.monotonic() + 0.05
    running, waiting = make_sequence(1, [5] * 9, deadline=soon), make_sequence(2, [6] * 9, deadline=soon)
    add(engine, running)
    engine.step()
    add(engine, waiting)
    time.sleep(0.06)
    output = engine.step()
    assert {s.sequence_id for s in output.finished} == {1, 2}
    assert all(s.finish_reason is FinishReason.DEADLINE for s in output.finished)
    assert engine.scheduler.is_idle
    assert output.num_rows == 0
    assert output.num_saved_tokens > 9


def test_deadlines_of_what_has_ended_are_forgotten() -> None:
    engine = make_engine(max_rows=4)
    for i in range(5000):
        add(engine, make_sequence(i, [5], deadline=time.monotonic() + 3600))
        while engine.has_work:
            engine.step()
    assert len(engine.scheduler.line._deadlines) < 2000


def test_bulk_work_pauses_while_interactive_work_runs_and_goes_on_afterwards() -> None:
    runner = EchoRunner(8)
    engine = make_engine(runner, max_rows=8)
    bulk = [make_sequence(i, [10 + i] * 6, priority=Priority.BULK) for i in range(3)]
    add(engine, *bulk)
    engine.step()
    urgent = make_sequence(9, [50, 51])
    add(engine, urgent)
    while not urgent.finish_reason:
        engine.step()
    assert runner.rows_per_step == [3, 1, 1, 1]
    while engine.has_work:
        engine.step()
    assert [s.output_ids for s in bulk] == [[10 + i] * 6 for i in range(3)]
    assert all(s.num_steps == 7 for s in bulk)


def test_bulk_rows_go_along_as_far_as_allowed() -> None:
    runner = EchoRunner(8)
    engine = make_engine(runner, max_rows=8, max_bulk_rows=2)
    bulk = [make_sequence(i, [10 + i] * 9, priority=Priority.BULK) for i in range(4)]
    add(engine, *bulk)
    engine.step()
    urgent = make_sequence(9, [50] * 3)
    add(engine, urgent)
    while not urgent.finish_reason:
        engine.step()
    assert runner.rows_per_step == [4, 3, 3, 3, 3]
    while engine.has_work:
        engine.step()
    assert [s.output_ids for s in bulk] == [[10 + i] * 9 for i in range(4)]


@pytest.mark.parametrize(("max_bulk_rows", "num_rows"), [(3, 1), (4, 5)])
def test_a_bulk_beam_goes_along_whole_or_not_at_all(max_bulk_rows: int, num_rows: int) -> None:
    runner = EchoRunner(8)
    engine = make_engine(runner, max_rows=8, max_bulk_rows=max_bulk_rows)
    beam = make_sequence(0, [20] * 9, search=BeamSearch(width=4), priority=Priority.BULK)
    add(engine, beam)
    for _ in range(2):
        engine.step()
    urgent = make_sequence(9, [50] * 3)
    add(engine, urgent)
    while not urgent.finish_reason:
        engine.step()
    assert set(runner.rows_per_step[2:]) == {num_rows}
    while engine.has_work:
        engine.step()
    assert beam.output_ids == [20] * 9


def test_interactive_work_takes_the_rows_of_bulk_work_that_loses_least() -> None:
    engine = make_engine(max_rows=2)
    old, young = (make_sequence(i, [10 + i] * 9, priority=Priority.BULK) for i in (1, 2))
    add(engine, old)
    engine.step()
    add(engine, young)
    engine.step()
    urgent = make_sequence(3, [50])
    add(engine, urgent)
    output = engine.step()
    assert output.num_preempted == 1
    assert young.status is SequenceStatus.WAITING
    assert old.status is SequenceStatus.RUNNING
    while engine.has_work:
        engine.step()
    assert [s.output_ids for s in (old, young, urgent)] == [[11] * 9, [12] * 9, [50]]


def test_two_engines_share_a_line_evenly() -> None:
    line = WaitingLine(100)
    engines = [make_engine(max_rows=8, max_encode_tokens=1000, line=line) for _ in range(2)]
    for i in range(10):
        line.add(make_sequence(i, [7] * 5))
    for engine in engines:
        engine.step()
    assert [len(engine.table.rows) for engine in engines] == [5, 5]


def test_what_is_certain_is_what_all_hypotheses_share_and_never_taken_back() -> None:
    engine = make_engine(max_rows=8)
    beam = make_sequence(1, [20, 30, 40, 50, 60, 70], search=BeamSearch(width=3))
    beam.streams = True
    add(engine, beam)
    told: list[int] = []
    while engine.has_work:
        for _, ids in engine.step().progressed:
            told += ids
            assert all(row.ids[: len(told)] == told for row in beam.rows)
    assert beam.output_ids[: len(told)] == told
    assert beam.output_ids == [20, 30, 40, 50, 60, 70]


def test_the_observer_sees_every_step() -> None:
    seen: list[tuple[StepOutput, int, int]] = []

    class Observer:
        def step_done(self, output: StepOutput, line: WaitingLine, num_rows: int) -> None:
            seen.append((output, line.num_waiting, num_rows))

    engine = make_engine(max_rows=1)
    engine.observer = Observer()
    for i in range(2):
        add(engine, make_sequence(i, [5]))
    while engine.has_work:
        engine.step()
    assert [(output.num_rows, waiting, running) for output, waiting, running in seen] == [
        (1, 1, 1), (1, 1, 0), (1, 0, 1), (1, 0, 0),
    ]  # fmt: skip
    assert [len(output.finished) for output, _, _ in seen] == [0, 1, 0, 1]


async def test_many_callers_get_their_own_answers() -> None:
    line = WaitingLine(1000)
    engine = make_async(*(make_engine(max_rows=5, line=line) for _ in range(3)))
    engine.start()
    sources = [[10 + i % 7] * (1 + i % 23) for i in range(200)]
    results = await asyncio.gather(*(engine.decode(source, OPTIONS) for source in sources))
    engine.stop()
    assert [sequence.output_ids for sequence in results] == sources


async def test_a_stream_tells_every_token_once_and_the_sequence_last() -> None:
    engine = make_async(make_engine())
    engine.start()
    source = list(range(10, 40))
    events = [event async for event in engine.stream(source, OPTIONS)]
    engine.stop()
    *news, last = events
    assert isinstance(last, Sequence)
    assert last.output_ids == source
    told = [token for ids in news if isinstance(ids, list) for token in ids]
    assert told == source[: len(told)]
    assert len(told) > 20


async def test_leaving_a_stream_frees_its_rows() -> None:
    core = make_engine(max_rows=1)
    engine = make_async(core)
    engine.start()
    stream = engine.stream([5] * 1_000_000, DecodingOptions(max_target_tokens=1_000_000))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await asyncio.wait_for(engine.decode([6, 7], OPTIONS), timeout=10)).output_ids == [6, 7]
    engine.stop()


async def test_cancelling_a_task_frees_its_slot() -> None:
    runner = EchoRunner()
    engine = make_async(make_engine(runner, max_rows=1))
    engine.start()
    endless = asyncio.create_task(engine.decode([5] * 1_000_000, DecodingOptions(max_target_tokens=1_000_000)))
    while not runner.encoded:
        await asyncio.sleep(0.001)
    endless.cancel()
    after = await asyncio.wait_for(engine.decode([6, 7], OPTIONS), timeout=10)
    assert after.output_ids == [6, 7]
    with pytest.raises(asyncio.CancelledError):
        await endless
    engine.stop()


async def test_a_cancelled_caller_in_the_queue_is_never_encoded() -> None:
    runner = EchoRunner()
    engine = make_async(make_engine(runner, max_rows=1))
    engine.start()
    running = asyncio.create_task(engine.decode([5] * 1_000_000, DecodingOptions(max_target_tokens=1_000_000)))
    while not runner.encoded:
        await asyncio.sleep(0.001)
    queued = asyncio.create_task(engine.decode([6], OPTIONS))
    await asyncio.sleep(0)
    queued.cancel()
    await asyncio.sleep(0)
    running.cancel()
    assert (await asyncio.wait_for(engine.decode([7], OPTIONS), timeout=10)).output_ids == [7]
    engine.stop()
    assert [source[0] for source in runner.encoded] == [5, 7]


def test_a_failed_step_ends_only_those_that_were_in_it() -> None:
    """Bulk work that pauses meanwhile, work in line and later work are not touched."""
    runner = EchoRunner(4, failing_steps={3})
    engine = make_engine(runner)
    bulk = make_sequence(1, [5, 6, 7, 8], priority=Priority.BULK)
    hit, later = make_sequence(2, [9] * 5), make_sequence(3, [7])
    add(engine, bulk)
    engine.step()
    add(engine, hit)
    engine.step()
    finished = engine.step().finished
    assert finished == [hit]
    assert hit.finish_reason is FinishReason.ERROR
    assert str(hit.error) == "the graph failed"
    assert list(violations(engine.scheduler)) == []
    add(engine, later)
    while engine.has_work:
        finished += engine.step().finished
    assert (bulk.output_ids, later.output_ids) == ([5, 6, 7, 8], [7])
    assert runner.num_used_slots == 0


def test_a_failed_encoder_pass_ends_only_the_newcomers() -> None:
    runner = EchoRunner(4, failing_encodes={3})
    engine = make_engine(runner)
    running, bulk = make_sequence(1, [5, 6, 7, 8]), make_sequence(2, [5, 6], priority=Priority.BULK)
    hit = make_sequence(3, [8, 9])
    add(engine, bulk)
    engine.step()
    add(engine, running)
    engine.step()
    add(engine, hit)
    finished = engine.step().finished
    assert finished == [hit]
    assert isinstance(hit.error, MemoryError)
    assert runner.num_used_slots == len(engine.table.rows) == 2
    while engine.has_work:
        finished += engine.step().finished
    assert (running.output_ids, bulk.output_ids) == ([5, 6, 7, 8], [5, 6])
    assert runner.num_used_slots == 0


def test_an_engine_that_keeps_failing_gives_up() -> None:
    engine = make_engine(EchoRunner(4, failing_steps=range(2, 100)))
    for number in range(3):
        add(engine, make_sequence(number, [5, 6, 7]))
    engine.step()
    for number in range(3, 6):
        assert len(engine.step().finished) == (3 if number == 3 else 1)
        add(engine, make_sequence(number, [5, 6]))
    with pytest.raises(RuntimeError, match="the graph failed"):
        engine.step()


async def test_a_dead_engine_fails_everybody_with_the_cause() -> None:
    causes: list[BaseException] = []
    line = WaitingLine(100)
    failing = make_engine(EchoRunner(1, failing_steps=range(3, 100)), 1, line=line)
    engine = make_async(failing, make_engine(max_rows=1, line=line))
    engine.on_death = causes.append
    engine.start()
    calls = [engine.decode([5] * 100_000, DecodingOptions(max_target_tokens=200_000)) for _ in range(9)]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=20)
    ended = [result for result in results if isinstance(result, Sequence)]
    assert [str(sequence.error) for sequence in ended] == ["the graph failed"] * 3
    for result in results:
        if not isinstance(result, Sequence):
            assert isinstance(result, EngineDeadError)
            assert str(result.__cause__) == "the graph failed"
    engine.stop()  # waits for the threads, which tell their callers first and the process after them
    assert [str(cause) for cause in causes] == ["the graph failed"]
    with pytest.raises(EngineDeadError):
        await engine.decode([5], OPTIONS)
    assert not engine.is_alive


async def test_a_step_that_never_ends_is_noticed_and_nobody_waits_for_it() -> None:
    released = threading.Event()

    class Wedged(EchoRunner):
        def decode_step(self, rows: Seq[Row]) -> None:  # noqa: ARG002
            released.wait(30)

    engine = make_async(make_engine(Wedged()))
    engine.start()
    call = asyncio.create_task(engine.decode([5], OPTIONS))
    while engine.longest_step() < 0.05:
        await asyncio.sleep(0.01)
    engine.give_up(TimeoutError("too slow"))
    with pytest.raises(EngineDeadError) as caught:
        await call
    assert isinstance(caught.value.__cause__, TimeoutError)
    engine.stop()
    released.set()


async def test_a_full_queue_refuses_at_once() -> None:
    engine = make_async(make_engine(max_rows=1, max_waiting=1))
    calls = [asyncio.create_task(engine.decode([5] * 50, OPTIONS)) for _ in range(3)]
    await asyncio.sleep(0)
    engine.start()
    results = await asyncio.gather(*calls, return_exceptions=True)
    engine.stop()
    assert sum(isinstance(result, QueueFullError) for result in results) == 2
    assert sum(isinstance(result, Sequence) for result in results) == 1


async def test_cancelling_what_was_refused_or_has_ended_hurts_nobody() -> None:
    engine = make_async(make_engine(max_rows=1, max_waiting=1))
    calls = [asyncio.create_task(engine.decode([5, 6], OPTIONS)) for _ in range(5)]
    await asyncio.sleep(0)
    for call in calls[1:]:
        call.cancel()
    await asyncio.sleep(0)
    engine.start()
    assert (await calls[0]).output_ids == [5, 6]
    assert (await engine.decode([7], OPTIONS)).output_ids == [7]
    assert engine.is_alive
    engine.stop()


async def test_stopping_tells_whoever_waits() -> None:
    engine = make_async(make_engine())
    engine.start()
    call = asyncio.create_task(engine.decode([5] * 1_000_000, DecodingOptions(max_target_tokens=1_000_000)))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(engine.stop)
    with pytest.raises(EngineDeadError, match="has stopped"):
        await call
