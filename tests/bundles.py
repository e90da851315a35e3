"""A bundle that is complete and tiny, for tests that damage bundles; its graphs compute nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from dragoman_bundle.architecture import Architecture
from dragoman_bundle.bundle import digest
from dragoman_bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    BundleManifest,
    DirectionSpec,
    GeneratedLength,
    Golden,
    Limits,
    ParityReport,
    SpecialIds,
    Variant,
    variant_tensors,
)

ENCODER, DECODER, SEARCH, WEIGHTS = "encoder.onnx", "decoder.onnx", "search.onnx", "weights.bin"
_ARCH = Architecture(vocab_size=16, d_model=8, num_heads=2, d_ff=8, encoder_layers=1, decoder_layers=1)


def external_tensor(location: str, **keys: str) -> TensorProto:
    """A float tensor of one element that lies in another file."""
    tensor = TensorProto(name="elsewhere", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, value in ({"location": location} | keys).items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def graph_model(*tensors: TensorProto, **fields: Any) -> onnx.ModelProto:
    """An ONNX model with some initializers."""
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    node = helper.make_node("Identity", ["elsewhere"], ["y"])
    graph = helper.make_graph([node], "graph", [], [output], initializer=list(tensors))
    return helper.make_model(graph, **fields)


def write_bundle(path: Path) -> Path:
    """Write a bundle that `load_bundle` accepts."""
    path.mkdir(parents=True, exist_ok=True)
    (path / WEIGHTS).write_bytes(b"\0\0\x80\x3f")
    for name in (ENCODER, DECODER, SEARCH):
        onnx.save(graph_model(external_tensor(WEIGHTS, offset="0", length="4")), path / name)
    (path / "tokenizer.model").write_bytes(b"pieces")
    (path / "samples.json").write_text("{}", encoding="utf-8")
    files = {file.name: digest(file) for file in sorted(path.iterdir()) if file.name != MANIFEST}
    parity = ParityReport(
        reference="none",
        num_sentences=1,
        num_identical=1,
        max_abs_logit_difference=0.0,
        top1_agreement=1.0,
        batch_invariant=True,
        batch_sizes=(1,),
        passed=True,
        requirement="none",
    )
    variant = Variant(
        device="cpu",
        precision="fp32",
        encoder=ENCODER,
        decoder=DECODER,
        search=SEARCH,
        weights=WEIGHTS,
        cache_dtype="float32",
        parity=parity,
        goldens=(Golden(source="de", target="en", text="ä", token_ids=(5,), translation="a"),),
        tensors=variant_tensors(_ARCH, "float32"),
    )
    manifest = BundleManifest(
        format_version=FORMAT_VERSION,
        name="tiny",
        architecture=_ARCH,
        tokenizer="tokenizer.model",
        special_ids=SpecialIds(padding=0, unknown=1, start=2, end=3),
        directions=(DirectionSpec(source="de", target="en", source_prefix=(4,)),),
        limits=Limits(max_source_tokens=8, max_target_tokens=8),
        generated_length=GeneratedLength(factor=2.0, extra=4),
        alignment_layer=0,
        variants=(variant,),
        files=files,
        samples="samples.json",
    )
    (path / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return path


def replace_file(path: Path, name: str, content: bytes) -> None:
    """Put a file into a bundle, with its digest: what somebody who can write a manifest can do."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    found = digest(path / name)
    manifest["files"][name] = {"size": found.size, "sha256": found.sha256}
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
