"""int8: which values linear layers read and caches hold on real sentences, and a model that fits into those ranges."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dragoman_export.batching import Example, collate
from dragoman_export.linear import ActivationRange, Int8Linear
from dragoman_export.model import MultiHeadAttention, Transformer

_BATCH_ROWS = 32
_VALUES_PER_BATCH = 20_000
"""Sampled from each layer's input in each batch: enough to see its distribution, little enough to keep."""
_CANDIDATES = 60
_LEVELS = 127
"""Of a key or value in a cache, on either side of zero."""
_TINY = 1e-6


def quantised(model: Transformer, examples: Sequence[Example]) -> tuple[Transformer, Int8Linear]:
    """A model for int8 graphs: its equal with keys and values that int8 caches can hold, and int8 linear layers.

    Args:
        model: in fp32.
        examples: real sentence pairs, a few hundred.
    """
    scaled = with_int8_caches(model, examples)
    return scaled, Int8Linear(calibrate(scaled, examples))


@torch.no_grad()
def with_int8_caches(model: Transformer, examples: Sequence[Example]) -> Transformer:
    """The same function with other weights: every channel of the decoder's keys and values spans -127 to 127.

    Rounded to whole numbers they are an int8 cache, and no scale has to be applied to it. The inverse scales are in the
    queries' weights and in those that read the values, where they cost nothing. Having one per channel and not one for
    all keys loses less to rounding. What is beyond all examples saturates.

    Args:
        model: in fp32; stays as it is.
        examples: real sentence pairs, a few hundred.
    """
    largest: dict[str, Tensor] = {}

    def watch(name: str, output: Tensor) -> None:
        maxima = output.abs().flatten(0, -2).amax(0)
        largest[name] = torch.maximum(largest.get(name, maxima), maxima)

    scaled = copy.deepcopy(model)
    attentions = dict(_cached_attentions(scaled))
    hooks = [
        attention.key_value.register_forward_hook(lambda _module, _inputs, output, name=name: watch(name, output))
        for name, attention in attentions.items()
    ]
    _run(scaled, examples, batch_rows=1)  # padding, which no cache will hold, shall not count
    for hook in hooks:
        hook.remove()
    for name, attention in attentions.items():
        keys, values = (largest[name].clamp(min=_TINY) / _LEVELS).chunk(2)
        _rescale(attention, keys, values)
    return scaled


@torch.no_grad()
def balance(model: Transformer) -> None:
    """Undo what `with_int8_caches` does to weights, as far as it can be known.

    The function stays the same. Queries and keys, values and what reads them get weights of equal norms, channel by
    channel, which is how training from small random weights leaves them. Weights that were rounded to int8 before are
    rounded anew if they are exported again.

    Args:
        model: whose weights are changed.
    """
    for _, attention in _cached_attentions(model):
        key, value = attention.key_value.weight.chunk(2)
        query, output = attention.query.weight, attention.output.weight
        _rescale(
            attention,
            (key.norm(dim=1).clamp(min=_TINY) / query.norm(dim=1).clamp(min=_TINY)).sqrt(),
            (value.norm(dim=1).clamp(min=_TINY) / output.norm(dim=0).clamp(min=_TINY)).sqrt(),
        )


def _cached_attentions(model: Transformer) -> Iterator[tuple[str, MultiHeadAttention]]:
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and name.startswith("decoder."):
            yield name, module


def _rescale(attention: MultiHeadAttention, keys: Tensor, values: Tensor) -> None:
    """Divide keys and values by factors [d_attention], and make up for it on the other side."""
    divisors = torch.cat([keys, values])
    attention.key_value.weight.div_(divisors[:, None])
    attention.key_value.bias.div_(divisors)
    attention.query.weight.mul_(keys[:, None])
    attention.query.bias.mul_(keys)
    attention.output.weight.mul_(values)


def _run(model: Transformer, examples: Sequence[Example], batch_rows: int = _BATCH_ROWS) -> None:
    """Teacher-forced."""
    model.eval()
    for start in range(0, len(examples), batch_rows):
        batch = collate(examples[start : start + batch_rows])
        model.generator(model(batch.source_ids, batch.source_lengths, batch.target_inputs))


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
    _run(model, examples)
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
