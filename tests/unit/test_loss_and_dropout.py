from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dragoman_export.dropout import Dropout
from dragoman_export.loss import generator_loss


@given(rows=st.integers(1, 9), smoothing=st.sampled_from([0.0, 0.1, 0.4]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_loss_and_gradients_are_torchs(rows: int, smoothing: float, seed: int) -> None:
    torch.manual_seed(seed)
    generator = nn.Linear(16, 37, bias=False).double()
    hidden = torch.randn(rows, 5, 16, dtype=torch.double, requires_grad=True)
    targets = torch.randint(0, 37, (rows, 5))
    targets[0, 0] = 5
    losses = generator_loss(hidden, generator, targets, 0, smoothing)
    found = torch.autograd.grad(losses.smoothed, [hidden, generator.weight])
    logits = generator(hidden).flatten(0, 1)
    reference = F.cross_entropy(logits, targets.flatten(), ignore_index=0, label_smoothing=smoothing, reduction="sum")
    expected = torch.autograd.grad(reference, [hidden, generator.weight])
    torch.testing.assert_close(losses.smoothed, reference)
    torch.testing.assert_close(found, expected)
    nll = F.cross_entropy(generator(hidden).flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    torch.testing.assert_close(losses.nll, nll.detach())


def test_loss_in_chunks_is_the_loss_at_once() -> None:
    torch.manual_seed(0)
    generator, hidden = nn.Linear(8, 11, bias=False), torch.randn(700, 3, 8)
    targets = torch.randint(1, 11, (700, 3))
    reference = F.cross_entropy(generator(hidden).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(generator_loss(hidden, generator, targets, 0, 0.0).smoothed, reference)


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5])
def test_dropout_keeps_the_mean_and_drops_its_share(probability: float) -> None:
    torch.manual_seed(0)
    dropped = Dropout(probability)(torch.ones(1000, 1000))
    assert abs(float((dropped == 0).float().mean()) - probability) < 0.004
    assert abs(float(dropped.mean()) - 1.0) < 0.005


def test_dropout_gradient_has_the_same_mask() -> None:
    x = torch.ones(100, 7, requires_grad=True)
    dropped = Dropout(0.4)(x)
    dropped.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, dropped.detach())


def test_dropout_is_the_identity_outside_training() -> None:
    x = torch.randn(5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_dropout_probability_is_checked() -> None:
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        Dropout(1.0)
