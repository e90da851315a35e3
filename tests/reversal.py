"""A toy language pair with a known answer: the target is the source's words in reverse order."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from dragoman_bundle.architecture import PRESETS
from dragoman_bundle.manifest import Limits
from dragoman_export.commands import export_run
from dragoman_export.corpus import Corpus, Direction
from dragoman_export.distributed import Process
from dragoman_export.options import VARIANT_KINDS, RunOptions, TrainingOptions
from dragoman_export.runs import train

DIRECTION = Direction("fwd", "rev")
WORDS = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"][:24]


def reverse(text: str) -> str:
    """The right translation."""
    return " ".join(reversed(text.split()))


def sentences(count: int, seed: int, shortest: int = 2, longest: int = 9) -> list[str]:
    """Random sources."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(shortest, longest))) for _ in range(count)]


def write_pairs(path: Path, texts: list[str]) -> Path:
    """A TSV file of sources and right translations."""
    path.write_text("".join(f"{text}\t{reverse(text)}\n" for text in texts), encoding="utf-8")
    return path


def train_reversal(directory: Path, max_steps: int = 1300) -> Path:
    """Train a tiny model to reverse, with the pipeline that trains any model; returns the run's directory."""
    directory.mkdir(parents=True)
    run = RunOptions(
        directory=directory / "run",
        directions=(DIRECTION,),
        corpora=(Corpus((write_pairs(directory / "train.tsv", sentences(12_000, seed=1)),)),),
        validation=(Corpus((write_pairs(directory / "valid.tsv", sentences(520, seed=2)),)),),
        architecture=PRESETS["tiny"],
        max_validation_sentences=100,
    )
    options = TrainingOptions(
        dropout=0.0,
        label_smoothing=0.0,
        batch_tokens=1024,
        learning_rate=0.002,
        warmup_steps=200,
        cooldown_steps=max(0, max_steps - 200),
        max_steps=max_steps,
        validate_every=400,
        checkpoint_every=1000,
        average=3,
        precision="fp32",
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices are so small that threads would only wait for each other
    try:
        train(run, options, Process())
    finally:
        torch.set_num_threads(num_threads)
    return run.directory


def export_reversal(run: Path, models: Path) -> Path:
    """A model repository with the toy model, in fp32, int8 and fp16."""
    kinds = [VARIANT_KINDS[name] for name in ("cpu-fp32", "cpu-int8", "cuda-fp16")]
    limits = Limits(max_source_tokens=64, max_target_tokens=64)
    export_run(run, models / "reversal" / "1", "reversal", kinds, limits, [], lambda _: None)
    return models
