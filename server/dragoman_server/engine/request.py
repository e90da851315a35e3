"""What the engine works on: sequences, their options and how they end."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    EOS = "eos"
    """The model produced its end token."""
    LENGTH = "length"
    """It reached its longest allowed output."""
    CANCELLED = "cancelled"
    """Its caller went away."""
    DEADLINE = "deadline"
    """Its caller's deadline passed."""


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life; it only ever moves down this list."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """How to decode one sequence."""

    max_target_tokens: int
    """Most tokens to produce, the end token not counted; at least 1."""


@dataclass(slots=True, kw_only=True)
class SequenceTimes:
    """Moments in a sequence's life, in seconds of `time.monotonic`; 0 while they have not come."""

    arrived: float
    scheduled: float = 0.0
    """Its encoding began."""
    encoded: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One source being decoded: a row of the running batch once it is scheduled."""

    sequence_id: int
    source_ids: list[int]
    """As the encoder wants them: prefix, pieces, end token."""
    options: DecodingOptions
    times: SequenceTimes
    deadline: float | None = None
    """Moment of `time.monotonic` after which nobody waits for the result; None is never."""
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    """Its row in the caches while it is running."""
    output_ids: list[int] = field(default_factory=list)
    """Tokens produced so far, the end token not among them."""
    finish_reason: FinishReason | None = None

    @property
    def past_len(self) -> int:
        """Target positions in its cache when the next step begins: the start token and all outputs but the last."""
        return len(self.output_ids)

    def last_id(self, start_id: int) -> int:
        """What the decoder reads next."""
        return self.output_ids[-1] if self.output_ids else start_id

    def accept(self, token: int, end_id: int, now: float) -> None:
        """Take the token that a step produced."""
        assert self.status is SequenceStatus.RUNNING
        if not self.times.first_token:
            self.times.first_token = now
        if token == end_id:
            self.finish(FinishReason.EOS, now)
            return
        self.output_ids.append(token)
        if len(self.output_ids) >= self.options.max_target_tokens:
            self.finish(FinishReason.LENGTH, now)

    def finish(self, reason: FinishReason, now: float) -> None:
        """End it."""
        assert self.status is not SequenceStatus.FINISHED
        self.status, self.finish_reason, self.times.finished = SequenceStatus.FINISHED, reason, now


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does."""

    newcomers: list[Sequence]
    """To be given slots and encoded; they decode in this step already."""
    rows: list[Sequence]
    """All sequences to decode by one token, newcomers included, in slot order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step did."""

    finished: list[Sequence]
    """Sequences that ended since the last step, by producing their last token or by being dropped."""
    num_rows: int
    """Rows decoded."""
    num_encoded: int
    """Newcomers encoded."""
    encode_s: float
    decode_s: float
