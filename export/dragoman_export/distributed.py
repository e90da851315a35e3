"""Data-parallel training under torchrun: who this process is, and the few collectives that training needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(hours=6)
"""The others wait while the main process trains a tokenizer and validates, however long that takes."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run; a run without torchrun is a single process of rank 0."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this process validates, logs and writes checkpoints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until every process is here."""
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def join_run(device: str) -> Iterator[Process]:
    """Join the process group that torchrun describes in the environment, if it does.

    Args:
        device: "auto" takes this process's GPU where there is one; otherwise a torch device.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device == "auto":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    process = Process(rank, world_size, torch.device(device))
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)
    if world_size > 1:
        backend = "nccl" if process.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_TIMEOUT)
    try:
        yield process
    finally:
        if world_size > 1:
            dist.destroy_process_group()
