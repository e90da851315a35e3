"""What sampling may draw is what a full sort of the vocabulary says, though none is made."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_server.engine.request import Row, Sampling
from dragoman_server.engine.search import draw
from tests.doubles import make_sequence

LOGITS = st.lists(st.sampled_from([-np.inf, -3.0, -1.0, 0.0, 0.5, 0.5000001, 2.0, 9.0]), min_size=1, max_size=700)


def allowed(logits: npt.NDArray[np.float32], options: Sampling) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Tokens by falling probability and their probabilities, cut as Holtzman et al. (2020, section 3.1) say."""
    scaled = logits.astype(np.float64) / options.temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])[: options.top_k or None]
    weights = np.exp(scaled[order] - scaled[order[0]])
    cumulated = np.cumsum(weights) / weights.sum()
    count = int(np.argmax(cumulated >= options.top_p)) + 1 if options.top_p < 1 else len(order)
    return order[:count], weights[:count] / weights[:count].sum()


def drawn(logits: npt.NDArray[np.float32], options: Sampling, num_draws: int) -> list[int]:
    row = Row(sequence=make_sequence(0, [4], search=options), ids=[5])
    tokens = []
    for branch in range(num_draws):
        row.branch = branch
        tokens += draw(row, logits).ids
    return tokens


@given(
    values=LOGITS.filter(lambda values: max(values) > -np.inf),
    top_k=st.sampled_from([0, 0, 1, 3, 80]),
    top_p=st.sampled_from([1.0, 0.999, 0.7, 0.1]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    seed=st.integers(0, 99),
)
def test_only_tokens_that_may_be_drawn_are(
    values: list[float], top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    logits = np.array(values, np.float32)
    options = Sampling(seed=seed, top_k=top_k, top_p=top_p, temperature=temperature)
    tokens, probabilities = allowed(logits, options)
    assert set(drawn(logits, options, 20)) <= {token for token, p in zip(tokens, probabilities, strict=True) if p > 0}


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 7}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.9}, {"temperature": 2.0}]
)
def test_tokens_come_as_often_as_they_are_probable(options: dict[str, float]) -> None:
    logits = np.random.default_rng(0).normal(scale=2, size=500).astype(np.float32)
    logits[[3, 400]] = logits.max() + 1  # two that are equally probable
    sampling = Sampling(seed=0, **options)  # type: ignore[arg-type]
    counts = np.bincount(drawn(logits, sampling, 5000), minlength=500) / 5000
    tokens, probabilities = allowed(logits, sampling)
    assert counts[tokens] == pytest.approx(probabilities, abs=0.03)


def test_the_largest_random_number_draws_a_token_that_has_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random.Random, "random", lambda _self: 1.0 - 2**-53)
    logits = np.array([1.0, 0.1, 0.7, -np.inf, -np.inf], np.float32)
    assert drawn(logits, Sampling(seed=0), 1) == [2]
    assert drawn(logits, Sampling(seed=0, top_k=5), 1) == [1]
