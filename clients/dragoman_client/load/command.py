"""`dragoman load`, from options to an exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType

from dragoman_client.load.connection import Connection
from dragoman_client.load.generator import LoadGenerator, Traffic, precise_loop
from dragoman_client.load.knee import find_knee
from dragoman_client.load.options import (
    ClosedLoop,
    KneeSearch,
    LoadArguments,
    LoadOptions,
    LoadUsageError,
    OpenLoop,
    parse_arguments,
)
from dragoman_client.load.report import ProbeReport, RunReport, judge, knee_as_json, run_as_json
from dragoman_client.load.table import failures_text, knee_table, run_table

Say = Callable[[str], None]


def load_command(arguments: LoadArguments, say: Say) -> int:
    """Measure, show and write.

    Args:
        arguments: the command line.
        say: is told of progress, of problems, and of whatever makes a measurement doubtful.

    Returns:
        The exit code: 1 if requests failed or no rate held, 2 if the command was called wrongly.

    Raises:
        DragomanError: the server cannot be reached, or refuses the first request.
        CredentialsError: the credentials must not be used with this server.
        OSError: a result cannot be written.
    """
    try:
        options = parse_arguments(arguments)
    except LoadUsageError as error:
        say("\n".join(["dragoman load was called wrongly:", *(f"- {problem}" for problem in error.problems)]))
        return 2
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(_try_one(options.traffic))
        if isinstance(options.mode, KneeSearch):
            return _search(options, options.mode, runner, say)
        return _run(options, runner.run(_measure(options.traffic, options.mode)), say)


async def _try_one(traffic: Traffic) -> None:
    """One request, so that a server that is not there or cannot translate the pair is one error, not thousands."""
    async with Connection(traffic.target) as connection:
        await connection.translate(traffic.texts[0], traffic.priority)


async def _measure(traffic: Traffic, mode: OpenLoop | ClosedLoop) -> RunReport:
    async with Connection(traffic.target) as connection:
        generator = LoadGenerator(connection, traffic)
        if isinstance(mode, ClosedLoop):
            return await generator.closed_loop(mode.num_callers)
        return await generator.open_loop(mode.rate)


def _run(options: LoadOptions, run: RunReport, say: Say) -> int:
    _show(run_table(run))
    for problem in run.generator_problems:
        say(f"this measurement is not valid: {problem}")
    _write_json(options, run_as_json(run, options.settings))
    if options.plot:
        from dragoman_client.load.plot import plot_run  # noqa: PLC0415 - matplotlib is optional

        plot_run(run, options.slo_s, _subject(options), options.plot)
    for name, throughput in (("requests", run), ("bulk requests", run.bulk)):
        if throughput is not None and throughput.num_failed:
            say(f"{name}: {failures_text(throughput.failures)}")
    return 1 if run.num_failed or (run.bulk and run.bulk.num_failed) else 0


def _search(options: LoadOptions, mode: KneeSearch, runner: asyncio.Runner, say: Say) -> int:
    def probe(rate: float) -> ProbeReport:
        report = judge(rate, runner.run(_measure(options.traffic, OpenLoop(rate))), mode.slo_s)
        say(f"{rate:.1f} requests/s: {'held' if report.held else '; '.join(report.problems)}")
        return report

    def probe_twice_if_doubtful(rate: float) -> ProbeReport:
        # What only the generator broke says nothing about the server; on a busy machine it is often over soon.
        report = probe(rate)
        return report if report.held or report.server_problems else probe(rate)

    knee = find_knee(probe_twice_if_doubtful, start_rate=mode.start_rate, min_rate=mode.min_rate)
    _show(knee_table(knee, mode.slo_s))
    _write_json(options, knee_as_json(knee, options.settings))
    if options.plot:
        from dragoman_client.load.plot import plot_knee  # noqa: PLC0415 - matplotlib is optional

        plot_knee(knee, mode.slo_s, _subject(options), options.plot)
    return 1 if knee.rate is None else 0


def _subject(options: LoadOptions) -> str:
    """What was measured, for a picture's title."""
    target = options.traffic.target
    return f"{target.model or 'Dragoman'} {target.source}→{target.target} at {target.server}"


def _show(table: RenderableType) -> None:
    Console().print(table)


def _write_json(options: LoadOptions, report: dict[str, Any]) -> None:
    if options.json:
        options.json.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
