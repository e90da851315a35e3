"""What a deadline is judged by."""

from __future__ import annotations

import dataclasses

from dragoman_server.engine.pace import Pace
from dragoman_server.engine.request import StepOutput

STEP = StepOutput(
    finished=[],
    progressed=[],
    num_rows=1,
    num_encoded=1,
    num_source_tokens=10,
    num_padding_tokens=0,
    num_preempted=0,
    num_saved_tokens=0.0,
    encode_s=0.02,
    decode_s=0.001,
)


def test_nothing_is_refused_before_anything_has_been_seen() -> None:
    assert Pace().least_seconds([1000]) == 0.0


def test_a_long_source_needs_longer() -> None:
    pace = Pace()
    pace.observe(STEP)
    assert pace.least_seconds([100]) == 100 * 0.002 + 0.5 * 100 * 0.001
    assert pace.least_seconds([3, 100]) == pace.least_seconds([100])


def test_a_busy_hour_does_not_make_an_idle_server_refuse() -> None:
    pace = Pace()
    pace.observe(STEP)
    before = pace.least_seconds([20])
    for _ in range(100):
        pace.observe(dataclasses.replace(STEP, num_rows=64, decode_s=1.0, encode_s=5.0))
    assert pace.least_seconds([20]) == before
