"""Training: the schedule, exact resuming, several processes, and a task that must be learnt."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dragoman_bundle.architecture import Architecture
from dragoman_export.batching import Ids, collate, epoch_batches
from dragoman_export.checkpoint import (
    assign_weights,
    average_weights,
    load_model,
    load_training_state,
    load_weights,
    save_checkpoint,
    step_directories,
)
from dragoman_export.corpus import CleaningLimits, Corpus
from dragoman_export.decoding import TorchStepModel, beam_search, greedy_search
from dragoman_export.errors import CheckpointError
from dragoman_export.evaluation import Quality, encode_source
from dragoman_export.loss import generator_loss
from dragoman_export.model import Transformer
from dragoman_export.options import TrainingOptions
from dragoman_export.preparation import clean_corpora, encode_corpora
from dragoman_export.runs import open_run
from dragoman_export.tokenization import PADDING_ID, load_tokenizer
from dragoman_export.training import choose, learning_rate, mean_bleu
from tests.reversal import DIRECTION, reverse, sentences, write_pairs

TINY = ["--d-model", "32", "--num-heads", "2", "--d-ff", "48", "--encoder-layers", "1", "--decoder-layers", "1"]


def command(directory: Path, *options: str, steps: int = 60) -> list[str]:
    """A training command on a tiny corpus in `directory`, without validation."""
    if not (directory / "train.tsv").exists():
        write_pairs(directory / "train.tsv", sentences(600, seed=3))
    return [
        *("train", "--train", str(directory / "train.tsv"), "--pair", "fwd-rev", "--preset", "tiny", *TINY),
        *("--max-steps", str(steps), "--checkpoint-every", "5", "--validate-every", "20", "--batch-tokens", "256"),
        *("--warmup-steps", "10", *options),
    ]  # fmt: skip


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def final_weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "final" / "model.safetensors")


def test_learning_rate_warms_up_and_decays_with_the_root() -> None:
    options = TrainingOptions(learning_rate=0.5, warmup_steps=100)
    assert learning_rate(options, 1) == pytest.approx(0.005)
    assert learning_rate(options, 100) == pytest.approx(0.5)
    assert learning_rate(options, 400) == pytest.approx(0.25)
    # Section 5.3: d_model^-0.5 min(step^-0.5, step warmup^-1.5) is this schedule with peak (d_model warmup)^-0.5.
    paper = TrainingOptions(learning_rate=(512 * 4000) ** -0.5, warmup_steps=4000)
    for step in (1, 1000, 4000, 100_000):
        assert learning_rate(paper, step) == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5))


def test_learning_rate_cools_down_to_nothing_over_the_last_steps() -> None:
    options = TrainingOptions(learning_rate=0.5, warmup_steps=100, max_steps=500, cooldown_steps=99)
    without = TrainingOptions(learning_rate=0.5, warmup_steps=100, max_steps=500)
    assert learning_rate(options, 401) == learning_rate(without, 401)
    assert learning_rate(options, 451) == pytest.approx(learning_rate(without, 451) / 2)
    assert learning_rate(options, 500) == pytest.approx(learning_rate(without, 500) / 100)
    assert learning_rate(options, 501) == 0


def test_killed_at_random_moments_and_resumed_gives_the_same_weights(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    subprocess.run(python("dragoman_export", *command(tmp_path, "--output", str(unbroken))), check=True)
    for kill in range(2):
        process = subprocess.Popen(python("dragoman_export", *command(tmp_path, "--output", str(broken))))
        checkpoints_before = len(list(broken.glob("checkpoints/step-*")))
        deadline = time.monotonic() + 120
        while len(list(broken.glob("checkpoints/step-*"))) <= checkpoints_before and process.poll() is None:
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (broken / "final").exists(), f"it had finished before kill {kill}"
    last = python("dragoman_export", *command(tmp_path, "--output", str(broken)))
    resumed = subprocess.run(last, check=True, capture_output=True, text=True)
    assert re.search(r"resuming at step [1-9]", resumed.stderr)
    assert not [*broken.glob("**/.*")], "what killed processes were writing is still there"
    expected, found = final_weights(unbroken), final_weights(broken)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_signal_leaves_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--output", str(run), "--checkpoint-every", "1000000", "--validate-every", "1000000"]
    process = subprocess.Popen(
        python("dragoman_export", *command(tmp_path, *options, steps=1_000_000)), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("step 100:")
    process.send_signal(signal.SIGTERM)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "run the same command again to resume" in message
    [checkpoint] = step_directories(run / "checkpoints")
    assert int(checkpoint.name.removeprefix("step-")) >= 100
    assert not (run / "final").exists()


def test_two_processes_step_as_one_with_both_batches(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--output", str(run), "--dropout", "0", "--precision", "fp32", "--gradient-clip", "0"]
    subprocess.run(
        python("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dragoman_export",
               *command(tmp_path, *options, steps=1)),
        check=True,
    )  # fmt: skip
    description = open_run(run)
    tokenizer = load_tokenizer(description.tokenizer_path)
    torch.manual_seed(1)
    model = Transformer(Architecture.from_dict(description.description["architecture"]))
    corpora = [Corpus((tmp_path / "train.tsv",))]
    cleaned, reports = clean_corpora(corpora)
    weighted = encode_corpora(corpora, cleaned, reports, [DIRECTION], tokenizer, CleaningLimits())
    batches = [collate(batch) for batch in epoch_batches(weighted, 256, seed=1, epoch=0)[:2]]
    num_tokens = sum(batch.num_target_tokens for batch in batches)
    for batch in batches:
        hidden = model(batch.source_ids, batch.source_lengths, batch.target_inputs)
        losses = generator_loss(hidden, model.generator, batch.target_outputs, PADDING_ID, 0.1)
        (losses.smoothed / num_tokens).backward()
    [checkpoint] = step_directories(run / "checkpoints")
    moments = load_training_state(checkpoint)["optimizer"]["state"]
    for index, (name, parameter) in enumerate(model.named_parameters()):
        # After one step, Adam's first moment is a tenth of the gradient.
        assert parameter.grad is not None
        torch.testing.assert_close(moments[index]["exp_avg"], 0.1 * parameter.grad, atol=1e-7, rtol=1e-3, msg=name)


def test_another_number_of_processes_cannot_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    subprocess.run(python("dragoman_export", *command(tmp_path, "--output", str(run), steps=5)), check=True)
    again = command(tmp_path, "--output", str(run), steps=9)
    launch = python("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dragoman_export", *again)
    result = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "was trained by 1 processes and cannot be resumed by 2" in result.stderr


def test_a_tiny_model_learns_to_reverse(reversal_run: Path) -> None:
    run = open_run(reversal_run)
    tokenizer = load_tokenizer(run.tokenizer_path)
    model = TorchStepModel(load_model(run.weights()))
    unseen = sentences(1000, seed=4)
    sources = [encode_source(tokenizer, text, DIRECTION) for text in unseen]
    exact = [
        tokenizer.decode(ids) == reverse(text) for ids, text in zip(greedy_search(model, sources), unseen, strict=True)
    ]
    assert sum(exact) / len(exact) > 0.99


def test_a_beam_of_one_is_greedy_and_a_wide_beam_is_no_worse(reversal_run: Path) -> None:
    run = open_run(reversal_run)
    tokenizer = load_tokenizer(run.tokenizer_path)
    model = TorchStepModel(load_model(run.weights()))
    sources = [encode_source(tokenizer, text, DIRECTION) for text in sentences(40, seed=5)]
    greedy = greedy_search(model, sources)
    assert beam_search(model, sources, width=1) == greedy
    wide = beam_search(model, sources, width=4, length_penalty=0.0)
    for source, ours, theirs in zip(sources, wide, greedy, strict=True):
        assert log_probability(model, source, ours) >= log_probability(model, source, theirs) - 1e-4


def log_probability(model: TorchStepModel, source: Ids, ids: list[int]) -> float:
    state, total, last = model.start([source]), 0.0, 2
    for token in [*ids, 3]:
        logits, state = model.step(state, np.array([last]))
        row = torch.from_numpy(logits[0]).double()
        total += float(row[token] - row.logsumexp(0))
        last = token
    return total


def test_a_run_keeps_what_it_measured(reversal_run: Path) -> None:
    lines = (reversal_run / "validations.jsonl").read_text(encoding="utf-8").splitlines()
    scores = [json.loads(line) for line in lines]
    assert [row["step"] for row in scores] == [400, 800, 1200, 1300]
    assert scores[-1]["scores"][0]["bleu"] > scores[0]["scores"][0]["bleu"]
    assert list((reversal_run / "tensorboard").glob("events*"))
    corpora = json.loads((reversal_run / "run.json").read_text(encoding="utf-8"))["corpora"]
    assert corpora[0]["examples"]["read"] == 12_000
    assert json.loads((reversal_run / "final.json").read_text(encoding="utf-8"))["chosen"]


def test_averaging_is_the_mean(tmp_path: Path) -> None:
    arch = Architecture(vocab_size=9, d_model=8, num_heads=2, d_ff=8, encoder_layers=1, decoder_layers=1)
    models = [Transformer(arch) for _ in range(3)]
    for i, model in enumerate(models):
        save_checkpoint(tmp_path / str(i), model, None)
    _, averaged = average_weights([tmp_path / str(i) for i in range(3)])
    for name, parameter in models[0].named_parameters():
        others = [dict(model.named_parameters())[name].detach() for model in models]
        torch.testing.assert_close(averaged[name], sum(others) / 3, msg=name)
        assert parameter.shape == averaged[name].shape


def test_weights_of_another_model_are_refused_with_every_difference(tmp_path: Path) -> None:
    arch = Architecture(vocab_size=9, d_model=8, num_heads=2, d_ff=8, encoder_layers=1, decoder_layers=1)
    save_checkpoint(tmp_path / "a", Transformer(arch), None)
    _, weights = load_weights(tmp_path / "a")
    weights["extra"] = torch.zeros(1)
    del weights["encoder_norm.weight" if "encoder_norm.weight" in weights else "source_embedding.weight"]
    weights["encoder.0.feed_forward.inner.bias"] = torch.zeros(3)
    with pytest.raises(CheckpointError) as caught:
        assign_weights(Transformer(arch), weights, tmp_path)
    message = str(caught.value)
    assert "missing: source_embedding.weight" in message
    assert "unexpected: extra" in message
    assert "encoder.0.feed_forward.inner.bias has shape [3], the model wants [8]" in message


def test_an_output_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    subprocess.run(python("dragoman_export", *command(tmp_path, "--output", str(run), steps=5)), check=True)
    for option, name in ((["--d-ff", "64"], "architecture"), (["--seed", "7"], "options")):
        other = [*command(tmp_path, "--output", str(run), steps=5), *option]
        result = subprocess.run(python("dragoman_export", *other), capture_output=True, text=True, check=False)
        assert result.returncode == 1
        assert f"holds a run with other {name}" in result.stderr


def test_text_for_a_direction_that_is_not_trained_is_refused(tmp_path: Path) -> None:
    write_pairs(tmp_path / "back.tsv", sentences(5, seed=1))
    options = ["--output", str(tmp_path / "run"), "--train", f"rev-fwd={tmp_path / 'back.tsv'}"]
    result = subprocess.run(
        python("dragoman_export", *command(tmp_path, *options)), capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "back.tsv is for rev-fwd only, which the run does not train; add that --pair" in result.stderr


def test_without_validation_text_the_final_weights_are_the_last_ones_averaged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    subprocess.run(python("dragoman_export", *command(tmp_path, "--output", str(run))), check=True)
    averaged = [run / "checkpoints" / f"step-{step:08d}" for step in (20, 40, 60)]
    assert step_directories(run / "checkpoints") == averaged
    _, expected = average_weights(averaged)
    for name, tensor in final_weights(run).items():
        torch.testing.assert_close(tensor, expected[name])


def test_a_tokenizer_without_the_tags_is_refused(tmp_path: Path, reversal_run: Path) -> None:
    options = ["--output", str(tmp_path / "run"), "--tokenizer", str(reversal_run / "tokenizer.model")]
    call = [argument.replace("fwd-rev", "fwd-xx") for argument in command(tmp_path, *options)]
    result = subprocess.run(python("dragoman_export", *call), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "the tokenizer has no piece <2xx>" in result.stderr


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ({"best": 26.0}, "best"),
        ({"best": 26.05, "average of 4": 26.0}, "average of 4"),
        ({"best": 26.2, "average of 4": 26.0}, "best"),
        ({"average of 4": 0.0}, "average of 4"),
    ],
)
def test_the_best_checkpoint_has_to_beat_the_average(scores: dict[str, float], chosen: str) -> None:
    assert choose(scores) == chosen


def test_validation_scores_are_averaged() -> None:
    assert mean_bleu([Quality("a", "x-y", 10, 1, ""), Quality("b", "x-y", 20, 1, "")]) == 15
    assert mean_bleu([]) == 0
