"""Long text: cut into sentences that a model can translate, and put together again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import sentencex

from dragoman_server.tokenizer import Span

Fits = Callable[[str], bool]
"""Whether a model can translate a text as one sequence."""

_LINE = re.compile(r"[^\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")
_CLAUSE_END = re.compile(r"(?<=[,;:，、；：—–])\s*")
_WORD_END = re.compile(r"(?<=\s)(?=\S)")
_WITHOUT_SPACES = {"bo", "ja", "km", "lo", "my", "th", "wuu", "yue", "zh"}
"""Languages that put no space between sentences, by their primary subtag."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What is translated as one sequence."""

    span: Span
    """Without the white space around it."""
    divided: bool = False
    """Whether it is a part of a sentence that is too long for the model."""


def whole(text: str) -> list[Segment]:
    """The text as one segment."""
    return [Segment(trimmed(text, Span(0, len(text))))]


def split(text: str, language: str, fits: Fits) -> list[Segment]:
    """Cut a text at line breaks and ends of sentences; a sentence that does not fit also at clauses, words, anywhere.

    Args:
        text: with something in it besides white space.
        language: of the text, a BCP 47 tag.
        fits: says what can be translated in one go; anything of one code point must.

    Returns:
        The segments in order; between them is nothing but white space.
    """
    return [segment for span in _sentences(text, language) for segment in _divide(text, span, fits)]


def _sentences(text: str, language: str) -> Iterator[Span]:
    for line in _LINE.finditer(text):
        start = line.start()
        for sentence in sentencex.segment(_subtag(language), line.group()):
            span = trimmed(text, Span(start, start + len(sentence)))
            start += len(sentence)
            if span.start < span.end:
                yield span


def _divide(text: str, span: Span, fits: Fits) -> Iterator[Segment]:
    if fits(text[slice(*span)]):
        yield Segment(span)
        return
    for part in _parts(text, span, fits, (_CLAUSE_END, _WORD_END)):
        yield Segment(part, divided=True)


def _parts(text: str, span: Span, fits: Fits, boundaries: Sequence[re.Pattern[str]]) -> Iterator[Span]:
    """Cut at the first kind of boundary, with as few parts as fit; what is still too long at the next kind."""
    if fits(text[slice(*span)]):
        yield span
        return
    if boundaries:
        ends = [m.end() for m in boundaries[0].finditer(text, *span) if span.start < m.end() < span.end]
    else:
        ends = list(range(span.start + 1, span.end))
    ends.append(span.end)
    start = span.start
    while start < span.end:
        end = _furthest(text, start, [e for e in ends if e > start], fits)
        part = trimmed(text, Span(start, end))
        if part.start < part.end:
            yield from _parts(text, part, fits, boundaries[1:]) if boundaries else [part]
        start = end


def _furthest(text: str, start: int, ends: Sequence[int], fits: Fits) -> int:
    """The last end up to which the text fits, by bisection; the first one if none does."""
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(text[start : ends[middle]]):
            low = middle
        else:
            high = middle - 1
    return ends[low]


def join(
    text: str, segments: Sequence[Segment], translations: Sequence[str], target_language: str
) -> tuple[str, list[Span]]:
    """Put translations where their sources were.

    White space stays as it was, with one exception: between two sentences on a line it is what the target language has
    there, a space or nothing.

    Returns:
        The text, and where in it each translation is.
    """
    pieces: list[str] = []
    spans: list[Span] = []
    length, end = 0, 0
    for segment, translation in zip(segments, translations, strict=True):
        gap = text[end : segment.span.start]
        pieces.append(_gap(gap, target_language) if spans else gap)
        length += len(pieces[-1])
        spans.append(Span(length, length + len(translation)))
        pieces.append(translation)
        length += len(translation)
        end = segment.span.end
    return "".join([*pieces, text[end:]]), spans


def gap_before(text: str, segments: Sequence[Segment], index: int, target_language: str) -> str:
    """What `join` puts before a translation."""
    if not index:
        return text[: segments[0].span.start]
    return _gap(text[segments[index - 1].span.end : segments[index].span.start], target_language)


def _gap(gap: str, target_language: str) -> str:
    if gap in ("", " "):
        return "" if _subtag(target_language) in _WITHOUT_SPACES else " "
    return gap


def _subtag(language: str) -> str:
    return re.split("[-_]", language, maxsplit=1)[0].lower()


def trimmed(text: str, span: Span) -> Span:
    """A span without the white space around it."""
    part = text[slice(*span)]
    start = span.start + len(part) - len(part.lstrip())
    return Span(start, max(start, span.start + len(part.rstrip())))
