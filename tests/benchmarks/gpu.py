"""Everything that needs a GPU, in one go: `python -m tests.benchmarks.gpu`.

A Transformer base with random weights, as cuda-fp16: its tokens against the fp32 graphs on the CPU, against itself in
other company, and its speed against transformers' generate in fp16 on the same GPU. Writes results_gpu.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman_bundle.architecture import PRESETS, Architecture
from dragoman_bundle.manifest import Device
from dragoman_bundle.tensors import DType
from dragoman_export.linear import FloatLinear
from dragoman_export.model import Transformer
from dragoman_server.engine.device_runner import DeviceModelRunner
from dragoman_server.engine.devices import usable_gpus
from dragoman_server.engine.engine import Engine
from dragoman_server.engine.model_runner import ModelRunner, OnnxModelRunner
from dragoman_server.engine.request import BeamSearch, GreedySearch, Search
from dragoman_server.engine.scheduler import SchedulerLimits
from dragoman_server.engine.waiting_line import WaitingLine
from tests.bare_model import open_graphs, open_on_device, write_graphs
from tests.doubles import END, make_sequence
from tests.witnesses import to_transformers

RESULTS = Path(__file__).with_name("results_gpu.json")
BATCHES = (1, 8, 32, 64, 128)
WIDTHS = (1, 4)
_MAX_TOKENS = 128
_ROUNDS = 5

Ids = list[list[int]]
Decode = Callable[[Ids, int, int], Ids]
"""From sources, the beam's width (1 is greedy) and the number of tokens to the outputs."""


def random_model(arch: Architecture) -> Transformer:
    """A model none of whose outputs ends by itself: special tokens are improbable."""
    torch.manual_seed(1)
    model = Transformer(arch).eval()
    with torch.no_grad():
        model.generator.weight[:4] = 0
    return model


def with_runner(runner: ModelRunner, num_slots: int) -> Decode:
    """Our engine, with all sources in line from the start."""
    limits = SchedulerLimits(max_rows=num_slots, max_encode_tokens=16_384)

    def decode(sources: Ids, width: int, count: int) -> Ids:
        engine = Engine(runner, limits, WaitingLine(len(sources)), END)
        search: Search = BeamSearch(width=width) if width > 1 else GreedySearch()
        sequences = [make_sequence(i, source, count, search=search) for i, source in enumerate(sources)]
        engine.scheduler.line.add(*sequences)
        while engine.has_work:
            engine.step()
        return [sequence.output_ids for sequence in sequences]

    return decode


def with_transformers(model: Transformer, device: Device, dtype: torch.dtype) -> Decode:
    """transformers' generate; all sources are of one length."""
    witness = to_transformers(model, _MAX_TOKENS).to(device, dtype)

    def decode(sources: Ids, width: int, count: int) -> Ids:
        ids = torch.tensor(sources, device=device)
        options = {"num_beams": width, "max_new_tokens": count} | ({"early_stopping": True} if width > 1 else {})
        with torch.inference_mode():
            outputs = witness.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        found: Ids = outputs[:, 1:].tolist()
        return found

    return decode


def speed(decode: Decode, sources: Ids, width: int, count: int) -> float:
    """Median tokens per second, warm."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        begun = time.perf_counter()
        num_tokens = sum(map(len, decode(sources, width, count)))
        seconds.append(time.perf_counter() - begun)
    return num_tokens / statistics.median(seconds[1:])


def equal_tokens(found: Ids, expected: Ids) -> float:
    """Share of tokens that are the same at the same place."""
    pairs = [pair for a, b in zip(found, expected, strict=True) for pair in zip(a, b, strict=False)]
    return sum(a == b for a, b in pairs) / max(sum(map(len, expected)), 1)


def checks(device: Decode, cpu: Decode, sources: Ids, count: int) -> dict[str, float]:
    """Whether the device says what it should."""
    together = device(sources, 1, count)
    ragged = [source[: 5 + i % 20] for i, source in enumerate(sources)]
    alone = [device([source], 1, count)[0] for source in ragged[:16]]
    invariant = [a == b for a, b in zip(alone, device(ragged, 1, count), strict=False)]
    return {
        "greedy tokens equal to the CPU's in fp32": equal_tokens(together[:32], cpu(sources[:32], 1, count)),
        "ragged sources, likewise": equal_tokens(device(ragged[:32], 1, count), cpu(ragged[:32], 1, count)),
        "beam 4, likewise": equal_tokens(device(sources[:16], 4, count), cpu(sources[:16], 4, count)),
        "outputs the same alone and in a batch": sum(invariant) / len(invariant),
    }


def compare(ours: Decode, peer: Decode | None, sources: Ids, count: int) -> Iterator[dict[str, Any]]:
    """Tokens per second of both, by width and batch."""
    for width in WIDTHS:
        for batch in (b for b in BATCHES if b <= len(sources)):
            row: dict[str, Any] = {"beam": width, "batch": batch, "ours": speed(ours, sources[:batch], width, count)}
            row["transformers"] = speed(peer, sources[:batch], width, count) if peer else None
            shown = f"{row['transformers']:10,.0f} {row['ours'] / row['transformers']:6.2f}" if peer else f"{'-':>10}"
            print(f"{width:4} {batch:5} {row['ours']:10,.0f} {shown}", flush=True)
            yield row


def measure(arch: Architecture, device: Device, dtype: DType, num_sources: int, count: int = 25) -> dict[str, Any]:
    """All checks and speeds of one model.

    Args:
        arch: of the model.
        device: to run on; "cpu" tries this script out.
        dtype: of its graphs there.
        num_sources: of 25 tokens.
        count: tokens to produce for each.
    """
    model = random_model(arch)
    sources: Ids = np.random.default_rng(5).integers(4, arch.vocab_size, (num_sources, 25)).tolist()
    num_slots = num_sources * max(WIDTHS)
    with tempfile.TemporaryDirectory() as temporary:
        here, there = Path(temporary) / "cpu", Path(temporary) / device
        write_graphs(model, here, FloatLinear("float32"), _MAX_TOKENS)
        write_graphs(model, there / dtype, FloatLinear(dtype), _MAX_TOKENS, dtype)
        cpu = with_runner(OnnxModelRunner(open_graphs(here, arch, _MAX_TOKENS, num_threads=0), 128), 128)
        opened = open_on_device(there / dtype, arch, _MAX_TOKENS, device, dtype)
        ours = with_runner(DeviceModelRunner(opened, num_slots), num_slots)
    found = checks(ours, cpu, sources, count)
    for name, share in found.items():
        print(f"{share:7.1%}  {name}")
    has_peer = device == "cpu" or torch.cuda.is_available()
    peer = with_transformers(model, device, getattr(torch, dtype)) if has_peer else None
    print("beam batch   dragoman transformers ratio  (tokens/s)")
    return {"checks": found, "rows": list(compare(ours, peer, sources, count))}


def device_name() -> str:
    """What the driver calls the GPU."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def main() -> int:
    """Measure and write the results; 1 without a GPU."""
    if not usable_gpus():
        print("no GPU: this needs onnxruntime-gpu, CUDA and a device", file=sys.stderr)
        return 1
    name = device_name()
    print(name)
    results = measure(Architecture(vocab_size=32_000, **PRESETS["base"]), "cuda", "float16", max(BATCHES))
    report = {"date": datetime.now(UTC).date().isoformat(), "device": name} | results
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
