"""The serving engine gives what reference searches give, to the bit, in any company."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_bundle.bundle import Bundle, Samples
from dragoman_export.bundling import load_step_model
from dragoman_export.corpus import Direction
from dragoman_export.decoding import LengthLimit, beam_search, greedy_search
from dragoman_export.evaluation import encode_source
from dragoman_export.onnx_steps import OnnxStepModel
from dragoman_export.tokenization import load_tokenizer
from dragoman_server.engine import kv_cache
from dragoman_server.engine.engine import Engine
from dragoman_server.engine.invariants import violations
from dragoman_server.engine.model_runner import OnnxModel, OnnxModelRunner
from dragoman_server.engine.request import (
    Alternatives,
    BeamSearch,
    FinishReason,
    GreedySearch,
    Hypothesis,
    Priority,
    Sampling,
    Scoring,
    Sequence,
)
from dragoman_server.engine.scheduler import SchedulerLimits
from dragoman_server.engine.waiting_line import WaitingLine
from tests.doubles import END, make_sequence
from tests.readme import bundled_models
from tests.reversal import DIRECTION, sentences

TEXTS = sentences(60, seed=11, shortest=1, longest=14)


class Case(NamedTuple):
    """A variant of the toy model, opened by the server and by the reference."""

    models: dict[int, OnnxModel]
    """By number of threads."""
    reference: OnnxStepModel
    sources: list[list[int]]


@pytest.fixture(scope="module", params=["fp32", "int8"])
def case(request: pytest.FixtureRequest, reversal_bundle: Bundle) -> Case:
    variant = reversal_bundle.variant("cpu", request.param)
    assert variant is not None
    tokenizer = load_tokenizer(reversal_bundle.file("tokenizer.model"))
    return Case(
        {threads: OnnxModel(reversal_bundle, variant, threads) for threads in (1, 2)},
        load_step_model(reversal_bundle, variant, num_threads=1),
        [encode_source(tokenizer, text, DIRECTION).tolist() for text in TEXTS],
    )


def make_engine(case: Case, num_slots: int, num_threads: int = 1, max_bulk_rows: int = 2) -> Engine:
    limits = SchedulerLimits(max_rows=num_slots, max_encode_tokens=100, max_bulk_rows=max_bulk_rows)
    return Engine(OnnxModelRunner(case.models[num_threads], num_slots), limits, WaitingLine(1000), END)


def run(engine: Engine, *sequences: Sequence) -> None:
    """Step until everything has ended."""
    for sequence in sequences:
        engine.scheduler.line.add(sequence)
    while engine.has_work:
        engine.step()


def reference_limit(source: list[int]) -> int:
    """How long the reference lets an output get: the toy model does not end all of them by itself."""
    return LengthLimit()(len(source))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_greedy_search_all_at_once_is_the_references_one_by_one(case: Case, num_threads: int) -> None:
    expected = [greedy_search(case.reference, [np.array(source)])[0] for source in case.sources]
    sequences = [make_sequence(i, source, reference_limit(source)) for i, source in enumerate(case.sources)]
    run(make_engine(case, 16, num_threads), *sequences)
    assert [sequence.output_ids for sequence in sequences] == expected


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("longest_copy_bytes", [0, 2**20])  # rows of a sentence share pages; or each has a copy
def test_beam_search_all_at_once_is_the_references_one_by_one(
    case: Case, width: int, length_penalty: float, longest_copy_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_LONGEST_COPY_BYTES", longest_copy_bytes)
    expected = [
        beam_search(case.reference, [np.array(source)], width, length_penalty)[0] for source in case.sources[:25]
    ]
    search = BeamSearch(width=width, length_penalty=length_penalty)
    sequences = [
        make_sequence(i, source, reference_limit(source), search=search) for i, source in enumerate(case.sources[:25])
    ]
    run(make_engine(case, 16), *sequences)
    assert [sequence.output_ids for sequence in sequences] == expected


SEARCHES = st.one_of(
    st.builds(GreedySearch),
    st.builds(
        BeamSearch,
        width=st.integers(1, 5),
        length_penalty=st.sampled_from([0.0, 0.6, 1.0]),
        coverage_penalty=st.sampled_from([0.0, 0.2]),
        patience=st.sampled_from([1.0, 2.0]),
        early_stopping=st.booleans(),
    ).map(lambda search: dataclasses.replace(search, num_hypotheses=search.width)),
    st.builds(
        Sampling,
        seed=st.integers(0, 3),
        temperature=st.sampled_from([0.5, 1.0, 5.0]),
        top_k=st.sampled_from([0, 1, 5]),
        top_p=st.sampled_from([0.5, 1.0]),
        num_hypotheses=st.integers(1, 3),
    ),
    st.builds(Alternatives, count=st.integers(1, 4)),
)
REQUESTS = st.fixed_dictionaries(
    {
        "search": SEARCHES,
        "max_target_tokens": st.integers(1, 30),
        "min_target_tokens": st.sampled_from([0, 0, 1]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "no_repeat_ngram_size": st.sampled_from([0, 0, 2]),
        "suppressed": st.sampled_from([(), (), ((7,), (9, 12))]),
        "log_probs": st.booleans(),
        "alignment": st.booleans(),
    }
)


def alone(case: Case, source: list[int], options: Mapping[str, Any]) -> list[Hypothesis]:
    sequence = make_sequence(0, source, **options)
    run(make_engine(case, 8), sequence)
    return sequence.hypotheses


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_company_arrival_order_or_cancellation_changes_a_result(case: Case, data: st.DataObject) -> None:
    """Bitwise: tokens, scores, log-probabilities and attention, for any mixture of options and priorities."""
    check_mixture(case, data)


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_nor_does_it_with_the_bundled_model(bundled_case: Case, data: st.DataObject) -> None:
    """The same with real weights, the vocabulary of 8,000 pieces and real sentences."""
    check_mixture(bundled_case, data)


@pytest.fixture(scope="module")
def bundled_case() -> Case:
    [bundle] = bundled_models()
    [variant] = bundle.manifest.variants
    tokenizer = load_tokenizer(bundle.file("tokenizer.model"))
    samples = Samples.load(bundle.file("samples.json"))
    [chinese, english] = [Direction(spec.source, spec.target) for spec in bundle.manifest.directions]
    sources = [
        encode_source(tokenizer, text, direction).tolist()
        for pair in samples.parity[:20]
        for text, direction in zip(pair, (chinese, english), strict=True)
    ]
    return Case(
        {threads: OnnxModel(bundle, variant, threads) for threads in (1, 2)},
        load_step_model(bundle, variant, num_threads=1),
        sources,
    )


def check_mixture(case: Case, data: st.DataObject) -> None:
    requests: list[dict[str, Any]] = data.draw(st.lists(REQUESTS, min_size=1, max_size=12))
    chosen = [data.draw(st.integers(0, len(case.sources) - 1)) for _ in requests]
    gaps = [data.draw(st.integers(0, 6)) for _ in requests]
    cancelled = data.draw(st.sets(st.integers(0, len(requests) - 1), max_size=3))
    engine = make_engine(case, data.draw(st.integers(5, 12)), data.draw(st.sampled_from([1, 2])))
    sequences = [
        make_sequence(i, case.sources[index], priority=data.draw(st.sampled_from(Priority)), **options)
        for i, (index, options) in enumerate(zip(chosen, requests, strict=True))
    ]
    pending = list(zip(gaps, sequences, strict=True))
    step = 0
    while pending or engine.has_work:
        while pending and pending[0][0] <= step:
            engine.scheduler.line.add(pending.pop(0)[1])
            step = 0
        engine.step()
        assert list(violations(engine.scheduler)) == []
        step += 1
        for i in cancelled:
            if len(sequences[i].output_ids) == 2:
                engine.drop(sequences[i], FinishReason.CANCELLED)
    for i, (sequence, index) in enumerate(zip(sequences, chosen, strict=True)):
        if sequence.finish_reason is FinishReason.CANCELLED:
            assert i in cancelled
        else:
            assert_same(sequence.hypotheses, alone(case, case.sources[index], requests[i]))


def assert_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    """Equal to the last bit; NaN equals NaN."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.ids, a.finish_reason) == (b.ids, b.finish_reason)
        np.testing.assert_array_equal([a.score, a.log_prob], [b.score, b.log_prob])
        np.testing.assert_array_equal(a.token_log_probs, b.token_log_probs)
        assert (a.attention is None) == (b.attention is None)
        if a.attention is not None and b.attention is not None:
            np.testing.assert_array_equal(a.attention, b.attention)


def test_an_engine_that_is_alone_takes_more_threads_and_gives_the_same(case: Case, reversal_bundle: Bundle) -> None:
    model = OnnxModel(reversal_bundle, case.models[1].variant, num_threads=1, num_solo_threads=2)
    line, num_rows_elsewhere = WaitingLine(1000), [0]
    line.loads.append(lambda: num_rows_elsewhere[0])
    runner = OnnxModelRunner(model, 32)
    engine = Engine(runner, SchedulerLimits(max_rows=32, max_encode_tokens=100), line, END)
    wanted: list[Mapping[str, Any]] = [
        {"max_target_tokens": 30, "search": BeamSearch(width=2) if i % 2 else GreedySearch(), "log_probs": True}
        for i in range(20)
    ]
    sequences = [make_sequence(i, case.sources[i], **options) for i, options in enumerate(wanted)]
    line.add(*sequences)
    was_alone: list[bool] = []
    while engine.has_work:
        num_rows_elsewhere[0] = len(was_alone) // 3 % 2  # company comes and goes while they run
        engine.step()
        was_alone.append(runner.is_alone)
        assert runner.is_alone == (not line.num_waiting and not num_rows_elsewhere[0])
    assert set(was_alone) == {False, True}
    threads = [s.decoder.get_session_options().intra_op_num_threads for s in (model.solo, model.shared)]
    assert threads == [2, 1]
    for each, options in zip(sequences, wanted, strict=True):
        assert_same(each.hypotheses, alone(case, list(each.source_ids), options))


def test_scoring_what_greedy_search_said_gives_its_log_probabilities(case: Case) -> None:
    for source in case.sources[:10]:
        [said] = alone(case, source, {"max_target_tokens": 30, "log_probs": True})
        options = {"max_target_tokens": 40, "search": Scoring(), "target_prefix": said.ids}
        [scored] = alone(case, source, options)
        assert scored.finish_reason is said.finish_reason is FinishReason.EOS
        np.testing.assert_array_equal(scored.token_log_probs, said.token_log_probs)
        assert scored.score == said.score


def test_attention_shows_the_source_in_reverse(case: Case) -> None:
    source = max(case.sources, key=len)
    [hypothesis] = alone(case, source, {"max_target_tokens": 60, "alignment": True})
    assert hypothesis.attention is not None
    np.testing.assert_allclose(hypothesis.attention.sum(1), 1.0, atol=1e-5)
    assert hypothesis.attention.shape == (len(hypothesis.ids), len(source))
