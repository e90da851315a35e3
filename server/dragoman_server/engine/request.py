"""What the engine works on: sequences, how to decode them, their rows and their results."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.float32]


class FinishReason(enum.Enum):
    """Why a hypothesis, and with it its sequence, ended."""

    EOS = "eos"
    """The model produced its end token."""
    STOP = "stop"
    """It produced one of the request's own end tokens."""
    LENGTH = "length"
    """It reached its longest allowed output."""
    CANCELLED = "cancelled"
    """Its caller went away."""
    DEADLINE = "deadline"
    """Its caller's deadline passed."""
    SHED = "shed"
    """It gave its place in a full line to a caller that had less in it."""
    ERROR = "error"
    """The step that it took part in failed."""


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life. It moves down this list; only bulk work that is preempted moves up again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Priority(enum.IntEnum):
    """Who goes first."""

    INTERACTIVE = 0
    """Somebody waits for it."""
    BULK = 1
    """Uses what interactive work leaves idle, and gives it back at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedySearch:
    """The most probable token at every step."""

    @property
    def max_rows(self) -> int:
        """Rows it needs at most."""
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """The best of several hypotheses; a hypothesis scores (sum of log-probabilities) / length ** length_penalty.

    The length counts the token that ended it. On top comes coverage_penalty * sum over source tokens of
    log(min(attention received, 1)) (Wu et al. 2016, section 7).
    """

    width: int
    """Hypotheses that live side by side; 1 is greedy search with scores."""
    num_hypotheses: int = 1
    """How many to return, best first; at most `width`."""
    length_penalty: float = 1.0
    """0 does not normalise; larger values favour longer outputs."""
    coverage_penalty: float = 0.0
    """0 disables it."""
    patience: float = 1.0
    """Search ends when width * patience hypotheses have ended (Kasai et al. 2022)."""
    early_stopping: bool = True
    """If False, search goes on past that until no live hypothesis can still reach the results."""

    @property
    def max_rows(self) -> int:
        """Rows it needs at most."""
        return self.width

    @property
    def num_wanted(self) -> int:
        """Ended hypotheses after which search may end."""
        return max(self.num_hypotheses, round(self.width * self.patience))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Tokens drawn at random. Equal seeds give equal texts, whatever else is being decoded."""

    seed: int
    temperature: float = 1.0
    """Logits are divided by it; towards 0 it is greedy, 1 is the model's own distribution."""
    top_k: int = 0
    """Draw among this many most probable tokens; 0 disables it."""
    top_p: float = 1.0
    """Draw among the fewest most probable tokens that together have this probability; 1 disables it."""
    num_hypotheses: int = 1
    """Independent draws of the whole output."""

    @property
    def max_rows(self) -> int:
        """Rows it needs at most."""
        return self.num_hypotheses


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """The most probable tokens at the first free position, each continued greedily."""

    count: int
    """At most this many."""
    min_probability: float = 0.0
    """Leaves out tokens less probable than this; the most probable one always stays."""

    @property
    def max_rows(self) -> int:
        """Rows it needs at most."""
        return self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """No search: the log-probabilities of the given target and of the end token after it."""

    @property
    def max_rows(self) -> int:
        """Rows it needs at most."""
        return 1


Search = GreedySearch | BeamSearch | Sampling | Alternatives | Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """How to decode one sequence."""

    max_target_tokens: int
    """Most tokens to produce, prefix included, end token not; at least 1."""
    min_target_tokens: int = 0
    """The end token is not allowed before this many; 0 disables it."""
    search: Search = field(default_factory=GreedySearch)
    target_prefix: tuple[int, ...] = ()
    """The output starts with it; for `Scoring`, all of the target."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the output besides the model's own; they are not part of it."""
    suppressed: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens produced before (Keskar et al. 2019); 1 disables it."""
    no_repeat_ngram_size: int = 0
    """No sequence of this many tokens appears twice; 0 disables it."""
    log_probs: bool = False
    """Whether token log-probabilities and scores are wanted; beam search and scoring have them in any case."""
    alignment: bool = False
    """Whether each output token's attention over the source is wanted."""

    @property
    def edits_logits(self) -> bool:
        """Whether logits must be changed before a token is chosen."""
        return bool(
            self.min_target_tokens or self.suppressed or self.no_repeat_ngram_size or self.repetition_penalty != 1.0
        )

    @property
    def is_plain(self) -> bool:
        """Whether the most probable token is all that each step needs."""
        return isinstance(self.search, GreedySearch) and not (
            self.log_probs or self.alignment or self.target_prefix or self.edits_logits
        )

    @property
    def needs_attention(self) -> bool:
        """Whether attention weights have to be computed."""
        return self.alignment or (isinstance(self.search, BeamSearch) and self.search.coverage_penalty != 0.0)


@dataclass(slots=True, kw_only=True)
class SequenceTimes:
    """Moments in a sequence's life, in seconds of `time.monotonic`; 0 while they have not come."""

    arrived: float
    scheduled: float = 0.0
    """Its encoding began."""
    encoded: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A finished output."""

    ids: tuple[int, ...]
    """Prefix included, end token not."""
    finish_reason: FinishReason
    score: float
    """What hypotheses are ranked by; NaN if log-probabilities were not wanted."""
    log_prob: float
    """Sum over the tokens after the prefix and the one that ended it; NaN likewise."""
    token_log_probs: tuple[float, ...]
    """Of each token after the prefix and of the one that ended it; empty if not wanted."""
    attention: Weights | None
    """[len(ids), src_len], of each token over the source; None if not wanted."""


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """An output being decoded: one row of the running batch."""

    sequence: Sequence
    slot: int = -1
    """Its place in the caches."""
    ids: list[int] = field(default_factory=list)
    log_prob: float = 0.0
    token_log_probs: list[float] = field(default_factory=list)
    attention: list[Weights] = field(default_factory=list)
    """Of each produced token, [src_len]."""
    branch: int = 0
    """Which of a sampling's independent draws it is."""

    @property
    def forced_id(self) -> int | None:
        """The token that the prefix demands next."""
        prefix = self.sequence.options.target_prefix
        return prefix[len(self.ids)] if len(self.ids) < len(prefix) else None

    def fork(self) -> Row:
        """A copy that can go its own way; it has no slot yet."""
        return Row(
            sequence=self.sequence,
            ids=self.ids.copy(),
            log_prob=self.log_prob,
            token_log_probs=self.token_log_probs.copy(),
            attention=self.attention.copy(),
            branch=self.branch,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One source being decoded."""

    sequence_id: int
    source_ids: Seq[int]
    """As the encoder wants them: prefix, pieces, end token."""
    options: DecodingOptions
    times: SequenceTimes
    priority: Priority = Priority.INTERACTIVE
    deadline: float | None = None
    """Moment of `time.monotonic` after which nobody waits for the result; None is never."""
    caller: str = ""
    """Who asked for it; callers take turns."""
    turn: float = 0.0
    """Its place in line, in virtual time."""
    error: Exception | None = None
    """What failed, if its reason is ERROR."""
    streams: bool = False
    """Whether somebody wants to hear of tokens as they become certain."""
    status: SequenceStatus = SequenceStatus.WAITING
    rows: list[Row] = field(default_factory=list)
    """Its live outputs while it runs, best first."""
    hypotheses: list[Hypothesis] = field(default_factory=list)
    """Finished outputs; best first once the sequence has finished."""
    finish_reason: FinishReason | None = None
    num_certain: int = 0
    """Output tokens that have been reported as certain."""
    num_steps: int = 0
    """Decode steps that it took part in, over all its runs."""
    is_plain: bool = False
    """`options.is_plain`, which is asked at every step."""

    def __post_init__(self) -> None:
        self.is_plain = self.options.is_plain

    @property
    def max_rows(self) -> int:
        """Rows it may come to occupy; reserved while it runs."""
        return self.options.search.max_rows

    @property
    def output_ids(self) -> list[int]:
        """The best output so far."""
        if self.hypotheses:
            return list(self.hypotheses[0].ids)
        return self.rows[0].ids if self.rows else []

    def certain_ids(self) -> Seq[int]:
        """The output tokens that no later step can change: what all outputs have in common, ended ones included."""
        outputs: list[Seq[int]] = [row.ids for row in self.rows]
        if self.status is SequenceStatus.FINISHED:
            return self.output_ids
        outputs += [hypothesis.ids for hypothesis in self.hypotheses]
        first = min(outputs, key=len, default=[])
        for length, token in enumerate(first):
            if any(output[length] != token for output in outputs):
                return first[:length]
        return first

    def finish(self, reason: FinishReason, now: float) -> None:
        """End it."""
        assert self.status is not SequenceStatus.FINISHED
        self.status, self.finish_reason, self.times.finished = SequenceStatus.FINISHED, reason, now

    def restart(self) -> None:
        """Forget all progress and wait again; the result will be the same."""
        assert self.status is SequenceStatus.RUNNING
        self.status = SequenceStatus.WAITING
        self.rows, self.hypotheses = [], []


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does."""

    newcomers: list[Sequence]
    """To be encoded before anything is decoded."""
    rows: list[Row]
    """All rows to decode by one token; row i is in slot i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step did."""

    finished: list[Sequence]
    """Sequences that ended since the last step, by producing their last token or by being dropped."""
    progressed: list[tuple[Sequence, list[int]]]
    """Streaming sequences that go on, and their output tokens that have become certain."""
    num_rows: int
    """Rows decoded."""
    num_encoded: int
    """Newcomers encoded."""
    num_source_tokens: int
    """Their tokens."""
    num_padding_tokens: int
    """Padding encoded with them."""
    num_preempted: int
    """Bulk sequences that had to give their rows back."""
    num_saved_tokens: float
    """Target tokens that need not be decoded because their sequences were dropped; an estimate."""
    encode_s: float
    decode_s: float
