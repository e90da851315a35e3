"""Quality of a model on parallel text: sacreBLEU and chrF of what it really decodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sentencepiece import SentencePieceProcessor

from dragoman_bundle.manifest import Limits
from dragoman_export.batching import Ids
from dragoman_export.corpus import Corpus, Direction, check_columns
from dragoman_export.decoding import LengthLimit, Search, StepModel, beam_search, decode_corpus, greedy_search
from dragoman_export.tokenization import END_ID, language_tag

_BLEU_TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char", "th": "char"}
"""sacreBLEU's tokenizer per target language; the others are split by its default, 13a."""


@dataclass(frozen=True, slots=True)
class TestSet:
    """Raw sentences of one direction and their references."""

    name: str
    direction: Direction
    sources: list[str]
    references: list[str]


@dataclass(frozen=True, slots=True)
class Quality:
    """Scores of one test set, 0 to 100."""

    test_set: str
    direction: str
    bleu: float
    chrf: float
    signature: str
    """sacreBLEU's own description of how `bleu` was computed."""

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.test_set} {self.direction}: BLEU {self.bleu:.2f}, chrF {self.chrf:.2f}"


def read_test_sets(corpora: Sequence[Corpus], directions: Sequence[Direction], max_sentences: int = 0) -> list[TestSet]:
    """Each corpus in each direction it is used for, text as it stands in the file.

    Args:
        corpora: columns in the order of the first direction.
        directions: of the model.
        max_sentences: take the first so many of each corpus; 0 takes all.

    Raises:
        CorpusError: columns are the wrong way round.
    """
    sets: list[TestSet] = []
    for corpus in corpora:
        pairs = [pair for pair in corpus.lines() if pair is not None and pair.source.strip() and pair.target.strip()]
        pairs = pairs[: max_sentences or None]
        check_columns(corpus.name, pairs, directions[0])
        columns = {
            directions[0].source: [p.source for p in pairs],
            directions[0].target: [p.target for p in pairs],
        }
        sets += [
            TestSet(corpus.name, direction, columns[direction.source], columns[direction.target])
            for direction in directions
            if corpus.only in (None, direction)
        ]
    return sets


def encode_source(tokenizer: SentencePieceProcessor, text: str, direction: Direction) -> Ids:
    """Token ids of a source as the model wants them: language tag, pieces, end token."""
    tag = tokenizer.piece_to_id(language_tag(direction.target))
    return np.array([tag, *tokenizer.encode(text), END_ID], np.int32)


def make_search(beam_width: int, length_penalty: float = 1.0, limits: Limits | None = None) -> Search:
    """Greedy search for width 1, beam search above; outputs stay within a bundle's `limits`."""
    limit = LengthLimit(maximum=limits.max_target_tokens) if limits else LengthLimit()
    if beam_width == 1:
        return partial(greedy_search, limit=limit)
    return partial(beam_search, width=beam_width, length_penalty=length_penalty, limit=limit)


def translate(
    model: StepModel,
    tokenizer: SentencePieceProcessor,
    texts: Sequence[str],
    direction: Direction,
    search: Search,
) -> list[str]:
    """Decode texts; results in their order."""
    sources = [encode_source(tokenizer, text, direction) for text in texts]
    decoded: list[str] = tokenizer.decode(decode_corpus(model, sources, search))
    return decoded


def evaluate(
    model: StepModel, tokenizer: SentencePieceProcessor, test_sets: Sequence[TestSet], search: Search
) -> list[Quality]:
    """Translate every test set and score it."""
    return [
        score(test_set, translate(model, tokenizer, test_set.sources, test_set.direction, search))
        for test_set in test_sets
    ]


def score(test_set: TestSet, translations: Sequence[str]) -> Quality:
    """SacreBLEU and chrF of translations of a test set."""
    bleu = BLEU(tokenize=_BLEU_TOKENIZERS.get(test_set.direction.target.split("-")[0], "13a"))
    references = [test_set.references]
    return Quality(
        test_set=test_set.name,
        direction=str(test_set.direction),
        bleu=bleu.corpus_score(translations, references).score,
        chrf=CHRF().corpus_score(translations, references).score,
        signature=str(bleu.get_signature()),
    )
