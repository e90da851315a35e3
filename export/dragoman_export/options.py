"""What commands are asked to do: every field of a run is an option of `dragoman-export train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dragoman_bundle.manifest import Device
from dragoman_bundle.manifest import Precision as VariantPrecision
from dragoman_bundle.tensors import DType
from dragoman_export.corpus import CleaningLimits, Corpus, Direction
from dragoman_export.tokenization import TokenizerKind

Precision = Literal["auto", "fp32", "bf16", "fp16"]
"""Of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How to optimise; everything that changes the resulting weights for given examples and architecture."""

    dropout: float = 0.1
    """Residual dropout; 0 turns it off."""
    label_smoothing: float = 0.1
    """Epsilon of section 5.4; 0 turns it off."""
    batch_tokens: int = 4096
    """Padded tokens per batch and process."""
    learning_rate: float = 1e-3
    """Peak, reached at the end of the warm-up."""
    warmup_steps: int = 1000
    """Steps of linear increase, before the decay with 1/sqrt(step)."""
    cooldown_steps: int = 0
    """The last steps before `max_steps`, over which the rate falls linearly to 0; 0 is no cool-down."""
    gradient_clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    precision: Precision = "auto"
    """Of matrix products; auto is bf16 on CPU and CUDA. Weights and optimiser stay fp32."""
    max_steps: int = 100_000
    """Optimiser steps."""
    max_epochs: int = 0
    """Passes over the weighted corpora; 0 is no limit."""
    max_minutes: float = 0.0
    """Wall-clock time of this process; 0 is no limit."""
    validate_every: int = 1000
    """Steps between validations, each of which writes a checkpoint."""
    checkpoint_every: int = 200
    """Steps between checkpoints for resuming."""
    average: int = 5
    """How many of the last validated checkpoints to average at the end."""
    patience: int = 0
    """Stop after so many validations without a better mean BLEU; 0 never stops early."""
    seed: int = 1
    """Of initial weights, dropout and data order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to train: text, vocabulary, sizes."""

    directory: Path
    directions: tuple[Direction, ...]
    corpora: tuple[Corpus, ...]
    validation: tuple[Corpus, ...]
    architecture: dict[str, Any]
    """Fields of `Architecture` but `vocab_size`, which the tokenizer decides."""
    vocab_size: int = 8000
    """Pieces to train a tokenizer with; not used with `tokenizer`."""
    tokenizer_kind: TokenizerKind = "unigram"
    tokenizer: Path | None = None
    """A SentencePiece model to use instead of training one."""
    initial_weights: Path | None = None
    """A checkpoint or a bundle to start from instead of random weights; a bundle brings its tokenizer along."""
    limits: CleaningLimits = field(default_factory=CleaningLimits)
    max_validation_sentences: int = 0
    """Of each validation file, per validation; 0 uses all."""


@dataclass(frozen=True, slots=True)
class VariantKind:
    """A device and a precision, written "cpu-int8"."""

    device: Device
    precision: VariantPrecision

    def __str__(self) -> str:
        return f"{self.device}-{self.precision}"

    @property
    def cache_dtype(self) -> DType:
        """Of keys and values; what enters and leaves attention is of `activation_dtype`."""
        dtypes: dict[VariantPrecision, DType] = {"fp32": "float32", "int8": "int8", "fp16": "float16"}
        return dtypes[self.precision]


VARIANT_KINDS: dict[str, VariantKind] = {
    str(kind): kind for kind in (VariantKind("cpu", "fp32"), VariantKind("cpu", "int8"), VariantKind("cuda", "fp16"))
}
