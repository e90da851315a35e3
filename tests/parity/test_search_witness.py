"""Every search against an independent one: transformers' generate on the same weights, and exhaustive enumeration."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from dragoman_bundle.architecture import Architecture
from dragoman_export.linear import FloatLinear
from dragoman_export.model import Transformer
from dragoman_server.engine.engine import Engine
from dragoman_server.engine.model_runner import OnnxModel, OnnxModelRunner
from dragoman_server.engine.request import (
    Alternatives,
    BeamSearch,
    FinishReason,
    GreedySearch,
    Hypothesis,
    Row,
    Sampling,
    Scoring,
    Search,
)
from dragoman_server.engine.scheduler import SchedulerLimits
from dragoman_server.engine.search import draw
from dragoman_server.engine.waiting_line import WaitingLine
from tests.bare_model import open_graphs, write_graphs
from tests.doubles import END, START, log_softmax, make_sequence
from tests.witnesses import to_transformers

MAX_TOKENS = 20


class Pair(NamedTuple):
    """A random model in the server and in transformers."""

    ours: OnnxModel
    theirs: Any
    sources: list[list[int]]


def random_pair(norm: str, vocab_size: int, directory: Path) -> Pair:
    torch.manual_seed(3)
    arch = Architecture(
        vocab_size=vocab_size, d_model=32, num_heads=4, d_ff=48, encoder_layers=2, decoder_layers=2, norm=norm  # type: ignore[arg-type]
    )  # fmt: skip
    model = Transformer(arch).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        # The first dimension is about 4 wherever logits are made, so that it can favour some tokens everywhere.
        last = model.decoder_norm if norm == "pre" else model.decoder[-1].feed_forward_residual.norm
        last.bias[0] += 4  # type: ignore[operator, index, union-attr]
        model.generator.weight[:, 0] = 0
        model.generator.weight[:3, 0] = -3  # padding, unknown and start never come
        model.generator.weight[END, 0] = 0.6 if norm == "post" else 1.6  # the end comes soon
    rng = np.random.default_rng(1)
    sources = [[*rng.integers(4, vocab_size, rng.integers(2, 9)).tolist(), END] for _ in range(12)]
    write_graphs(model, directory, FloatLinear("float32"), 64)
    return Pair(open_graphs(directory, arch, 64), to_transformers(model, 64), sources)


@pytest.fixture(scope="module", params=["post", "pre"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return random_pair(request.param, 40, tmp_path_factory.mktemp("graphs"))


def decode(model: OnnxModel, sources: list[list[int]], **options: Any) -> list[list[Hypothesis]]:
    """All sources side by side."""
    num_slots = 48
    limits = SchedulerLimits(max_rows=num_slots, max_encode_tokens=100)
    engine = Engine(OnnxModelRunner(model, num_slots), limits, WaitingLine(100), END)
    options = {"max_target_tokens": MAX_TOKENS, **options}
    sequences = [make_sequence(i, source, **options) for i, source in enumerate(sources)]
    for sequence in sequences:
        engine.scheduler.line.add(sequence)
    while engine.has_work:
        engine.step()
    return [sequence.hypotheses for sequence in sequences]


def generate(pair: Pair, source: list[int], prefix: tuple[int, ...] = (), **options: Any) -> Any:
    """What transformers makes of a source."""
    return pair.theirs.generate(
        input_ids=torch.tensor([source]),
        decoder_input_ids=torch.tensor([[START, *prefix]]),
        max_new_tokens=MAX_TOKENS - len(prefix),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **options,
    )


def plain(ids: torch.Tensor, ends: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Their tokens without start, end and padding."""
    tokens = ids.tolist()[1:]
    stop = next((i for i, token in enumerate(tokens) if token == END or token in ends), len(tokens))
    return tuple(tokens[:stop])


CONSTRAINTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    ({"min_target_tokens": 6}, {"min_new_tokens": 6}),
    ({"suppressed": ((7,), (9,), (11, 12), (12, 13, 14))}, {"bad_words_ids": [[7], [9], [11, 12], [12, 13, 14]]}),
    ({"end_ids": frozenset([5, 8])}, {"eos_token_id": [END, 5, 8]}),
    ({"target_prefix": (20, 21)}, {"prefix": (20, 21)}),
]


@pytest.mark.parametrize(("ours", "theirs"), CONSTRAINTS)
@pytest.mark.parametrize("width", [1, 3])
def test_searches_and_constraints(pair: Pair, width: int, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    if width > 1 and "repetition_penalty" in ours:
        pytest.skip("transformers penalises log-probabilities in beam search; here, as in CTranslate2, logits are")
    search: Search = BeamSearch(width=width) if width > 1 else GreedySearch()
    beam: dict[str, Any] = {"num_beams": width, "early_stopping": True, "renormalize_logits": True} if width > 1 else {}
    num_compared = 0
    for source, hypotheses in zip(pair.sources, decode(pair.ours, pair.sources, search=search, **ours), strict=True):
        if width > 1 and hypotheses[0].finish_reason is FinishReason.LENGTH:
            continue
        their = generate(pair, source, **theirs, **beam)
        assert hypotheses[0].ids == plain(their.sequences[0], ours.get("end_ids", frozenset()))
        num_compared += 1
    assert num_compared


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("early_stopping", [True, False])
def test_beams_and_their_scores(pair: Pair, width: int, length_penalty: float, early_stopping: bool) -> None:
    search = BeamSearch(width=width, num_hypotheses=width, length_penalty=length_penalty, early_stopping=early_stopping)
    num_compared = 0
    for source, hypotheses in zip(pair.sources, decode(pair.ours, pair.sources, search=search), strict=True):
        if any(h.finish_reason is FinishReason.LENGTH for h in hypotheses):
            continue  # at the length limit transformers drops live hypotheses once others have ended
        their = generate(
            pair, source, num_beams=width, num_return_sequences=width, length_penalty=length_penalty,
            early_stopping=True if early_stopping else "never",
        )  # fmt: skip
        assert [h.ids for h in hypotheses] == [plain(ids) for ids in their.sequences]
        np.testing.assert_allclose([h.score for h in hypotheses], their.sequences_scores, atol=2e-5)
        num_compared += 1
    assert num_compared


def test_token_log_probabilities(pair: Pair) -> None:
    for source, [hypothesis] in zip(pair.sources, decode(pair.ours, pair.sources, log_probs=True), strict=True):
        logits = torch.stack(generate(pair, source).logits)[:, 0]
        tokens = [*hypothesis.ids, END][: len(logits)]
        expected = torch.log_softmax(logits, -1)[range(len(tokens)), tokens]
        np.testing.assert_allclose(hypothesis.token_log_probs, expected, atol=2e-5)
        assert hypothesis.score == pytest.approx(sum(hypothesis.token_log_probs) / len(tokens))


def test_scores_of_given_targets(pair: Pair) -> None:
    targets = [(5, 6, 7), (30,), (9, 9, 9, 9, 9, 9)]
    for source, target in itertools.product(pair.sources[:4], targets):
        [[scored]] = decode(
            pair.ours, [source], search=Scoring(), target_prefix=target, max_target_tokens=20, log_probs=True
        )
        labels = torch.tensor([[*target, END]])
        with torch.inference_mode():
            logits = pair.theirs(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[START, *target]])
            ).logits
        expected = torch.log_softmax(logits, -1).gather(2, labels[..., None])[0, :, 0]
        np.testing.assert_allclose(scored.token_log_probs, expected, atol=2e-5)


def test_attention_weights(pair: Pair) -> None:
    for source, [hypothesis] in zip(pair.sources, decode(pair.ours, pair.sources, alignment=True), strict=True):
        if not hypothesis.ids:
            continue
        decoder_ids = torch.tensor([[START, *hypothesis.ids[:-1]]])
        with torch.inference_mode():
            pair.theirs.set_attn_implementation("eager")
            out = pair.theirs(input_ids=torch.tensor([source]), decoder_input_ids=decoder_ids, output_attentions=True)
        assert hypothesis.attention is not None
        np.testing.assert_allclose(hypothesis.attention, out.cross_attentions[0][0].mean(0), atol=2e-5)


def test_alternatives_are_the_best_first_tokens_continued_greedily(pair: Pair) -> None:
    prefix = (20, 21)
    found = decode(pair.ours, pair.sources, search=Alternatives(count=5), target_prefix=prefix)
    for source, hypotheses in zip(pair.sources, found, strict=True):
        logits = generate(pair, source, prefix=prefix).logits[0][0]
        best = torch.log_softmax(logits, -1).topk(5)
        expected = [
            prefix if token == END else plain(generate(pair, source, prefix=(*prefix, token)).sequences[0])
            for token in best.indices.tolist()
        ]
        assert [h.ids for h in hypotheses] == expected
        np.testing.assert_allclose([h.token_log_probs[0] for h in hypotheses], best.values, atol=2e-5)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("coverage_penalty", [0.0, 0.5])
def test_a_beam_wide_enough_finds_the_best_of_all_outputs(
    length_penalty: float, coverage_penalty: float, tmp_path: Path
) -> None:
    """Over 7 tokens and 3 positions: every output is scored on its own, and the best ones are compared."""
    pair = random_pair("pre", 7, tmp_path)
    longest, width = 3, 7**2
    for source in pair.sources[:3]:
        scored = []
        for length in range(longest + 1):
            for ids in itertools.product([i for i in range(7) if i != END], repeat=length):
                [[h]] = decode(
                    pair.ours, [source], search=Scoring(), target_prefix=ids, max_target_tokens=20, alignment=True
                )
                # At the longest length there is no room for the end token.
                log_probs = h.token_log_probs[:-1] if length == longest else h.token_log_probs
                score = sum(log_probs) / len(log_probs) ** length_penalty
                attention = h.attention if h.attention is not None else np.zeros((0, len(source)))
                if coverage_penalty:
                    received = np.clip(attention.sum(0, dtype=np.float64), 1e-9, 1.0)
                    score += coverage_penalty * float(np.log(received).sum()) if length else 0.0
                scored.append((score, ids))
        scored.sort(reverse=True)
        search = BeamSearch(
            width=min(width, 48), num_hypotheses=5, length_penalty=length_penalty, coverage_penalty=coverage_penalty,
            patience=100.0,
        )  # fmt: skip
        [found] = decode(pair.ours, [source], search=search, max_target_tokens=longest)
        assert [h.ids for h in found] == [ids for _, ids in scored[:5]]
        np.testing.assert_allclose([h.score for h in found], [score for score, _ in scored[:5]], atol=1e-5)


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(0, 1.0, 1.0), (5, 1.0, 1.0), (0, 0.6, 1.0), (8, 0.7, 2.0), (0, 0.2, 0.5)]
)
def test_samples_have_the_distribution_that_transformers_would_draw_from(
    top_k: int, top_p: float, temperature: float
) -> None:
    logits = np.random.default_rng(5).normal(size=30).astype(np.float32) * 2
    warped = torch.from_numpy(logits)[None] / temperature
    if top_k:
        warped = transformers.TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = transformers.TopPLogitsWarper(top_p)(None, warped)
    expected = torch.softmax(warped[0].double(), -1).numpy()
    count = 20_000
    drawn = np.zeros(30)
    for seed in range(count):
        search = Sampling(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
        row = Row(sequence=make_sequence(0, [4], search=search), ids=[5], branch=0)
        found = draw(row, logits)
        drawn[found.ids[0]] += 1
    assert set(np.flatnonzero(drawn)) <= set(np.flatnonzero(expected))
    possible = expected > 0
    chi_square = ((drawn - count * expected)[possible] ** 2 / (count * expected[possible])).sum()
    # 99.99 % of a chi-square distribution lies below (Wilson and Hilferty's approximation); the seeds are fixed.
    freedom = max(possible.sum() - 1, 1)
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def test_a_samples_log_probability_is_the_models_own() -> None:
    logits = np.random.default_rng(6).normal(size=30).astype(np.float32)
    row = Row(sequence=make_sequence(0, [4], search=Sampling(seed=1, temperature=3.0, top_k=4)), ids=[5])
    found = draw(row, logits)
    assert found.log_probs[0] == pytest.approx(log_softmax(logits)[found.ids[0]])
