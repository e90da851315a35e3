"""The tables of README.md, from the manifest and the benchmarks. `python -m tests.readme` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dragoman_bundle.bundle import Bundle, load_bundle
from dragoman_bundle.manifest import MANIFEST
from dragoman_server.settings import ServerSettings
from tests.benchmarks.results import RESULTS, Row

ROOT = Path(__file__).parent.parent
SERVICE = RESULTS.with_name("service.json")
_NOTES = "[tried]: tests/benchmarks/NOTES.md"
"""Where a goal that was missed leads to."""
_MODEL_COLUMNS = "{}: ours | best peer | ratio | of roofline"


def bundled_models() -> list[Bundle]:
    """The bundles of deploy/models."""
    return [load_bundle(path.parent) for path in sorted((ROOT / "deploy" / "models").glob(f"*/*/{MANIFEST}"))]


def quality_table() -> str:
    """BLEU / chrF per test set and direction, for every precision and search."""
    scores = [score for bundle in bundled_models() for score in bundle.manifest.quality]
    columns = list(dict.fromkeys((score.precision, score.search) for score in scores))
    return "\n".join(
        [
            "| BLEU / chrF | " + " | ".join(f"{precision}, {search}" for precision, search in columns) + " |",
            "|---|" + "---|" * len(columns),
            *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in _rows(columns)),
        ]
    )


def _rows(columns: list[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    for bundle in bundled_models():
        quality = bundle.manifest.quality
        for test_set, direction in dict.fromkeys((score.test_set, score.direction) for score in quality):
            found = {(s.precision, s.search): s for s in quality if (s.test_set, s.direction) == (test_set, direction)}
            cells = [f"{found[column].bleu:.1f} / {found[column].chrf:.1f}" for column in columns]
            yield f"{test_set.removesuffix('.tsv')} {direction.replace('-', '→')}", cells


def benchmark_table(path: Path = RESULTS) -> str:
    """The rows of the benchmarks, with where and when they were measured: a line for each case, models side by side."""
    report = json.loads(path.read_text(encoding="utf-8"))
    groups: dict[str, dict[str, dict[str, Row]]] = {}
    for row in (Row(**fields) for fields in report["rows"]):
        groups.setdefault(_group(row), {}).setdefault(_case(row), {})[row.settings["model"]] = row
    models = list(dict.fromkeys(row["settings"]["model"] for row in report["rows"]))
    lines = [_measured(report), "", f"| | {' | '.join(_MODEL_COLUMNS.format(model) for model in models)} |"]
    lines.append("|---|" + "--:|--:|--:|--:|" * len(models))
    for group, cases in groups.items():
        lines.append(f"| **{group}** |" + " | | | |" * len(models))
        for case, rows in cases.items():
            cells = [_cells(rows[model]) if model in rows else " | | | " for model in models]
            lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _NOTES])


def _measured(report: dict[str, Any]) -> str:
    commit = report.get("commit")  # the first results were kept without
    code = f", commit {commit['id'][:10]}{' with changes' if commit['dirty'] else ''}" if commit else ""
    return f"Measured {report['date']} on {report['machine']}{code}:"


def _group(row: Row) -> str:
    """What is compared with whom; the heading of its lines."""
    settings = row.settings
    against = f" against {settings['against']}" if "against" in settings else ""
    situation = [settings[key] for key in ("running", "newcomers") if key in settings]
    return f"{row.benchmark}, {settings['precision']}{against}" + (f" ({'; '.join(situation)})" if situation else "")


def _case(row: Row) -> str:
    """What tells a row from the others of its group; the beginning of its line."""
    settings = row.settings
    keys = ("source", "target") if "source" in settings else ("batch",)
    parts = [f"{key} {settings[key]}" for key in keys if key in settings]
    if "percentile" in settings:
        parts.append("median" if settings["percentile"] == 50 else f"p{settings['percentile']}")
    return ", ".join([*parts, *([settings["search"]] if "search" in settings else [])])


def _cells(row: Row) -> str:
    """Ours, the best peer, the ratio, our share of the roofline; each goal with a tick, or with what it is."""
    goals = dict.fromkeys(("ours", "ratio"), "")
    if row.target is not None:
        goals[row.target_of] = " ✓" if row.meets_target else f" [of {row.target:g}][tried]"
    name = row.peer_name.removeprefix(row.settings.get("against", "")).strip()
    peer = "" if row.peer is None else f"{row.peer:g} {f'({name})' if name else ''}".rstrip()
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    share = "" if row.roofline is None else f"{row.roofline['share']:.0%}"
    return f"{row.ours:g}{goals['ours']} | {peer} | {ratio}{goals['ratio']} | {share}"


def service_table(path: Path = SERVICE) -> str:
    """The servers under load."""
    report = json.loads(path.read_text(encoding="utf-8"))
    lines = [_measured(report), "", "| | ours | peer | ratio |", "|---|--:|--:|--:|"]
    for row in (Row(**fields) for fields in report["rows"]):
        goal = "" if row.target is None else " ✓" if row.meets_target else f" [of {row.target:g}][tried]"
        peer = "" if row.peer is None else f"{row.peer:g} ({row.peer_name})"
        lines.append(f"| {row.benchmark} | {row.ours:g} | {peer} | {'' if row.ratio is None else row.ratio}{goal} |")
    return "\n".join(lines)


def settings_table() -> str:
    """Every setting of the server, with its default."""
    lines = ["| flag | default | |", "|---|---|---|"]
    for name, field in ServerSettings.model_fields.items():
        lines.append(f"| `--{name.replace('_', '-')}` | {_default(name, field.default)} | {field.description} |")
    return "\n".join(lines)


def _default(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in {"models", "latency_buckets"}:
        return "the bundled models" if name == "models" else "36, from 0.5 ms to 60 s"
    return f"`{'on' if value is True else 'off' if value is False else value}`".replace(".0`", "`")


if __name__ == "__main__":
    print(f"{quality_table()}\n\n{settings_table()}\n\n{benchmark_table()}\n\n{service_table()}")
