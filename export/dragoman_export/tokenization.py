"""SentencePiece tokenizers: training one on a corpus, and encoding the examples of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import sentencepiece

from dragoman_export.errors import TokenizerError
from dragoman_export.text import normalization_rules

TokenizerKind = Literal["unigram", "bpe"]

PADDING_ID, UNKNOWN_ID, START_ID, END_ID = 0, 1, 2, 3


def language_tag(language: str) -> str:
    """The piece that opens a source text and names the language to translate into."""
    return f"<2{language}>"


def train_tokenizer(
    sentences: Iterable[str], path: Path, vocab_size: int, kind: TokenizerKind, languages: Iterable[str]
) -> None:
    """Train a SentencePiece model and write it to `path`.

    Characters too rare for a piece of their own are spelled in bytes, so no text is unknown. Each language of
    `languages` gets a tag (see `language_tag`).

    Raises:
        TokenizerError: the corpus is too small for `vocab_size`.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8") as rules:
        rules.write("\n".join(normalization_rules()) + "\n")
        rules.flush()
        prefix = path.with_suffix("")
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_prefix=str(prefix),
                model_type=kind,
                vocab_size=vocab_size,
                hard_vocab_limit=kind == "bpe",  # a small corpus gets as many pieces as it has; BPE cannot tell
                character_coverage=0.9995,
                byte_fallback=True,
                split_digits=True,
                normalization_rule_tsv=rules.name,
                max_sentence_length=16384,
                pad_id=PADDING_ID,
                unk_id=UNKNOWN_ID,
                bos_id=START_ID,
                eos_id=END_ID,
                control_symbols=[language_tag(language) for language in sorted(set(languages))],
                num_threads=1,  # the result depends on it
                minloglevel=2,
            )
        except RuntimeError as error:
            raise TokenizerError(
                f"SentencePiece cannot train {vocab_size} pieces on this corpus: {error}. "
                "Lower --vocab-size, or give it more text"
            ) from error
    prefix.with_suffix(".vocab").unlink()


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    """Load a SentencePiece model.

    Raises:
        TokenizerError: the file is missing or is not one.
    """
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from error


def check_tags(tokenizer: sentencepiece.SentencePieceProcessor, languages: Iterable[str]) -> None:
    """Make sure that a tokenizer has the tag of every language.

    Raises:
        TokenizerError: naming the tags it lacks.
    """
    tags = [language_tag(language) for language in languages]
    missing = [tag for tag in tags if tokenizer.piece_to_id(tag) == tokenizer.unk_id()]
    if missing:
        raise TokenizerError(
            f"the tokenizer has no piece {', '.join(missing)}: train it with control_symbols={tags}, or leave out "
            "--tokenizer"
        )
