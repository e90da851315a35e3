"""Speed and memory against the peers: `python -m tests.benchmarks`. What was tried is in NOTES.md."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CORES = len(os.sched_getaffinity(0))
