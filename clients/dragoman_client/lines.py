"""Line-by-line translation of files and pipes: one line in, one line out, in order, many in flight."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TextIO

from dragoman_client.aio import AsyncClient
from dragoman_client.errors import DragomanError
from dragoman_client.types import DecodingOptions, Priority, Translation

Complaint = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOptions:
    """What to do with every line."""

    source: str
    target: str
    model: str
    concurrency: int
    """Lines in flight at once."""
    as_json: bool
    """Write an object per line instead of the text alone."""
    decoding: DecodingOptions
    split: bool
    """Whether lines may be cut into sentences."""
    priority: Priority


@dataclass(slots=True)
class LineTranslator:
    """Translates lines.

    Args:
        client: connected.
        options: for every line.
        sink: where results go.
        complain: is told of every line that could not be translated completely.
        advance: is called after every line, for progress.
    """

    client: AsyncClient
    options: LineOptions
    sink: TextIO
    complain: Complaint
    advance: Callable[[], None]
    num_failed: int = 0
    _num_written: int = 0
    _blank: deque[bool] = field(default_factory=deque)

    async def run(self, lines: Iterable[str]) -> int:
        """Translate all lines; returns how many could not be."""
        options = self.options
        results = self.client.translate_many(
            self._with_text(lines),
            source=options.source,
            target=options.target,
            model=options.model,
            concurrency=options.concurrency,
            options=options.decoding,
            split=options.split,
            priority=options.priority,
        )
        async for result in results:
            self._write_blanks()
            self._blank.popleft()
            self._write(result)
        self._write_blanks()
        return self.num_failed

    def _with_text(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines worth sending; the others keep their place."""
        for line in lines:
            is_blank = not line.strip()
            self._blank.append(is_blank)
            if not is_blank:
                yield line

    def _write_blanks(self) -> None:
        while self._blank and self._blank[0]:
            self._blank.popleft()
            self._write(None)

    def _write(self, result: Translation | DragomanError | None) -> None:
        self._num_written += 1
        if isinstance(result, DragomanError):
            self.num_failed += 1
            self.complain(f"line {self._num_written}: {result}")
        elif result is not None and not result.complete:
            self.complain(f"line {self._num_written}: cut after {result.target_tokens} tokens; text may be missing")
        self.sink.write((self._as_json(result) if self.options.as_json else _as_text(result)) + "\n")
        self.sink.flush()
        self.advance()

    def _as_json(self, result: Translation | DragomanError | None) -> str:
        row: dict[str, object] = {"line": self._num_written}
        if isinstance(result, DragomanError):
            row |= {"error": str(result), "code": result.code.name}
        elif result is None:
            row |= {"text": ""}
        else:
            row |= {
                "text": result.text,
                "finish_reason": result.finish_reason,
                "source_tokens": result.source_tokens,
                "target_tokens": result.target_tokens,
                "model": result.model,
                "model_version": result.model_version,
                "segments": [asdict(segment) for segment in result.segments],
                "timings": asdict(result.timings),
            }
        return json.dumps(row, ensure_ascii=False)


def _as_text(result: Translation | DragomanError | None) -> str:
    # A translation never holds a line break, but one line out per line in must not depend on that.
    return " ".join(result.text.splitlines()) if isinstance(result, Translation) else ""
