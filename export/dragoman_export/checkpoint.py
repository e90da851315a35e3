"""Checkpoints that survive a kill at any moment: written aside, then renamed into place."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dragoman_bundle.architecture import Architecture
from dragoman_export.errors import CheckpointError
from dragoman_export.model import Transformer

WEIGHTS, TRAINING_STATE, ARCHITECTURE = "model.safetensors", "training_state.pt", "architecture.json"


def save_checkpoint(path: Path, model: Transformer, training_state: dict[str, Any] | None) -> None:
    """Write a checkpoint directory; readers see all of it or nothing.

    Args:
        path: the directory; replaced if it exists.
        model: whose weights to write.
        training_state: what is needed to resume exactly (tensors and plain values); None writes weights only.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    (aside / ARCHITECTURE).write_text(json.dumps(model.arch.to_dict(), indent=2) + "\n", encoding="utf-8")
    save_file(_own_tensors(model), aside / WEIGHTS)
    if training_state is not None:
        torch.save(training_state, aside / TRAINING_STATE)
    for file in (*aside.iterdir(), aside):
        _sync(file)
    if path.exists():
        # Out of the way in one move: half a checkpoint must never stand under its name.
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        path.rename(old)
        aside.rename(path)
        shutil.rmtree(old)
    else:
        aside.rename(path)
    _sync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file; readers see the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    aside.write_text(text, encoding="utf-8")
    _sync(aside)
    aside.rename(path)


def remove_leftovers(directory: Path) -> None:
    """Delete what a killed process was writing."""
    for path in [*directory.glob(".*.partial"), *directory.glob(".*.old")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _own_tensors(model: Transformer) -> dict[str, Tensor]:
    # A tied weight appears in the state under several names; safetensors wants each tensor once.
    return {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_weights(path: Path) -> tuple[Architecture, dict[str, Tensor]]:
    """Architecture and weights of a checkpoint directory.

    Raises:
        CheckpointError: a file is missing or unreadable.
    """
    try:
        fields = json.loads((path / ARCHITECTURE).read_text(encoding="utf-8"))
        return Architecture.from_dict(fields), load_file(path / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error}") from error


def load_model(path: Path, dropout: float = 0.0, max_positions: int = 1024) -> Transformer:
    """A model with the weights of a checkpoint, in evaluation mode.

    Raises:
        CheckpointError: the checkpoint is unreadable, or its weights are not those of its architecture.
    """
    arch, weights = load_weights(path)
    model = Transformer(arch, dropout, max_positions)
    assign_weights(model, weights, path)
    return model.eval()


def assign_weights(model: Transformer, weights: dict[str, Tensor], origin: Path) -> None:
    """Copy weights into a model.

    Raises:
        CheckpointError: names or shapes differ; the message lists every one.
    """
    own = dict(model.named_parameters())
    problems = [f"missing: {name}" for name in sorted(own.keys() - weights.keys())]
    problems += [f"unexpected: {name}" for name in sorted(weights.keys() - own.keys())]
    problems += [
        f"{name} has shape {list(weights[name].shape)}, the model wants {list(own[name].shape)}"
        for name in sorted(own.keys() & weights.keys())
        if weights[name].shape != own[name].shape
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {origin} do not fit the model:\n" + "\n".join(f"- {p}" for p in problems)
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def load_training_state(path: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given as `training_state`; nothing in the file is executed."""
    try:
        state: dict[str, Any] = torch.load(path / TRAINING_STATE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be resumed from: {error}") from error
    return state


def step_directories(directory: Path) -> list[Path]:
    """Complete checkpoints `step-N` in a directory, oldest first."""
    return sorted(path for path in directory.glob("step-*") if (path / WEIGHTS).is_file())


def average_weights(paths: Sequence[Path]) -> tuple[Architecture, dict[str, Tensor]]:
    """The mean of several checkpoints of one run (section 6.1 of the paper averages the last 5 or 20)."""
    arch, total = load_weights(paths[0])
    for path in paths[1:]:
        other_arch, weights = load_weights(path)
        if other_arch != arch:
            raise CheckpointError(f"{path} has another architecture than {paths[0]}")
        for name, tensor in weights.items():
            total[name] += tensor
    return arch, {name: tensor / len(paths) for name, tensor in total.items()}
