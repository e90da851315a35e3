"""The chaos of tests/chaos.py, in short; `make soak` runs it at length."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import Chaos, problems
from tests.reversal import sentences


async def test_every_request_is_answered_once_or_may_be_tried_again(reversal_models: Path) -> None:
    chaos = Chaos(reversal_models, sentences(20, seed=9, shortest=1, longest=12), num_requests=3000)
    page = await chaos.run()
    assert problems(chaos, page) == []
    assert chaos.outcomes["answered"] > 0.6 * chaos.num_requests
    assert chaos.num_kills >= 1
    assert chaos.num_swaps >= 1
