"""What README.md says about the bundled model, from its manifest. `python -m tests.readme` prints it."""

from __future__ import annotations

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


if __name__ == "__main__":
    print(quality_table())
