"""Calibration of int8: which values every linear layer reads, on real sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dragoman_export.batching import Example, collate
from dragoman_export.linear import ActivationRange
from dragoman_export.model import Transformer

_BATCH_ROWS = 32
_VALUES_PER_BATCH = 20_000
"""Sampled from each layer's input in each batch: enough to see its distribution, little enough to keep."""
_CANDIDATES = 60


@torch.inference_mode()
def calibrate(model: Transformer, examples: Sequence[Example]) -> Mapping[str, ActivationRange]:
    """Run a model over examples, teacher-forced, and choose where each linear layer's input saturates.

    Args:
        model: in fp32.
        examples: real sentence pairs, a few hundred.

    Returns:
        Per Linear module name, the range that gives the smallest squared error after rounding to int8. Clipping a few
        outliers is better than giving every other value fewer levels.
    """
    generator = torch.Generator().manual_seed(0)
    samples: dict[str, list[Tensor]] = defaultdict(list)

    def watch(name: str, x: Tensor) -> None:
        values = x.abs().flatten()
        picked = torch.randint(len(values), (_VALUES_PER_BATCH,), generator=generator)
        samples[name] += [values[picked], values.max().unsqueeze(0)]

    hooks = [
        module.register_forward_pre_hook(lambda _module, inputs, name=name: watch(name, inputs[0]))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    model.eval()
    for start in range(0, len(examples), _BATCH_ROWS):
        batch = collate(examples[start : start + _BATCH_ROWS])
        model.generator(model(batch.source_ids, batch.source_lengths, batch.target_inputs))
    for hook in hooks:
        hook.remove()
    return {name: ActivationRange(_best_maximum(torch.cat(values), name)) for name, values in samples.items()}


def _best_maximum(magnitudes: Tensor, name: str) -> float:
    """The clipping point with the least squared error."""
    levels = 255 if name.endswith("feed_forward.outer") else 127
    largest = max(float(magnitudes.max()), 1e-6)
    candidates = torch.linspace(0.2, 1.0, _CANDIDATES) * largest

    def error(maximum: Tensor) -> float:
        scale = maximum / levels
        rounded = (magnitudes / scale).round().clamp(max=levels) * scale
        return float((rounded - magnitudes).square().mean())

    return float(min(candidates, key=error))
