"""Normalisation of raw text: the same rules for cleaning a corpus and inside the tokenizer that serves it."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator

KEPT_PUNCTUATION = "，！？：；（）～…"
"""NFKC would turn these into ASCII, but in Chinese text they are the correct forms and must be generated."""

_KEPT = re.compile(f"([{KEPT_PUNCTUATION}])")
_INVISIBLE = re.compile("[\u0000-\u0008\u000e-\u001f\u007f\u00ad\u200b-\u200f\u202a-\u202e\u2060\ufeff]")
_IDEOGRAPH = "\u3400-\u4dbf\u4e00-\u9fff"
_HALF_AFTER_IDEOGRAPH = re.compile(f"(?<=[{_IDEOGRAPH}])\\s*([,!?:;])")
_STOP_AFTER_IDEOGRAPH = re.compile(f"(?<=[{_IDEOGRAPH}])\\.(?=\\s*$)")
_FULL_WIDTH = {",": "，", "!": "！", "?": "？", ":": "：", ";": "；"}


def normalize(text: str) -> str:
    """NFKC except for Chinese punctuation; invisible characters dropped; white space collapsed to single spaces."""
    text = "".join(
        part if part in KEPT_PUNCTUATION else unicodedata.normalize("NFKC", part) for part in _KEPT.split(text)
    )
    return " ".join(_INVISIBLE.sub("", text).split())


def harmonize_punctuation(text: str) -> str:
    """Full-width punctuation after an ideograph, so that a model learns one form of it to generate."""
    text = _HALF_AFTER_IDEOGRAPH.sub(lambda match: _FULL_WIDTH[match[1]], text)
    return _STOP_AFTER_IDEOGRAPH.sub("。", text)


def normalization_rules() -> Iterator[str]:
    """`normalize` as rules for SentencePiece: "source code points TAB target code points", in hexadecimal."""
    seen: dict[str, str] = {}
    for codepoint in range(sys.maxunicode + 1):
        character = chr(codepoint)
        if unicodedata.category(character) in ("Cs", "Co", "Cn") or character in KEPT_PUNCTUATION:
            continue
        composed = unicodedata.normalize("NFKC", character)
        seen[character] = "" if _INVISIBLE.match(character) else " " if character.isspace() else composed
        decomposed = unicodedata.normalize("NFD", character)
        # Hangul composes by arithmetic over 11,172 syllables; its decomposed form is left to unicode-aware input.
        if len(decomposed) > 1 and not 0xAC00 <= codepoint <= 0xD7A3:
            seen.setdefault(decomposed, composed)
    for source, target in seen.items():
        if source != target and source != "\0":
            yield f"{_hex(source)}\t{_hex(target)}"


def _hex(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)
