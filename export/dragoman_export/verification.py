"""`dragoman-export verify` and `quantize`: what can be done with a bundle alone."""

from __future__ import annotations

from pathlib import Path

from dragoman_bundle.bundle import Bundle, load_bundle
from dragoman_bundle.manifest import BundleError, BundleManifest, Variant
from dragoman_export.bundling import (
    Report,
    Source,
    export_bundle,
    load_step_model,
    parity_sources,
)
from dragoman_export.decoding import LengthLimit, TorchStepModel, greedy_search
from dragoman_export.errors import CheckpointError
from dragoman_export.evaluation import encode_source
from dragoman_export.onnx_steps import OnnxStepModel
from dragoman_export.options import VariantKind
from dragoman_export.parity import check_interface, check_rows, compare
from dragoman_export.restoring import restore_source


def verify_bundle(path: Path, report: Report) -> BundleManifest:
    """Repeat everything that export proved: files, names, axes, numbers, tokens, golden outputs.

    Numbers and tokens are compared with PyTorch running the weights that the graphs hold.

    Raises:
        BundleError: listing every problem of every variant.
    """
    bundle = load_bundle(path)
    problems = []
    for variant in bundle.manifest.variants:
        label = f"{variant.device}-{variant.precision}"
        report(f"verifying {label}")
        try:
            problems += [f"{label}: {problem}" for problem in _variant_problems(bundle, variant)]
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's errors have no base class, and any is a finding
            problems.append(f"{label}: {error}")
    if problems:
        raise BundleError(path, problems)
    return bundle.manifest


def _variant_problems(bundle: Bundle, variant: Variant) -> list[str]:
    source = restore_source(bundle, variant)
    step_model = load_step_model(bundle, variant)
    check_interface(step_model, variant.tensors)
    check_rows(step_model)
    length = bundle.manifest.generated_length
    limit = LengthLimit(length.factor, length.extra, bundle.manifest.limits.max_target_tokens)
    sources = parity_sources(source)
    parity = compare(TorchStepModel(source.model), step_model, sources, variant.precision, limit, source.reference)
    problems = [] if parity.passed else [f"parity failed: {parity}"]
    return problems + _golden_problems(source, step_model, variant, limit)


def _golden_problems(source: Source, step_model: OnnxStepModel, variant: Variant, limit: LengthLimit) -> list[str]:
    problems = []
    for golden in variant.goldens:
        direction = next(d for d in source.directions if d == (golden.source, golden.target))
        [tokens] = greedy_search(step_model, [encode_source(source.tokenizer, golden.text, direction)], limit)
        if tuple(tokens) != golden.token_ids:
            problems.append(f"{golden.text!r} gives {source.tokenizer.decode(tokens)!r}, not {golden.translation!r}")
    return problems


def quantize_bundle(path: Path, output: Path, report: Report) -> BundleManifest:
    """Add an int8 variant to a bundle that has an fp32 one, calibrated on the bundle's own samples.

    Raises:
        BundleError: the bundle is refused.
        CheckpointError: it has no fp32 variant.
        ParityError: the int8 graphs are too far from the fp32 model.
    """
    bundle = load_bundle(path)
    variant = bundle.variant("cpu", "fp32")
    if variant is None:
        raise CheckpointError(f"{path} has no cpu-fp32 variant to quantise; export one with --variant cpu-fp32")
    source = restore_source(bundle, variant)
    kept = [VariantKind(v.device, v.precision) for v in bundle.manifest.variants if v.precision != "int8"]
    kinds = [*kept, VariantKind("cpu", "int8")]
    quality = tuple(score for score in bundle.manifest.quality if score.precision != "int8")
    return export_bundle(source, output, kinds, [], report, known_quality=quality)
