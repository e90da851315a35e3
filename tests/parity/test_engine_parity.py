"""The serving engine gives what the reference search gives, to the token, in any company."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_bundle.bundle import Bundle
from dragoman_export.bundling import load_step_model
from dragoman_export.decoding import greedy_search
from dragoman_export.evaluation import encode_source
from dragoman_export.tokenization import load_tokenizer
from dragoman_server.engine.engine import Engine
from dragoman_server.engine.model_runner import OnnxModelRunner
from dragoman_server.engine.request import FinishReason, Sequence
from dragoman_server.engine.scheduler import Scheduler, SchedulerLimits
from tests.doubles import END, START, make_sequence
from tests.reversal import DIRECTION, sentences

Case = tuple[Bundle, str, list[list[int]], list[list[int]]]
"""Bundle, precision, sources, and what the reference search makes of each alone."""

TEXTS = sentences(60, seed=11, shortest=1, longest=14)


@pytest.fixture(scope="module", params=["fp32", "int8"])
def case(request: pytest.FixtureRequest, reversal_bundle: Bundle) -> Case:
    variant = reversal_bundle.variant("cpu", request.param)
    assert variant is not None
    tokenizer = load_tokenizer(reversal_bundle.file("tokenizer.model"))
    sources = [encode_source(tokenizer, text, DIRECTION) for text in TEXTS]
    model = load_step_model(reversal_bundle, variant, num_threads=1)
    expected = [greedy_search(model, [source])[0] for source in sources]
    return reversal_bundle, request.param, [source.tolist() for source in sources], expected


def make_engine(bundle: Bundle, precision: str, num_slots: int, num_threads: int = 1) -> Engine:
    variant = bundle.variant("cpu", precision)
    assert variant is not None
    runner = OnnxModelRunner(bundle, variant, num_slots, num_threads)
    limits = SchedulerLimits(max_rows=num_slots, max_waiting=1000, max_encode_tokens=100)
    return Engine(runner, Scheduler(limits), START, END)


def run(engine: Engine, arrivals: list[list[Sequence]]) -> None:
    """Step until everything has ended; before step i, `arrivals[i]` come."""
    step = 0
    while step < len(arrivals) or not engine.scheduler.is_idle:
        for sequence in arrivals[step] if step < len(arrivals) else []:
            engine.add(sequence)
        engine.step()
        step += 1


@pytest.mark.parametrize("num_threads", [1, 2])
def test_all_at_once_gives_what_each_gives_alone(case: Case, num_threads: int) -> None:
    bundle, precision, sources, expected = case
    sequences = [make_sequence(i, source) for i, source in enumerate(sources)]
    run(make_engine(bundle, precision, num_slots=16, num_threads=num_threads), [sequences])
    assert [sequence.output_ids for sequence in sequences] == expected


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_any_arrival_order_and_any_cancellation_changes_nobody_else(case: Case, data: st.DataObject) -> None:
    bundle, precision, sources, expected = case
    chosen = data.draw(st.lists(st.integers(0, len(sources) - 1), min_size=1, max_size=24))
    gaps = data.draw(st.lists(st.integers(0, 6), min_size=len(chosen), max_size=len(chosen)))
    cancelled = data.draw(st.sets(st.integers(0, len(chosen) - 1)))
    engine = make_engine(bundle, precision, num_slots=data.draw(st.integers(1, 9)))
    sequences = [make_sequence(i, sources[index]) for i, index in enumerate(chosen)]
    pending = list(zip(gaps, sequences, strict=True))
    step = 0
    while pending or not engine.scheduler.is_idle:
        while pending and pending[0][0] <= step:
            engine.add(pending.pop(0)[1])
            step = 0
        engine.step()
        step += 1
        for i in cancelled:
            if len(sequences[i].output_ids) == 2:
                engine.drop(sequences[i], FinishReason.CANCELLED)
    for i, (sequence, index) in enumerate(zip(sequences, chosen, strict=True)):
        if sequence.finish_reason is FinishReason.CANCELLED:
            assert i in cancelled
        else:
            assert sequence.output_ids == expected[index]
