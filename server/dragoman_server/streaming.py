"""Text as it becomes certain: in order, in whole characters, and never taken back."""

from __future__ import annotations

from dataclasses import dataclass, field

from dragoman_server.engine.request import Sequence
from dragoman_server.segmentation import gap_before
from dragoman_server.validation import ValidRequest, ValidText

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a character decodes to while some of its bytes are missing."""


@dataclass(slots=True)
class SegmentText:
    """The certain text of one segment."""

    ids: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    """Once it has finished."""
    num_sent: int = 0
    """Characters."""


@dataclass(slots=True)
class TextStream:
    """Puts the segments of one text in order.

    Args:
        request: that the text belongs to.
        text: that is being translated.
    """

    request: ValidRequest
    text: ValidText
    segments: list[SegmentText] = field(default_factory=list)
    _current: int = 0
    _is_begun: bool = False

    def __post_init__(self) -> None:
        self.segments = [SegmentText() for _ in self.text.segments]

    def accept(self, index: int, event: list[int] | Sequence) -> str:
        """Take what has become certain of a segment; the text that can be sent now."""
        segment = self.segments[index]
        if isinstance(event, Sequence):
            segment.sequence, segment.ids = event, event.output_ids
        else:
            segment.ids = [*segment.ids, *event]
        return "".join(self._ready()) if index == self._current else ""

    @property
    def sequences(self) -> list[Sequence] | None:
        """All of them, once all have finished."""
        done = [segment.sequence for segment in self.segments if segment.sequence is not None]
        return done if len(done) == len(self.segments) else None

    def _ready(self) -> list[str]:
        ready: list[str] = []
        while self._current < len(self.segments):
            segment = self.segments[self._current]
            decoded = self.request.model.tokenizer.decode(segment.ids)
            if segment.sequence is None:
                decoded = decoded.rstrip(_INCOMPLETE)
            if not self._is_begun and (decoded or segment.sequence is not None):
                spans = [valid.segment for valid in self.text.segments]
                ready.append(gap_before(self.text.text, spans, self._current, self.request.direction.target))
                self._is_begun = True
            ready.append(decoded[segment.num_sent :])
            segment.num_sent = max(segment.num_sent, len(decoded))
            if segment.sequence is None:
                return ready
            self._current, self._is_begun = self._current + 1, False
        ready.append(self.text.text[self.text.segments[-1].segment.span.end :])
        return ready
