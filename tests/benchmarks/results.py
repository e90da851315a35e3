"""A benchmark's rows, and the file that they are kept in."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tests.benchmarks import CORES, ROOT
from tests.benchmarks.roofline import Roofline

RESULTS = Path(__file__).with_name("results.json")
OURS = "Dragoman"
"""How the names of our contenders begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison; a larger ratio is better for us."""

    benchmark: str
    settings: dict[str, Any]
    ours: float
    peer: float | None
    """None where there is nobody to compare with."""
    peer_name: str
    ratio: float | None
    target: float | None
    """None where no goal is set."""
    target_of: Literal["ratio", "ours"] = "ratio"
    """Whether the ratio must reach the target, or our number must not exceed it."""
    roofline: dict[str, float] | None = None
    """Of rows in tokens/s: what a step touches, the bound that follows, and our share of it."""

    @property
    def meets_target(self) -> bool:
        """Whether nothing is left to do."""
        if self.target is None:
            return True
        if self.target_of == "ours":
            return self.ours <= self.target
        return self.ratio is not None and self.ratio >= self.target


def compared(
    benchmark: str,
    settings: dict[str, Any],
    values: Mapping[str, float],
    *,
    better: Literal["more", "less"],
    target: float | None = None,
    target_of: Literal["ratio", "ours"] = "ratio",
) -> Row:
    """Our value against the best of the others.

    Args:
        benchmark: what was measured, with its unit.
        settings: under which.
        values: by contender; exactly one is ours.
        better: whether more is better, or less.
        target: of the row.
        target_of: what it applies to.
    """
    [mine] = (value for name, value in values.items() if name.startswith(OURS))
    others = [(value, name) for name, value in values.items() if not name.startswith(OURS)]
    peer, peer_name = max(others) if better == "more" else min(others)
    return Row(
        benchmark=benchmark,
        settings=settings,
        ours=_rounded(mine),
        peer=_rounded(peer),
        peer_name=peer_name,
        ratio=round(mine / peer if better == "more" else peer / mine, 2),
        target=target,
        target_of=target_of,
    )


def under_roof(row: Row, roof: Roofline, precision: str) -> Row:
    """The same row with its bound."""
    fields = {
        "bytes_per_step": round(roof.num_bytes / roof.num_steps),
        f"{precision}_macs_per_step": round(roof.num_macs / roof.num_steps),
        "bound_tokens_per_s": round(roof.bound_tokens_per_s, 1),
        "share": round(row.ours / roof.bound_tokens_per_s, 3),
    }
    return dataclasses.replace(row, roofline=fields)


def _rounded(value: float) -> float:
    """To four digits, and not less than a tenth of hundreds and thousands."""
    return round(value, 1) if value >= 100 else float(f"{value:.4g}")


def current_commit() -> dict[str, Any]:
    """Which code is being measured; dirty if tracked files differ from it."""
    return {"id": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that a run found out."""

    measured: dict[str, Any]
    """Rates of the machine."""
    rounds: int
    commit: dict[str, Any] = field(default_factory=current_commit)
    agreement: list[dict[str, Any]] = field(default_factory=list)
    """Share of texts to which all contenders gave the same tokens, in fp32."""
    qualifying: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Tokens/s at batch 1 and 32 of every way that CTranslate2 was run, by model."""
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Keep a row and show it."""
        self.rows.append(row)
        against = f"against {row.peer_name} {row.peer}: {row.ratio}" if row.peer is not None else ""
        goal = "" if row.target is None else f"(target {row.target}{'' if row.meets_target else ', missed'})"
        print(f"{row.benchmark:28} {row.settings} {row.ours} {against} {goal}", flush=True)

    def write(self, path: Path) -> None:
        """As JSON."""
        fields = {"date": datetime.now(UTC).date().isoformat(), "machine": f"{CORES} cores, {_processor()}"}
        path.write_text(json.dumps(fields | dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    flags = {flag for line in info.splitlines() if line.startswith("flags") for flag in line.split()}
    isa = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if flag in flags]
    return f"{names[0] if names else platform.processor()} ({', '.join(isa)})"
