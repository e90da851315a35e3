"""A training run as a directory: what it was asked to do, its tokenizer, its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dragoman_bundle.architecture import Architecture
from dragoman_bundle.bundle import Samples, load_bundle
from dragoman_bundle.manifest import MANIFEST
from dragoman_export.batching import WeightedExamples
from dragoman_export.checkpoint import assign_weights, load_weights, step_directories, write_atomically
from dragoman_export.corpus import CleaningReport, Direction, Pair, check_columns
from dragoman_export.distributed import Process
from dragoman_export.errors import CheckpointError, TrainingError
from dragoman_export.evaluation import read_test_sets
from dragoman_export.model import Transformer
from dragoman_export.options import RunOptions, TrainingOptions
from dragoman_export.preparation import clean_corpora, encode_corpora, train_shared_tokenizer
from dragoman_export.restoring import restore_most_precise
from dragoman_export.tokenization import check_tags, load_tokenizer
from dragoman_export.training import Trainer

_DESCRIPTION, _TOKENIZER = "run.json", "tokenizer.model"
SAMPLES = "samples.json"
_NUM_CALIBRATION_PAIRS = 400
_NUM_PARITY_PAIRS = 520


@dataclass(frozen=True, slots=True)
class Run:
    """A run that exists on disk."""

    directory: Path
    description: dict[str, Any]

    @property
    def directions(self) -> list[Direction]:
        """What the model translates."""
        return [Direction.parse(text) for text in self.description["directions"]]

    @property
    def tokenizer_path(self) -> Path:
        """The SentencePiece model of the run."""
        return self.directory / _TOKENIZER

    def weights(self) -> Path:
        """The checkpoint to serve: `final`, or else `best`, or else the newest.

        Raises:
            CheckpointError: the run has written none yet.
        """
        for path in (self.directory / "final", self.directory / "best"):
            if path.is_dir():
                return path
        checkpoints = step_directories(self.directory / "checkpoints")
        if not checkpoints:
            raise CheckpointError(f"{self.directory} has no checkpoint yet; let `dragoman-export train` write one")
        return checkpoints[-1]


def open_run(directory: Path) -> Run:
    """Read a run's description.

    Raises:
        CheckpointError: the directory is not a run.
    """
    try:
        return Run(directory, json.loads((directory / _DESCRIPTION).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} is not a training run: {error}") from error


def train(run: RunOptions, options: TrainingOptions, process: Process) -> bool:
    """Prepare a run, or resume it, and train to the end.

    Returns:
        Whether it reached its limit; False if a signal stopped it.
    """
    _check_directions(run)
    cleaned, reports = clean_corpora(run.corpora)
    for corpus, pairs in zip(run.corpora, cleaned, strict=True):
        check_columns(corpus.name, pairs, run.directions[0])
    test_sets = read_test_sets(run.validation, run.directions, run.max_validation_sentences)
    tokenizer_path = run.directory / _TOKENIZER
    if process.is_main and not tokenizer_path.exists():
        _make_tokenizer(run, cleaned)
    process.wait()
    tokenizer = load_tokenizer(tokenizer_path)
    check_tags(tokenizer, [direction.target for direction in run.directions])
    examples = encode_corpora(run.corpora, cleaned, reports, run.directions, tokenizer, run.limits)
    arch = Architecture(vocab_size=tokenizer.vocab_size(), **run.architecture)
    if process.is_main:
        _describe(run, options, arch, reports)
        _save_samples(run, cleaned, options.seed)
    model = _initial_model(run, options, arch, examples)
    return Trainer(run.directory, model, examples, tokenizer, test_sets, options, process).run()


def _check_directions(run: RunOptions) -> None:
    directions = run.directions
    languages = set(directions[0])
    if any(set(direction) != languages for direction in directions):
        raise TrainingError(
            f"directions {', '.join(map(str, directions))} are of different languages; "
            "a run trains one pair, in one or both directions"
        )
    for corpus in (*run.corpora, *run.validation):
        if corpus.only not in (None, *directions):
            raise TrainingError(
                f"{corpus.name} is for {corpus.only} only, which the run does not train; add that --pair"
            )


def _make_tokenizer(run: RunOptions, cleaned: Sequence[Sequence[Any]]) -> None:
    run.directory.mkdir(parents=True, exist_ok=True)
    aside = run.directory / f".partial-{_TOKENIZER}"
    given = run.tokenizer
    if given is None and run.initial_weights is not None and _is_bundle(run.initial_weights):
        bundle = load_bundle(run.initial_weights)
        given = bundle.file(bundle.manifest.tokenizer)
    if given is None:
        train_shared_tokenizer(cleaned, run.directions, aside, run.vocab_size, run.tokenizer_kind)
    else:
        aside.write_bytes(given.read_bytes())
    load_tokenizer(aside)
    aside.rename(run.directory / _TOKENIZER)


def _save_samples(run: RunOptions, cleaned: Sequence[Sequence[Pair]], seed: int) -> None:
    """Keep the sentences that export will calibrate and compare on, so that it needs nothing but the run."""
    rng = random.Random(seed)  # noqa: S311
    weights = [corpus.weight * len(pairs) for corpus, pairs in zip(run.corpora, cleaned, strict=True)]
    drawn = rng.choices(range(len(cleaned)), weights, k=_NUM_CALIBRATION_PAIRS)
    calibration = [rng.choice(cleaned[index]) for index in drawn]
    unseen = [pair for corpus in run.validation for pair in corpus.lines() if pair and all(pair)]
    rng.shuffle(unseen)
    seen = [pair for pairs in cleaned for pair in pairs]
    parity = unseen + rng.sample(seen, min(len(seen), max(0, _NUM_PARITY_PAIRS - len(unseen))))
    Samples(calibration, parity[:_NUM_PARITY_PAIRS]).save(run.directory / SAMPLES)


def _initial_model(
    run: RunOptions, options: TrainingOptions, arch: Architecture, examples: Sequence[WeightedExamples]
) -> Transformer:
    torch.manual_seed(options.seed)
    longest = max(max(len(e.source), len(e.target) + 1) for weighted in examples for e in weighted.examples)
    model = Transformer(arch, options.dropout, max_positions=max(1024, longest))
    if run.initial_weights is not None:
        assign_weights(model, _weights_to_start_from(run.initial_weights), run.initial_weights)
    return model


def _weights_to_start_from(path: Path) -> dict[str, Tensor]:
    if _is_bundle(path):
        restored = restore_most_precise(load_bundle(path))
        return {name: parameter.detach() for name, parameter in restored.named_parameters()}
    _, weights = load_weights(path)
    return weights


def _is_bundle(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _describe(run: RunOptions, options: TrainingOptions, arch: Architecture, reports: Sequence[CleaningReport]) -> None:
    path = run.directory / _DESCRIPTION
    description = {
        "directions": [str(direction) for direction in run.directions],
        "architecture": arch.to_dict(),
        "options": dataclasses.asdict(options),
        "cleaning": run.limits.to_dict(),
        "corpora": [
            {
                "name": corpus.name,
                "weight": corpus.weight,
                "direction": str(corpus.only) if corpus.only else None,
                "sha256": corpus.digest(),
                "examples": report.to_dict(),
            }
            for corpus, report in zip(run.corpora, reports, strict=True)
        ],
    }
    if path.exists():
        _check_same_run(path, description)
    write_atomically(path, json.dumps(description, indent=2) + "\n")


def _check_same_run(path: Path, description: dict[str, Any]) -> None:
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name, value in _identity(description).items() if _identity(before)[name] != value]
    if changed:
        raise TrainingError(
            f"{path.parent} holds a run with other {' and '.join(changed)}; resume it with the same ones, or choose "
            "another --output"
        )


def _identity(description: dict[str, Any]) -> dict[str, Any]:
    """What must stay the same for a resumed run to be the same run: everything but when to stop."""
    limits = ("max_steps", "max_epochs", "max_minutes", "patience")
    corpora = [{name: v for name, v in corpus.items() if name != "examples"} for corpus in description["corpora"]]
    options = {name: v for name, v in description["options"].items() if name not in limits}
    kept = {name: description[name] for name in ("directions", "architecture", "cleaning")}
    return kept | {"corpora": corpora, "options": options}
