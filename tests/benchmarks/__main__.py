"""`make bench`: throughput against the peers, on the same weights, interleaved, medians, outputs compared first.

Writes results.json beside this file: one object a row, with benchmark, settings, ours, peer, peer_name, ratio, target.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman_bundle.architecture import PRESETS, Architecture
from dragoman_bundle.bundle import load_bundle
from dragoman_export.batching import Example
from dragoman_export.bundling import parity_sources
from dragoman_export.linear import FloatLinear, Int8Linear
from dragoman_export.model import Transformer
from dragoman_export.quantization import calibrate
from dragoman_export.restoring import restore_source
from tests.bare_model import write_graphs
from tests.benchmarks.peers import to_ctranslate2
from tests.benchmarks.worker import CORES

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).with_name("results.json")
MAX_TOKENS = 512
MAX_ROWS = 512
_REST_S = 0.25
"""Between two contenders: threads that spin after their work have come to rest."""

Sources = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison; a larger ratio is better for us."""

    benchmark: str
    settings: dict[str, Any]
    ours: float
    peer: float
    peer_name: str
    ratio: float
    target: float | None


class Worker:
    """A contender's process."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.worker", name, str(directory)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.load_s: float = self._answer()["load_s"]
        self.peak_mib = 0.0

    def run(self, sources: Sources, width: int, max_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds and outputs."""
        assert self._process.stdin is not None
        job = {"sources": sources, "width": width, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak_mib = answer["peak_mib"]
        return answer["seconds"], answer["outputs"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextmanager
def workers(directory: Path, *names: str) -> Iterator[list[Worker]]:
    """Contenders that are ready."""
    with ExitStack() as stack:
        opened = []
        for name in names:
            opened.append(Worker(name, directory))
            stack.callback(opened[-1].close)
        yield opened


@dataclass(frozen=True, slots=True)
class Model:
    """Weights in every contender's format, and sources to decode."""

    name: str
    directory: Path
    sources: Sources
    max_tokens: int


def prepare_base(directory: Path) -> Model:
    """Transformer base with random weights; 25 tokens in, 25 out, as no output ends by itself."""
    torch.manual_seed(1)
    model = Transformer(Architecture(vocab_size=32_000, **PRESETS["base"])).eval()
    with torch.no_grad():
        model.generator.weight[:4] = 0
    rng = np.random.default_rng(5)
    ids = rng.integers(4, 32_000, (128, 25))
    examples = [Example(row.astype(np.int32), row[::-1].astype(np.int32)) for row in ids[:32]]
    _write(model, directory, examples)
    return Model("base", directory, ids.tolist(), 25)


def prepare_bundled(directory: Path) -> Model:
    """The bundled model and the sentences that its parity was checked on."""
    bundle = load_bundle(ROOT / "deploy" / "models" / "zh-en" / "1")
    source = restore_source(bundle, bundle.manifest.variants[0])
    sources = [ids.tolist() for ids in parity_sources(source)]
    examples = [Example(np.array(ids, np.int32), np.array(ids, np.int32)) for ids in sources[:200]]
    _write(source.model, directory, examples)
    order = np.random.default_rng(0).permutation(len(sources))
    return Model("bundled zh-en", directory, [sources[i] for i in order[:512]], 100)


def _write(model: Transformer, directory: Path, examples: Sequence[Example]) -> None:
    directory.mkdir(parents=True)
    write_graphs(model, directory / "fp32", FloatLinear("float32"), MAX_TOKENS)
    write_graphs(model, directory / "int8", Int8Linear(calibrate(model, examples)), MAX_TOKENS)
    to_ctranslate2(model, directory / "ctranslate2", MAX_TOKENS)
    torch.save(model.state_dict(), directory / "weights.pt")
    settings = {"architecture": dataclasses.asdict(model.arch), "max_tokens": MAX_TOKENS, "max_rows": MAX_ROWS}
    (directory / "settings.json").write_text(json.dumps(settings))


def ours(precision: str) -> str:
    """Our contender as the server configures itself: an engine per core, one thread each."""
    return f"dragoman:{precision}:{CORES}x1"


def ct2(types: Sequence[str]) -> list[str]:
    """CTranslate2 in all ways to use the cores."""
    return [f"ctranslate2:{kind}:{inter}" for kind in types for inter in sorted({1, CORES})]


def compare(model: Model, width: int, batch: int, contenders: list[Worker], rounds: int) -> dict[str, float]:
    """Target tokens per second of each contender, the median of interleaved rounds."""
    sources = (model.sources * (1 + batch // len(model.sources)))[:batch]
    repeats = max(1, 8 // batch)  # small batches are over in milliseconds
    speeds: dict[str, list[float]] = {worker.name: [] for worker in contenders}
    for round_ in range(rounds + 1):
        for worker in contenders:
            time.sleep(_REST_S)
            seconds, tokens = 0.0, 0
            for _ in range(repeats):
                spent, outputs = worker.run(sources, width, model.max_tokens)
                seconds += spent
                tokens += sum(map(len, outputs))
            if round_:
                speeds[worker.name].append(tokens / seconds)
    return {name: statistics.median(values) for name, values in speeds.items()}


def agreement(model: Model, width: int, contenders: list[Worker], count: int = 64) -> float:
    """Share of sources to which all contenders give the same tokens."""
    outputs = [worker.run(model.sources[:count], width, model.max_tokens)[1] for worker in contenders]
    return sum(len({tuple(ids) for ids in row}) == 1 for row in zip(*outputs, strict=True)) / min(
        count, len(model.sources)
    )


def best_row(
    benchmark: str, settings: dict[str, Any], speeds: dict[str, float], mine: str, target: float | None
) -> Row:
    """Our speed against the best of the others."""
    peer_name, peer = max(((n, s) for n, s in speeds.items() if not n.startswith("dragoman")), key=lambda pair: pair[1])
    row = Row(
        benchmark=benchmark,
        settings=settings,
        ours=round(speeds[mine], 1),
        peer=round(peer, 1),
        peer_name=peer_name,
        ratio=round(speeds[mine] / peer, 2),
        target=target,
    )
    print(f"{benchmark:28} {settings} {row.ours} against {row.peer_name} {row.peer}: {row.ratio} (target {target})")
    return row


def throughput(model: Model, rounds: int) -> Iterator[Row]:
    """Greedy and beam 4 against CTranslate2 in int8 and fp32, and against transformers."""
    plans: list[tuple[str, str, list[str], dict[int, dict[int, float]]]] = [
        ("int8", "int8", ct2(["int8", "int8_float32", "int16"]), {
            1: {1: 2.0, 8: 2.0, 32: 2.0, 64: 1.5, 128: 1.5}, 4: {1: 1.5, 8: 1.5, 32: 1.5}}),
        ("fp32", "fp32", ct2(["float32"]), {1: {1: 1.3, 8: 1.3, 32: 1.3, 64: 1.3, 128: 1.3}}),
        ("int8 against bfloat16", "int8", ["transformers:bfloat16"], {1: {1: 2.5, 8: 2.5, 32: 2.5}}),
        ("int8 against fp32", "int8", ["transformers:float32"], {1: {1: 5.0, 8: 5.0, 32: 5.0}}),
    ]  # fmt: skip
    for label, precision, peers, targets in plans:
        with workers(model.directory, ours(precision), *peers) as contenders:
            if precision == "fp32":
                share = agreement(model, 1, contenders)
                print(f"{model.name}: {share:.1%} of the fp32 outputs are the same")
                assert share >= 0.97, "the contenders do not compute the same"
            for width, batches in targets.items():
                for batch, target in batches.items():
                    speeds = compare(model, width, batch, contenders, rounds)
                    settings = {"model": model.name, "batch": batch, "beam": width, "precision": label}
                    search = "greedy" if width == 1 else f"beam {width}"
                    yield best_row(f"{search} tokens/s", settings, speeds, ours(precision), target)
            if label == "int8":
                yield from footprint(model, contenders)


def footprint(model: Model, contenders: list[Worker]) -> Iterator[Row]:
    """Peak memory after batches of 64, in fresh processes, and the time until ready."""
    names = [worker.name for worker in contenders if "int16" not in worker.name]
    peaks: dict[str, float] = {}
    loads: dict[str, float] = {}
    for name in names:
        with workers(model.directory, name) as [worker]:
            worker.run(model.sources[:64], 1, model.max_tokens)
            peaks[name], loads[name] = worker.peak_mib, worker.load_s
    for benchmark, values, target in (
        ("peak resident MiB, batch 64", peaks, 1.0),
        ("seconds until ready", loads, None),
    ):
        peer_name, peer = min(((n, v) for n, v in values.items() if not n.startswith("dragoman")), key=lambda p: p[1])
        mine = values[names[0]]
        row = Row(
            benchmark=benchmark,
            settings={"model": model.name, "precision": "int8"},
            ours=round(mine, 2),
            peer=round(peer, 2),
            peer_name=peer_name,
            ratio=round(peer / mine, 2),
            target=target,
        )
        print(row)
        yield row


def main() -> None:
    """Measure everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of every comparison; the median counts")
    parser.add_argument("--model", choices=["base", "bundled"], action="append", help="only this one; repeatable")
    arguments = parser.parse_args()
    wanted = arguments.model or ["base", "bundled"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        prepare = {"base": prepare_base, "bundled": prepare_bundled}
        for name in wanted:
            rows += throughput(prepare[name](Path(temporary) / name), arguments.rounds)
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{CORES} cores, {_processor()}",
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    flags = {flag for line in info.splitlines() if line.startswith("flags") for flag in line.split()}
    isa = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if flag in flags]
    return f"{names[0] if names else platform.processor()} ({', '.join(isa)})"


if __name__ == "__main__":
    main()
