"""Who may call: API keys, what each may do, and how much of it per second.

The server knows SHA-256 digests of keys, never keys. A plain digest is right for them, where for passwords it would be
wrong: a key is 32 random bytes that `new_key` drew, so there is nothing to guess from a digest, and a slow hash would
only slow down every call. Keys are looked up by digest; the time that a lookup takes tells of digests, which nobody can
choose without inverting SHA-256.

    AccessError
    ├── MissingKeyError      the call brings no key
    ├── UnknownKeyError      it brings one that is not in the file, or several
    ├── MissingRightError    the key is known, and may not do this
    └── ExhaustedError       the key's rate is used up; says when to come again

`dragoman-server keys new-key --name web >> keys.toml` makes a key: shown once, on stderr; the file gets its
digest.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import secrets
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from dragoman_server.rates import Rate, TokenBucket
from dragoman_server.watched_files import RefusedFileError, WatchedFiles

Right = Literal["translate", "admin"]
RIGHTS: Final = get_args(Right)

KEY_PREFIX: Final = "dgm_"
"""Of every key, so that scanners for leaked secrets know one when they see it."""

_WHAT = "the API keys"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RATES = ("requests_per_second", "characters_per_second")
_BOUNDS: dict[str, tuple[float, float]] = {
    "requests_per_second": (0.001, 1e9),
    "characters_per_second": (0.001, 1e12),
    "burst_seconds": (0.001, 86_400.0),
}
"""Per number of an entry, the least and the most."""
_DEFAULT_BURST_S = 2.0
_KNOWN_FIELDS = {"name", "sha256", "rights", *_BOUNDS}

_RIGHTS_BY_SERVICE: dict[str, Right] = {
    "dragoman.v1.TranslationService": "translate",
    "dragoman.v1.AdminService": "admin",
}


class AccessError(Exception):
    """Base class; messages are for the caller and never repeat what the caller sent."""


class MissingKeyError(AccessError):
    """No key came with the call."""


class UnknownKeyError(AccessError):
    """The key is not one of the server's."""


class MissingRightError(AccessError):
    """The key is known, and may not do this."""


class ExhaustedError(AccessError):
    """The caller's rate is used up.

    Args:
        caller: name of the key.
        which: field of the key's entry that says the rate.
        retry_after_s: seconds until the same call would be let through, if no other call of this caller came first.
    """

    def __init__(self, caller: str, which: str, retry_after_s: float) -> None:
        self.caller = caller
        self.which = which
        self.retry_after_s = retry_after_s
        super().__init__(f"{caller} has used up its {which}; try again in {retry_after_s:.3f} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Somebody who has said who they are."""

    name: str
    rights: frozenset[Right]
    rates: Mapping[str, Rate] = field(default_factory=dict)
    """Limits under the names of `_RATES`; a missing one is no limit."""

    def require(self, right: Right) -> None:
        """Check a right.

        Raises:
            MissingRightError: the caller has not got it.
        """
        if right not in self.rights:
            has = ", ".join(sorted(self.rights))
            raise MissingRightError(f"this needs the right {right!r}, but {self.name} has {has}")


def required_right(method: str) -> Right:
    """What a method needs.

    Args:
        method: as gRPC names it, "/package.Service/Method". Services that nobody thought of need "admin".
    """
    return _RIGHTS_BY_SERVICE.get(method.removeprefix("/").rpartition("/")[0], "admin")


class KeyRing:
    """The keys of a file, which is read again when it changes; threads must not share it.

    Args:
        path: TOML file of `[[keys]]` entries: name, sha256, rights, and if wanted requests_per_second,
            characters_per_second and burst_seconds (for both, 2 by default).
        clock: nanoseconds, never going back.

    Raises:
        RefusedFileError: listing everything wrong with the file. If it goes wrong later, that is logged, and the keys
            stay as they were.
    """

    def __init__(self, path: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._file = WatchedFiles(_WHAT, [path], lambda: read_keys(path))
        self._by_digest: dict[str, Caller] = {}
        self._by_name: dict[str, Caller] = {}
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        """Per name and rate; as many as the file has, and they outlast a change of it."""
        self._refresh()

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """Whose key a call brings, as `authorization: Bearer <key>` or as `x-api-key: <key>`.

        Raises:
            MissingKeyError: there is none.
            UnknownKeyError: it is not in the file, or there are several.
        """
        self._refresh()
        keys = set(_keys_in(metadata or ()))
        if not keys:
            raise MissingKeyError("a key is needed: send it as metadata, authorization: Bearer <key>")
        caller = self._by_digest.get(_digest(keys.pop()))
        if caller is None or keys:
            raise UnknownKeyError("several different keys were sent" if keys else "the key is not known")
        return caller

    def charge(self, name: str, num_characters: int) -> None:
        """Let one request of so many characters through; takes from both rates, or from none.

        Args:
            name: of a caller; one that is not, or no longer, in the file has no limits.
            num_characters: of all texts together.

        Raises:
            ExhaustedError: not now.
        """
        if name not in self._by_name:
            return
        now_ns, rates = self._clock(), self._by_name[name].rates
        units = dict(zip(_RATES, (1, num_characters), strict=True))
        buckets = {which: self._buckets.setdefault((name, which), TokenBucket()) for which in rates}
        waits = ((buckets[which].wait_ns(rate, units[which], now_ns), which) for which, rate in rates.items())
        wait_ns, longest = max(waits, default=(0, ""))
        if wait_ns:
            raise ExhaustedError(name, longest, wait_ns / 1e9)
        for which, rate in rates.items():
            buckets[which].take(rate, units[which], now_ns)

    def _refresh(self) -> None:
        by_digest = self._file.current()
        if by_digest is not self._by_digest:
            self._by_digest = by_digest
            self._by_name = {caller.name: caller for caller in by_digest.values()}
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if key[0] in self._by_name}


def caller_from_auth_context(
    context: Mapping[str, Iterable[bytes]], rights: frozenset[Right] = frozenset({"translate"})
) -> Caller | None:
    """Whom a client certificate names, where TLS has checked it; None if there was none.

    Args:
        context: what a call's `auth_context()` gives.
        rights: that such a caller has. Whoever the authority signs for has them, so "admin" is better left to keys.
    """
    if b"ssl" not in context.get("transport_security_type", ()):
        return None
    name = next(iter(context.get("x509_common_name", ())), b"").decode("utf-8", "replace")
    return Caller(name=name, rights=rights) if name else None


def read_keys(path: Path) -> dict[str, Caller]:
    """Callers by the SHA-256 of their keys, in hexadecimal.

    Raises:
        RefusedFileError: listing everything wrong with the file.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RefusedFileError(_WHAT, [f"{path} cannot be read: {error.strerror}"]) from error
    except (ValueError, RecursionError) as error:
        raise RefusedFileError(_WHAT, [f"{path} is not TOML: {error}"]) from error
    if problems := list(_file_problems(content)):
        raise RefusedFileError(_WHAT, [f"{path}: {problem}" for problem in problems])
    return {entry["sha256"]: _caller(entry) for entry in content["keys"]}


def _caller(entry: Mapping[str, Any]) -> Caller:
    burst_s = entry.get("burst_seconds", _DEFAULT_BURST_S)
    rates = {name: Rate(entry[name], burst_s) for name in _RATES if name in entry}
    return Caller(name=entry["name"], rights=frozenset(entry["rights"]), rates=rates)


def _file_problems(content: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name} is not a known table" for name in sorted(content.keys() - {"keys"}))
    entries = content.get("keys", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        yield "keys must be tables: begin each entry with [[keys]]"
        return
    if not entries:
        yield "it has no keys, so nobody could call; add an entry that begins with [[keys]]"
    for index, entry in enumerate(entries):
        label = f"keys[{index}] ({entry.get('name', 'without a name')!s:.64})"
        yield from (f"{label}: {problem}" for problem in _entry_problems(entry))
    for name in ("name", "sha256"):
        counts = Counter(str(entry[name]) for entry in entries if name in entry)
        yield from (f"{name} {value:.64} stands in {count} entries" for value, count in counts.items() if count > 1)


def _entry_problems(entry: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name} is not a known field" for name in sorted(entry.keys() - _KNOWN_FIELDS))
    for name, pattern, shape in (
        ("name", _NAME, "1 to 64 letters, digits, '.', '_' and '-'"),
        ("sha256", _SHA256, "64 hexadecimal digits in lower case"),
    ):
        value = entry.get(name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            yield f"{name} must be {shape}"
    rights = entry.get("rights")
    if not isinstance(rights, list) or not rights or not all(right in RIGHTS for right in rights):
        yield f"rights must be a list of one or more of {', '.join(RIGHTS)}"
    for name, (least, most) in _BOUNDS.items():
        if name in entry and not _is_number(entry[name], least, most):
            yield f"{name} must be a number from {least:g} to {most:g}"
    if "burst_seconds" in entry and not entry.keys() & set(_RATES):
        yield f"burst_seconds means nothing without {' or '.join(_RATES)}"


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _keys_in(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[str]:
    for name, value in metadata:
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        if name == "x-api-key":
            yield text.strip()
        elif name == "authorization":
            scheme, _, key = text.strip().partition(" ")
            if scheme.lower() == "bearer":
                yield key.strip()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key(name: str, rights: Sequence[str] = ("translate",), **numbers: float) -> tuple[str, str]:
    """Draw a key.

    Args:
        name: of the entry.
        rights: of the caller.
        numbers: requests_per_second, characters_per_second, burst_seconds.

    Returns:
        The key, to be given to the caller and forgotten; and the entry for the file.

    Raises:
        RefusedFileError: the entry would not be accepted.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    entry = {"name": name, "sha256": _digest(key), "rights": list(rights), **numbers}
    if problems := list(_entry_problems(entry)):
        raise RefusedFileError("the new key", problems)
    # Strings, lists of strings and numbers look the same in TOML as in Python, with other quotes.
    lines = [f"{field} = {value!r}".replace("'", '"') for field, value in entry.items()]
    return key, "\n".join(["[[keys]]", *lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dragoman-server keys", description="API keys of a server.")
    command = parser.add_subparsers(required=True).add_parser(
        "new-key", help="make a key: the key goes to stderr, once; its entry for the file to stdout"
    )
    command.add_argument("--name", required=True, help="of the caller, for logs")
    command.add_argument("--right", action="append", choices=RIGHTS, dest="rights", help="default: translate")
    for name in _BOUNDS:
        default = f"{_DEFAULT_BURST_S:g}, with a rate" if name == "burst_seconds" else "no limit"
        command.add_argument(f"--{name.replace('_', '-')}", type=float, help=f"default: {default}")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        key, entry = new_key(**given)
    except RefusedFileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stderr.write(f"the key, which is shown only now: {key}\n")
    sys.stdout.write(entry)
    return 0
