"""What the commands do once their arguments are parsed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

import dragoman_export
from dragoman_bundle.architecture import PRESET_DROPOUT, PRESETS, Architecture
from dragoman_bundle.bundle import Samples, load_bundle
from dragoman_bundle.manifest import MANIFEST, BundleError, Limits
from dragoman_export.bundling import Report, Source, export_bundle, load_step_model
from dragoman_export.checkpoint import load_model
from dragoman_export.corpus import CleaningLimits, Corpus, Direction
from dragoman_export.decoding import StepModel, TorchStepModel
from dragoman_export.distributed import join_run
from dragoman_export.evaluation import make_search, read_test_sets, score, translate
from dragoman_export.options import RunOptions, TrainingOptions, VariantKind
from dragoman_export.runs import SAMPLES, open_run, train
from dragoman_export.tokenization import load_tokenizer


def train_model(given: Mapping[str, Any]) -> bool:
    """Train; `given` holds every option of the command by its name. False if a signal stopped it."""
    changes = {
        field.name: given.get(field.name) for field in dataclasses.fields(Architecture) if field.name != "vocab_size"
    }
    run = RunOptions(
        directory=given["output"],
        directions=tuple(given["pair"]),
        corpora=tuple(given["train"]),
        validation=tuple(given["valid"] or []),
        architecture=PRESETS[given["preset"]] | {name: v for name, v in changes.items() if v is not None},
        limits=CleaningLimits(max_tokens=given["max_tokens"], max_ratio=given["max_ratio"]),
        **_same_named(RunOptions, given),
    )
    dropout = PRESET_DROPOUT[given["preset"]] if given["dropout"] is None else given["dropout"]
    options = TrainingOptions(**_same_named(TrainingOptions, given) | {"dropout": dropout})
    with join_run(given["device"]) as process:
        return train(run, options, process)


def _same_named(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}


def evaluate_model(
    path: Path,
    corpora: Sequence[Corpus],
    beam: int,
    length_penalty: float,
    precision: str | None,
    output: Path | None,
    report: Report,
) -> None:
    """Score a run or a bundle on test sets."""
    model, tokenizer, directions = _open_model(path, precision)
    results = []
    for test_set in read_test_sets(corpora, directions):
        search = make_search(beam, length_penalty)
        translations = translate(model, tokenizer, test_set.sources, test_set.direction, search)
        quality = score(test_set, translations)
        report(f"{quality}  [{quality.signature}]")
        results.append({"score": quality.to_dict(), "translations": translations})
    if output is not None:
        output.write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _open_model(path: Path, precision: str | None) -> tuple[StepModel, SentencePieceProcessor, list[Direction]]:
    if not (path / MANIFEST).is_file():
        run = open_run(path)
        return TorchStepModel(load_model(run.weights())), load_tokenizer(run.tokenizer_path), run.directions
    bundle = load_bundle(path)
    variant = bundle.variant("cpu", precision)
    if variant is None:
        have = ", ".join(f"{v.device}-{v.precision}" for v in bundle.manifest.variants)
        raise BundleError(path, [f"it has no cpu variant of precision {precision}; it has {have}"])
    directions = [Direction(spec.source, spec.target) for spec in bundle.manifest.directions]
    return (
        load_step_model(bundle, variant),
        load_tokenizer(bundle.file(bundle.manifest.tokenizer)),
        directions,
    )


def export_run(
    run_directory: Path,
    output: Path,
    name: str,
    kinds: Sequence[VariantKind],
    limits: Limits,
    test_sets: Sequence[Corpus],
    report: Report,
) -> None:
    """Export a run's weights as a bundle."""
    run = open_run(run_directory)
    weights = run.weights()
    report(f"exporting {weights}")
    source = Source(
        name=name,
        model=load_model(weights, max_positions=max(1024, limits.max_source_tokens, limits.max_target_tokens)),
        tokenizer_path=run.tokenizer_path,
        tokenizer=load_tokenizer(run.tokenizer_path),
        directions=run.directions,
        samples=Samples.load(run_directory / SAMPLES),
        limits=limits,
        provenance={"dragoman": dragoman_export.__version__, "checkpoint": weights.name} | run.description,
    )
    export_bundle(source, output, kinds, read_test_sets(test_sets, run.directions), report)
