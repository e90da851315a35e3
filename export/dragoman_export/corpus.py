"""Parallel text: reading it, cleaning it, and saying what was dropped and why."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from dragoman_export.errors import CorpusError
from dragoman_export.text import harmonize_punctuation, normalize


class Direction(NamedTuple):
    """What a model translates: source language and target language, as BCP 47 tags."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}{':' if '-' in self.source + self.target else '-'}{self.target}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "zh-en", or "zh-Hant:en" where a tag has a dash of its own."""
        source, sign, target = text.partition(":" if ":" in text else "-")
        if not (source and sign and target) or source == target or (sign == "-" and "-" in target):
            raise CorpusError(
                f"{text!r} is not a translation direction; write it as SOURCE-TARGET, such as zh-en, or as "
                "SOURCE:TARGET, such as zh-Hant:en"
            )
        return cls(source, target)


class Pair(NamedTuple):
    """One example: the same sentence in two languages."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """One source of parallel text.

    Written `[DIRECTION=]PATH[,PATH2][@WEIGHT]`: a TSV file, or two line-aligned files. The columns (or files) are in
    the order of the run's first direction. What exists as a file is a path, whatever signs are in it.
    """

    paths: tuple[Path, ...]
    weight: float = 1.0
    """How often an epoch shows each example, on average."""
    only: Direction | None = None
    """Use it for this direction alone; None uses it for every direction of the run."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the command line's form of a corpus, and check that its files exist."""
        only, name, weight = None, text, 1.0
        if "=" in name and not (Path(name).is_file() or Path(name.rpartition("@")[0]).is_file()):
            direction, name = name.split("=", 1)
            only = Direction.parse(direction)
        if "@" in name and not Path(name).is_file():
            name, _, number = name.rpartition("@")
            try:
                weight = float(number)
            except ValueError as error:
                raise CorpusError(f"{text!r}: {number!r} is not a weight; write PATH@0.5, say") from error
        paths = [name] if Path(name).is_file() else name.split(",")
        corpus = cls(tuple(map(Path, paths)), weight, only)
        corpus._check(text)
        return corpus

    def _check(self, text: str) -> None:
        if len(self.paths) > 2:
            raise CorpusError(f"{text!r} names {len(self.paths)} files; give one TSV file or two line-aligned files")
        if not self.weight > 0:
            raise CorpusError(f"{text!r}: the weight must be above 0, not {self.weight}")
        for path in self.paths:
            if not path.is_file():
                raise CorpusError(f"{text!r}: there is no file {path}")

    @property
    def name(self) -> str:
        """File names, for reports."""
        return ",".join(path.name for path in self.paths)

    def digest(self) -> str:
        """sha256 of the files' bytes."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def lines(self) -> Iterator[Pair | None]:
        """Every line's two columns; None for a line that does not have them.

        Raises:
            CorpusError: two files of different length, or bytes that are not UTF-8.
        """
        if len(self.paths) == 2:
            sources, targets = (_read_lines(path) for path in self.paths)
            if len(sources) != len(targets):
                raise CorpusError(
                    f"{self.name}: {len(sources)} lines against {len(targets)}; they must be line-aligned"
                )
            yield from map(Pair, sources, targets)
            return
        for line in _read_lines(self.paths[0]):
            columns = line.split("\t")
            yield Pair(columns[0], columns[1]) if len(columns) >= 2 else None


def _read_lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            # Not splitlines(): U+2028 and friends inside a sentence must not end it.
            return [line.rstrip("\r") for line in file.read().removesuffix("\n").split("\n")]
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8: {error}") from error


@dataclass(slots=True)
class CleaningReport:
    """How many examples were read and kept, and why the others were dropped."""

    num_read: int = 0
    num_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"read": self.num_read, "kept": self.num_kept, "dropped": dict(sorted(self.dropped.items()))}

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        return f"{self.num_read:,} read, {self.num_kept:,} kept; dropped: {reasons}"


@dataclass(frozen=True, slots=True)
class CleaningLimits:
    """When an example is dropped; lengths are in tokens, the end token not counted."""

    max_tokens: int = 128
    """Longest source or target."""
    max_ratio: float = 4.0
    """Longest length ratio of the two sides; 0 disables the check."""
    ratio_free_tokens: int = 10
    """Examples whose longer side is at most this long may have any ratio."""

    def problem(self, source_len: int, target_len: int) -> str | None:
        """Why an example of these lengths is dropped, or None."""
        longer, shorter = max(source_len, target_len), min(source_len, target_len)
        if longer > self.max_tokens:
            return f"longer than {self.max_tokens} tokens"
        if self.max_ratio and longer > self.ratio_free_tokens and longer > self.max_ratio * shorter:
            return f"length ratio above {self.max_ratio:g}"
        return None

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return dataclasses.asdict(self)


Seen = set[tuple[Pair, Direction | None]]
"""Pairs, and the one direction for which they were met; None for all."""


def clean(corpus: Corpus, report: CleaningReport, seen: Seen) -> Iterator[Pair]:
    """Normalised, deduplicated pairs of a corpus; what can be judged without a tokenizer is dropped here.

    Args:
        corpus: what to read.
        report: counts are added to it.
        seen: pairs met before, in this corpus or another that serves the same directions; grows.
    """
    for line in corpus.lines():
        report.num_read += 1
        if line is None:
            report.dropped["without a second column"] += 1
            continue
        pair = Pair(normalize(line.source), normalize(line.target))
        if not (pair.source and pair.target):
            report.dropped["empty"] += 1
        elif (pair, None) in seen or (pair, corpus.only) in seen:
            report.dropped["duplicate"] += 1
        else:
            seen.add((pair, corpus.only))
            yield pair


_SCRIPTS = {
    **dict.fromkeys(("zh", "yue", "wuu", "ja"), "\u3040-\u30ff\u3400-\u9fff"),
    "ko": "\uac00-\ud7a3",
    **dict.fromkeys(("ru", "uk", "be", "bg", "mk"), "\u0400-\u04ff"),
    **dict.fromkeys(("ar", "fa", "ur"), "\u0600-\u06ff"),
    "he": "\u0590-\u05ff",
    "el": "\u0370-\u03ff",
    **dict.fromkeys(("hi", "mr", "ne"), "\u0900-\u097f"),
    "th": "\u0e00-\u0e7f",
}
"""Characters that are in nearly every sentence of a language, and in few of languages with other ones."""
_MANY, _FEW = 0.8, 0.2


def check_columns(name: str, pairs: Sequence[Pair], first: Direction) -> None:
    """Refuse text whose columns are the other way round, as far as their scripts tell.

    Args:
        name: of the corpus.
        pairs: of it, or some of them.
        first: direction of the run, which names the columns.

    Raises:
        CorpusError: they look swapped.
    """
    for column, language in enumerate(first):
        script, other_script = (_SCRIPTS.get(tag.partition("-")[0]) for tag in (language, first[1 - column]))
        if script is None or script == other_script or not pairs:
            continue
        characters = re.compile(f"[{script}]")
        own, other = (sum(bool(characters.search(p[i])) for p in pairs) / len(pairs) for i in (column, 1 - column))
        if own < _FEW and other > _MANY:
            raise CorpusError(
                f"{name}: its columns look swapped: by the first direction, {first}, column {column + 1} is {language}"
                f", but its script is in {own:.0%} of that column and in {other:.0%} of the other; swap the columns, "
                f"or give {Direction(first.target, first.source)} first"
            )


def as_target(text: str) -> str:
    """A normalised text as a model should learn to write it."""
    return harmonize_punctuation(text)
