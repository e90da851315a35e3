"""Label-smoothed cross-entropy over a vocabulary, without ever holding all logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_CHUNK = 256
"""Rows of logits alive at a time: small enough to stay in cache, large enough for efficient matrix products."""

_TINY = 1e-38
"""Smallest probability whose logarithm is taken."""


class TokenLoss(NamedTuple):
    """Sums over target tokens, so that batches of any size (and several GPUs) can be added up."""

    smoothed: Tensor
    """Label-smoothed cross-entropy: what training minimises. Scalar, nats."""
    nll: Tensor
    """Negative log-likelihood of the references. Scalar, nats, carries no gradient."""


class _GeneratorLoss(torch.autograd.Function):
    """Projection onto the vocabulary and cross-entropy in one pass; gradients are made while the logits are hot.

    With q = (1 - eps) one_hot(target) + eps / vocab_size (Szegedy et al., 2016, section 7), the loss of a row is
    logsumexp(z) - q.z and its gradient softmax(z) - q. The uniform part of q is the same for every row, so its
    share of loss and gradients is added once at the end instead of in another pass over the logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        # hidden [rows, d_model], weight [vocab_size, d_model], targets int64 [rows]
        dtype = _compute_dtype(hidden)
        uniform = smoothing / weight.shape[0]
        low_weight, low_hidden = weight.to(dtype), hidden.to(dtype)
        grad_hidden = torch.empty_like(low_hidden)
        grad_weight = torch.zeros_like(weight)
        smoothed, nll = weight.new_zeros(()), weight.new_zeros(())
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], _CHUNK):
                rows = slice(start, start + _CHUNK)
                target = targets[rows].unsqueeze(1)
                logits = low_hidden[rows] @ low_weight.t()
                grad = torch.softmax(logits, 1, dtype=weight.dtype)
                row_nll = -grad.gather(1, target).clamp_min_(_TINY).log_()
                nll += row_nll.sum()
                # logsumexp(z) - (1 - eps) z_target = nll + eps z_target
                smoothed += row_nll.sum() + smoothing * logits.gather(1, target).to(weight.dtype).sum()
                grad.scatter_add_(1, target, torch.full_like(row_nll, smoothing - 1))
                low_grad = grad.to(dtype)
                torch.mm(low_grad, low_weight, out=grad_hidden[rows])
                grad_weight += torch.mm(low_grad.t(), low_hidden[rows])
            weight_sum, hidden_sum = weight.sum(0), hidden.to(weight.dtype).sum(0)
            smoothed -= uniform * weight_sum.dot(hidden_sum)
            grad_weight -= uniform * hidden_sum
            full_grad_hidden = (grad_hidden.to(weight.dtype) - uniform * weight_sum).to(hidden.dtype)
        ctx.save_for_backward(full_grad_hidden, grad_weight)
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * gradients[0], grad_weight * gradients[0], None, None


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def generator_loss(
    hidden: Tensor, generator: nn.Linear, targets: Tensor, padding_id: int, smoothing: float
) -> TokenLoss:
    """Loss of the decoder's outputs against the reference tokens; padding does not count.

    Args:
        hidden: [batch, tgt_len, d_model].
        generator: the projection onto the vocabulary.
        targets: int64 [batch, tgt_len].
        padding_id: positions with this target are left out.
        smoothing: label smoothing epsilon in [0, 1); 0 is plain cross-entropy. The paper uses 0.1.
    """
    real = targets != padding_id
    sums = _GeneratorLoss.apply(  # type: ignore[no-untyped-call]
        hidden[real], generator.weight, targets[real], smoothing
    )
    return TokenLoss(*sums)
