"""What a run shows while it trains: a progress bar or log lines, and TensorBoard scalars."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from dragoman_export.evaluation import Quality

_WINDOW = 100
"""Steps over which loss and speed are averaged."""


class TrainingLog:
    """A progress bar on a terminal, log lines elsewhere; `validations.jsonl` and TensorBoard files."""

    def __init__(self, directory: Path, enabled: bool) -> None:
        self._directory = directory
        self._enabled = enabled
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("step {task.fields[step]:,}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console, disable=not (enabled and self._console.is_terminal),
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=1.0, step=0)
        self._writer = SummaryWriter(str(directory / "tensorboard")) if enabled else None
        self._window_start = time.monotonic()
        self._window: list[tuple[float, float, int]] = []

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._writer:
            self._writer.close()

    def step(
        self, step: int, share_done: float, means: tuple[float, float], num_tokens: int, gradient_norm: torch.Tensor
    ) -> None:
        """Record one optimiser step.

        Args:
            step: counted from 1.
            share_done: of the run, 0 to 1.
            means: loss with label smoothing and without, nats per target token.
            num_tokens: target tokens of the step, over all processes.
            gradient_norm: before clipping.
        """
        if self._writer is None:
            return
        self._window.append((*means, num_tokens))
        self._bar.update(self._task, completed=share_done, step=step)
        if step % _WINDOW == 0:
            self._flush(step, float(gradient_norm))

    def _flush(self, step: int, gradient_norm: float) -> None:
        assert self._writer is not None
        tokens = sum(count for _, _, count in self._window)
        loss, nll = (sum(row[i] * row[2] for row in self._window) / tokens for i in (0, 1))
        now = time.monotonic()
        speed = tokens / (now - self._window_start)
        for name, scalar in {
            "loss": loss,
            "nll": nll,
            "tokens_per_s": speed,
            "gradient_norm": gradient_norm,
        }.items():
            self._writer.add_scalar(f"train/{name}", scalar, step)
        line = f"loss {loss:.3f}, nll {nll:.3f}, {speed:,.0f} target tokens/s"
        self._bar.update(self._task, description=line)
        if self._bar.disable:
            self._console.print(f"step {step}: {line}")
        self._window, self._window_start = [], now

    def validation(self, step: int, qualities: Sequence[Quality]) -> None:
        """Record the scores of a validation."""
        assert self._writer is not None
        for quality in qualities:
            self._writer.add_scalar(f"{quality.test_set}/{quality.direction}/bleu", quality.bleu, step)
            self._writer.add_scalar(f"{quality.test_set}/{quality.direction}/chrf", quality.chrf, step)
            self._bar.console.print(f"step {step}: {quality}")
        with (self._directory / "validations.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "scores": [quality.to_dict() for quality in qualities]}) + "\n")
        self._window, self._window_start = [], time.monotonic()
