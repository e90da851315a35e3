"""Reports as a terminal shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from dragoman_client.load.distribution import Percentiles
from dragoman_client.load.knee import Knee
from dragoman_client.load.report import ProbeReport, RunReport, Throughput, is_limited_by_generator

_COLUMNS = {"p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p99_9": "p99.9", "max": "max"}


def run_table(run: RunReport) -> Table:
    """The times of one run, in milliseconds."""
    table = Table(title=run_title(run), title_justify="left", caption=_caption(run), caption_justify="left")
    table.add_column("ms")
    for name in _COLUMNS.values():
        table.add_column(name, justify="right")
    for label, percentiles in _rows(run):
        table.add_row(label, *_cells(percentiles))
    return table


def run_title(run: RunReport) -> str:
    """What was done."""
    if run.loop == "open":
        return f"Open loop, {run.rate:g} requests/s for {run.duration_s:g} s"
    return f"Closed loop, {run.concurrency} callers for {run.duration_s:g} s"


def _rows(run: RunReport) -> Iterator[tuple[str, Percentiles]]:
    is_open = run.loop == "open"
    rows = {
        "latency, from scheduled arrival" if is_open else "latency, corrected": run.latency_s,
        "latency, from sending": run.uncorrected_latency_s,
        "in the server": run.server_total_s,
        "  queue": run.server_queue_s,
        "  until first token": run.server_first_token_s,
        "sent late by": run.lateness_s,
    }
    yield from ((label, percentiles) for label, percentiles in rows.items() if percentiles is not None)


def _cells(percentiles: Percentiles) -> Iterator[str]:
    for field in _COLUMNS:
        yield milliseconds(getattr(percentiles, field))


def milliseconds(seconds: float) -> str:
    """Three digits, at least."""
    value = seconds * 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _caption(run: RunReport) -> str:
    lines = [f"{_throughput(run)}; offered {run.offered_rate:.1f}/s; generator {run.generator_cpu:.0%} of a core"]
    if run.bulk is not None:
        lines.append(f"bulk, {run.bulk.concurrency} callers: {_throughput(run.bulk)}")
    return "\n".join(lines)


def _throughput(throughput: Throughput) -> str:
    tokens = throughput.target_tokens_per_s
    return (
        f"{throughput.num_sent} sent, {throughput.num_ok} ok, {failures_text(throughput.failures)};"
        f" answered {throughput.achieved_rate:.1f}/s"
        + (f", {tokens:.0f} target tokens/s" if tokens is not None else "")
    )


def failures_text(failures: Mapping[str, int]) -> str:
    """Failures by status code."""
    counts = ", ".join(f"{count} {code}" for code, count in sorted(failures.items()))
    return f"failed: {counts}" if counts else "none failed"


def knee_table(knee: Knee[ProbeReport], slo_s: float) -> Table:
    """The probes of a search, by rate."""
    title = f"Knee: the highest rate with p99 ≤ {slo_s * 1000:g} ms"
    table = Table(title=title, title_justify="left", caption=knee_text(knee), caption_justify="left")
    for name in ("requests/s", "offered/s", "answered/s", "p50 ms", "p99 ms", "p99.9 ms"):
        table.add_column(name, justify="right")
    table.add_column("held")
    for rate, probe in sorted(knee.probes.items()):
        table.add_row(*_probe_cells(probe), style="bold" if rate == knee.rate else None)
    return table


def _probe_cells(probe: ProbeReport) -> Iterator[str]:
    latency = probe.run.latency_s
    yield f"{probe.rate:.1f}"
    yield f"{probe.run.offered_rate:.1f}"
    yield f"{probe.run.achieved_rate:.1f}"
    for seconds in (latency.p50, latency.p99, latency.p99_9) if latency else ():
        yield milliseconds(seconds)
    yield from () if latency else ("", "", "")
    yield "yes" if probe.held else "no"


def knee_text(knee: Knee[ProbeReport]) -> str:
    """The answer, in a sentence."""
    if knee.rate is None:
        least = min(knee.probes)
        return f"no rate held, not even {least:g} requests/s: {knee.probes[least].problems[0]}"
    if is_limited_by_generator(knee):
        return (
            f"{knee.rate:.1f} requests/s held; above, the generator could not keep up, so the server's knee is higher"
        )
    if knee.first_broken is None:
        return f"{knee.rate:.1f} requests/s held, the highest rate tried"
    reason = knee.probes[knee.first_broken].problems[0]
    return f"{knee.rate:.1f} requests/s held, {knee.first_broken:.1f} did not: {reason}"
