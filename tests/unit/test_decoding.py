"""Beam search against all possible outputs, on a vocabulary small enough to list them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from dragoman_export.batching import Ids
from dragoman_export.decoding import LengthLimit, Logits, Rows, beam_search, greedy_search
from dragoman_export.tokenization import END_ID, START_ID

VOCAB_SIZE, LENGTH = 7, 4
State = list[tuple[int, tuple[int, ...] | None]]
"""Per row its source, and what was decoded; None before the first step."""

TOKENS = [token for token in range(VOCAB_SIZE) if token != END_ID]


class TableModel:
    """Logits are a random function of the source and everything decoded so far."""

    def logits(self, source: int, prefix: tuple[int, ...]) -> Logits:
        return np.random.default_rng([source, *prefix]).normal(size=VOCAB_SIZE).astype(np.float32) * 2

    def start(self, sources: Sequence[Ids]) -> State:
        return [(int(source[0]), None) for source in sources]

    def step(self, state: State, last_ids: Rows) -> tuple[Logits, State]:
        grown: State = []
        for (source, prefix), token in zip(state, last_ids, strict=True):
            assert prefix is not None or token == START_ID
            grown.append((source, () if prefix is None else (*prefix, int(token))))
        return np.stack([self.logits(source, prefix or ()) for source, prefix in grown]), grown

    def select(self, state: State, rows: Rows) -> State:
        return [state[row] for row in rows]


def log_probability(source: int, ids: tuple[int, ...], ended: bool) -> float:
    total = 0.0
    for i, token in enumerate([*ids, END_ID] if ended else ids):
        row = TableModel().logits(source, ids[:i]).astype(np.float64)
        total += float(row[token] - np.log(np.exp(row).sum()))
    return total


def best_output(source: int, length_penalty: float) -> list[int]:
    """Of all outputs of at most LENGTH tokens; one at the limit need not have ended."""
    scored = []
    for length in range(LENGTH + 1):
        for ids in itertools.product(TOKENS, repeat=length):
            ended = length < LENGTH
            steps = length + ended
            scored.append((log_probability(source, ids, ended) / max(steps, 1) ** length_penalty, list(ids)))
    return max(scored)[1]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_beam_as_wide_as_the_search_space_finds_the_best_output(length_penalty: float) -> None:
    limit = LengthLimit(factor=0, extra=LENGTH, maximum=LENGTH)
    sources = [np.array([seed], np.int32) for seed in range(100, 104)]
    found = beam_search(TableModel(), sources, width=len(TOKENS) ** LENGTH, length_penalty=length_penalty, limit=limit)
    assert found == [best_output(int(source[0]), length_penalty) for source in sources]


def test_a_beam_of_one_is_greedy() -> None:
    sources = [np.array([seed], np.int32) for seed in range(50)]
    limit = LengthLimit(factor=0, extra=12, maximum=12)
    assert beam_search(TableModel(), sources, width=1, limit=limit) == greedy_search(TableModel(), sources, limit)
