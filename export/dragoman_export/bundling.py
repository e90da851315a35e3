"""From a trained model to a bundle: graphs per variant, proof of parity, golden outputs, manifest."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from sentencepiece import SentencePieceProcessor

from dragoman_bundle.bundle import Bundle, Samples, digest
from dragoman_bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    BundleManifest,
    Device,
    DirectionSpec,
    GeneratedLength,
    Golden,
    Limits,
    Precision,
    QualityScore,
    SpecialIds,
    Variant,
    variant_tensors,
)
from dragoman_bundle.tensors import activation_dtype
from dragoman_export.batching import Example, Ids
from dragoman_export.corpus import Direction
from dragoman_export.decoding import LengthLimit, StepModel, TorchStepModel, greedy_search
from dragoman_export.errors import ParityError
from dragoman_export.evaluation import TestSet, encode_source, evaluate, make_search
from dragoman_export.graphs import Graphs, build_graphs
from dragoman_export.linear import FloatLinear, LinearStyle
from dragoman_export.model import Transformer
from dragoman_export.onnx_steps import OnnxStepModel
from dragoman_export.options import VariantKind
from dragoman_export.parity import check_interface, check_rows, compare
from dragoman_export.quantization import quantised
from dragoman_export.tokenization import END_ID, PADDING_ID, START_ID, UNKNOWN_ID, language_tag

TOKENIZER, SAMPLES = "tokenizer.model", "samples.json"
_GOLDENS_PER_DIRECTION = 6
_MAX_CALIBRATION_CHARACTERS = 500
_GOLDEN_TOKENS = range(4, 16)
_DEFAULT_LENGTH = LengthLimit()

Report = Callable[[str], None]
"""Receives lines about what is being done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trained model and what belongs to it."""

    name: str
    model: Transformer
    """In fp32, on the CPU."""
    tokenizer_path: Path
    tokenizer: SentencePieceProcessor
    directions: Sequence[Direction]
    samples: Samples
    limits: Limits
    provenance: dict[str, Any]
    reference: str = "PyTorch fp32, the trained checkpoint"
    """What parity compares with, for the report."""


def export_bundle(
    source: Source,
    output: Path,
    kinds: Sequence[VariantKind],
    test_sets: Sequence[TestSet],
    report: Report,
    known_quality: tuple[QualityScore, ...] = (),
) -> BundleManifest:
    """Write a bundle; `output` appears only once everything in it has been proved.

    Args:
        source: the model.
        output: directory to create; replaced if it is a bundle already.
        kinds: variants to build.
        test_sets: quality is measured on them for every precision, greedy and beam 4; may be empty.
        report: is told what happens.
        known_quality: scores measured before, to keep in the manifest.

    Raises:
        ParityError: graphs do not compute what the model computes.
    """
    with _replaced_directory(output) as directory:
        shutil.copyfile(source.tokenizer_path, directory / TOKENIZER)
        source.samples.save(directory / SAMPLES)
        variants, step_models = [], {}
        for kind in kinds:
            report(f"building {kind}")
            variant, step_models[kind.precision] = _build_variant(source, kind, directory)
            report(f"  {_summary(variant)}")
            variants.append(variant)
        quality = known_quality + (measure_quality(source, step_models, test_sets, report) if test_sets else ())
        manifest = _manifest(source, variants, quality, directory)
        (directory / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _build_variant(source: Source, kind: VariantKind, directory: Path) -> tuple[Variant, OnnxStepModel]:
    arch = source.model.arch
    files = {part: f"{part}.{kind}.onnx" for part in graph_names(kind.device)}
    files["weights"] = f"weights.{kind}.bin"
    max_positions = max(source.limits.max_source_tokens, source.limits.max_target_tokens)
    model, linear = _prepared(source, kind)
    graphs = build_graphs(arch, model_weights(model), linear, kind.cache_dtype, max_positions, files["weights"])
    _write_graphs(graphs, directory, files)
    step_model = OnnxStepModel(
        directory, files["encoder"], files["decoder"], files["search"], arch, rows=files.get("rows")
    )
    sources = parity_sources(source)
    limit = _DEFAULT_LENGTH._replace(maximum=source.limits.max_target_tokens)
    tensors = variant_tensors(arch, kind.cache_dtype, has_rows="rows" in files)
    check_interface(step_model, tensors)
    check_rows(step_model)
    variant = Variant(
        device=kind.device,
        precision=kind.precision,
        **files,
        cache_dtype=kind.cache_dtype,
        parity=compare(TorchStepModel(source.model), step_model, sources, kind.precision, limit, source.reference),
        goldens=tuple(_choose_goldens(source, step_model, limit)),
        tensors=tensors,
    )
    if not variant.parity.passed:
        raise ParityError(f"{kind} failed parity: {_summary(variant)}; required: {variant.parity.requirement}")
    return variant, step_model


def graph_names(device: Device) -> list[str]:
    """The graphs of a variant; caches in the processor's own memory are copied without one."""
    return ["encoder", "decoder", "search", *(["rows"] if device == "cuda" else [])]


def _prepared(source: Source, kind: VariantKind) -> tuple[Transformer, LinearStyle]:
    """The model that the graphs are built from, and how they multiply."""
    if kind.precision != "int8":
        return source.model, FloatLinear(activation_dtype(kind.cache_dtype))
    return quantised(source.model, _calibration_examples(source))


def _write_graphs(graphs: Graphs, directory: Path, files: dict[str, str]) -> None:
    for name, graph in graphs.named().items():
        if name in files:
            onnx.save(graph, directory / files[name])
    graphs.weights.write(directory)


def model_weights(model: Transformer) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Every parameter under every name it has; a tied one appears under several."""
    return {name: p.detach().cpu().numpy() for name, p in model.named_parameters(remove_duplicate=False)}


def _columns(source: Source, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[Direction, list[str], list[str]]]:
    for direction in source.directions:
        forward = direction == source.directions[0]
        yield direction, [pair[not forward] for pair in pairs], [pair[forward] for pair in pairs]


def parity_sources(source: Source) -> list[Ids]:
    """Token ids of the parity sentences, in every direction."""
    return [
        ids
        for direction, texts, _ in _columns(source, source.samples.parity)
        for ids in (encode_source(source.tokenizer, text, direction) for text in texts)
        if len(ids) <= source.limits.max_source_tokens
    ]


def _calibration_examples(source: Source) -> list[Example]:
    return [
        Example(
            encode_source(source.tokenizer, text, direction),
            np.array(source.tokenizer.encode(translation), np.int32),
        )
        for direction, texts, translations in _columns(source, source.samples.calibration)
        for text, translation in zip(texts, translations, strict=True)
        if max(len(text), len(translation)) < _MAX_CALIBRATION_CHARACTERS
    ]


def _choose_goldens(source: Source, model: StepModel, limit: LengthLimit) -> Iterator[Golden]:
    """Per direction, the sentences whose every decision is clearest: another CPU's rounding must not change them."""
    for direction, texts, _ in _columns(source, source.samples.parity):
        scored = []
        for text in texts[:150]:
            ids = encode_source(source.tokenizer, text, direction)
            if len(ids) > source.limits.max_source_tokens:
                continue
            [tokens] = greedy_search(model, [ids], limit)
            scored.append((_smallest_margin(model, ids, tokens), text, tokens))
        usable = [row for row in scored if len(row[2]) in _GOLDEN_TOKENS] or scored
        for _, text, tokens in sorted(usable, reverse=True)[:_GOLDENS_PER_DIRECTION]:
            yield Golden(
                source=direction.source,
                target=direction.target,
                text=text,
                token_ids=tuple(tokens),
                translation=source.tokenizer.decode(tokens),
            )


def _smallest_margin(model: StepModel, source: Ids, tokens: Sequence[int]) -> float:
    """Over all steps, the least distance between the two highest logits."""
    state, margin = model.start([source]), float("inf")
    for last in [START_ID, *tokens]:
        logits, state = model.step(state, np.array([last], np.int64))
        second, first = np.partition(logits[0], -2)[-2:]
        margin = min(margin, float(first - second))
    return margin


def measure_quality(
    source: Source, step_models: dict[Precision, OnnxStepModel], test_sets: Sequence[TestSet], report: Report
) -> tuple[QualityScore, ...]:
    """BLEU and chrF of PyTorch in fp32 (if no fp32 graph was built) and of every variant, greedy and beam 4."""
    models: dict[Precision, StepModel] = {"fp32": TorchStepModel(source.model)}
    models.update(step_models)
    scores = []
    for precision, model in models.items():
        for width in (1, 4):
            search = "greedy" if width == 1 else f"beam {width}"
            for quality in evaluate(model, source.tokenizer, test_sets, make_search(width, limits=source.limits)):
                report(f"{precision} {search}: {quality}")
                scores.append(
                    QualityScore(
                        test_set=quality.test_set,
                        direction=quality.direction,
                        precision=precision,
                        search=search,
                        bleu=round(quality.bleu, 2),
                        chrf=round(quality.chrf, 2),
                        signature=quality.signature,
                    )
                )
    return tuple(scores)


def _manifest(
    source: Source, variants: Sequence[Variant], quality: tuple[QualityScore, ...], directory: Path
) -> BundleManifest:
    tokenizer = source.tokenizer
    return BundleManifest(
        format_version=FORMAT_VERSION,
        name=source.name,
        architecture=source.model.arch,
        tokenizer=TOKENIZER,
        special_ids=SpecialIds(padding=PADDING_ID, unknown=UNKNOWN_ID, start=START_ID, end=END_ID),
        directions=tuple(
            DirectionSpec(
                source=d.source,
                target=d.target,
                source_prefix=(tokenizer.piece_to_id(language_tag(d.target)),),
            )
            for d in source.directions
        ),
        limits=source.limits,
        generated_length=GeneratedLength(factor=_DEFAULT_LENGTH.factor, extra=_DEFAULT_LENGTH.extra),
        # The last layer but one aligns best (Garg et al. 2019, section 3).
        alignment_layer=max(0, source.model.arch.decoder_layers - 2),
        variants=tuple(variants),
        files={path.name: digest(path) for path in sorted(directory.iterdir())},
        samples=SAMPLES,
        quality=quality,
        provenance=source.provenance,
    )


def _summary(variant: Variant) -> str:
    parity = variant.parity
    return (
        f"max abs logit difference {parity.max_abs_logit_difference:.2g}, top-1 agreement {parity.top1_agreement:.4f}, "
        f"{parity.num_identical} of {parity.num_sentences} sentences identical, "
        f"batch-invariant: {'yes' if parity.batch_invariant else 'no'}"
    )


@contextmanager
def _replaced_directory(output: Path) -> Iterator[Path]:
    """A directory beside `output` that takes its place when the block succeeds."""
    if output.exists() and not (output / MANIFEST).is_file() and any(output.iterdir()):
        raise FileExistsError(f"{output} exists and is not a bundle; choose another --output or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        aside = Path(temporary) / "bundle"
        aside.mkdir()
        yield aside
        if output.exists():
            shutil.rmtree(output)
        aside.rename(output)


def load_step_model(bundle: Bundle, variant: Variant, num_threads: int = 0) -> OnnxStepModel:
    """The graphs of a bundle's variant, ready to run."""
    manifest = bundle.manifest
    return OnnxStepModel(
        bundle.path,
        variant.encoder,
        variant.decoder,
        variant.search,
        manifest.architecture,
        num_threads,
        variant.rows,
    )
