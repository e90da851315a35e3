"""The command `dragoman-export`: train, evaluate, export, quantize and verify models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer

from dragoman_bundle.architecture import PRESET_DROPOUT, PRESETS, ArchitectureError
from dragoman_bundle.manifest import BundleError, Limits
from dragoman_export.corpus import CleaningLimits, Corpus, Direction
from dragoman_export.errors import CorpusError, ExportError
from dragoman_export.tokenization import TokenizerKind
from dragoman_export.training import Precision, TrainingOptions

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train an encoder-decoder Transformer, export it as a bundle for dragoman-server, and prove that it is right.",
)
T = TypeVar("T")
_DEFAULTS = TrainingOptions()
_CORPUS_HELP = (
    "[DIRECTION=]PATH[,PATH2][@WEIGHT]: a TSV file, or two line-aligned files; columns as in the first --pair."
)


@app.callback()
def _root() -> None:
    pass


@app.command()
def train(
    train: Annotated[list[str], typer.Option(help=f"{_CORPUS_HELP} Repeatable.")],
    pair: Annotated[
        list[str],
        typer.Option(help="What to translate, such as zh-en; twice (zh-en, en-zh) for one bilingual model."),
    ],
    output: Annotated[Path, typer.Option(help="Directory of the run; an interrupted run there is resumed.")],
    valid: Annotated[list[str] | None, typer.Option(help="Validation text, written like --train. Repeatable.")] = None,
    preset: Annotated[str, typer.Option(help=f"Sizes: {', '.join(PRESETS)} (base and big as published).")] = "small",
    encoder_layers: Annotated[int | None, typer.Option(help="Layers; the preset's if not given.")] = None,
    decoder_layers: Annotated[int | None, typer.Option(help="Layers; the preset's if not given.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Width; the preset's if not given.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Heads; the preset's if not given.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of one head; d_model / num_heads if not given.")] = None,
    d_ff: Annotated[int | None, typer.Option(help="Feed-forward width; the preset's if not given.")] = None,
    norm: Annotated[str | None, typer.Option(help="post (as published) or pre; the preset's if not given.")] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Residual dropout; the preset's if not given, 0 turns it off.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Pieces of the shared SentencePiece vocabulary.")] = 8000,
    tokenizer_kind: Annotated[str, typer.Option(help=f"{' or '.join(get_args(TokenizerKind))}.")] = "unigram",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A SentencePiece model to use instead of training one.")
    ] = None,
    initial_weights: Annotated[Path | None, typer.Option(help="A checkpoint directory to start from.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Drop examples with a longer side, in tokens.")] = 128,
    max_ratio: Annotated[float, typer.Option(help="Drop examples with a larger length ratio; 0 disables.")] = 4.0,
    label_smoothing: Annotated[float, typer.Option(help="Epsilon; 0 turns it off.")] = _DEFAULTS.label_smoothing,
    batch_tokens: Annotated[int, typer.Option(help="Padded tokens per batch and process.")] = _DEFAULTS.batch_tokens,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = _DEFAULTS.learning_rate,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = _DEFAULTS.warmup_steps,
    gradient_clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 disables.")] = _DEFAULTS.gradient_clip,
    precision: Annotated[
        str, typer.Option(help=f"{', '.join(get_args(Precision))}; auto is bf16.")
    ] = _DEFAULTS.precision,
    max_steps: Annotated[int, typer.Option(help="Optimiser steps.")] = _DEFAULTS.max_steps,
    max_epochs: Annotated[int, typer.Option(help="Passes over the weighted corpora; 0 is no limit.")] = 0,
    max_minutes: Annotated[float, typer.Option(help="Minutes of wall-clock time; 0 is no limit.")] = 0.0,
    validate_every: Annotated[int, typer.Option(help="Steps between validations.")] = _DEFAULTS.validate_every,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = _DEFAULTS.checkpoint_every,
    average: Annotated[int, typer.Option(help="Validated checkpoints to average; 0 disables.")] = _DEFAULTS.average,
    patience: Annotated[int, typer.Option(help="Stop after so many validations without gain; 0 never.")] = 0,
    max_validation_sentences: Annotated[int, typer.Option(help="Per file and validation; 0 uses all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of weights, dropout and data order.")] = _DEFAULTS.seed,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N. For several GPUs start it with torchrun.")
    ] = "auto",
) -> None:
    """Train a model on parallel text; run the same command again to resume."""
    from dragoman_export.distributed import join_run
    from dragoman_export.runs import RunOptions
    from dragoman_export.runs import train as run_training

    given = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers, "d_model": d_model,
             "num_heads": num_heads, "head_dim": head_dim, "d_ff": d_ff, "norm": norm}  # fmt: skip
    run = RunOptions(
        directory=output,
        directions=tuple(_parsed(Direction.parse, text) for text in pair),
        corpora=tuple(_parsed(Corpus.parse, text) for text in train),
        validation=tuple(_parsed(Corpus.parse, text) for text in valid or []),
        architecture=_choice(preset, PRESETS, "--preset")
        | {name: value for name, value in given.items() if value is not None},
        vocab_size=vocab_size,
        tokenizer_kind=tokenizer_kind,  # type: ignore[arg-type]
        tokenizer=tokenizer,
        initial_weights=initial_weights,
        limits=CleaningLimits(max_tokens=max_tokens, max_ratio=max_ratio),
        max_validation_sentences=max_validation_sentences,
    )
    options = TrainingOptions(
        dropout=PRESET_DROPOUT[preset] if dropout is None else dropout,
        label_smoothing=label_smoothing,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        gradient_clip=gradient_clip,
        precision=precision,  # type: ignore[arg-type]
        max_steps=max_steps,
        max_epochs=max_epochs,
        max_minutes=max_minutes,
        validate_every=validate_every,
        checkpoint_every=checkpoint_every,
        average=average,
        patience=patience,
        seed=seed,
    )
    with join_run(device) as process:
        run_training(run, options, process)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="A run's directory, or a bundle's.", exists=True, file_okay=False)],
    test_set: Annotated[list[str], typer.Option(help=f"{_CORPUS_HELP} Repeatable.")],
    beam: Annotated[int, typer.Option(help="Beam width; 1 is greedy.", min=1)] = 1,
    length_penalty: Annotated[float, typer.Option(help="Score is log-probability / length^penalty; 0 disables.")] = 1.0,
    precision: Annotated[
        str | None, typer.Option(help="Of a bundle: fp32, int8 or fp16; its fastest if not given.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write scores and translations here, as JSON.")] = None,
) -> None:
    """Score translations of a test set with sacreBLEU and chrF."""
    from dragoman_export.commands import evaluate_model

    test_sets = [_parsed(Corpus.parse, text) for text in test_set]
    evaluate_model(model, test_sets, beam, length_penalty, precision, output, _say)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A training run's directory.", exists=True, file_okay=False)],
    output: Annotated[Path, typer.Option(help="The bundle's directory, <models>/<name>/<version>.")],
    variant: Annotated[
        list[str] | None, typer.Option(help="cpu-fp32, cpu-int8, cuda-fp16. Repeatable; cpu-int8 if none.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name; the output's parent directory if not given.")
    ] = None,
    test_set: Annotated[
        list[str] | None, typer.Option(help="Measure quality on it for the manifest. Repeatable.")
    ] = None,
    max_source_tokens: Annotated[int, typer.Option(help="Longest source the server shall take, in tokens.")] = 256,
    max_target_tokens: Annotated[int, typer.Option(help="Longest translation, in tokens.")] = 256,
) -> None:
    """Turn a run into a bundle, proving that its graphs compute what PyTorch computes."""
    from dragoman_export.bundling import VARIANT_KINDS
    from dragoman_export.commands import export_run

    kinds = [_choice(text, VARIANT_KINDS, "--variant") for text in variant or ["cpu-int8"]]
    limits = Limits(max_source_tokens=max_source_tokens, max_target_tokens=max_target_tokens)
    test_sets = [_parsed(Corpus.parse, text) for text in test_set or []]
    export_run(run, output, name or output.resolve().parent.name, kinds, limits, test_sets, _say)


@app.command()
def quantize(
    bundle: Annotated[Path, typer.Argument(help="A bundle with a cpu-fp32 variant.", exists=True, file_okay=False)],
    output: Annotated[Path, typer.Option(help="Where to write the bundle with cpu-fp32 and cpu-int8.")],
) -> None:
    """Add a batch-invariant int8 variant to a bundle."""
    from dragoman_export.verification import quantize_bundle

    quantize_bundle(bundle, output, _say)


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="A bundle's directory.", exists=True, file_okay=False)],
) -> None:
    """Repeat the proof of a bundle: files, tensors, numbers, tokens, golden outputs."""
    from dragoman_export.verification import verify_bundle

    manifest = verify_bundle(bundle, _say)
    _say(f"{bundle} is what its manifest says: {manifest.name}, {len(manifest.variants)} variant(s)")


def _parsed(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except CorpusError as error:
        raise typer.BadParameter(str(error)) from error


def _choice(text: str, choices: Mapping[str, T], option: str) -> T:
    if text not in choices:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(choices)}", param_hint=option)
    return choices[text]


def _say(line: str) -> None:
    typer.echo(line, err=True)


def main() -> None:
    """Run the command line: exit code 0, 1 if it failed, 2 if it was called wrongly."""
    try:
        app()
    except (ExportError, BundleError, ArchitectureError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
