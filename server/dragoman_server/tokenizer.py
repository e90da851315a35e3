"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece


class Tokenizer(Protocol):
    """What the service needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any special ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


class SentencePieceTokenizer:
    """A SentencePiece model; it normalises text by the rules it was trained with.

    Args:
        path: of the model file.
    """

    def __init__(self, path: Path) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        text: str = self._processor.decode(list(ids))
        return text
