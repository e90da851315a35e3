"""How fast a model is going, measured as it goes; what a deadline is judged by."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from dragoman_server.engine.request import FinishReason, Sequence, StepOutput

_RECENT = 0.1
"""Weight of the newest observation in a running mean."""
_OPTIMISM = 0.5
"""Only what would miss its deadline even if its translation came out half as long as usual is refused."""


@dataclass(slots=True)
class Pace:
    """What is known of a model's speed.

    For times, the shortest that were seen: they say what is possible on this machine whatever the load was, so that a
    busy hour does not make an idle server refuse work.
    """

    step_s: float = math.inf
    """Of a decode step."""
    encode_token_s: float = math.inf
    """Encoder time per source token."""
    encode_tokens_per_s: float = math.inf
    """Source tokens, padding included, that the encoder does, a running mean."""
    target_ratio: float = 1.0
    """Decode steps per source token, a running mean."""
    tokens_per_s: float = math.inf
    """Target tokens of all rows per second and engine while sequences had to wait, a running mean."""

    def observe(self, output: StepOutput, *, is_saturated: bool = False) -> None:
        """Learn from a step; `is_saturated` says whether others were waiting."""
        if is_saturated and output.num_rows:
            rate = output.num_rows / (output.encode_s + output.decode_s)
            self.tokens_per_s = _mean(self.tokens_per_s, rate)
        if output.num_source_tokens and output.encode_s:
            rate = (output.num_source_tokens + output.num_padding_tokens) / output.encode_s
            self.encode_tokens_per_s = _mean(self.encode_tokens_per_s, rate)
        if output.num_rows:
            self.step_s = min(self.step_s, output.decode_s)
        if output.num_source_tokens:
            self.encode_token_s = min(self.encode_token_s, output.encode_s / output.num_source_tokens)
        for sequence in output.finished:
            if sequence.finish_reason in {FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH}:
                ratio = sequence.num_steps / len(sequence.source_ids)
                self.target_ratio += _RECENT * (ratio - self.target_ratio)

    def least_seconds(self, source_lengths: Seq[int]) -> float:
        """The least time that sequences decoded side by side will need; 0 before anything has been observed."""
        if math.isinf(self.step_s):
            return 0.0
        longest = max(source_lengths)
        return self.encode_token_s * longest + _OPTIMISM * self.expected_tokens(longest) * self.step_s

    def wait_seconds(self, num_source_tokens: float, num_engines: int) -> float:
        """How long it will take to serve what waits; 0 before anything had to.

        Args:
            num_source_tokens: that are served first, each row of a search counted.
            num_engines: that serve them.
        """
        return self.expected_tokens(num_source_tokens) / (self.tokens_per_s * num_engines)

    def expected_tokens(self, source_length: float) -> float:
        """How long a translation will probably be."""
        return self.target_ratio * source_length

    def saved_tokens(self, sequence: Sequence) -> float:
        """Target tokens that need not be decoded because a sequence was dropped; an estimate."""
        limit = min(self.expected_tokens(len(sequence.source_ids)), sequence.options.max_target_tokens)
        return max(0.0, limit - sequence.num_steps)


def _mean(mean: float, observed: float) -> float:
    """A running mean; infinite before the first observation."""
    return observed if math.isinf(mean) else mean + _RECENT * (observed - mean)
