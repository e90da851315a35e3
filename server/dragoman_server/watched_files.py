"""Files that are read again when they change, and whose last good version stays when the new one is broken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class RefusedFileError(Exception):
    """Files that cannot be used; the message lists every problem.

    Args:
        what: the files are for, such as "the API keys".
        problems: one line each.
    """

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{what} cannot be used:\n" + "\n".join(f"- {problem}" for problem in problems))


class WatchedFiles(Generic[T]):
    """What some files say, as of now; threads may share it.

    A change shows in what the system says of a file: device, inode, times, size. Symbolic links are followed, so that
    what Kubernetes does, to swap a link to a directory, is a change of the files behind it.

    Args:
        what: the files are for; for log messages.
        paths: of the files.
        read: gives what they say now.

    Raises:
        RefusedFileError: what `read` finds wrong, when this object is made; later, it is logged.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._refused = ""
        self._seen = self._identities()  # before reading: a change in between is then seen at the next look
        self._value = read()

    def current(self) -> T:
        """What the files say; if they have changed and cannot be used, what they said before."""
        with self._lock:
            seen = self._identities()
            # A refused version is looked at again even if it has not changed: its time may have come.
            if seen != self._seen or self._refused:
                self._seen = seen
                self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            self._value = self._read()
        except RefusedFileError as error:
            if str(error) != self._refused:
                _LOG.error("%s\nwhat was read before stays in use", error)
            self._refused = str(error)
        else:
            self._refused = ""
            _LOG.info("%s: read again from %s", self._what, ", ".join(map(str, self._paths)))

    def _identities(self) -> list[tuple[int, ...] | None]:
        return [_identity(path) for path in self._paths]


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size
