"""How fast a model is going, measured as it goes; what a deadline is judged by."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from dragoman_server.engine.request import FinishReason, Sequence, StepOutput

_RECENT = 0.1
"""Weight of the newest observation in a running mean."""
_OPTIMISM = 0.5
"""Only what would miss its deadline even if everything went twice as fast is refused."""


@dataclass(slots=True)
class Pace:
    """Running means of a model's speed, fed by its engines."""

    step_s: float = 0.0
    """Of a decode step."""
    encode_token_s: float = 0.0
    """Encoder time per source token."""
    target_ratio: float = 1.0
    """Target tokens per source token."""

    def observe(self, output: StepOutput) -> None:
        """Learn from a step."""
        if output.num_rows:
            self.step_s = _mean(self.step_s, output.decode_s)
        if output.num_source_tokens:
            self.encode_token_s = _mean(self.encode_token_s, output.encode_s / output.num_source_tokens)
        for sequence in output.finished:
            if sequence.finish_reason is FinishReason.EOS:
                ratio = len(sequence.output_ids) / len(sequence.source_ids)
                self.target_ratio = _mean(self.target_ratio, ratio)

    def least_seconds(self, source_lengths: Seq[int]) -> float:
        """The least time that sequences decoded side by side will need; 0 before anything has been observed."""
        longest = max(source_lengths)
        return _OPTIMISM * (self.encode_token_s * longest + self.expected_tokens(longest) * self.step_s)

    def expected_tokens(self, source_length: int) -> float:
        """How long a translation will probably be."""
        return self.target_ratio * source_length

    def saved_tokens(self, sequence: Sequence) -> float:
        """Target tokens that need not be decoded because a sequence was dropped; an estimate."""
        limit = min(self.expected_tokens(len(sequence.source_ids)), sequence.options.max_target_tokens)
        return max(0.0, limit - sequence.num_steps)


def _mean(old: float, new: float) -> float:
    return new if not old else old + _RECENT * (new - old)
