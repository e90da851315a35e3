"""Pictures of latency. Needs matplotlib: the extra `load`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from dragoman_client.load.distribution import Curve, Percentiles
from dragoman_client.load.knee import Knee
from dragoman_client.load.report import ProbeReport, RunReport
from dragoman_client.load.table import knee_text, milliseconds, run_title

_BLUES = {"p50": "#6baed6", "p90": "#3182bd", "p99": "#08519c", "p99_9": "#041f42"}
"""One hue, darker towards the tail: the lines are one quantity."""
_RED = "#c0392b"
_GREY = "#5f6368"
_DPI = 160
_LABEL_GAP = 0.045
"""Least distance between two labels, relative to the height of the axes."""


class _Line(NamedTuple):
    label: str
    xs: list[float]
    ys: list[float]
    """In milliseconds."""
    color: str
    style: str = "-"


def plot_run(run: RunReport, slo_s: float | None, subject: str, path: Path) -> None:
    """Draw the latency distribution of one run, with percentages on a logarithmic axis, and write it.

    Args:
        run: what was measured; the axes stay empty if nothing was answered.
        slo_s: a line to draw, in seconds; None for none.
        subject: of the title.
        path: ends in .png or .svg.
    """
    figure, axes = _canvas(f"Latency distribution: {subject}", run_title(run))
    lines = list(_distributions(run))
    _draw(axes, lines)
    _percent_axis(axes, run.latency_curve)
    _latency_axis(axes, _latency_name(run))
    if slo_s is not None:
        _slo_line(axes, slo_s)
    if run.latency_s is not None:
        _mark_percentiles(axes, run.latency_s)
    if run.uncorrected_latency_s is not None and len(lines) > 1:
        _label_ends(axes, lines[:1])
        _label_uncorrected(axes, run.uncorrected_latency_s, lines[1])
    figure.savefig(path, dpi=_DPI)


def plot_knee(knee: Knee[ProbeReport], slo_s: float, subject: str, path: Path) -> None:
    """Draw the latency percentiles of a knee search against the rate, and write it.

    Args:
        knee: what the search found.
        slo_s: what p99 must not exceed, in seconds.
        subject: of the title.
        path: ends in .png or .svg.
    """
    figure, axes = _canvas(f"Latency against rate: {subject}", f"{knee_text(knee)} (filled: held, hollow: not)")
    probes = [probe for _, probe in sorted(knee.probes.items()) if probe.run.latency_s is not None]
    rates = [probe.rate for probe in probes]
    lines = [_Line(_name(p), rates, [_ms(probe, p) for probe in probes], color) for p, color in _BLUES.items()]
    _draw(axes, lines)
    for line in lines:
        for probe, value in zip(probes, line.ys, strict=True):
            face = line.color if probe.held else "white"
            axes.plot(probe.rate, value, "o", markersize=5.5, color=line.color, markerfacecolor=face)
    _rate_axis(axes, rates)
    _latency_axis(axes, "latency from scheduled arrival")
    _slo_line(axes, slo_s)
    if knee.rate is not None:
        _knee_line(axes, knee.rate)
    _label_ends(axes, lines)
    figure.savefig(path, dpi=_DPI)


def _canvas(title: str, subtitle: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=24)
    axes.annotate(
        subtitle, (0, 1), xycoords="axes fraction",
        xytext=(0, 9), textcoords="offset points", color=_GREY, fontsize=9.5,
    )  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _distributions(run: RunReport) -> Iterator[_Line]:
    """One curve; two where the callers' own view is another one."""
    corrected, uncorrected = run.latency_curve, run.uncorrected_latency_curve
    if corrected:
        yield _line("from schedule" if run.loop == "open" else "corrected", corrected, _BLUES["p99"])
    if _differ(corrected, uncorrected):
        yield _line("from sending", uncorrected, _GREY, "--")


def _line(label: str, curve: Curve, color: str, style: str = "-") -> _Line:
    return _Line(label, [100 / (100 - p) for p, _ in curve], [s * 1000 for _, s in curve], color, style)


def _differ(first: Curve, second: Curve) -> bool:
    """Whether two curves can be told apart anywhere: by a tenth."""
    return any(abs(a - b) > 0.1 * max(a, b) for a, b in zip(_at_percents(first), _at_percents(second), strict=True))


def _at_percents(curve: Curve) -> Iterator[float]:
    """Values at a few percentages that all curves have."""
    for percent in (50, 90, 95, 99, 99.9):
        yield next((seconds for p, seconds in curve if p >= percent), curve[-1][1] if curve else 0.0)


def _latency_name(run: RunReport) -> str:
    return "latency from scheduled arrival" if run.loop == "open" else "latency"


def _name(field: str) -> str:
    return field.replace("_", ".")


def _ms(probe: ProbeReport, field: str) -> float:
    seconds: float = getattr(probe.run.latency_s, field)
    return seconds * 1000


def _draw(axes: Axes, lines: Sequence[_Line]) -> None:
    for line in lines:
        axes.plot(line.xs, line.ys, line.style, color=line.color, linewidth=2)


def _percent_axis(axes: Axes, curve: Curve) -> None:
    axes.set_xscale("log")
    last = 100 / (100 - curve[-1][0]) if curve else 1000
    axes.xaxis.set_major_locator(FixedLocator([1, 2, *(10**i for i in range(1, 8) if 10**i <= last)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 - 100 / x:.7g} %"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(1, last)
    axes.set_xlabel("percentile of the answered requests")


def _rate_axis(axes: Axes, rates: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if rates:
        axes.set_xlim(min(rates) / 1.1, max(rates) * 1.03)
    axes.set_xlabel("rate (requests/s), Poisson arrivals")


def _latency_axis(axes: Axes, name: str) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(f"{name} (ms)")


def _slo_line(axes: Axes, slo_s: float) -> None:
    axes.axhline(slo_s * 1000, color=_RED, linewidth=1.2, linestyle="--")
    axes.annotate(
        f"SLO: p99 ≤ {slo_s * 1000:g} ms", (0, slo_s * 1000), xycoords=("axes fraction", "data"),
        xytext=(4, 3), textcoords="offset points", color=_RED, fontsize=9,
    )  # fmt: skip


def _knee_line(axes: Axes, rate: float) -> None:
    axes.axvline(rate, color=_GREY, linewidth=1.2, linestyle=":")
    axes.annotate(
        f"knee {rate:.0f}/s", (rate, 0), xycoords=("data", "axes fraction"),
        xytext=(-4, 4), textcoords="offset points", color=_GREY, fontsize=9, ha="right",
    )  # fmt: skip


def _mark_percentiles(axes: Axes, latency: Percentiles) -> None:
    """Points with their values, as far as there were enough requests to speak of them."""
    for field, percent in (("p50", 50), ("p90", 90), ("p99", 99), ("p99_9", 99.9)):
        x, seconds = 100 / (100 - percent), getattr(latency, field)
        if x > latency.count:
            continue
        axes.plot(x, seconds * 1000, "o", markersize=5.5, color=_BLUES["p99"])
        # The first one has the axis to its left.
        offset, side = ((6.0, -13.0), "left") if field == "p50" else ((-6.0, 5.0), "right")
        axes.annotate(
            f"{_name(field)} {milliseconds(seconds)} ms", (x, seconds * 1000),
            xytext=offset, textcoords="offset points", color=_BLUES["p99"], fontsize=9, ha=side,
        )  # fmt: skip


def _label_uncorrected(axes: Axes, latency: Percentiles, line: _Line) -> None:
    """Name the line of the callers' own view at p99; at its end it would meet the other one."""
    axes.annotate(
        f"{line.label}: p99 {milliseconds(latency.p99)} ms", (100, latency.p99 * 1000),
        xytext=(6, -12), textcoords="offset points", color=line.color, fontsize=9,
    )  # fmt: skip


def _label_ends(axes: Axes, lines: Sequence[_Line]) -> None:
    """Name each line at its right end; where lines meet, one above the other around that place."""
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted((float(to_axes.transform((line.xs[-1], line.ys[-1]))[1]), line) for line in lines if line.ys)
    for height, (_, line) in zip(_spread([height for height, _ in ends]), ends, strict=True):
        axes.text(1.01, height, line.label, transform=axes.transAxes, color=line.color, va="center", fontsize=10)


def _spread(heights: Sequence[float]) -> list[float]:
    """Ascending heights with room for a label between any two: moved up where needed, then all of them back a bit."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + _LABEL_GAP) if moved else height)
    too_high = sum(moved) - sum(heights)
    return [height - too_high / len(heights) for height in moved]
