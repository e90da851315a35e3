"""What is known of the call that is being worked on, for whoever works on it."""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

from dragoman_server.engine.request import Sequence

REQUEST_ID = "x-request-id"
"""Metadata: the caller's name for a call; sent back with the answer."""
CALLER = "x-dragoman-caller"
"""Metadata: on whose behalf a call is made, where there are no keys; callers share the server fairly."""

_SAFE = re.compile(r"[A-Za-z0-9._:/@-]{1,128}")


@dataclass(slots=True)
class Stopwatch:
    """Where a call's time goes outside the engine, in seconds."""

    arrived: float = field(default_factory=time.monotonic)
    """Moment of `time.monotonic`."""
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def phase(self, name: str) -> Phase:
        """Add the time spent inside to a phase."""
        return Phase(self, name)


@dataclass(slots=True)
class Phase:
    """A context manager that times what is inside. Every call enters several, so none is a generator."""

    watch: Stopwatch
    name: str
    begun: float = 0.0

    def __enter__(self) -> None:
        self.begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.watch.phases[self.name] += time.monotonic() - self.begun


@dataclass(slots=True)
class Call:
    """One RPC; whoever learns more about it notes it here."""

    method: str
    request_id: str
    caller: str
    """Whose it is; "" if nobody says so."""
    model: str = ""
    """Empty until it is known, like the next two."""
    version: str = ""
    priority: str = ""
    watch: Stopwatch = field(default_factory=Stopwatch)
    sequences: list[Sequence] = field(default_factory=list)
    """That it was decoded as, once they have finished."""


current_call: ContextVar[Call] = ContextVar("current_call")


def metadata_value(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> str:
    """A value of the call's metadata that is safe to write down; "" if there is none, or it is not."""
    for key, value in metadata or ():
        if key == name and isinstance(value, str) and _SAFE.fullmatch(value):
            return value
    return ""


_PROCESS = secrets.token_hex(6)
_numbers = itertools.count(1)


def new_request_id() -> str:
    """For a call that came without one; no other process makes the same."""
    return f"{_PROCESS}-{next(_numbers):x}"
