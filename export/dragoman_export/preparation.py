"""From corpora to training examples: clean, train the tokenizer, encode, and count what was dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor

from dragoman_export.batching import Example, WeightedExamples
from dragoman_export.corpus import (
    CleaningLimits,
    CleaningReport,
    Corpus,
    Direction,
    Pair,
    Seen,
    as_target,
    clean,
)
from dragoman_export.errors import CorpusError
from dragoman_export.tokenization import END_ID, TokenizerKind, language_tag, train_tokenizer


def clean_corpora(corpora: Sequence[Corpus]) -> tuple[list[list[Pair]], list[CleaningReport]]:
    """Clean every corpus; a pair that an earlier corpus had is a duplicate in a later one."""
    seen: Seen = set()
    reports = [CleaningReport() for _ in corpora]
    cleaned = [list(clean(corpus, report, seen)) for corpus, report in zip(corpora, reports, strict=True)]
    return cleaned, reports


def train_shared_tokenizer(
    cleaned: Sequence[Sequence[Pair]],
    directions: Sequence[Direction],
    path: Path,
    vocab_size: int,
    kind: TokenizerKind,
) -> None:
    """Train one tokenizer on both sides of all corpora."""
    languages = {language for direction in directions for language in direction}
    train_tokenizer(_sides(cleaned), path, vocab_size, kind, languages)


def _sides(cleaned: Sequence[Sequence[Pair]]) -> Iterator[str]:
    for pairs in cleaned:
        for pair in pairs:
            yield from (pair.source, as_target(pair.target), as_target(pair.source))


def encode_corpora(
    corpora: Sequence[Corpus],
    cleaned: Sequence[Sequence[Pair]],
    reports: Sequence[CleaningReport],
    directions: Sequence[Direction],
    tokenizer: SentencePieceProcessor,
    limits: CleaningLimits,
) -> list[WeightedExamples]:
    """Token ids of every example in every direction its corpus is used for.

    Raises:
        CorpusError: nothing is left to train on.
    """
    prepared = []
    for corpus, pairs, report in zip(corpora, cleaned, reports, strict=True):
        # Source-side and target-side ids of both columns; the columns are in the order of the first direction.
        as_sources = [tokenizer.encode([pair[i] for pair in pairs]) for i in (0, 1)]
        as_targets = [tokenizer.encode([as_target(pair[i]) for pair in pairs]) for i in (0, 1)]
        kept = [i for i in range(len(pairs)) if _fits(len(as_sources[0][i]), len(as_targets[1][i]), limits, report)]
        report.num_kept += len(kept)
        for direction in directions:
            if corpus.only in (None, direction):
                column = 0 if direction.source == directions[0].source else 1
                tag = tokenizer.piece_to_id(language_tag(direction.target))
                examples = [_example(tag, as_sources[column][i], as_targets[1 - column][i]) for i in kept]
                prepared.append(WeightedExamples(examples, corpus.weight))
    if not any(weighted.examples for weighted in prepared):
        raise CorpusError(
            "nothing is left to train on: "
            + "; ".join(
                f"{name}: {report}" for name, report in zip([corpus.name for corpus in corpora], reports, strict=True)
            )
        )
    return prepared


def _fits(source_len: int, target_len: int, limits: CleaningLimits, report: CleaningReport) -> bool:
    problem = limits.problem(source_len, target_len)
    if problem:
        report.dropped[problem] += 1
    return problem is None


def _example(tag: int, source: list[int], target: list[int]) -> Example:
    return Example(np.array([tag, *source, END_ID], np.int32), np.array(target, np.int32))
