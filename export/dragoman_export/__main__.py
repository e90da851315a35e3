"""The command `dragoman-export`: train, evaluate, export, quantize and verify models."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dragoman_bundle.architecture import ArchitectureError, Norm
from dragoman_bundle.manifest import BundleError, Limits
from dragoman_export.corpus import Corpus, Direction
from dragoman_export.errors import CorpusError, ExportError
from dragoman_export.options import VARIANT_KINDS, Precision, TrainingOptions, VariantKind
from dragoman_export.tokenization import TokenizerKind

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train an encoder-decoder Transformer, export it as a bundle for dragoman-server, and prove that it is right.",
)
Preset = Literal["base", "big", "small", "tiny"]
_DEFAULTS = TrainingOptions()
_CORPUS_HELP = (
    "A TSV file, or two line-aligned files PATH,PATH2; columns as in the first --pair. PATH@0.5 shows half of it in an "
    "epoch, zh-en=PATH uses it for that direction only."
)
_VARIANT_HELP = f"One of {', '.join(VARIANT_KINDS)}; cpu-int8 if none. Repeatable."
_PAIR_HELP = "What to translate, such as zh-en (or zh-Hant:en); twice (zh-en, en-zh) for one bilingual model."


def _corpus(text: str) -> Corpus:
    try:
        return Corpus.parse(text)
    except CorpusError as error:
        raise typer.BadParameter(str(error)) from error


def _direction(text: str) -> Direction:
    try:
        return Direction.parse(text)
    except CorpusError as error:
        raise typer.BadParameter(str(error)) from error


def _variant(text: str) -> VariantKind:
    if text not in VARIANT_KINDS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(VARIANT_KINDS)}")
    return VARIANT_KINDS[text]


@app.callback()
def _root() -> None:
    pass


@app.command()
def train(
    train: Annotated[list[Corpus], typer.Option(parser=_corpus, help=f"{_CORPUS_HELP} Repeatable.")],
    pair: Annotated[list[Direction], typer.Option(parser=_direction, help=_PAIR_HELP)],
    output: Annotated[Path, typer.Option(help="Directory of the run; an interrupted run there is resumed.")],
    valid: Annotated[list[Corpus] | None, typer.Option(parser=_corpus, help="Validation text, like --train.")] = None,
    preset: Annotated[Preset, typer.Option(help="Sizes; base and big as published.")] = "small",
    encoder_layers: Annotated[int | None, typer.Option(help="Layers; the preset's if not given.")] = None,
    decoder_layers: Annotated[int | None, typer.Option(help="Layers; the preset's if not given.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Width; the preset's if not given.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Heads; the preset's if not given.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of one head; d_model / num_heads if not given.")] = None,
    d_ff: Annotated[int | None, typer.Option(help="Feed-forward width; the preset's if not given.")] = None,
    tied_embeddings: Annotated[bool, typer.Option(help="One matrix for both embeddings and the output.")] = True,
    norm: Annotated[Norm | None, typer.Option(help="post (as published) or pre; the preset's if not given.")] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Of residuals; the preset's if not given, 0: off.", min=0, max=0.99)
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Pieces of the shared SentencePiece vocabulary.", min=1)] = 8000,
    tokenizer_kind: Annotated[TokenizerKind, typer.Option(help="SentencePiece algorithm.")] = "unigram",
    tokenizer: Annotated[Path | None, typer.Option(help="SentencePiece model to use; trained if not given.")] = None,
    initial_weights: Annotated[
        Path | None, typer.Option(help="A checkpoint to start from, or a bundle, whose tokenizer is then the default.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Drop examples with a longer side, in tokens.")] = 128,
    max_ratio: Annotated[float, typer.Option(help="Drop examples with a larger length ratio; 0 disables.")] = 4.0,
    label_smoothing: Annotated[
        float, typer.Option(help="Epsilon; 0 turns it off.", min=0, max=0.99)
    ] = _DEFAULTS.label_smoothing,
    batch_tokens: Annotated[
        int, typer.Option(help="Padded tokens per batch and process.", min=1)
    ] = _DEFAULTS.batch_tokens,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = _DEFAULTS.learning_rate,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = _DEFAULTS.warmup_steps,
    cooldown_steps: Annotated[
        int, typer.Option(min=0, help="Last steps of --max-steps, over which the rate falls to 0. 0: no cool-down.")
    ] = _DEFAULTS.cooldown_steps,
    gradient_clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 disables.")] = _DEFAULTS.gradient_clip,
    precision: Annotated[Precision, typer.Option(help="Of matrix products; auto is bf16.")] = _DEFAULTS.precision,
    max_steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = _DEFAULTS.max_steps,
    max_epochs: Annotated[int, typer.Option(help="Passes over the weighted corpora; 0 is no limit.")] = 0,
    max_minutes: Annotated[float, typer.Option(help="Minutes of wall-clock time; 0 is no limit.")] = 0.0,
    validate_every: Annotated[int, typer.Option(help="Steps between validations.", min=1)] = _DEFAULTS.validate_every,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints.", min=1)
    ] = _DEFAULTS.checkpoint_every,
    average: Annotated[int, typer.Option(help="Validated checkpoints to average; 0 disables.")] = _DEFAULTS.average,
    patience: Annotated[int, typer.Option(help="Stop after so many validations without gain; 0 never.")] = 0,
    max_validation_sentences: Annotated[int, typer.Option(help="Per file and validation; 0 uses all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of weights, dropout and data order.")] = _DEFAULTS.seed,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; torchrun for several GPUs.")] = "auto",
) -> None:
    """Train a model on parallel text; run the same command again to resume."""
    given = dict(locals())
    from dragoman_export.commands import train_model

    if not train_model(given):
        _say("stopped by a signal; run the same command again to resume")
        raise typer.Exit(1)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="A run's directory, or a bundle's.", exists=True, file_okay=False)],
    test_set: Annotated[list[Corpus], typer.Option(parser=_corpus, help=f"{_CORPUS_HELP} Repeatable.")],
    beam: Annotated[int, typer.Option(help="Beam width; 1 is greedy.", min=1)] = 1,
    length_penalty: Annotated[float, typer.Option(help="Score is log-probability / length^penalty; 0 disables.")] = 1.0,
    precision: Annotated[
        Literal["fp32", "int8", "fp16"] | None, typer.Option(help="Of a bundle; its fastest if not given.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write scores and translations here, as JSON.")] = None,
) -> None:
    """Score translations of a test set with sacreBLEU and chrF."""
    from dragoman_export.commands import evaluate_model

    evaluate_model(model, test_set, beam, length_penalty, precision, output, _say)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A training run's directory.", exists=True, file_okay=False)],
    output: Annotated[Path, typer.Option(help="The bundle's directory, <models>/<name>/<version>.")],
    variant: Annotated[list[VariantKind] | None, typer.Option(parser=_variant, help=_VARIANT_HELP)] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name; the output's parent directory if not given.")
    ] = None,
    test_set: Annotated[
        list[Corpus] | None, typer.Option(parser=_corpus, help="Measure quality on it. Repeatable.")
    ] = None,
    max_source_tokens: Annotated[int, typer.Option(help="Longest source the server shall take, in tokens.")] = 256,
    max_target_tokens: Annotated[int, typer.Option(help="Longest translation, in tokens.")] = 256,
) -> None:
    """Turn a run into a bundle, proving that its graphs compute what PyTorch computes."""
    from dragoman_export.commands import export_run
    from dragoman_export.options import VARIANT_KINDS

    kinds = variant or [VARIANT_KINDS["cpu-int8"]]
    limits = Limits(max_source_tokens=max_source_tokens, max_target_tokens=max_target_tokens)
    export_run(run, output, name or output.resolve().parent.name, kinds, limits, test_set or [], _say)


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


def _say(line: str) -> None:
    typer.echo(line, err=True)


def main() -> None:
    """Run the command line: exit code 0, 1 if it failed, 2 if it was called wrongly."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        app()
    except (ExportError, BundleError, ArchitectureError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
