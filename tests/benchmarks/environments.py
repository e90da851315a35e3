"""An interpreter of its own for the peer that needs other versions than ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benchmarks import ROOT

_REQUIREMENTS = Path(__file__).with_name("optimum.txt")


def optimum_python() -> str:
    """The interpreter of a virtual environment with optimum, inside our own; made if it is not what it should be."""
    environment = Path(sys.prefix) / "optimum"
    python, installed = environment / "bin" / "python", environment / "installed.txt"
    wanted = _REQUIREMENTS.read_text(encoding="utf-8")
    if not installed.exists() or installed.read_text(encoding="utf-8") != wanted:
        print(f"installing optimum into {environment}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        _pip(python, "--requirement", _REQUIREMENTS)
        _pip(python, "--no-deps", "--editable", ROOT)  # for the witnesses, which export what optimum then runs
        installed.write_text(wanted, encoding="utf-8")
    return str(python)


def _pip(python: Path, *arguments: str | Path) -> None:
    subprocess.run([python, "-m", "pip", "install", "-qq", *arguments], check=True)
