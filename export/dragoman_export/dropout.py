"""Dropout whose random numbers do not dominate training on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_LEVELS = 256


def _keep_mask(x: Tensor, dropped_levels: int) -> Tensor:
    # One 64-bit draw serves eight elements: Bernoulli sampling otherwise costs more than the matrix products.
    words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    return (words.view(torch.uint8)[: x.numel()] >= dropped_levels).view(x.shape)


class _ByteDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped_levels: int) -> Tensor:
        keep = _keep_mask(x, dropped_levels)
        ctx.save_for_backward(keep)
        ctx.scale = _LEVELS / (_LEVELS - dropped_levels)
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return (gradients[0] * keep).mul_(ctx.scale), None


class Dropout(nn.Module):
    """Inverted dropout; on a CPU the probability is rounded to a multiple of 1/256.

    Args:
        probability: of zeroing an element while training, in [0, 1); 0 turns it off.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        if not 0.0 <= probability < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, not {probability}")
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`; the identity outside training."""
        dropped_levels = min(round(self.probability * _LEVELS), _LEVELS - 1)
        if not self.training or dropped_levels == 0:
            return x
        if x.device.type != "cpu":
            return nn.functional.dropout(x, self.probability)
        dropped: Tensor = _ByteDropout.apply(x, dropped_levels)  # type: ignore[no-untyped-call]
        return dropped
