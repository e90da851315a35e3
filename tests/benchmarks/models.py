"""Models to measure with: the same weights in every contender's format, and sources to decode."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dragoman_bundle.architecture import PRESETS, Architecture
from dragoman_bundle.bundle import load_bundle
from dragoman_export.batching import Example
from dragoman_export.bundling import parity_sources
from dragoman_export.linear import FloatLinear
from dragoman_export.model import Transformer
from dragoman_export.options import VARIANT_KINDS
from dragoman_export.quantization import quantised
from dragoman_export.restoring import restore_source
from dragoman_export.tokenization import END_ID, PADDING_ID, START_ID, UNKNOWN_ID
from tests.bare_model import write_graphs
from tests.benchmarks import ROOT
from tests.benchmarks.peers import to_ctranslate2
from tests.benchmarks.roofline import Workload
from tests.benchmarks.stored import CTRANSLATE2, CTRANSLATE2_INT8, SETTINGS, WEIGHTS

BUNDLE = ROOT / "deploy" / "models" / "zh-en" / "1"
MAX_TOKENS = 512
"""Of a source and of a target."""
_CACHE_DTYPES = {precision: VARIANT_KINDS[f"cpu-{precision}"].cache_dtype for precision in ("fp32", "int8")}

Sources = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Weights in every contender's format, and sources to decode."""

    name: str
    directory: Path
    arch: Architecture
    sources: Sources
    max_tokens: int
    """Of an output, unless said otherwise."""
    num_single: int
    """Sources that are decoded one after the other to measure batch 1."""

    def batches(self, size: int) -> list[Sources]:
        """Batches to decode one after the other: several small ones, or one large one; the same every time."""
        count = max(1, min(self.num_single, 8 * self.num_single // size))
        endless = self.sources * (1 + count * size // len(self.sources))
        return [endless[start : start + size] for start in range(0, count * size, size)]

    def workload(self, precision: str, width: int, batch: int, instances: int) -> Workload:
        """What decoding it in our way costs at least."""
        return Workload(
            arch=self.arch,
            precision=precision,
            cache_bytes=np.dtype(_CACHE_DTYPES[precision]).itemsize,
            width=width,
            instances=min(batch, instances),
        )


def prepare_random(directory: Path, name: str, vocab_size: int) -> Model:
    """A preset with random weights; 25 tokens in, 25 out, as no output ends by itself."""
    torch.manual_seed(1)
    model = Transformer(Architecture(vocab_size=vocab_size, **PRESETS[name])).eval()
    with torch.no_grad():
        model.generator.weight[:4] = 0
    sources = random_sources(vocab_size, 256, 25)
    examples = [Example(np.array(ids, np.int32), np.array(ids[::-1], np.int32)) for ids in sources[:32]]
    _write(model, directory, examples)
    return Model(
        name=name, directory=directory, arch=model.arch, sources=sources, max_tokens=25, num_single=8,
    )  # fmt: skip


def prepare_bundled(directory: Path) -> Model:
    """The bundled model and the sentences that its parity was checked on."""
    bundle = load_bundle(BUNDLE)
    source = restore_source(bundle, bundle.manifest.variants[0])
    sources = [ids.tolist() for ids in parity_sources(source)]
    examples = [Example(np.array(ids, np.int32), np.array(ids, np.int32)) for ids in sources[:200]]
    _write(source.model, directory, examples)
    order = np.random.default_rng(0).permutation(len(sources))
    return Model(
        name=f"bundled {bundle.manifest.name}", directory=directory, arch=source.model.arch,
        sources=[sources[i] for i in order[:512]], max_tokens=100, num_single=32,
    )  # fmt: skip


def random_sources(vocab_size: int, count: int, length: int, seed: int = 5) -> Sources:
    """Sources without special tokens; the same every time."""
    rng = np.random.default_rng(seed)
    sources: Sources = rng.integers(4, vocab_size, (count, length)).tolist()
    return sources


def export_for_optimum(model: Model, python: str) -> None:
    """Let optimum export the model with the interpreter that has it."""
    command = [python, "-m", "tests.benchmarks.optimum_export", str(model.directory)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def _write(model: Transformer, directory: Path, examples: Sequence[Example]) -> None:
    """Write all formats."""
    directory.mkdir(parents=True)
    write_graphs(model, directory / "fp32", FloatLinear("float32"), MAX_TOKENS, _CACHE_DTYPES["fp32"])
    scaled, linear = quantised(model, examples)
    write_graphs(scaled, directory / "int8", linear, MAX_TOKENS, _CACHE_DTYPES["int8"])
    to_ctranslate2(model, directory / CTRANSLATE2, MAX_TOKENS, None)
    to_ctranslate2(model, directory / CTRANSLATE2_INT8, MAX_TOKENS, "int8")
    torch.save(model.state_dict(), directory / WEIGHTS)
    settings = {
        "architecture": dataclasses.asdict(model.arch),
        "max_tokens": MAX_TOKENS,
        "special_ids": {"padding": PADDING_ID, "unknown": UNKNOWN_ID, "start": START_ID, "end": END_ID},
        "cache_dtypes": _CACHE_DTYPES,
    }
    (directory / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
