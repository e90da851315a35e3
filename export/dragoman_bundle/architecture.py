"""One description of an encoder-decoder Transformer, shared by training, export and serving."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

Norm = Literal["post", "pre"]


class ArchitectureError(ValueError):
    """An architecture that cannot be built; the message lists every problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and options of the Transformer of "Attention Is All You Need", section 3.

    `head_dim` is d_k = d_v of the paper. It need not be `d_model / num_heads`; left at 0 it is, and then
    `d_model` must be divisible by `num_heads`.
    """

    vocab_size: int
    """Pieces in the vocabulary that source and target share."""
    d_model: int = 512
    """Width of the residual stream."""
    num_heads: int = 8
    """Attention heads, the same in every attention layer."""
    head_dim: int = 0
    """Width of one head; 0 means d_model / num_heads."""
    d_ff: int = 2048
    """Inner width of the feed-forward layers."""
    encoder_layers: int = 6
    decoder_layers: int = 6
    norm: Norm = "post"
    """"post": LayerNorm after each residual sum, as published. "pre": before each sub-layer, and once at the end."""
    tied_embeddings: bool = True
    """One matrix serves as source embedding, target embedding and output projection (section 3.4)."""

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.num_heads > 0 and self.d_model % self.num_heads == 0:
            object.__setattr__(self, "head_dim", self.d_model // self.num_heads)
        if problems := list(self._problems()):
            raise ArchitectureError("this architecture cannot be built:\n" + "\n".join(f"- {p}" for p in problems))

    def _problems(self) -> list[str]:
        sizes = ("vocab_size", "d_model", "num_heads", "d_ff", "encoder_layers", "decoder_layers")
        problems = [
            f"{name} must be at least 1, not {getattr(self, name)}" for name in sizes if getattr(self, name) < 1
        ]
        if self.head_dim == 0 and self.num_heads > 0:
            problems.append(
                f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}: "
                "change one of them, or set head_dim to the head size you want"
            )
        if self.head_dim < 0:
            problems.append(f"head_dim must be 0 (d_model / num_heads) or more, not {self.head_dim}")
        if self.d_model % 2:
            problems.append(f"d_model must be even for sinusoidal positions, not {self.d_model}")
        if self.norm not in ("post", "pre"):
            problems.append(f"norm must be 'post' or 'pre', not {self.norm!r}")
        return problems

    @property
    def d_attention(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Read what `to_dict` wrote; unknown or missing fields are an error."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ArchitectureError(f"unknown architecture fields {unknown}; known are {sorted(known)}")
        if "vocab_size" not in fields:
            raise ArchitectureError("architecture field vocab_size is missing")
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Every field, in declaration order."""
        return dataclasses.asdict(self)


PRESETS: dict[str, dict[str, Any]] = {
    # Table 3 of the paper, rows "base" and "big".
    "base": {
        "d_model": 512,
        "num_heads": 8,
        "d_ff": 2048,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "norm": "post",
    },
    "big": {
        "d_model": 1024,
        "num_heads": 16,
        "d_ff": 4096,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "norm": "post",
    },
    # A deep encoder and a shallow decoder: nearly the quality of 6+6, and the decoder is what a served token costs.
    "small": {
        "d_model": 256,
        "num_heads": 4,
        "d_ff": 1024,
        "encoder_layers": 6,
        "decoder_layers": 3,
        "norm": "pre",
    },
    "tiny": {
        "d_model": 64,
        "num_heads": 4,
        "d_ff": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "norm": "pre",
    },
}
"""Named sizes for `dragoman-export train --preset`; all but `vocab_size`."""

PRESET_DROPOUT: dict[str, float] = {"base": 0.1, "big": 0.3, "small": 0.1, "tiny": 0.1}
"""Residual dropout that belongs to each preset (Table 3 for base and big)."""
