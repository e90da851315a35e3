"""The tables of README.md, from the manifest and the benchmarks. `python -m tests.readme` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dragoman_bundle.bundle import Bundle, load_bundle
from dragoman_bundle.manifest import MANIFEST

ROOT = Path(__file__).parent.parent


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


def benchmark_table() -> str:
    """The rows of tests/benchmarks/results.json, with where and when they were measured."""
    report = json.loads((ROOT / "tests" / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    lines = [
        f"Measured {report['date']} on {report['machine']}:",
        "",
        "| | model | batch | ours | best peer | | ratio | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        settings = row["settings"]
        label = f"{row['benchmark']}, {settings['precision']}"
        cells = [label, settings["model"], settings.get("batch", ""), f"{row['ours']:g}", row["peer_name"]]
        cells += [f"{row['peer']:g}", f"{row['ratio']:.2f}", "" if row["target"] is None else f"{row['target']:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(quality_table())
    print()
    print(benchmark_table())
