"""`python -m tests.benchmarks.service`: both servers under the same load, ours and CTranslate2's (`ct2_server`).

Finds the highest rate of Poisson arrivals with p99 within the SLO, and what bulk traffic does to interactive latency.
The peer gets its best settings first; then the servers take turns, each alone on the machine with the load generator,
which is a process of its own. Writes service.json beside this file: rows like those of results.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dragoman_bundle.bundle import Samples, load_bundle
from dragoman_client import Client
from dragoman_export.restoring import restore_source
from tests.benchmarks import CORES, ROOT
from tests.benchmarks.models import BUNDLE, MAX_TOKENS
from tests.benchmarks.peers import to_ctranslate2
from tests.benchmarks.results import OURS, Report, Row, compared
from tests.e2e.server_process import running_server

SERVICE = Path(__file__).with_name("service.json")
_MODEL = "bundled zh-en"
_START_RATE = 64.0
_BULK_CONCURRENCY = 128
"""Twice the server's slots: bulk work waits at any moment."""
_NUM_COMPARED = 300
_LEAST_AGREEMENT = 0.8
"""Of int8 outputs, whose kernels round differently; in fp32 they are the same."""
_LEAST_BULK_RATIO = 0.91
"""Of the 99th percentile alone to that with bulk traffic: a tenth more."""
_TUNING_DURATION_S, _TUNING_WARMUP_S = 5.0, 1.0

Serving = Callable[[], AbstractContextManager[str]]
"""Starts a server; the context's value is its address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to measure."""

    texts: Path
    slo_ms: float
    rounds: int
    duration_s: float
    warmup_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """How to run the peer; the defaults are what its users would begin with."""

    isa: str = ""
    """CT2_FORCE_CPU_ISA; empty leaves it to CTranslate2, which takes AVX2 at most."""
    inter_threads: int = CORES
    """Batches at once; they share the cores."""
    max_batch: int = 32
    max_wait_ms: float = 5.0

    @property
    def name(self) -> str:
        """All of them."""
        threads = f"{self.inter_threads}x{max(1, CORES // self.inter_threads)}"
        isa = f" {self.isa}" if self.isa else ""
        return f"CTranslate2 int8 {threads}{isa}, gRPC, batches of {self.max_batch} or {self.max_wait_ms:g} ms"

    def options(self) -> list[str]:
        """Of `ct2_server`."""
        values = {
            "inter-threads": self.inter_threads,
            "intra-threads": max(1, CORES // self.inter_threads),
            "max-batch": self.max_batch,
            "max-wait-ms": self.max_wait_ms,
        }
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]


_ALTERNATIVES: Mapping[str, tuple[Any, ...]] = {
    "isa": ("AVX512",) if platform.machine() == "x86_64" else (),
    "inter_threads": (1,),
    "max_batch": (16, 64),
    "max_wait_ms": (2.0, 10.0),
}


class PeerError(Exception):
    """The peer does not start with its settings."""


@contextmanager
def our_server() -> Iterator[str]:
    """`dragoman-server` with the bundled model and nothing but defaults."""
    with running_server(BUNDLE.parent.parent) as server:
        yield server.address


@contextmanager
def peer_server(model: Path, settings: PeerSettings) -> Iterator[str]:
    """`ct2_server` with a converted model."""
    command = [sys.executable, "-m", "tests.benchmarks.ct2_server", "--model", str(model), "--bundle", str(BUNDLE)]
    environment = os.environ | ({"CT2_FORCE_CPU_ISA": settings.isa} if settings.isa else {})
    with subprocess.Popen(
        [*command, *settings.options()], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("serving on "):
                raise PeerError(f"{settings.name} does not start")
            yield line.split()[-1]
        finally:
            process.kill()


def load(address: str, plan: Plan, *options: str) -> dict[str, Any]:
    """What `dragoman load` says of a server, from a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "load.json"
        command = [sys.executable, "-m", "dragoman_client", "load", "--source", "zh", "--target", "en", "--no-split"]
        command += ["--input", str(plan.texts), "--server", address, "--json", str(path)]
        command += ["--duration", str(plan.duration_s), "--warmup", str(plan.warmup_s)]
        result = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
        if not path.exists():
            raise RuntimeError(f"dragoman load has failed: {result.stderr}")
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report


def knee_rate(address: str, plan: Plan, start_rate: float) -> float:
    """The highest rate that holds, in requests per second."""
    options = ("--find-knee", "--slo-ms", str(plan.slo_ms), "--start-rate", str(start_rate))
    knee = load(address, plan, *options)["knee"]
    if knee["rate"] is None:
        raise RuntimeError(f"no rate held: {[(probe['rate'], probe['problems']) for probe in knee['probes']]}")
    if knee["limited_by_generator"]:
        print(f"the load generator could not send more than {knee['rate']:.1f} requests/s: the knee is higher")
    rate: float = knee["rate"]
    return rate


def tune(model: Path, plan: Plan) -> tuple[PeerSettings, dict[str, float]]:
    """The peer's best settings, changed one after the other, and the rate that each of those tried sustained."""
    quick = dataclasses.replace(plan, duration_s=_TUNING_DURATION_S, warmup_s=_TUNING_WARMUP_S)
    best, rates = PeerSettings(), dict[str, float]()
    rates[best.name] = _try(model, best, quick, _START_RATE)
    for field, values in _ALTERNATIVES.items():
        for candidate in [dataclasses.replace(best, **{field: value}) for value in values]:
            rates[candidate.name] = _try(model, candidate, quick, 0.9 * rates[best.name])
            if rates[candidate.name] > rates[best.name]:
                best = candidate
    return best, rates


def _try(model: Path, settings: PeerSettings, plan: Plan, start_rate: float) -> float:
    try:
        with peer_server(model, settings) as address:
            rate = knee_rate(address, plan, start_rate)
    except PeerError as error:
        print(f"left out: {error}", flush=True)
        return 0.0
    print(f"-- {settings.name}: {rate:.1f} requests/s", flush=True)
    return rate


def agreement(servers: Mapping[str, Serving], plan: Plan) -> float:
    """Share of texts that both servers translate the same."""
    texts = plan.texts.read_text(encoding="utf-8").splitlines()[:_NUM_COMPARED]
    outputs: list[list[str]] = []
    for serve in servers.values():
        with serve() as address, Client(address, timeout=600.0) as client:
            answers = client.translate_batch(texts, source="zh", target="en", split=False)
            outputs.append([answer.text for answer in answers])
    first, second = outputs
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(texts)


def knees(servers: Mapping[str, Serving], plan: Plan) -> dict[str, float]:
    """The rate that each server sustains: the median of rounds in which they take turns."""
    rates: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(plan.rounds):
        for name, serve in servers.items():
            start_rate = 0.9 * rates[name][-1] if rates[name] else _START_RATE
            with serve() as address:
                rates[name].append(knee_rate(address, plan, start_rate))
            print(f"-- {name}: {rates[name][-1]:.1f} requests/s", flush=True)
    return {name: statistics.median(values) for name, values in rates.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkEffect:
    """Interactive latency without and with bulk traffic; medians of rounds that take turns."""

    rate: float
    """Of interactive requests, per second."""
    alone_ms: float
    """99th percentile."""
    with_bulk_ms: float
    bulk_rate: float
    """Of bulk requests that were answered meanwhile, per second."""

    @property
    def factor(self) -> float:
        """What bulk traffic multiplies the 99th percentile by."""
        return self.with_bulk_ms / self.alone_ms


def bulk_effect(serve: Serving, plan: Plan, rate: float) -> BulkEffect:
    """Measure at a rate, with and without bulk traffic that takes whatever it is given."""
    alone, mixed = [], []
    with serve() as address:
        for _ in range(plan.rounds):
            alone.append(load(address, plan, "--rate", str(rate))["run"])
            mixed.append(load(address, plan, "--rate", str(rate), "--bulk-concurrency", str(_BULK_CONCURRENCY))["run"])
    for run in (*alone, *mixed):
        if run["failures"] or not run["valid"]:
            print(f"doubtful: {run['failures']} {run['generator_problems']}", flush=True)
    return BulkEffect(
        rate=rate,
        alone_ms=_median_p99_ms(alone),
        with_bulk_ms=_median_p99_ms(mixed),
        bulk_rate=statistics.median(run["bulk"]["achieved_rate"] for run in mixed),
    )


def _median_p99_ms(runs: list[dict[str, Any]]) -> float:
    p99s: list[float] = [run["latency_s"]["p99"] for run in runs]
    return 1000 * statistics.median(p99s)


def knee_row(rates: Mapping[str, float], plan: Plan) -> Row:
    """The goal is twice the peer's rate."""
    return compared(f"requests/s with p99 ≤ {plan.slo_ms:g} ms", _settings(plan), rates, better="more", target=2.0)


def bulk_rows(effects: Mapping[str, BulkEffect], plan: Plan) -> Iterator[Row]:
    """The goal is that bulk traffic moves our interactive p99 by no more than a tenth. The peer knows no priorities."""
    ours = effects[OURS]
    yield Row(
        benchmark="interactive p99 in ms while bulk saturates the rest",
        settings=_settings(plan) | _rates(ours),
        ours=round(ours.with_bulk_ms, 1),
        peer=round(ours.alone_ms, 1),
        peer_name="the same without bulk",
        ratio=round(1 / ours.factor, 2),
        target=_LEAST_BULK_RATIO,
    )
    settings = _settings(plan) | {name: _rates(effect) for name, effect in effects.items()}
    factors = {name: effect.factor for name, effect in effects.items()}
    yield compared("times that bulk raises the interactive p99", settings, factors, better="less")


def _rates(effect: BulkEffect) -> dict[str, float]:
    return {"interactive_rate": round(effect.rate, 1), "bulk_rate": round(effect.bulk_rate, 1)}


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "model": _MODEL, "precision": "int8", "slo_ms": plan.slo_ms, "duration_s": plan.duration_s,
    }  # fmt: skip


def write_texts(source: Path | None, path: Path) -> None:
    """Write the texts to send: a file's lines, the first column of a .tsv, or the samples that came with the bundle."""
    if source is None:
        bundle = load_bundle(BUNDLE)
        texts = [text for text, _ in Samples.load(bundle.file(bundle.manifest.samples)).parity]
    else:
        lines = source.read_text(encoding="utf-8").splitlines()
        texts = [line.partition("\t")[0] for line in lines] if source.suffix == ".tsv" else lines
    path.write_text("\n".join(filter(str.strip, texts)) + "\n", encoding="utf-8")


def convert(directory: Path) -> Path:
    """The bundled model as CTranslate2 loads it."""
    bundle = load_bundle(BUNDLE)
    source = restore_source(bundle, bundle.manifest.variants[0])
    to_ctranslate2(source.model, directory, MAX_TOKENS, None)
    return directory


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.service", description=__doc__)
    parser.add_argument(
        "--input", type=Path, help="texts, or a .tsv with them in its first column; default: the bundle's"
    )
    parser.add_argument("--slo-ms", type=float, default=300.0, help="bound on p99; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of everything; the median counts")
    parser.add_argument("--duration", type=float, default=15.0, help="of every measurement, in seconds")
    parser.add_argument("--warmup", type=float, default=3.0, help="before every measurement, in seconds")
    parser.add_argument("--no-tuning", action="store_true", help="leave the peer's settings as they are")
    parser.add_argument("--output", type=Path, default=SERVICE, help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    """Measure everything and write the results."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as temporary:
        plan = Plan(
            texts=Path(temporary) / "texts",
            slo_ms=arguments.slo_ms,
            rounds=arguments.rounds,
            duration_s=arguments.duration,
            warmup_s=arguments.warmup,
        )
        write_texts(arguments.input, plan.texts)
        measure(plan, convert(Path(temporary) / "ctranslate2"), arguments).write(arguments.output)


def measure(plan: Plan, model: Path, arguments: argparse.Namespace) -> Report:
    """Everything, in order."""
    report = Report(measured={}, rounds=plan.rounds)
    peer, rates = (PeerSettings(), {}) if arguments.no_tuning else tune(model, plan)
    report.qualifying[_MODEL] = {name: [rate] for name, rate in rates.items()}
    servers: dict[str, Serving] = {OURS: our_server, peer.name: lambda: peer_server(model, peer)}
    share = agreement(servers, plan)
    print(f"{share:.1%} of the int8 outputs are the same", flush=True)
    assert share >= _LEAST_AGREEMENT, "the servers do not compute the same"
    report.agreement.append({"model": _MODEL, "precision": "int8", "share": share})
    sustained = knees(servers, plan)
    report.add(knee_row(sustained, plan))
    effects = {name: bulk_effect(serve, plan, sustained[name] / 2) for name, serve in servers.items()}
    for row in bulk_rows(effects, plan):
        report.add(row)
    return report


if __name__ == "__main__":
    main()
