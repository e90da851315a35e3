"""The engine with a model whose answer is known."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from dragoman_server.engine.async_engine import AsyncEngine, EngineDeadError
from dragoman_server.engine.engine import Engine
from dragoman_server.engine.invariants import violations
from dragoman_server.engine.request import DecodingOptions, FinishReason, Sequence, SequenceStatus, StepOutput
from dragoman_server.engine.scheduler import QueueFullError, Scheduler, SchedulerLimits
from tests.doubles import END, START, EchoRunner, make_sequence

OPTIONS = DecodingOptions(max_target_tokens=1000)


def make_engine(
    runner: EchoRunner | None = None, max_rows: int = 4, max_waiting: int = 1000, max_encode_tokens: int = 64
) -> Engine:
    limits = SchedulerLimits(max_rows=max_rows, max_waiting=max_waiting, max_encode_tokens=max_encode_tokens)
    return Engine(runner or EchoRunner(), Scheduler(limits), START, END)


class EngineMachine(RuleBasedStateMachine):
    """Any order of arrivals, cancellations and steps: nothing is lost, mixed up or left behind."""

    sequences: Bundle[Sequence] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.engine = make_engine(max_rows=3, max_waiting=5)
        self.accepted: list[Sequence] = []
        self.cancelled: set[int] = set()
        self.reported: list[Sequence] = []
        self.count = 0

    @rule(target=sequences, source=st.lists(st.integers(4, 99), min_size=1, max_size=12), limit=st.integers(1, 9))
    def add(self, source: list[int], limit: int) -> Sequence:
        self.count += 1
        sequence = make_sequence(self.count, source, limit)
        if self.engine.scheduler.num_waiting == 5:
            with pytest.raises(QueueFullError):
                self.engine.add(sequence)
        else:
            self.engine.add(sequence)
            self.accepted.append(sequence)
        return sequence

    @rule(sequence=consumes(sequences))
    def cancel(self, sequence: Sequence) -> None:
        if sequence in self.accepted:
            if sequence.status is not SequenceStatus.FINISHED:
                self.cancelled.add(sequence.sequence_id)
            self.engine.drop(sequence, FinishReason.CANCELLED)

    @precondition(lambda self: not self.engine.scheduler.is_idle)
    @rule()
    def step(self) -> None:
        self.reported += self.engine.step().finished

    @invariant()
    def nothing_is_violated(self) -> None:
        assert list(violations(self.engine.scheduler)) == []

    def teardown(self) -> None:
        while not self.engine.scheduler.is_idle:
            self.reported += self.engine.step().finished
        self.reported += self.engine.step().finished
        assert sorted(s.sequence_id for s in self.reported) == sorted(s.sequence_id for s in self.accepted)
        for sequence in self.accepted:
            assert sequence.slot == -1
            limit = sequence.options.max_target_tokens
            if sequence.sequence_id in self.cancelled:
                assert sequence.finish_reason is FinishReason.CANCELLED
                assert sequence.output_ids == sequence.source_ids[: len(sequence.output_ids)]
            elif len(sequence.source_ids) < limit:
                assert sequence.finish_reason is FinishReason.EOS
                assert sequence.output_ids == sequence.source_ids
            else:
                assert sequence.finish_reason is FinishReason.LENGTH
                assert sequence.output_ids == sequence.source_ids[:limit]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_newcomer_joins_a_running_batch_and_leaves_before_it() -> None:
    engine = make_engine()
    long, short = make_sequence(1, list(range(10, 40))), make_sequence(2, [7, 8])
    engine.add(long)
    for _ in range(5):
        engine.step()
    engine.add(short)
    finished: list[Sequence] = []
    while short not in finished:
        finished += engine.step().finished
    assert finished == [short]
    assert short.output_ids == [7, 8]
    assert len(long.output_ids) == 8


def test_newcomers_are_encoded_within_the_token_budget() -> None:
    engine = make_engine(max_rows=10, max_encode_tokens=12)
    lengths = [5, 6, 4, 30, 2]
    for i, length in enumerate(lengths):
        engine.add(make_sequence(i, list(range(4, 4 + length))))
    encoded = []
    while engine.scheduler.num_waiting:
        encoded.append(engine.step().num_encoded)
    # 5 and 6 pad to 2 x 6; 4 would be a third row; 30 is over the budget and goes alone.
    assert encoded == [2, 1, 1, 1]


def test_a_deadline_ends_a_running_and_a_waiting_sequence() -> None:
    engine = make_engine(max_rows=1)
    soon = time.monotonic() + 0.05
    running, waiting = make_sequence(1, [5] * 9, deadline=soon), make_sequence(2, [6] * 9, deadline=soon)
    engine.add(running)
    engine.step()
    engine.add(waiting)
    time.sleep(0.06)
    output = engine.step()
    assert {s.sequence_id for s in output.finished} == {1, 2}
    assert all(s.finish_reason is FinishReason.DEADLINE for s in output.finished)
    assert engine.scheduler.is_idle
    assert output.num_rows == 0


def test_the_observer_sees_every_step() -> None:
    seen: list[tuple[StepOutput, int, int]] = []

    class Observer:
        def step_done(self, output: StepOutput, num_waiting: int, num_running: int) -> None:
            seen.append((output, num_waiting, num_running))

    engine = make_engine(max_rows=1)
    engine.observer = Observer()
    for i in range(2):
        engine.add(make_sequence(i, [5]))
    while not engine.scheduler.is_idle:
        engine.step()
    assert [(output.num_rows, waiting, running) for output, waiting, running in seen] == [
        (1, 1, 1), (1, 1, 0), (1, 0, 1), (1, 0, 0),
    ]  # fmt: skip
    assert [len(output.finished) for output, _, _ in seen] == [0, 1, 0, 1]


async def test_many_callers_get_their_own_answers() -> None:
    engine = AsyncEngine(make_engine(max_rows=5), "echo")
    engine.start()
    sources = [[10 + i % 7] * (1 + i % 23) for i in range(200)]
    results = await asyncio.gather(*(engine.decode(source, OPTIONS) for source in sources))
    engine.stop()
    assert [sequence.output_ids for sequence in results] == sources


async def test_cancelling_a_task_frees_its_slot() -> None:
    core = make_engine(max_rows=1)
    engine = AsyncEngine(core, "echo")
    engine.start()
    endless = asyncio.create_task(engine.decode([5] * 1_000_000, DecodingOptions(max_target_tokens=1_000_000)))
    while not core.scheduler.running:
        await asyncio.sleep(0.001)
    endless.cancel()
    after = await asyncio.wait_for(engine.decode([6, 7], OPTIONS), timeout=10)
    assert after.output_ids == [6, 7]
    with pytest.raises(asyncio.CancelledError):
        await endless
    engine.stop()


async def test_a_cancelled_caller_in_the_queue_is_never_encoded() -> None:
    runner = EchoRunner()
    core = make_engine(runner, max_rows=1)
    engine = AsyncEngine(core, "echo")
    engine.start()
    running = asyncio.create_task(engine.decode([5] * 2000, DecodingOptions(max_target_tokens=3000)))
    while not core.scheduler.running:
        await asyncio.sleep(0.001)
    queued = asyncio.create_task(engine.decode([6], OPTIONS))
    await asyncio.sleep(0)
    queued.cancel()
    assert (await running).output_ids == [5] * 2000
    engine.stop()
    assert runner.num_steps == 2001


async def test_a_failed_step_fails_everybody_with_the_cause() -> None:
    causes: list[BaseException] = []
    engine = AsyncEngine(make_engine(EchoRunner(fail_at_step=3), max_rows=2), "echo", on_death=causes.append)
    engine.start()
    calls = [engine.decode([5] * 10, OPTIONS) for _ in range(6)]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=10)
    for result in results:
        assert isinstance(result, EngineDeadError)
        assert str(result.__cause__) == "the graph failed"
    engine.stop()  # waits for the thread, which tells its callers first and the process after them
    assert [str(cause) for cause in causes] == ["the graph failed"]
    with pytest.raises(EngineDeadError):
        await engine.decode([5], OPTIONS)
    assert not engine.is_alive


async def test_a_full_queue_refuses_at_once() -> None:
    engine = AsyncEngine(make_engine(max_rows=1, max_waiting=1), "echo")
    calls = [asyncio.create_task(engine.decode([5] * 50, OPTIONS)) for _ in range(3)]
    await asyncio.sleep(0)
    engine.start()
    results = await asyncio.gather(*calls, return_exceptions=True)
    engine.stop()
    assert sum(isinstance(result, QueueFullError) for result in results) == 2
    assert sum(isinstance(result, Sequence) for result in results) == 1


async def test_cancelling_what_was_refused_or_has_ended_hurts_nobody() -> None:
    core = make_engine(max_rows=1, max_waiting=1)
    engine = AsyncEngine(core, "echo")
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
    engine = AsyncEngine(make_engine(), "echo")
    engine.start()
    call = asyncio.create_task(engine.decode([5] * 1_000_000, DecodingOptions(max_target_tokens=1_000_000)))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(engine.stop)
    with pytest.raises(EngineDeadError, match="has stopped"):
        await call
