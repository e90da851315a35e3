"""Training: teacher forcing, Adam with warm-up, checkpoints that resume exactly, validation by real decoding."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceProcessor
from torch import nn

from dragoman_export.batching import Batch, Example, WeightedExamples, collate, epoch_batches
from dragoman_export.checkpoint import (
    assign_weights,
    average_weights,
    load_model,
    load_training_state,
    load_weights,
    remove_leftovers,
    save_checkpoint,
    step_directories,
    write_atomically,
)
from dragoman_export.decoding import TorchStepModel, greedy_search
from dragoman_export.distributed import Process
from dragoman_export.errors import TrainingError
from dragoman_export.evaluation import Quality, TestSet, evaluate
from dragoman_export.loss import TokenLoss, generator_loss
from dragoman_export.model import Transformer
from dragoman_export.options import Precision, TrainingOptions
from dragoman_export.progress import TrainingLog
from dragoman_export.tokenization import PADDING_ID

_LOG = logging.getLogger(__name__)


_AVERAGES_LEAD = 0.1
"""BLEU by which the best checkpoint has to beat the average: this very validation text has picked it out of many."""


@dataclass(slots=True)
class Progress:
    """Where a run is; part of every checkpoint."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    best_bleu: float = -1.0
    best_step: int = 0
    validations_since_best: int = 0
    trained_s: float = 0.0
    """Wall-clock time spent so far, over all processes that worked on the run one after the other."""
    world_size: int = 1
    """Processes that work on it together: they share out the batches."""


def learning_rate(options: TrainingOptions, step: int) -> float:
    """Section 5.3's schedule, scaled to its peak: linear warm-up, then decay with 1/sqrt(step). `step` from 1.

    A cool-down multiplies the last steps by what is left of it: most of what a small rate gains, in a fraction of the
    steps (Hägele et al., 2024).
    """
    warmup = max(options.warmup_steps, 1)
    cooldown = min((options.max_steps - step + 1) / (options.cooldown_steps + 1), 1.0)
    return options.learning_rate * min(step / warmup, math.sqrt(warmup / step)) * cooldown


class TranslationLoss(nn.Module):
    """Model and loss as one module, which is what DistributedDataParallel wants to wrap."""

    def __init__(self, model: Transformer, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def forward(self, batch: Batch) -> TokenLoss:
        """Summed losses of a batch."""
        hidden = self.model(batch.source_ids, batch.source_lengths, batch.target_inputs)
        return generator_loss(hidden, self.model.generator, batch.target_outputs, PADDING_ID, self.label_smoothing)


@dataclass
class Trainer:
    """One run: `run()` trains until a limit and leaves the weights to serve in `directory/final`."""

    directory: Path
    model: Transformer
    corpora: Sequence[WeightedExamples]
    tokenizer: SentencePieceProcessor
    test_sets: Sequence[TestSet]
    options: TrainingOptions
    process: Process = field(default_factory=Process)

    def __post_init__(self) -> None:
        self.progress = Progress()
        self.model.to(self.process.device)
        loss: nn.Module = TranslationLoss(self.model, self.options.label_smoothing)
        self.loss = nn.parallel.DistributedDataParallel(loss) if self.process.world_size > 1 else loss
        # Adam with the paper's betas and epsilon (section 5.3).
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.autocast = autocast_dtype(self.options.precision, self.process.device)
        self.scaler = torch.amp.GradScaler(self.process.device.type, enabled=self.autocast is torch.float16)
        self._started = 0.0
        self._epoch_batches: tuple[int, list[list[Example]]] = (-1, [])

    @property
    def checkpoints(self) -> Path:
        """Directory of the run's checkpoints."""
        return self.directory / "checkpoints"

    def run(self) -> bool:
        """Train from wherever the run is to its limit, then average and choose the final weights.

        Returns:
            Whether the limit was reached; False if a signal stopped it, with a checkpoint to resume from.
        """
        self._resume()
        self._started = time.monotonic() - self.progress.trained_s
        with (
            TrainingLog(self.directory, self.process.is_main) as log,
            _stop_on_signal() as stop,
        ):
            finished = self._loop(log, stop)
        if finished and self.process.is_main:
            self._choose_final()
        self.process.wait()
        return finished

    def _loop(self, log: TrainingLog, stop: list[int]) -> bool:
        """Step until a limit is reached (True) or a signal asks to stop (False)."""
        while not self._at_limit():
            self._step(log)
            stopping = self._agree(bool(stop))
            if self.progress.step % self.options.validate_every == 0:
                self._validate(log)
            elif stopping or self.progress.step % self.options.checkpoint_every == 0:
                self._save(self.progress.step)
            if stopping:
                return False
        if self.progress.step % self.options.validate_every:
            self._validate(log)
        return True

    def _at_limit(self) -> bool:
        exhausted = self.options.patience > 0 and self.progress.validations_since_best >= self.options.patience
        return exhausted or self._agree(self._share_done() >= 1)

    def _share_done(self) -> float:
        """How far the run is towards the nearest of its limits, 0 to 1."""
        options, progress = self.options, self.progress
        progress.trained_s = time.monotonic() - self._started
        shares = [progress.step / options.max_steps]
        if options.max_epochs:
            shares.append(progress.epoch / options.max_epochs)
        if options.max_minutes:
            shares.append(progress.trained_s / (60 * options.max_minutes))
        return max(shares)

    def _agree(self, condition: bool) -> bool:
        """Whether the condition holds in any process: all must leave the loop at the same step."""
        if self.process.world_size == 1:
            return condition
        return bool(self.process.sum(torch.tensor(float(condition), device=self.process.device)) > 0)

    def _step(self, log: TrainingLog) -> None:
        batch = self._next_batch()
        progress, options = self.progress, self.options
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(options, progress.step + 1)
        self.model.train()
        # Dropout is a function of seed, process and step, so that resuming needs no generator state of any process.
        torch.manual_seed((options.seed * 1_000_003 + progress.step) * self.process.world_size + self.process.rank)
        with torch.autocast(self.process.device.type, self.autocast, enabled=self.autocast is not None):
            losses = self.loss(batch)
        # Sums over all processes: DDP averages gradients, the loss is a mean over all target tokens.
        sums = torch.stack([losses.smoothed.detach(), losses.nll, losses.nll.new_tensor(batch.num_target_tokens)])
        smoothed, nll, num_tokens = self.process.sum(sums.double()).tolist()
        self.scaler.scale(losses.smoothed * (self.process.world_size / num_tokens)).backward()
        self.scaler.unscale_(self.optimizer)
        clip = options.gradient_clip or math.inf
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=False)
        progress.step += 1
        means = smoothed / num_tokens, nll / num_tokens
        log.step(progress.step, self._share_done(), means, int(num_tokens), gradient_norm)

    def _next_batch(self) -> Batch:
        """This process's next batch; processes take turns in one common order."""
        progress, process = self.progress, self.process
        while True:
            if self._epoch_batches[0] != progress.epoch:
                batches = epoch_batches(self.corpora, self.options.batch_tokens, self.options.seed, progress.epoch)
                usable = len(batches) - len(batches) % process.world_size
                if not usable:
                    raise TrainingError("an epoch has fewer batches than there are processes; lower --batch-tokens")
                self._epoch_batches = progress.epoch, batches[:usable]
            batches = self._epoch_batches[1]
            if progress.batch < len(batches):
                batch = collate(batches[progress.batch + process.rank])
                progress.batch += process.world_size
                if progress.batch >= len(batches):
                    progress.epoch, progress.batch = progress.epoch + 1, 0
                return batch.to(process.device)
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def _validate(self, log: TrainingLog) -> None:
        qualities: list[Quality] = []
        if self.process.is_main and self.test_sets:
            step_model = TorchStepModel(self.model, self.autocast)
            qualities = evaluate(step_model, self.tokenizer, self.test_sets, greedy_search)
            log.validation(self.progress.step, qualities)
        own = torch.tensor(mean_bleu(qualities), dtype=torch.float64, device=self.process.device)
        bleu = float(self.process.sum(own))
        if self.test_sets and bleu > self.progress.best_bleu:
            self.progress.best_bleu, self.progress.best_step = bleu, self.progress.step
            self.progress.validations_since_best = 0
        elif self.test_sets:
            self.progress.validations_since_best += 1
        if self.process.is_main and self.progress.best_step == self.progress.step:
            save_checkpoint(self.directory / "best", self.model, None)
        self._save(self.progress.step)

    def _save(self, step: int) -> None:
        if self.process.is_main:
            save_checkpoint(self.checkpoints / f"step-{step:08d}", self.model, self._state())
            self._prune()
        self.process.wait()

    def _state(self) -> dict[str, Any]:
        return {
            "progress": dataclasses.asdict(self.progress),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def _prune(self) -> None:
        """Keep the newest checkpoint and the validated ones that averaging wants."""
        every = step_directories(self.checkpoints)
        keep = set(self._averaged(every)) | set(every[-1:])
        for path in every:
            if path not in keep:
                shutil.rmtree(path)

    def _averaged(self, checkpoints: list[Path]) -> list[Path]:
        validated = [p for p in checkpoints if int(p.name.removeprefix("step-")) % self.options.validate_every == 0]
        return (validated or checkpoints[-1:])[-self.options.average :] if self.options.average else []

    def _resume(self) -> None:
        """Continue from the newest checkpoint, if there is one: same weights, moments, data order and dropout."""
        self.progress.world_size = self.process.world_size
        if self.process.is_main:
            remove_leftovers(self.directory)
            remove_leftovers(self.checkpoints)
        self.process.wait()
        checkpoints = step_directories(self.checkpoints)
        if not checkpoints:
            return
        _, weights = load_weights(checkpoints[-1])
        assign_weights(self.model, weights, checkpoints[-1])
        state = load_training_state(checkpoints[-1])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**state["progress"])
        if self.progress.world_size != self.process.world_size:
            raise TrainingError(
                f"{self.directory} was trained by {self.progress.world_size} processes and cannot be resumed by "
                f"{self.process.world_size}: they would share out the batches differently"
            )
        if self.process.is_main:
            _LOG.info("resuming at step %d", self.progress.step)

    def _choose_final(self) -> None:
        """The average of the last checkpoints becomes `final`, or the best one if that validates clearly better.

        Without validation text it is the average, or the newest checkpoint if there is nothing to average.
        """
        candidates: dict[str, Transformer] = {}
        if (self.directory / "best").is_dir():
            candidates["best"] = load_model(self.directory / "best", max_positions=self.model.max_positions)
        checkpoints = step_directories(self.checkpoints)
        averaged = self._averaged(checkpoints)
        if len(averaged) > 1 or not candidates:
            _, weights = average_weights(averaged or checkpoints[-1:])
            model = Transformer(self.model.arch, max_positions=self.model.max_positions)
            assign_weights(model, weights, self.checkpoints)
            candidates[f"average of {len(averaged) or 1}"] = model
        scores = {name: round(self._final_bleu(model), 2) for name, model in candidates.items()}
        chosen = choose(scores)
        save_checkpoint(self.directory / "final", candidates[chosen], None)
        summary = json.dumps({"mean_bleu": scores, "chosen": chosen}, indent=2)
        write_atomically(self.directory / "final.json", summary + "\n")

    def _final_bleu(self, model: Transformer) -> float:
        model.to(self.process.device)
        step_model = TorchStepModel(model, self.autocast)
        return mean_bleu(evaluate(step_model, self.tokenizer, self.test_sets, greedy_search))


def choose(scores: Mapping[str, float]) -> str:
    """Of final weights by name, those to serve: the average, unless "best" has clearly more BLEU."""
    return max(scores, key=lambda name: scores[name] + (0.0 if name == "best" else _AVERAGES_LEAD))


def mean_bleu(qualities: Sequence[Quality]) -> float:
    """The mean over test sets; 0 without any."""
    return sum(quality.bleu for quality in qualities) / max(len(qualities), 1)


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """The dtype of matrix products; None keeps fp32.

    Raises:
        TrainingError: fp16 on a CPU, where its range is too small to train without hardware support.
    """
    if precision == "fp16" and device.type == "cpu":
        raise TrainingError("fp16 training needs a GPU; use --precision bf16 or fp32 on a CPU")
    return {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]


@contextmanager
def _stop_on_signal() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, so that a step in progress ends and is checkpointed."""
    received: list[int] = []
    previous = {number: signal.signal(number, lambda *args: received.append(args[0])) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
