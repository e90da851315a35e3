"""How fast a batch could be decoded at most, from the architecture and what the machine was measured to do.

Counted is what no implementation of the model can do without: reading weights, keys and values, writing and reading
logits, and the products of the linear layers. NOTES.md says what is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dragoman_bundle.architecture import Architecture

_LOGIT_BYTES = 4
_LOGIT_PASSES = 2
"""They are written once and searched once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Measured rates, of one core and of all cores together."""

    cores: int
    read_bytes_per_s: dict[str, dict[int, float]]
    """By "one core" and "all cores", then by how many bytes are read again and again."""
    copy_bytes_per_s: dict[str, float]
    """Of the largest size, bytes read and bytes written added up."""
    products_per_s: dict[str, dict[str, float]]
    """By "one core" and "all cores", then by "int8 x 64 rows" and so on."""

    def bytes_per_s(self, working_set: float) -> float:
        """How fast `working_set` bytes can be read that are read at every step; rather too fast than too slow."""
        sizes = self.read_bytes_per_s["all cores"]
        size = max((size for size in sizes if size <= working_set), default=min(sizes))
        return max(rates[size] for rates in self.read_bytes_per_s.values())

    @property
    def macs_per_s(self) -> dict[str, float]:
        """Most multiply-accumulate operations, by precision."""
        rates = [pair for rates in self.products_per_s.values() for pair in rates.items()]
        return {p: max(rate for name, rate in rates if name.startswith(p)) for p in ("int8", "fp32")}

    def to_dict(self) -> dict[str, Any]:
        """For results.json, in units that can be read."""
        reads = {
            who: {f"{size // 2**20} MiB": round(rate / 1e9, 1) for size, rate in rates.items()}
            for who, rates in self.read_bytes_per_s.items()
        }
        return {
            "read GB/s": reads,
            "copy GB/s": {who: round(rate / 1e9, 1) for who, rate in self.copy_bytes_per_s.items()},
            "GMAC/s": {
                who: {name: round(rate / 1e9, 1) for name, rate in rates.items()}
                for who, rates in self.products_per_s.items()
            },
        }


class Text(NamedTuple):
    """A source that was decoded."""

    source_tokens: int
    target_tokens: int
    """End token not counted."""
    steps: int
    """Decode steps: one per target token, and one for the end token unless the output was cut."""


Batches = Sequence[Sequence[Text]]
"""Decoded one after the other, the texts of each side by side."""


def texts(sources: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], max_tokens: int) -> list[Text]:
    """What was decoded, as the bound counts it."""
    return [
        Text(len(source), len(output), min(len(output) + 1, max_tokens))
        for source, output in zip(sources, outputs, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and how it is decoded."""

    arch: Architecture
    precision: str
    """int8 or fp32; of weights and linear layers."""
    cache_bytes: int
    """Of one element of the caches of keys and values."""
    width: int = 1
    """Beams; each is a row."""
    instances: int = 1
    """Engines among which a batch is divided; each reads all weights."""

    @property
    def weight_bytes(self) -> int:
        """Of one weight."""
        return 1 if self.precision == "int8" else 4

    @property
    def decoder_weights(self) -> int:
        """Weights that a decode step multiplies with, which is also its multiplications per row."""
        arch = self.arch
        self_attention = 4 * arch.d_model * arch.d_attention
        cross_attention = 2 * arch.d_model * arch.d_attention
        feed_forward = 2 * arch.d_model * arch.d_ff
        layers = arch.decoder_layers * (self_attention + cross_attention + feed_forward)
        return layers + arch.d_model * arch.vocab_size

    @property
    def encoder_weights(self) -> int:
        """Likewise of the encoder, per source token, with the keys and values that cross-attention will read."""
        arch = self.arch
        layer = 4 * arch.d_model * arch.d_attention + 2 * arch.d_model * arch.d_ff
        return arch.encoder_layers * layer + arch.decoder_layers * 2 * arch.d_model * arch.d_attention

    def decode_bytes(self, batch: Sequence[Text]) -> int:
        """Bytes that all steps of a batch touch."""
        per_position = 2 * self.arch.d_attention * self.arch.decoder_layers * self.cache_bytes
        row_steps = sum(text.steps for text in batch) * self.width
        own = sum(text.steps * (text.steps + 1) // 2 for text in batch) * self.width  # step t reads t positions
        source = sum(text.steps * text.source_tokens for text in batch)  # the beams of a text share it
        logits = row_steps * self.arch.vocab_size * _LOGIT_BYTES * _LOGIT_PASSES
        weights = self._weight_reads(batch) * self.decoder_weights * self.weight_bytes
        return weights + (own + source) * per_position + logits

    def decode_macs(self, batch: Sequence[Text]) -> int:
        """Multiplications of all steps of a batch."""
        return sum(text.steps for text in batch) * self.width * self.decoder_weights

    def encode_macs(self, batch: Sequence[Text]) -> int:
        """Multiplications to encode a batch."""
        return sum(text.source_tokens for text in batch) * self.encoder_weights

    def encode_bytes(self, batch: Sequence[Text]) -> int:
        """Bytes of weights read to encode a batch."""
        return min(len(batch), self.instances) * self.encoder_weights * self.weight_bytes

    def _weight_reads(self, batch: Sequence[Text]) -> int:
        """How often all weights are read: as often as the longest text of every instance has steps.

        Long texts are taken to run together, which is the least that any division among the instances costs.
        """
        per_instance = -(-len(batch) // self.instances)
        return sum(sorted((text.steps for text in batch), reverse=True)[::per_instance])


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What a run had to do, and how fast this machine could do it."""

    num_steps: int
    num_bytes: int
    """Touched by all steps."""
    num_macs: int
    """Multiplied by all steps."""
    bound_tokens_per_s: float


def roofline(workload: Workload, batches: Batches, machine: Machine) -> Roofline:
    """The bound of decoding batches one after the other."""
    num_steps = sum(max(text.steps for text in batch) for batch in batches)
    num_bytes = sum(map(workload.decode_bytes, batches))
    distinct_bytes = sum(map(dataclasses.replace(workload, instances=1).decode_bytes, batches))
    num_macs = sum(map(workload.decode_macs, batches))
    macs_per_s = machine.macs_per_s[workload.precision]
    bytes_per_s = machine.bytes_per_s(distinct_bytes / num_steps)
    seconds = max(num_bytes / bytes_per_s, num_macs / macs_per_s)
    for batch in batches:
        seconds += max(workload.encode_bytes(batch) / bytes_per_s, workload.encode_macs(batch) / macs_per_s)
    num_tokens = sum(text.target_tokens for batch in batches for text in batch)
    return Roofline(
        num_steps=num_steps, num_bytes=num_bytes, num_macs=num_macs, bound_tokens_per_s=num_tokens / seconds
    )
