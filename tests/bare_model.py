"""A model's graphs without the rest of a bundle: for random models, which have no tokenizer and no goldens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx

from dragoman_bundle.architecture import Architecture
from dragoman_bundle.manifest import Limits, SpecialIds
from dragoman_export.bundling import model_weights
from dragoman_export.graphs import build_graphs
from dragoman_export.linear import LinearStyle
from dragoman_export.model import Transformer
from dragoman_export.tokenization import END_ID, PADDING_ID, START_ID, UNKNOWN_ID
from dragoman_server.engine.model_runner import OnnxModel


def write_graphs(model: Transformer, directory: Path, linear: LinearStyle, max_tokens: int) -> None:
    """Write a model's graphs for the CPU."""
    directory.mkdir(parents=True, exist_ok=True)
    graphs = build_graphs(model.arch, model_weights(model), linear, "float32", max_tokens, "weights.bin")
    for name in ("encoder", "decoder", "search"):
        onnx.save(getattr(graphs, name), directory / f"{name}.onnx")
    graphs.weights.write(directory)


def open_graphs(directory: Path, arch: Architecture, max_tokens: int, num_threads: int = 1) -> OnnxModel:
    """What `write_graphs` wrote, opened by the server."""
    manifest = SimpleNamespace(
        architecture=arch,
        limits=Limits(max_source_tokens=max_tokens, max_target_tokens=max_tokens),
        special_ids=SpecialIds(padding=PADDING_ID, unknown=UNKNOWN_ID, start=START_ID, end=END_ID),
        alignment_layer=0,
    )
    bundle: Any = SimpleNamespace(manifest=manifest, path=directory, file=lambda name: directory / name)
    variant: Any = SimpleNamespace(
        encoder="encoder.onnx", decoder="decoder.onnx", search="search.onnx", cache_dtype="float32"
    )
    return OnnxModel(bundle, variant, num_threads)
