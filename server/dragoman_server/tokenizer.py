"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import sentencepiece


class Span(NamedTuple):
    """A stretch of text, in code points; the end is exclusive."""

    start: int
    end: int


class Tokenizer(Protocol):
    """What the service needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any special ids."""

    def encode_with_spans(self, text: str) -> list[Span]:
        """Where each token of `encode(text)` comes from."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""

    def piece(self, token: int) -> str:
        """How the vocabulary spells a token."""

    def find_piece(self, piece: str) -> int | None:
        """The token that the vocabulary spells so; None if there is none."""


class SentencePieceTokenizer:
    """A SentencePiece model; it normalises text by the rules it was trained with.

    Args:
        path: of the model file.

    Raises:
        ValueError: it is not a SentencePiece model.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"SentencePiece cannot read {path.name}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_with_spans(self, text: str) -> list[Span]:
        """See `Tokenizer`."""
        encoded: Any = self._processor.encode(text, out_type="offset_mapping")
        return [Span(start, end) for start, end in encoded["offsets"]]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        text: str = self._processor.decode(list(ids))
        return text

    def piece(self, token: int) -> str:
        """See `Tokenizer`."""
        piece: str = self._processor.id_to_piece(token)
        return piece

    def find_piece(self, piece: str) -> int | None:
        """See `Tokenizer`."""
        token: int = self._processor.piece_to_id(piece)
        return token if self._processor.id_to_piece(token) == piece else None
