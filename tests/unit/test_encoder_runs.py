"""Which newcomers are encoded together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dragoman_server.engine.model_runner import of_similar_length
from tests.doubles import make_sequence


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 300))
def test_a_run_is_bounded_and_nobody_is_left_out(lengths: list[int], max_tokens: int) -> None:
    sequences = [make_sequence(i, [5] * length, 10) for i, length in enumerate(lengths)]
    groups = list(of_similar_length(sequences, max_tokens))
    assert sorted(s.sequence_id for group in groups for s in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(len(s.source_ids) for s in group)
        assert len(group) == 1 or len(group) * longest <= max_tokens
        assert longest <= 1.25 * min(len(s.source_ids) for s in group) + 2
