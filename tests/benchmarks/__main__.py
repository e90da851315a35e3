"""`make bench`: measure against the peers, on the same weights, interleaved, medians, outputs compared first.

Writes results.json beside this file: one object a row with benchmark, settings, ours, peer, peer_name, ratio, target,
and for tokens/s the roofline; with the machine's own rates, the commit, and how CTranslate2 was run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.benchmarks import scenarios
from tests.benchmarks.contenders import optimum
from tests.benchmarks.environments import optimum_python
from tests.benchmarks.machine import measured
from tests.benchmarks.models import Model, export_for_optimum, prepare_bundled, prepare_random
from tests.benchmarks.qualifying import qualify
from tests.benchmarks.results import RESULTS, Report, Row
from tests.benchmarks.scenarios import Field

Scenario = Callable[[Field], Iterator[Row]]

MODELS: Mapping[str, Callable[[Path], Model]] = {
    "base": lambda directory: prepare_random(directory, "base", 32_000),
    "bundled": prepare_bundled,
    "tiny": lambda directory: prepare_random(directory, "tiny", 1000),
}
SCENARIOS: Mapping[str, Scenario] = {
    "throughput": scenarios.throughput,
    "others": scenarios.others,
    "first-token": scenarios.first_token,
    "lengths": scenarios.lengths,
    "joining": scenarios.joining,
    "memory": scenarios.memory,
    "loading": scenarios.loading,
    "quality": scenarios.quality,
}
RANDOM_ONLY = {"lengths", "joining"}
"""They need outputs of a given length."""
BUNDLED_ONLY = {"loading", "quality"}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of every comparison; the median counts")
    parser.add_argument(
        "--model", choices=MODELS, action="append", help="only this one; repeatable; tiny is for trying out"
    )
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only this one; repeatable")
    parser.add_argument("--without-optimum", action="store_true", help="leave that peer out: it needs an installation")
    parser.add_argument("--output", type=Path, default=RESULTS, help="default: %(default)s")
    return parser.parse_args()


def run(report: Report, field: Field, wanted: list[str]) -> None:
    """All scenarios that make sense for a model."""
    is_bundled = field.model.name.startswith("bundled")
    for name in wanted:
        if name not in (RANDOM_ONLY if is_bundled else BUNDLED_ONLY):
            begun = time.monotonic()
            for row in SCENARIOS[name](field):
                report.add(row)
            print(f"-- {field.model.name}, {name}: {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    """Measure everything and write the results."""
    arguments = parse()
    begun = time.monotonic()
    machine = measured()
    report = Report(measured=machine.to_dict(), rounds=arguments.rounds)
    python = None if arguments.without_optimum else optimum_python()
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.model or ["base", "bundled"]:
            model = MODELS[name](Path(temporary) / name)
            if python:
                export_for_optimum(model, python)
            peers = [optimum(precision, python) for precision in ("fp32", "int8")] if python else []
            ct2, report.qualifying[model.name] = qualify(model)
            print(f"-- {model.name}, everything so far: {time.monotonic() - begun:.0f} s", flush=True)
            field = Field(model=model, machine=machine, rounds=arguments.rounds, ct2=ct2, optimum=peers)
            report.agreement += scenarios.agreement(field)
            run(report, field, arguments.scenario or list(SCENARIOS))
    report.write(arguments.output)
    print(f"-- everything: {time.monotonic() - begun:.0f} s; {arguments.output}")


if __name__ == "__main__":
    main()
