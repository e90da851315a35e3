"""One contender in a process of its own: `python -m tests.benchmarks.worker JSON`, then a job a line.

The argument names the engine, the model's directory and the engine's options. The first answer says how long imports
and opening took; after that each line of stdin is a job, {"job": ..., "arguments": {...}}, and each line of stdout its
answer. Standard library only: what a contender needs is imported by its own module.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.engines import Engine, Ids


def decode(engine: Engine, batches: Sequence[Sequence[Ids]], width: int, max_tokens: int) -> dict[str, Any]:
    """Decode batches one after the other."""
    begun = time.perf_counter()
    outputs = [engine.decode(sources, width, max_tokens) for sources in batches]
    return {"seconds": time.perf_counter() - begun, "outputs": outputs}


def first_tokens(engine: Engine, sources: Sequence[Ids]) -> list[float]:
    """Seconds until each source's first token; nothing else runs meanwhile."""
    return [engine.first_token_s(source) for source in sources]


def join(engine: Any, **arguments: Any) -> Any:
    """See `Dragoman.join`; no other engine lets anybody join."""
    return engine.join(**arguments)


def peak_mib(_engine: Engine) -> float:
    """Most memory that was ever resident. Not ru_maxrss, which a process inherits from the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


JOBS: Mapping[str, Callable[..., Any]] = {
    "decode": decode, "first_tokens": first_tokens, "join": join, "peak_mib": peak_mib,
}  # fmt: skip


def main() -> None:
    """Open the engine and serve jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    wanted = json.loads(sys.argv[1])
    begun = time.perf_counter()
    module = importlib.import_module(f"tests.benchmarks.engines.{wanted['engine']}")
    imported = time.perf_counter()
    engine = module.open_engine(Path(wanted["directory"]), wanted["options"])
    answer: Any = {"import_s": imported - begun, "open_s": time.perf_counter() - imported}
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = JOBS[asked["job"]](engine, **asked["arguments"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
