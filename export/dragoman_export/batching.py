"""Which examples make up an epoch, in which batches and in which order: pure functions of seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dragoman_export.tokenization import END_ID, PADDING_ID, START_ID

Ids = npt.NDArray[np.int32]


class Example(NamedTuple):
    """Token ids of one training example."""

    source: Ids
    """Language tag, pieces, end token."""
    target: Ids
    """Pieces alone; the start and end tokens are added in the batch."""


@dataclass(frozen=True, slots=True)
class WeightedExamples:
    """Examples of one corpus in one direction, and how often an epoch shows each."""

    examples: Sequence[Example]
    weight: float


class Batch(NamedTuple):
    """Padded tensors of one step."""

    source_ids: Tensor
    """int64 [batch, src_len]."""
    source_lengths: Tensor
    """int64 [batch]."""
    target_inputs: Tensor
    """int64 [batch, tgt_len]: start token, then the reference."""
    target_outputs: Tensor
    """int64 [batch, tgt_len]: the reference, then the end token."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    @property
    def num_target_tokens(self) -> int:
        """Target tokens that count towards the loss."""
        return int((self.target_outputs != PADDING_ID).sum())


def epoch_batches(corpora: Sequence[WeightedExamples], batch_tokens: int, seed: int, epoch: int) -> list[list[Example]]:
    """The batches of one epoch, in order: examples of similar length together, at most `batch_tokens` padded tokens.

    Args:
        corpora: a weight of 2.5 shows every example twice, and a random half of them a third time.
        batch_tokens: bound on rows times longest side; a longer example makes a batch of its own.
        seed: of the run.
        epoch: counted from 0. The same seed and epoch always give the same batches.
    """
    rng = np.random.default_rng([seed, epoch])
    chosen = [example for corpus in corpora for example in _draw(corpus, rng)]
    lengths = np.array([max(len(example.source), len(example.target) + 1) for example in chosen])
    # Random order among examples of (nearly) equal length.
    order = np.argsort(lengths + rng.random(len(chosen)) * (1 + lengths / 8), kind="stable")
    batches: list[list[Example]] = []
    longest = 0
    for index in order:
        longest = max(longest, int(lengths[index]))
        if not batches or (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
            longest = int(lengths[index])
        batches[-1].append(chosen[index])
    rng.shuffle(batches)
    return batches


def _draw(corpus: WeightedExamples, rng: np.random.Generator) -> list[Example]:
    copies, fraction = divmod(corpus.weight, 1.0)
    extra = rng.permutation(len(corpus.examples))[: round(fraction * len(corpus.examples))]
    return list(corpus.examples) * int(copies) + [corpus.examples[i] for i in extra]


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples into tensors."""
    sources = [torch.from_numpy(example.source.astype(np.int64)) for example in examples]
    targets = [torch.from_numpy(example.target.astype(np.int64)) for example in examples]
    start, end = torch.tensor([START_ID]), torch.tensor([END_ID])
    return Batch(
        _pad(sources),
        torch.tensor([len(source) for source in sources]),
        _pad([torch.cat([start, target]) for target in targets]),
        _pad([torch.cat([target, end]) for target in targets]),
    )


def _pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING_ID)
