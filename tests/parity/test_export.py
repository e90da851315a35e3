"""A bundle's graphs compute what PyTorch computes, and a bundle that is not what it says is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from dragoman_bundle import tensors
from dragoman_bundle.architecture import PRESETS, Architecture
from dragoman_bundle.bundle import Bundle, digest, load_bundle
from dragoman_bundle.manifest import MANIFEST, BundleError, parse_manifest, variant_tensors
from dragoman_bundle.tensors import DType, activation_dtype
from dragoman_export.batching import Example, Ids, collate
from dragoman_export.bundling import load_step_model, model_weights
from dragoman_export.checkpoint import load_model
from dragoman_export.corpus import Corpus
from dragoman_export.decoding import LengthLimit, TorchStepModel, beam_search, greedy_search
from dragoman_export.distributed import Process
from dragoman_export.errors import ParityError
from dragoman_export.graphs import build_graphs
from dragoman_export.linear import FloatLinear, quantise_weight
from dragoman_export.model import MultiHeadAttention, Transformer
from dragoman_export.onnx_steps import OnnxStepModel, open_session
from dragoman_export.options import RunOptions, TrainingOptions
from dragoman_export.parity import check_interface, compare
from dragoman_export.quantization import balance, with_int8_caches
from dragoman_export.restoring import restore_model
from dragoman_export.runs import open_run, train
from dragoman_export.verification import quantize_bundle, verify_bundle
from tests.reversal import DIRECTION, sentences, write_pairs

LIMIT = LengthLimit(maximum=20)


def random_model(arch: Architecture, seed: int = 0) -> Transformer:
    """With biases and norms that are not what they are set to at first."""
    torch.manual_seed(seed)
    model = Transformer(arch).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def build(
    arch: Architecture, directory: Path, seed: int = 0, cache_dtype: DType = "float32"
) -> tuple[Transformer, OnnxStepModel]:
    """A random model, and its graphs with linear layers in floating point."""
    model = random_model(arch, seed)
    exported = with_int8_caches(model, examples(arch.vocab_size)) if cache_dtype == "int8" else model
    linear = FloatLinear(activation_dtype(cache_dtype))
    graphs = build_graphs(arch, model_weights(exported), linear, cache_dtype, 64, "weights.bin")
    for name, graph in graphs.named().items():
        onnx.save(graph, directory / f"{name}.onnx")
    graphs.weights.write(directory)
    return model, OnnxStepModel(directory, "encoder.onnx", "decoder.onnx", "search.onnx", arch)


def sources(count: int, vocab_size: int, seed: int = 0) -> list[Ids]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, vocab_size, rng.integers(1, 25), np.int32) for _ in range(count)]


def examples(vocab_size: int) -> list[Example]:
    """To calibrate a random model with: what `sources` gives, there and back."""
    return [Example(ids, ids[::-1].copy()) for ids in sources(70, vocab_size)]


@pytest.fixture(params=["post", "pre"])
def norm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    params=[
        {"d_model": 32, "num_heads": 4},
        {"d_model": 48, "num_heads": 3, "head_dim": 24, "encoder_layers": 1, "decoder_layers": 3},
        {"d_model": 64, "num_heads": 1, "tied_embeddings": False},
    ],
    ids=["heads", "odd sizes", "untied"],
)
def arch(request: pytest.FixtureRequest, norm: str) -> Architecture:
    fields = {"vocab_size": 300, "d_ff": 96, "norm": norm, "encoder_layers": 2, "decoder_layers": 2} | request.param
    return Architecture(**fields)


def test_random_models_of_every_shape_are_reproduced(arch: Architecture, tmp_path: Path) -> None:
    model, graphs = build(arch, tmp_path)
    report = compare(TorchStepModel(model), graphs, sources(70, 300), "fp32", LIMIT, "random")
    assert report.passed, report
    assert report.max_abs_logit_difference <= 1e-4
    assert report.num_identical == 70


def cached_attentions(model: Transformer) -> list[MultiHeadAttention]:
    layers = [(layer.self_attention, layer.cross_attention) for layer in model.decoder]
    return [attention for pair in layers for attention in pair]  # type: ignore[misc]


def logits(model: Transformer, pairs: list[Example] | None = None) -> torch.Tensor:
    batch = collate(pairs or examples(model.arch.vocab_size))
    with torch.no_grad():
        return torch.Tensor(model.generator(model(batch.source_ids, batch.source_lengths, batch.target_inputs)))


def test_int8_caches_hold_rounded_keys_and_values(arch: Architecture, tmp_path: Path) -> None:
    model, graphs = build(arch, tmp_path, cache_dtype="int8")
    rounding = with_int8_caches(model, examples(300))
    for attention in cached_attentions(rounding):
        attention.key_value.register_forward_hook(lambda _module, _inputs, output: output.round().clamp(-128, 127))
    report = compare(TorchStepModel(rounding), graphs, sources(70, 300), "int8", LIMIT, "rounding")
    assert report.batch_invariant
    assert report.top1_agreement >= 0.999
    report = compare(TorchStepModel(model), graphs, sources(70, 300), "int8", LIMIT, "not rounding")
    assert report.top1_agreement >= 0.98


def test_scaling_for_int8_caches_and_back_leaves_the_function(arch: Architecture) -> None:
    model = random_model(arch)
    scaled = with_int8_caches(model, examples(300))
    torch.testing.assert_close(logits(scaled), logits(model), rtol=1e-4, atol=1e-4)
    outputs: dict[int, list[torch.Tensor]] = defaultdict(list)
    hooks = [
        attention.key_value.register_forward_hook(lambda _m, _i, output, i=i: outputs[i].append(output.abs()[0]))
        for i, attention in enumerate(cached_attentions(scaled))
    ]
    for example in examples(300):
        logits(scaled, [example])
    for hook in hooks:
        hook.remove()
    for seen in outputs.values():
        maxima = torch.cat(seen).amax(0)
        torch.testing.assert_close(maxima, torch.full_like(maxima, 127.0), rtol=1e-4, atol=0.0)
    balance(scaled)
    torch.testing.assert_close(logits(scaled), logits(model), rtol=1e-4, atol=1e-4)
    for attention in cached_attentions(scaled):
        keys, values = attention.key_value.weight.chunk(2)
        torch.testing.assert_close(keys.norm(dim=1), attention.query.weight.norm(dim=1))
        torch.testing.assert_close(values.norm(dim=1), attention.output.weight.norm(dim=0))


def test_the_comparison_notices_one_wrong_weight(tmp_path: Path) -> None:
    arch = Architecture(vocab_size=100, d_model=32, num_heads=4, d_ff=48, encoder_layers=1, decoder_layers=1)
    model, graphs = build(arch, tmp_path)
    with torch.no_grad():
        model.decoder[0].cross_attention.output.bias[3] += 0.01  # type: ignore[union-attr, operator, index]
    report = compare(TorchStepModel(model), graphs, sources(20, 100), "fp32", LIMIT, "changed")
    assert not report.passed


def test_beam_search_agrees_between_pytorch_and_onnx(tmp_path: Path) -> None:
    arch = Architecture(vocab_size=100, d_model=32, num_heads=4, d_ff=48, encoder_layers=1, decoder_layers=2)
    model, graphs = build(arch, tmp_path)
    batch = sources(12, 100)
    assert beam_search(TorchStepModel(model), batch, 3, limit=LIMIT) == beam_search(graphs, batch, 3, limit=LIMIT)


@pytest.mark.parametrize("precision", ["fp32", "int8", "fp16"])
def test_a_trained_model_is_exported_with_proof(precision: str, reversal_bundle: Bundle) -> None:
    variant = next(v for v in reversal_bundle.manifest.variants if v.precision == precision)
    parity = variant.parity
    assert parity.passed
    assert parity.num_sentences >= 500
    assert parity.batch_invariant
    if precision == "fp32":
        assert parity.max_abs_logit_difference <= 1e-4
        assert parity.num_identical == parity.num_sentences
    assert len(variant.goldens) == 6


def test_training_starts_from_a_bundle_with_its_tokenizer(reversal_bundle: Bundle, tmp_path: Path) -> None:
    run = RunOptions(
        directory=tmp_path / "run",
        directions=(DIRECTION,),
        corpora=(Corpus((write_pairs(tmp_path / "train.tsv", sentences(100, seed=5)),)),),
        validation=(),
        architecture=PRESETS["tiny"],
        initial_weights=reversal_bundle.path,
    )
    train(run, TrainingOptions(learning_rate=0.0, max_steps=1, average=0), Process())
    assert (
        open_run(run.directory).tokenizer_path.read_bytes() == (reversal_bundle.path / "tokenizer.model").read_bytes()
    )
    variant = reversal_bundle.variant("cpu", "fp32")
    assert variant is not None
    trained = dict(load_model(open_run(run.directory).weights()).named_parameters())
    for name, parameter in restore_model(reversal_bundle, variant).named_parameters():
        assert torch.equal(trained[name], parameter), name


def test_weights_that_were_scaled_for_int8_caches_are_restored_in_balance(
    reversal_run: Path, reversal_bundle: Bundle
) -> None:
    variant = reversal_bundle.variant("cpu", "int8")
    assert variant is not None
    assert variant.cache_dtype == "int8"
    trained = load_model(open_run(reversal_run).weights())
    balance(trained)
    restored = restore_model(reversal_bundle, variant)
    for ours, theirs in zip(cached_attentions(restored), cached_attentions(trained), strict=True):
        for name, parameter in theirs.named_parameters():
            error = ours.get_parameter(name) - parameter
            assert error.norm() <= 0.02 * parameter.norm(), name


def test_the_bundles_weights_are_the_checkpoints(reversal_run: Path, reversal_bundle: Bundle) -> None:
    variant = reversal_bundle.variant("cpu", "fp32")
    assert variant is not None
    trained = dict(load_model(open_run(reversal_run).weights()).named_parameters())
    restored = dict(restore_model(reversal_bundle, variant).named_parameters())
    assert trained.keys() == restored.keys()
    for name, parameter in trained.items():
        assert torch.equal(restored[name], parameter), name


def test_quantised_weights_are_within_half_a_step() -> None:
    weight = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    weight[:, 5] = 0.0
    integers, scales = quantise_weight(weight)
    assert integers.dtype == np.int8
    assert integers.min() >= -127
    assert np.all(np.abs(integers * scales - weight) <= scales / 2 + 1e-7)


def test_tensors_shared_by_both_graphs_are_stored_once(reversal_bundle: Bundle) -> None:
    variant = reversal_bundle.variant("cpu", "fp32")
    assert variant is not None
    places = {}
    for name in (variant.encoder, variant.decoder):
        graph = onnx.load(reversal_bundle.file(name), load_external_data=False).graph
        places[name] = {t.name: t.external_data[1].value for t in graph.initializer if t.external_data}
    assert places[variant.encoder]["source_embedding.weight"] == places[variant.decoder]["target_embedding.weight"]


def test_verify_repeats_the_proof(reversal_bundle: Bundle) -> None:
    lines: list[str] = []
    verify_bundle(reversal_bundle.path, lines.append)
    assert lines == ["verifying cpu-fp32", "verifying cpu-int8", "verifying cuda-fp16"]


def test_quantize_adds_int8_to_an_fp32_bundle(reversal_bundle: Bundle, tmp_path: Path) -> None:
    manifest = quantize_bundle(reversal_bundle.path, tmp_path / "quantised", lambda _: None)
    assert [v.precision for v in manifest.variants] == ["fp32", "fp16", "int8"]
    assert load_bundle(tmp_path / "quantised").manifest == manifest


@pytest.fixture
def copy(reversal_bundle: Bundle, tmp_path: Path) -> Path:
    """A copy of the bundle to damage."""
    return Path(shutil.copytree(reversal_bundle.path, tmp_path / "copy"))


def edit_manifest(path: Path, **changes: object) -> None:
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    manifest.update(changes)
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def test_a_changed_byte_and_a_missing_file_are_reported_together(copy: Path) -> None:
    weights = copy / "weights.cpu-int8.bin"
    content = bytearray(weights.read_bytes())
    content[1234] ^= 1
    weights.write_bytes(content)
    (copy / "tokenizer.model").unlink()
    with pytest.raises(BundleError) as caught:
        load_bundle(copy)
    assert len(caught.value.problems) == 2
    assert "file tokenizer.model cannot be read" in str(caught.value)
    assert "file weights.cpu-int8.bin has changed" in str(caught.value)


def test_an_unknown_format_version_is_refused(copy: Path) -> None:
    edit_manifest(copy, format_version=99)
    with pytest.raises(BundleError, match="format_version 99; Dragoman reads 1"):
        load_bundle(copy)


def test_every_wrong_field_of_a_manifest_is_reported(copy: Path) -> None:
    edit_manifest(copy, surprise=1, tokenizer=7, limits={"max_source_tokens": "many"})
    with pytest.raises(BundleError) as caught:
        load_bundle(copy)
    assert sorted(caught.value.problems) == [
        "manifest.limits.max_source_tokens must be a int, not 'many'",
        "manifest.limits.max_target_tokens is missing",
        "manifest.surprise is not a known field",
        "manifest.tokenizer must be a str, not 7",
    ]


def test_a_failed_parity_and_wrong_tensors_are_refused(copy: Path, reversal_bundle: Bundle) -> None:
    manifest = reversal_bundle.manifest
    first, *others = manifest.variants
    parity = dataclasses.replace(first.parity, passed=False)
    wrong = variant_tensors(manifest.architecture, "float16")
    changed = dataclasses.replace(
        manifest, variants=(dataclasses.replace(first, parity=parity, tensors=wrong), *others)
    )
    (copy / MANIFEST).write_text(changed.to_json(), encoding="utf-8")
    with pytest.raises(BundleError) as caught:
        load_bundle(copy)
    assert "variant cpu-fp32 failed parity" in str(caught.value)
    assert "variant cpu-fp32 has tensors that are not those of its architecture" in str(caught.value)


def test_a_file_outside_the_bundle_is_refused(copy: Path, reversal_bundle: Bundle) -> None:
    digest = next(iter(reversal_bundle.manifest.files.values()))
    changed = dataclasses.replace(reversal_bundle.manifest, files=reversal_bundle.manifest.files | {"../x": digest})
    (copy / MANIFEST).write_text(changed.to_json(), encoding="utf-8")
    with pytest.raises(BundleError, match=r"file name '\.\./x' leaves the bundle"):
        load_bundle(copy)


def test_a_manifest_survives_being_written_and_read(reversal_bundle: Bundle) -> None:
    manifest = reversal_bundle.manifest
    assert parse_manifest(manifest.to_json(), Path()) == manifest


def test_wrong_weights_with_right_digests_fail_verification(copy: Path, reversal_bundle: Bundle) -> None:
    """Digests prove that nothing changed since export; parity and goldens prove that it is right."""
    graph = onnx.load(copy / "decoder.cpu-fp32.onnx", load_external_data=False)
    [norm] = [t for t in graph.graph.initializer if t.name == "decoder_norm.bias"]
    values = numpy_helper.to_array(norm) + np.linspace(-60, 60, 64, dtype=np.float32)
    norm.CopyFrom(numpy_helper.from_array(values.astype(np.float32), norm.name))
    onnx.save(graph, copy / "decoder.cpu-fp32.onnx")
    resign(copy, reversal_bundle)
    with pytest.raises(BundleError, match=r"cpu-fp32: .* gives"):
        verify_bundle(copy, lambda _: None)


def test_a_graph_with_another_output_fails_verification(copy: Path, reversal_bundle: Bundle) -> None:
    graph = onnx.load(copy / "decoder.cpu-fp32.onnx", load_external_data=False)
    for node in graph.graph.node:
        for i, output in enumerate(node.output):
            if output == tensors.LOGITS:
                node.output[i] = "surprise"
    next(o for o in graph.graph.output if o.name == tensors.LOGITS).name = "surprise"
    onnx.save(graph, copy / "decoder.cpu-fp32.onnx")
    resign(copy, reversal_bundle)
    with pytest.raises(BundleError) as caught:
        verify_bundle(copy, lambda _: None)
    assert "output logits is missing" in str(caught.value)
    assert "output surprise is unexpected" in str(caught.value)


def test_only_variants_for_cuda_have_a_graph_that_copies_rows(reversal_bundle: Bundle) -> None:
    assert {(v.device, v.rows) for v in reversal_bundle.manifest.variants} == {
        ("cpu", None),
        ("cuda", "rows.cuda-fp16.onnx"),
    }


def test_a_manifest_from_before_there_were_such_graphs_is_read(copy: Path) -> None:
    fields = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    for variant in fields["variants"]:
        if variant.pop("rows") is not None:
            del variant["tensors"]["rows_inputs"], variant["tensors"]["rows_outputs"]
    (copy / MANIFEST).write_text(json.dumps(fields), encoding="utf-8")
    assert all(variant.rows is None for variant in load_bundle(copy).manifest.variants)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("absent.onnx", "file absent.onnx has no digest"),
        (None, "variant cuda-fp16 has tensors that are not those of its architecture"),
        (7, r"manifest.variants\[2\].rows must be a str, not 7"),
    ],
)
def test_a_wrong_rows_graph_is_refused(rows: object, problem: str, copy: Path) -> None:
    fields = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    fields["variants"][2]["rows"] = rows
    (copy / MANIFEST).write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(BundleError, match=problem):
        load_bundle(copy)


def test_a_graph_that_copies_other_lines_fails_verification(copy: Path, reversal_bundle: Bundle) -> None:
    graph = onnx.load(copy / "rows.cuda-fp16.onnx")
    copied = [node for node in graph.graph.node if node.op_type == "Gather"]
    copied[0].input[0], copied[1].input[0] = copied[1].input[0], copied[0].input[0]
    onnx.save(graph, copy / "rows.cuda-fp16.onnx")
    resign(copy, reversal_bundle)
    with pytest.raises(BundleError, match=r"cuda-fp16: the rows graph does not copy the lines of tensors \[0, 1\]"):
        verify_bundle(copy, lambda _: None)


def test_padding_stays_hidden_from_kernels_that_pad_the_lengths(tmp_path: Path) -> None:
    """As CUDA's do with a prompt, which they take an encoder's input for."""
    arch = Architecture(vocab_size=100, d_model=32, num_heads=4, d_ff=48, encoder_layers=2, decoder_layers=1)
    build(arch, tmp_path, cache_dtype="float16")
    graph = onnx.load(tmp_path / "encoder.onnx", load_external_data=False)
    [attention, _] = [node for node in graph.graph.node if node.op_type == "GroupQueryAttention"]
    lengths, total = attention.input[5], attention.input[6]
    padded = [
        onnx.helper.make_node("Sub", [lengths, lengths], ["nothing"]),
        onnx.helper.make_node("Sub", [total, "int32(1)"], ["last_position"]),
        onnx.helper.make_node("Add", ["nothing", "last_position"], ["padded_lengths"]),
    ]
    nodes = [*graph.graph.node]
    for node in nodes:
        if node.op_type == "GroupQueryAttention":
            node.input[5] = "padded_lengths"
    del graph.graph.node[:]
    place = nodes.index(attention)
    graph.graph.node.extend([*nodes[:place], *padded, *nodes[place:]])
    onnx.save(graph, tmp_path / "padded.onnx")
    ids = np.random.default_rng(0).integers(4, 100, (3, 9))
    feeds = {tensors.INPUT_IDS: ids, tensors.SOURCE_LENGTHS: np.array([3, 9, 1], np.int32)}
    expected, found = (open_session(tmp_path / name).run(None, feeds) for name in ("encoder.onnx", "padded.onnx"))
    for a, b in zip(expected, found, strict=True):
        for row, length in enumerate((3, 9, 1)):
            np.testing.assert_allclose(a[row, :, :length], b[row, :, :length], atol=2e-3)


def resign(path: Path, original: Bundle) -> None:
    """Give a damaged bundle the digests of its damaged files."""
    files = {name: digest(path / name) for name in original.manifest.files}
    manifest = dataclasses.replace(original.manifest, files=files)
    (path / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def test_interface_differences_are_all_listed(tmp_path: Path, reversal_bundle: Bundle) -> None:
    other = Architecture(vocab_size=50, d_model=32, num_heads=2, d_ff=48, encoder_layers=1, decoder_layers=1)
    _, graphs = build(other, tmp_path)
    with pytest.raises(ParityError) as caught:
        check_interface(graphs, reversal_bundle.manifest.variants[0].tensors)
    message = str(caught.value)
    assert "decoder: input past_key_values.1.decoder.key is missing" in message
    assert "decoder: output logits has axes ['rows', 50]" in message


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_row_is_bitwise_the_same_in_any_company(precision: str, reversal_bundle: Bundle) -> None:
    variant = reversal_bundle.variant("cpu", precision)
    assert variant is not None
    batch = sources(40, 200, seed=7)
    for threads in (1, 2):
        model = load_step_model(reversal_bundle, variant, threads)
        alone = [forced(model, [source])[:, 0] for source in batch[:6]]
        for rows in (batch[:6], batch, batch[:6] + [batch[0]] * 9):
            together = forced(model, rows)
            for i, expected in enumerate(alone):
                assert np.array_equal(together[:, i], expected)


def forced(model: OnnxStepModel, batch: list[Ids]) -> np.ndarray:
    """Logits [steps, rows, vocab_size] while fixed tokens are fed in."""
    state, steps = model.start(batch), []
    for token in range(4, 14):
        logits, state = model.step(state, np.full(len(batch), token, np.int64))
        steps.append(logits.copy())
    return np.stack(steps)


def test_greedy_search_stops_at_its_limit(tmp_path: Path) -> None:
    arch = Architecture(vocab_size=100, d_model=32, num_heads=4, d_ff=48, encoder_layers=1, decoder_layers=1)
    _, graphs = build(arch, tmp_path)
    limit = LengthLimit(factor=0, extra=5, maximum=20)
    assert all(len(ids) <= 5 for ids in greedy_search(graphs, sources(9, 100), limit))
