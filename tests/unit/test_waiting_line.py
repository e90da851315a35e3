"""The waiting line: bounds, turns, and who gives way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_server.engine.request import BeamSearch, FinishReason, Priority, Sequence
from dragoman_server.engine.waiting_line import QueueFullError, WaitingLine, cost
from tests.doubles import make_sequence


def serve(line: WaitingLine, count: int = 1) -> list[Sequence]:
    """Take so many, one after the other."""
    remaining = iter(range(count))
    return line.take(lambda _: next(remaining, None) is not None)


def from_caller(caller: str, ids: range, size: int = 10) -> list[Sequence]:
    return [make_sequence(i, [5] * size, caller=caller) for i in ids]


def test_callers_take_turns_and_each_keeps_its_order() -> None:
    line = WaitingLine(100)
    line.add(*from_caller("flood", range(6)))
    line.add(*from_caller("light", range(10, 12)))
    assert [s.sequence_id for s in serve(line, 8)] == [0, 10, 1, 11, 2, 3, 4, 5]


def test_turns_are_by_tokens_not_by_texts() -> None:
    line = WaitingLine(100)
    line.add(*from_caller("long", range(3), size=30))
    line.add(*from_caller("short", range(10, 19), size=10))
    order = ["long" if s.sequence_id < 10 else "short" for s in serve(line, 12)]
    assert order.count("long") == 3
    assert order[:8].count("short") == 6, "three short texts for every long one"


def test_a_newcomer_does_not_wait_for_what_others_have_piled_up() -> None:
    line = WaitingLine(1000)
    line.add(*from_caller("flood", range(500)))
    serve(line, 100)
    line.add(*from_caller("light", range(1000, 1001)))
    assert 1000 in [s.sequence_id for s in serve(line, 2)]


def test_interactive_work_goes_first_whatever_the_turns() -> None:
    line = WaitingLine(100)
    line.add(make_sequence(1, [5], priority=Priority.BULK))
    line.add(make_sequence(2, [5] * 50))
    assert [s.sequence_id for s in serve(line, 2)] == [2, 1]


def test_a_full_line_takes_the_places_of_whoever_has_most() -> None:
    line = WaitingLine(5)
    line.add(*from_caller("flood", range(5)))
    line.add(*from_caller("light", range(10, 12)))
    assert [(s.sequence_id, reason) for s, reason in line.take_dropped(0)] == [
        (4, FinishReason.SHED),
        (3, FinishReason.SHED),
    ]
    with pytest.raises(QueueFullError, match="5 sequences are waiting, 1 more exceed 5"):
        line.add(*from_caller("light", range(12, 13)))
    with pytest.raises(QueueFullError):
        line.add(*from_caller("flood", range(20, 21)))
    assert line.num_waiting == 5


@pytest.mark.parametrize(
    ("size", "message", "is_hopeless"),
    [
        (90, "20 tokens are waiting, 90 more exceed 100", False),
        (101, "the call makes 101 tokens, more may not wait than 100", True),
    ],
)
def test_tokens_are_bounded_too(size: int, message: str, is_hopeless: bool) -> None:
    line = WaitingLine(50, max_tokens=100)
    line.add(make_sequence(1, [5] * 10, search=BeamSearch(width=2)))
    with pytest.raises(QueueFullError, match=message) as caught:
        line.add(make_sequence(2, [5] * size))
    assert caught.value.bound == "tokens"
    assert caught.value.is_hopeless is is_hopeless


def test_each_priority_has_a_line_of_its_own() -> None:
    line = WaitingLine(2)
    line.add(make_sequence(1, [5], priority=Priority.BULK), make_sequence(2, [5], priority=Priority.BULK))
    line.add(make_sequence(3, [5]))
    assert line.size(Priority.BULK) == (2, 2)
    assert line.size(Priority.INTERACTIVE) == (1, 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), min_size=1, max_size=40), st.data())
def test_what_a_newcomer_is_told_to_wait_for_is_about_what_is_served_before_it(
    waiting: list[tuple[str, int]], data: st.DataObject
) -> None:
    line = WaitingLine(1000)
    for number, (caller, size) in enumerate(waiting):
        line.add(make_sequence(number, [5] * size, caller=caller))
    size = data.draw(st.integers(1, 30))
    caller = data.draw(st.sampled_from("abcd"))
    told = line.tokens_before(Priority.INTERACTIVE, caller, size)
    line.add(newcomer := make_sequence(999, [5] * size, caller=caller))
    served = serve(line, len(waiting) + 1)
    before = sum(cost(s) for s in served[: served.index(newcomer)])
    slack = 30 * (len({name for name, _ in waiting} | {caller}) + 1)
    assert abs(told - before) <= slack


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 20)), min_size=1, max_size=60))
def test_no_caller_gets_far_ahead_of_another_that_waits(arrivals: list[tuple[str, int]]) -> None:
    """The bound of start-time fair queuing: while two callers wait, their service differs by two texts at most."""
    line = WaitingLine(1000)
    for number, (caller, size) in enumerate(arrivals):
        line.add(make_sequence(number, [5] * size, caller=caller))
    left = {caller: sum(size for name, size in arrivals if name == caller) for caller, _ in arrivals}
    got = dict.fromkeys(left, 0)
    while served := serve(line, 1):
        got[served[0].caller] += cost(served[0])
        unfinished = [got[caller] for caller in left if got[caller] < left[caller]]
        if len(unfinished) > 1:
            assert max(unfinished) - min(unfinished) <= 2 * 20
    assert got == left
