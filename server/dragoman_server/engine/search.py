"""How outputs grow by a token: greedy, beam search, sampling, alternatives, scoring. No tensors but a row's logits."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dragoman_server.engine.model_runner import Candidates
from dragoman_server.engine.request import (
    Alternatives,
    BeamSearch,
    FinishReason,
    GreedySearch,
    Hypothesis,
    Row,
    Sampling,
    Scoring,
    Sequence,
    Weights,
)

Logits = npt.NDArray[np.float32]

_FIRST_NUCLEUS = 64
"""Tokens in which the most probable ones, up to top_p, are looked for first."""
_LEAST_ATTENTION = 1e-9
"""Keeps the logarithm of the coverage penalty finite."""


class Child(NamedTuple):
    """A row, grown by a token."""

    parent: Row
    token: int
    log_prob: float
    """Of the token; NaN if nobody wanted it."""
    branch: int
    """Which of a sampling's independent draws it belongs to."""


class Growth(NamedTuple):
    """What becomes of a sequence in one step."""

    live: list[Child]
    """Outputs that go on, best first."""
    ended: list[Hypothesis]
    """Outputs that ended in this step."""
    is_done: bool
    """Whether the search is over; nothing that is live counts any more."""


_GOES_ON = Growth([], [], is_done=False)


def num_candidates(row: Row, end_ids: Seq[int]) -> int:
    """How many candidates with log-probabilities a row's search wants; 0 if the most probable token will do."""
    options = row.sequence.options
    match options.search:
        case BeamSearch(width=width):
            return width + len(end_ids) + len(options.end_ids)  # `width` of them do not end
        case Alternatives(count=count):
            return count if is_first_choice(row) else 1
        case Scoring():
            return 1
    return 1 if options.log_probs else 0


def edit_logits(row: Row, logits: Logits, end_id: int) -> None:
    """Change a row's logits [vocab_size] as its options demand."""
    options, ids = row.sequence.options, row.ids
    if options.repetition_penalty != 1.0 and ids:
        seen = list(set(ids))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / options.repetition_penalty, values * options.repetition_penalty)
    if options.no_repeat_ngram_size:
        logits[_repeated(ids, options.no_repeat_ngram_size)] = -np.inf
    for sequence in options.suppressed:
        *before, last = sequence
        if not before or ids[-len(before) :] == before:
            logits[last] = -np.inf
    if len(ids) < options.min_target_tokens:
        logits[[end_id, *options.end_ids]] = -np.inf


def _repeated(ids: Seq[int], size: int) -> list[int]:
    """Tokens that would complete an n-gram which is in `ids` already."""
    tail = list(ids[len(ids) - size + 1 :]) if size > 1 else []
    if len(tail) < size - 1:
        return []
    return [ids[i + size - 1] for i in range(len(ids) - size + 1) if list(ids[i : i + size - 1]) == tail]


def grow(sequence: Sequence, candidates: Seq[Candidates], end_id: int) -> Growth:
    """Let a sequence's rows produce their next tokens.

    Args:
        sequence: running.
        candidates: of each of its rows. Without log-probabilities, one token and NaN.
        end_id: the model's end token.
    """
    first, search = sequence.rows[0], sequence.options.search
    if isinstance(search, BeamSearch) and first.forced_id is None:
        return _grow_beam(sequence, search, candidates, end_id)
    return _settle(list(_children(sequence, candidates, end_id)), end_id)


def grow_plain(sequence: Sequence, token: int, end_id: int) -> Growth:
    """What `grow` does, for a sequence that needs nothing but the most probable token; nearly all are of this kind."""
    [row] = sequence.rows
    options = sequence.options
    if token == end_id or token in options.end_ids:
        reason = FinishReason.EOS if token == end_id else FinishReason.STOP
    else:
        row.ids.append(token)
        if len(row.ids) < options.max_target_tokens:
            return _GOES_ON
        reason = FinishReason.LENGTH
    ended = Hypothesis(
        ids=tuple(row.ids),
        finish_reason=reason,
        score=math.nan,
        log_prob=math.nan,
        token_log_probs=(),
        attention=None,
    )
    return Growth([], [ended], is_done=True)


def _children(sequence: Sequence, candidates: Seq[Candidates], end_id: int) -> Iterator[Child]:
    """The next outputs of a search that has no need to compare them."""
    first, search = sequence.rows[0], sequence.options.search
    if (forced := first.forced_id) is not None:
        yield Child(first, forced, candidates[0].asked, 0)
    elif isinstance(search, Scoring):
        yield Child(first, end_id, candidates[0].asked, 0)
    elif isinstance(search, Alternatives | Sampling) and is_first_choice(first):
        least = math.log(search.min_probability) if isinstance(search, Alternatives) and search.min_probability else 0.0
        for branch, (token, log_prob) in enumerate(zip(candidates[0].ids, candidates[0].log_probs, strict=True)):
            if not branch or not least or log_prob >= least:
                yield Child(first, token, log_prob, branch)
    else:
        for row, found in zip(sequence.rows, candidates, strict=True):
            yield Child(row, found.ids[0], found.log_probs[0], row.branch)


def is_first_choice(row: Row) -> bool:
    """Whether a row stands where its prefix ends, so that this step makes its first own token."""
    return len(row.ids) == len(row.sequence.options.target_prefix)


def _settle(children: Seq[Child], end_id: int) -> Growth:
    """Each child goes on or ends on its own."""
    live, ended = [], []
    for child in children:
        reason = end_reason(child, end_id)
        if reason is None:
            live.append(child)
        else:
            ended.append(_end(child, reason))
    return Growth(live, ended, is_done=not live)


def end_reason(child: Child, end_id: int) -> FinishReason | None:
    """Why an output ends with a token; None if it goes on."""
    row = child.parent
    options = row.sequence.options
    if isinstance(options.search, Scoring):
        return None if row.forced_id is not None else FinishReason.EOS
    if child.token == end_id:
        return FinishReason.EOS
    if child.token in options.end_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(row.ids) + 1 >= options.max_target_tokens else None


def _grow_beam(sequence: Sequence, beam: BeamSearch, candidates: Seq[Candidates], end_id: int) -> Growth:
    children = [
        Child(row, token, log_prob, 0)
        for row, found in zip(sequence.rows, candidates, strict=True)
        for token, log_prob in zip(found.ids, found.log_probs, strict=True)
        if log_prob > -math.inf
    ]
    children.sort(key=lambda child: -(child.parent.log_prob + child.log_prob))  # stable: ties keep the parents' order
    live: list[Child] = []
    ended: list[Hypothesis] = []
    at_limit = len(sequence.rows[0].ids) + 1 >= sequence.options.max_target_tokens
    for rank, child in enumerate(children):
        if len(live) == beam.width:
            break
        if child.token == end_id or child.token in sequence.options.end_ids:
            if rank < beam.width:  # an ending that would not have survived as a hypothesis does not count either
                ended.append(_end(child, FinishReason.EOS if child.token == end_id else FinishReason.STOP))
        else:
            live.append(child)
    if at_limit:
        return Growth([], ended + [_end(child, FinishReason.LENGTH) for child in live], is_done=True)
    finished = sequence.hypotheses + ended
    is_done = not live or (
        len(finished) >= beam.num_wanted
        and (beam.early_stopping or not _can_improve(finished, live, beam, sequence.options.max_target_tokens))
    )
    return Growth(live, ended, is_done)


def _can_improve(finished: Seq[Hypothesis], live: Seq[Child], beam: BeamSearch, max_target_tokens: int) -> bool:
    """Whether a live hypothesis can still end among the results, however well it goes on.

    From here on a log-probability can only fall, and the kindest length is the longest or the one it has.
    """
    worst = sorted((h.score for h in finished), reverse=True)[beam.num_hypotheses - 1]
    row = live[0].parent
    done = len(row.ids) + 1 - len(row.sequence.options.target_prefix)
    longest = max_target_tokens - len(row.sequence.options.target_prefix) + 1
    best = max(child.parent.log_prob + child.log_prob for child in live)
    return max(_normalise(best, n, beam.length_penalty) for n in (done + 1, longest)) > worst


def _normalise(log_prob: float, length: int, length_penalty: float) -> float:
    return log_prob / float(max(length, 1) ** length_penalty)


def is_scored(row: Row) -> bool:
    """Whether a row's next token counts in its score: a prefix that the request gave does not."""
    options = row.sequence.options
    return isinstance(options.search, Scoring) or len(row.ids) >= len(options.target_prefix)


def extend(row: Row, child: Child) -> None:
    """Let a row take its child's token."""
    if is_scored(row):
        row.log_prob += child.log_prob
        row.token_log_probs.append(child.log_prob)
    row.ids.append(child.token)
    row.branch = child.branch


def _end(child: Child, reason: FinishReason) -> Hypothesis:
    row = child.parent.fork()
    options = row.sequence.options
    extend(row, child)
    if reason is not FinishReason.LENGTH:
        row.ids.pop()
    attention = np.stack(row.attention[: len(row.ids)]) if row.attention and row.ids else None
    is_known = not math.isnan(row.log_prob)
    return Hypothesis(
        ids=tuple(row.ids),
        finish_reason=reason,
        score=_score(row, attention),
        log_prob=row.log_prob,
        token_log_probs=tuple(row.token_log_probs) if is_known else (),
        attention=attention if options.alignment else None,
    )


def _score(row: Row, attention: Weights | None) -> float:
    search, length = row.sequence.options.search, len(row.token_log_probs)
    if not isinstance(search, BeamSearch):
        return _normalise(row.log_prob, length, 1.0)
    score = _normalise(row.log_prob, length, search.length_penalty)
    if search.coverage_penalty and attention is not None:
        received = np.clip(attention.sum(0, dtype=np.float64), _LEAST_ATTENTION, 1.0)
        score += search.coverage_penalty * float(np.log(received).sum())
    return score


def ranked(sequence: Sequence) -> list[Hypothesis]:
    """A finished sequence's results, best first."""
    found = sequence.hypotheses
    match sequence.options.search:
        case BeamSearch(num_hypotheses=count):
            return sorted(found, key=lambda h: -h.score)[:count]
        case Alternatives():
            return sorted(found, key=lambda h: -h.token_log_probs[0])
        case GreedySearch() | Scoring() | Sampling():
            return sorted(found, key=lambda h: -h.score) if len(found) > 1 else found


def draw(row: Row, logits: Logits) -> Candidates:
    """Draw the next token of a row that samples, or one for each of its draws where they part.

    The random number depends on seed, draw and position alone: not on when, or with whom, the row is decoded.

    Args:
        row: to be grown.
        logits: its own, [vocab_size], edited already.

    Returns:
        Tokens, and their log-probabilities before temperature, top_k and top_p.
    """
    options = row.sequence.options.search
    assert isinstance(options, Sampling)
    branches = range(options.num_hypotheses) if is_first_choice(row) else [row.branch]
    found, cumulated = _distribution(logits, options)
    last = int(np.searchsorted(cumulated, cumulated[-1]))  # behind it is nothing that has any weight
    tokens = []
    for branch in branches:
        number = random.Random(f"{options.seed}/{branch}/{len(row.ids)}").random()  # noqa: S311 - not for secrets
        place = min(int(np.searchsorted(cumulated, number * cumulated[-1], side="right")), last)
        tokens.append(place if found is None else int(found[place]))
    wide = logits.astype(np.float64)
    largest = wide.max()
    log_probs = wide[tokens] - largest - np.log(np.exp(wide - largest).sum())
    return Candidates(tokens, log_probs.tolist(), math.nan)


def _distribution(logits: Logits, options: Sampling) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float64]]:
    """Tokens that may be drawn, None for all by their ids, and their cumulated weights."""
    scaled = logits.astype(np.float64) / options.temperature
    weights = np.exp(scaled - scaled.max())
    if not options.top_k and options.top_p >= 1.0:
        return None, weights.cumsum()
    if options.top_k:
        found = _largest(weights, options.top_k)
        total = weights[found].sum()
    else:
        total, count = weights.sum(), _FIRST_NUCLEUS
        found = _largest(weights, count)
        while weights[found].sum() < options.top_p * total and count < len(weights):
            count *= 8
            found = _largest(weights, count)
    cumulated = weights[found].cumsum()
    # The first tokens whose sum reaches top_p, the one that reaches it included.
    count = int(np.searchsorted(cumulated, options.top_p * total)) + 1
    return found[:count], cumulated[:count]


def _largest(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Where the largest weights are, in their order, of equal ones the first; most of the others are never sorted."""
    if count >= len(weights):
        return np.argsort(-weights, kind="stable")
    least = np.partition(weights, -count)[-count]
    found = np.flatnonzero(weights >= least)
    return found[np.argsort(-weights[found], kind="stable")][:count]
