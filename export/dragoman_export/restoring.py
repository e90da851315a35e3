"""The PyTorch model inside a bundle: what its graphs' own weights say the answer should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import numpy_helper

from dragoman_bundle.bundle import Bundle, Samples
from dragoman_bundle.manifest import Variant
from dragoman_export.bundling import Source
from dragoman_export.checkpoint import assign_weights
from dragoman_export.corpus import Direction
from dragoman_export.model import Transformer
from dragoman_export.quantization import balance
from dragoman_export.tokenization import load_tokenizer

Array = npt.NDArray[Any]


def restore_source(bundle: Bundle, variant: Variant) -> Source:
    """Everything that `export_bundle` was given, from the bundle itself; int8 and fp16 weights as fp32.

    Raises:
        CheckpointError: the graphs do not hold the weights of the manifest's architecture.
    """
    manifest = bundle.manifest
    return Source(
        name=manifest.name,
        model=restore_model(bundle, variant),
        tokenizer_path=bundle.file(manifest.tokenizer),
        tokenizer=load_tokenizer(bundle.file(manifest.tokenizer)),
        directions=[Direction(spec.source, spec.target) for spec in manifest.directions],
        samples=Samples.load(bundle.file(manifest.samples)),
        limits=manifest.limits,
        provenance=manifest.provenance,
        reference=f"PyTorch fp32, on the weights of {variant.device}-{variant.precision}",
    )


def restore_model(bundle: Bundle, variant: Variant) -> Transformer:
    """A PyTorch model with the weights of a variant's graphs."""
    limits = bundle.manifest.limits
    positions = max(1024, limits.max_source_tokens, limits.max_target_tokens)
    model = Transformer(bundle.manifest.architecture, max_positions=positions)
    rows = {name: parameter.shape[0] for name, parameter in model.named_parameters(remove_duplicate=False)}
    weights: dict[str, torch.Tensor] = {}
    for graph in (variant.encoder, variant.decoder):
        weights |= _named_weights(_initializers(bundle.file(graph)), rows)
    own = {name for name, _ in model.named_parameters()}
    assign_weights(model, {name: tensor for name, tensor in weights.items() if name in own}, bundle.path)
    if variant.cache_dtype == "int8":
        balance(model)
    return model.eval()


def restore_most_precise(bundle: Bundle) -> Transformer:
    """A PyTorch model with the weights of the variant that rounded them least."""
    best = min(bundle.manifest.variants, key=lambda variant: ("fp32", "fp16", "int8").index(variant.precision))
    return restore_model(bundle, best)


def _initializers(path: Path) -> dict[str, Array]:
    model = onnx.load(path)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def _named_weights(initializers: dict[str, Array], rows: dict[str, int]) -> dict[str, torch.Tensor]:
    """Undo what the graphs do to weights: several layers side by side, transposition, int8."""
    weights = {}
    for name, value in initializers.items():
        joined, _, role = name.rpartition(".")
        parts = [f"{module}.{role}" for module in joined.split("+")]
        if not all(part in rows for part in parts):
            continue
        floats = value.astype(np.float32)
        if value.dtype == np.int8:
            floats *= initializers[f"{joined}.weight_scale"]
        is_table = joined.endswith("_embedding")  # stored row by row already
        matrix = floats.T if floats.ndim == 2 and not is_table else floats
        offsets = np.cumsum([rows[part] for part in parts])[:-1]
        for part, piece in zip(parts, np.split(matrix, offsets), strict=True):
            weights[part] = torch.from_numpy(np.ascontiguousarray(piece))
    return weights
