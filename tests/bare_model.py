"""A model's graphs without the rest of a bundle: for random models, which have no tokenizer and no goldens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx

from dragoman_bundle.architecture import Architecture
from dragoman_bundle.manifest import Device, Limits, SpecialIds
from dragoman_bundle.tensors import DType
from dragoman_export.bundling import model_weights
from dragoman_export.graphs import build_graphs
from dragoman_export.linear import LinearStyle
from dragoman_export.model import Transformer
from dragoman_export.tokenization import END_ID, PADDING_ID, START_ID, UNKNOWN_ID
from dragoman_server.engine.device_model import DeviceModel
from dragoman_server.engine.model_runner import OnnxModel


def write_graphs(
    model: Transformer, directory: Path, linear: LinearStyle, max_tokens: int, cache_dtype: DType = "float32"
) -> None:
    """Write a model's graphs, those for a GPU included."""
    directory.mkdir(parents=True, exist_ok=True)
    graphs = build_graphs(model.arch, model_weights(model), linear, cache_dtype, max_tokens, "weights.bin")
    for name, graph in graphs.named().items():
        onnx.save(graph, directory / f"{name}.onnx")
    graphs.weights.write(directory)


def open_graphs(directory: Path, arch: Architecture, max_tokens: int, num_threads: int = 1) -> OnnxModel:
    """What `write_graphs` wrote, opened by the server on the CPU."""
    return OnnxModel(_bundle(directory, arch, max_tokens), _variant("float32"), num_threads)


def open_on_device(
    directory: Path, arch: Architecture, max_tokens: int, device: Device, dtype: DType = "float32"
) -> DeviceModel:
    """What `write_graphs` wrote, opened as for a GPU."""
    return DeviceModel(_bundle(directory, arch, max_tokens), _variant(dtype), 1, device)


def _bundle(directory: Path, arch: Architecture, max_tokens: int) -> Any:
    manifest = SimpleNamespace(
        name=directory.name,
        architecture=arch,
        limits=Limits(max_source_tokens=max_tokens, max_target_tokens=max_tokens),
        special_ids=SpecialIds(padding=PADDING_ID, unknown=UNKNOWN_ID, start=START_ID, end=END_ID),
        alignment_layer=0,
    )
    return SimpleNamespace(manifest=manifest, path=directory, file=lambda name: directory / name)


def _variant(dtype: DType) -> Any:
    graphs = {name: f"{name}.onnx" for name in ("encoder", "decoder", "search", "rows")}
    return SimpleNamespace(**graphs, cache_dtype=dtype)
