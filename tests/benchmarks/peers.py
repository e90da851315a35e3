"""The same weights as CTranslate2 loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

from dragoman_export.bundling import model_weights
from dragoman_export.model import Transformer, sinusoidal_positions
from dragoman_export.tokenization import START_ID
from tests.benchmarks.stored import token


def to_ctranslate2(model: Transformer, directory: Path, max_positions: int, quantization: str | None = None) -> None:
    """Write a model for CTranslate2.

    Args:
        model: to write.
        directory: that will hold it.
        max_positions: of a source or target.
        quantization: as CTranslate2 calls it; None stores fp32.
    """
    arch = model.arch
    weights = {name: array.copy() for name, array in model_weights(model).items()}  # quantising works in place
    spec = transformer_spec.TransformerSpec.from_config(
        (arch.encoder_layers, arch.decoder_layers),
        arch.num_heads,
        pre_norm=arch.norm == "pre",
        activation=common_spec.Activation.RELU,
    )
    for i, layer in enumerate(spec.encoder.layer):
        _self_attention(layer, weights, f"encoder.{i}")
        _feed_forward(layer, weights, f"encoder.{i}")
    for i, layer in enumerate(spec.decoder.layer):
        name = f"decoder.{i}"
        _self_attention(layer, weights, name)
        for part, linear in zip(("query", "key_value", "output"), layer.attention.linear, strict=True):
            _linear(linear, weights, f"{name}.cross_attention.{part}")
        _norm(layer.attention.layer_norm, weights, f"{name}.cross_attention_residual.norm")
        _feed_forward(layer, weights, name)
    if arch.norm == "pre":
        _norm(spec.encoder.layer_norm, weights, "encoder_norm")
        _norm(spec.decoder.layer_norm, weights, "decoder_norm")
    spec.encoder.embeddings[0].weight = weights["source_embedding.weight"]
    spec.decoder.embeddings.weight = weights["target_embedding.weight"]
    spec.decoder.projection.weight = weights["generator.weight"]
    for side in (spec.encoder, spec.decoder):
        side.position_encodings.encodings = sinusoidal_positions(max_positions, arch.d_model).numpy()
        side.scale_embeddings = True
    vocabulary = [token(i) for i in range(arch.vocab_size)]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.config.decoder_start_token = token(START_ID)
    spec.validate()
    spec.optimize(quantization=quantization)
    directory.mkdir(parents=True, exist_ok=True)
    spec.save(str(directory))


def _self_attention(layer: Any, weights: dict[str, Any], name: str) -> None:
    query_key_value, output = layer.self_attention.linear
    _linear(query_key_value, weights, f"{name}.self_attention.query", f"{name}.self_attention.key_value")
    _linear(output, weights, f"{name}.self_attention.output")
    _norm(layer.self_attention.layer_norm, weights, f"{name}.self_attention_residual.norm")


def _feed_forward(layer: Any, weights: dict[str, Any], name: str) -> None:
    _linear(layer.ffn.linear_0, weights, f"{name}.feed_forward.inner")
    _linear(layer.ffn.linear_1, weights, f"{name}.feed_forward.outer")
    _norm(layer.ffn.layer_norm, weights, f"{name}.feed_forward_residual.norm")


def _linear(spec: Any, weights: dict[str, Any], *names: str) -> None:
    spec.weight = np.concatenate([weights[f"{name}.weight"] for name in names])
    spec.bias = np.concatenate([weights[f"{name}.bias"] for name in names])


def _norm(spec: Any, weights: dict[str, Any], name: str) -> None:
    spec.gamma, spec.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]
