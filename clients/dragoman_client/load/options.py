"""From the command line's values to a measurement that can be made: every problem is found before any of it starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dragoman_client.credentials import Security
from dragoman_client.load.connection import Target
from dragoman_client.load.generator import Traffic
from dragoman_client.types import PRIORITIES, BeamSearch, DecodingOptions

DEFAULT_SLO_MS = 300.0
DEFAULT_START_RATE = 16.0
_PLOT_SUFFIXES = (".png", ".svg")
_MIN_REQUESTS = 10
"""In a window that says something."""


class LoadUsageError(Exception):
    """The command was called wrongly.

    Args:
        problems: all of them.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadArguments:
    """The command line, as it was given; `dragoman load --help` says what each value means."""

    source: str
    target: str
    input: Path | None
    server: str
    model: str
    rate: float | None
    concurrency: int | None
    find_knee: bool
    slo_ms: float | None
    start_rate: float | None
    duration: float
    warmup: float
    seed: int
    priority: str
    bulk_concurrency: int
    beam: int
    split: bool
    timeout: float
    json: Path | None
    plot: Path | None
    security: Security = field(default_factory=Security, repr=False)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Poisson arrivals."""

    rate: float
    """Requests per second."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Callers back to back."""

    num_callers: int


@dataclass(frozen=True, slots=True)
class KneeSearch:
    """Open loops at many rates."""

    slo_s: float
    """What the 99th percentile must not exceed, in seconds."""
    start_rate: float
    min_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """A measurement that can be made; `parse_arguments` alone makes one."""

    traffic: Traffic
    mode: OpenLoop | ClosedLoop | KneeSearch
    slo_s: float | None
    """To be drawn; and, in a search, to be held."""
    json: Path | None
    plot: Path | None
    settings: dict[str, object]
    """As the JSON tells them; see `report`."""


def parse_arguments(arguments: LoadArguments) -> LoadOptions:
    """Check a command line and read its texts.

    Raises:
        LoadUsageError: listing every problem.
    """
    problems = [*_mode_problems(arguments), *_value_problems(arguments), *_output_problems(arguments)]
    texts = _read_texts(arguments.input, problems)
    if problems:
        raise LoadUsageError(problems)
    slo_ms = arguments.slo_ms or (DEFAULT_SLO_MS if arguments.find_knee else None)
    slo_s = None if slo_ms is None else slo_ms / 1000
    return LoadOptions(
        traffic=_traffic(arguments, texts),
        mode=_mode(arguments, slo_s),
        slo_s=slo_s,
        json=arguments.json,
        plot=arguments.plot,
        settings=_settings(arguments, slo_s, len(texts)),
    )


def _mode_problems(arguments: LoadArguments) -> Iterator[str]:
    modes = {
        "--rate": arguments.rate is not None,
        "--concurrency": arguments.concurrency is not None,
        "--find-knee": arguments.find_knee,
    }
    given = [name for name, is_given in modes.items() if is_given]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        yield f"give one of {', '.join(modes)}; there is {found}"
    if arguments.start_rate is not None and not arguments.find_knee:
        yield "--start-rate is where --find-knee begins; leave it out"
    if arguments.bulk_concurrency > 0 and arguments.priority == "bulk":
        yield "--bulk-concurrency is the background of interactive traffic; leave out --priority bulk"


def _value_problems(arguments: LoadArguments) -> Iterator[str]:
    for name, text in (("--source", arguments.source), ("--target", arguments.target)):
        if not text:
            yield f"{name} is not set; give a language, such as zh"
    positive = {
        "--rate": arguments.rate,
        "--concurrency": arguments.concurrency,
        "--slo-ms": arguments.slo_ms,
        "--start-rate": arguments.start_rate,
        "--duration": arguments.duration,
        "--timeout": arguments.timeout,
        "--beam": arguments.beam,
    }
    for name, value in positive.items():
        if value is not None and not 0 < value < float("inf"):
            yield f"{name} is {value:g}; it must be above 0"
    for name, value in (("--warmup", arguments.warmup), ("--bulk-concurrency", arguments.bulk_concurrency)):
        if not 0 <= value < float("inf"):
            yield f"{name} is {value:g}; it must not be below 0"
    if arguments.priority not in PRIORITIES:
        yield f"--priority is {arguments.priority}; it must be one of {', '.join(PRIORITIES)}"


def _output_problems(arguments: LoadArguments) -> Iterator[str]:
    for name, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            yield f"{name} cannot be written: {path} is a directory, or is in none"
    if arguments.plot is None:
        return
    if arguments.plot.suffix not in _PLOT_SUFFIXES:
        yield f"--plot is {arguments.plot}; its name must end in {' or '.join(_PLOT_SUFFIXES)}"
    if importlib.util.find_spec("matplotlib") is None:
        yield "--plot needs matplotlib, which is not installed: pip install 'dragoman[load]'"


def _read_texts(path: Path | None, problems: list[str]) -> tuple[str, ...]:
    if path is None:
        problems.append("--input is not set; give a UTF-8 file, one text a line")
        return ()
    try:
        texts = tuple(filter(None, map(str.strip, path.read_text(encoding="utf-8").split("\n"))))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"--input cannot be read: {error}")
        return ()
    if not texts:
        problems.append(f"--input has no text: {path}")
    return texts


def _traffic(arguments: LoadArguments, texts: tuple[str, ...]) -> Traffic:
    target = Target(
        server=arguments.server,
        source=arguments.source,
        target=arguments.target,
        model=arguments.model,
        decoding=DecodingOptions(search=BeamSearch(width=arguments.beam) if arguments.beam > 1 else None),
        split=arguments.split,
        timeout_s=arguments.timeout,
        security=arguments.security,
    )
    return Traffic(
        target=target,
        texts=texts,
        priority="bulk" if arguments.priority == "bulk" else "interactive",
        duration_s=arguments.duration,
        warmup_s=arguments.warmup,
        seed=arguments.seed,
        bulk_concurrency=arguments.bulk_concurrency,
    )


def _mode(arguments: LoadArguments, slo_s: float | None) -> OpenLoop | ClosedLoop | KneeSearch:
    if arguments.rate is not None:
        return OpenLoop(arguments.rate)
    if arguments.concurrency is not None:
        return ClosedLoop(arguments.concurrency)
    assert slo_s is not None
    start_rate = arguments.start_rate or DEFAULT_START_RATE
    return KneeSearch(slo_s, start_rate, _MIN_REQUESTS / arguments.duration)


def _settings(arguments: LoadArguments, slo_s: float | None, num_texts: int) -> dict[str, object]:
    return {
        "server": arguments.server,
        "source": arguments.source,
        "target": arguments.target,
        "model": arguments.model,
        "input": str(arguments.input),
        "num_texts": num_texts,
        "priority": arguments.priority,
        "beam": arguments.beam,
        "split": arguments.split,
        "timeout_s": arguments.timeout,
        "duration_s": arguments.duration,
        "warmup_s": arguments.warmup,
        "seed": arguments.seed,
        "bulk_concurrency": arguments.bulk_concurrency,
        "slo_s": slo_s,
    }
