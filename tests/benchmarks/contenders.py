"""Who takes part: each contender is a process of its own, so that libraries and their threads do not meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dragoman_server.settings import ServerSettings
from tests.benchmarks import CORES, ROOT
from tests.benchmarks.results import OURS
from tests.benchmarks.stored import CTRANSLATE2, CTRANSLATE2_INT8, OPTIMUM, OPTIMUM_INT8

Sources = Sequence[Sequence[int]]
_BULK = {"slots": 512, "max_encode_tokens": 4096}
"""For throughput: batches of 128 beams of 4 run side by side, as they do in the peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A library and how to use it."""

    name: str
    engine: str
    """Module of `tests.benchmarks.engines`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of its `open_engine`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process."""
    python: str = sys.executable


def ours(precision: str) -> Contender:
    """Our engines as the server configures them, with slots for the largest batch."""
    return _ours(precision, _BULK)


def ours_by_default(precision: str) -> Contender:
    """Our engines with all of the server's defaults."""
    defaults = ServerSettings.model_validate({}).engine_settings(1)
    return _ours(precision, {"slots": defaults.num_slots, "max_encode_tokens": defaults.max_encode_tokens})


def _ours(precision: str, limits: Mapping[str, int]) -> Contender:
    settings = ServerSettings.model_validate({}).engine_settings(1)
    options = {
        "precision": precision,
        "instances": settings.num_instances,
        "threads": settings.num_threads,
        "solo_threads": settings.num_solo_threads,
    }
    name = f"{OURS} {precision} {settings.num_instances}x{settings.num_threads}"
    return Contender(name=name, engine="dragoman", options={**options, **limits})


def served() -> Contender:
    """A bundle behind `dragoman-server`'s own loading."""
    return Contender(name=f"{OURS} server", engine="served")


def ct2(compute_type: str, inter_threads: int, label: str = "", **environment: str) -> Contender:
    """CTranslate2 with a compute type, so many workers that share the cores, and variables that change what it runs."""
    intra_threads = max(1, CORES // inter_threads)
    options = {
        "model": CTRANSLATE2_INT8 if compute_type.startswith("int8") else CTRANSLATE2,
        "compute_type": compute_type,
        "inter_threads": inter_threads,
        "intra_threads": intra_threads,
    }
    name = f"CTranslate2 {compute_type} {inter_threads}x{intra_threads} {label}".rstrip()
    return Contender(name=name, engine="ctranslate2", options=options, environment=environment)


def transformers(dtype: str) -> Contender:
    """transformers' generate in a floating-point type of PyTorch."""
    return Contender(name=f"transformers {dtype}", engine="transformers", options={"dtype": dtype})


def optimum(precision: str, python: str) -> Contender:
    """optimum's ONNX Runtime model, run by the interpreter that has it."""
    is_int8 = precision == "int8"
    options = {"model": OPTIMUM_INT8 if is_int8 else OPTIMUM, "merged": not is_int8}
    return Contender(name=f"optimum {precision}", engine="optimum", options=options, python=python)


class WorkerError(Exception):
    """A contender's process has ended; the message has the last it said."""


class Worker:
    """A contender's process.

    Args:
        contender: to start.
        directory: of its model.
    """

    def __init__(self, contender: Contender, directory: Path) -> None:
        self.name = contender.name
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process is
        job = {"engine": contender.engine, "directory": str(directory), "options": dict(contender.options)}
        self._process = subprocess.Popen(
            [contender.python, "-m", "tests.benchmarks.worker", json.dumps(job)],
            cwd=ROOT, env=os.environ | contender.environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        try:
            self.times: dict[str, float] = self._answer()
        except WorkerError:
            self.close()
            raise

    def ask(self, job: str, **arguments: Any) -> Any:
        """What a job of the worker's answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": job, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def decode(self, batches: Sequence[Sources], width: int, max_tokens: int) -> tuple[float, list[list[list[int]]]]:
        """Seconds for all batches, one after the other, and their outputs."""
        answer = self.ask("decode", batches=batches, width=width, max_tokens=max_tokens)
        return answer["seconds"], answer["outputs"]

    def first_tokens_s(self, sources: Sources) -> list[float]:
        """Seconds until each source's first token is known; one after the other."""
        seconds: list[float] = self.ask("first_tokens", sources=sources)
        return seconds

    def peak_mib(self) -> float:
        """Most memory that was ever resident."""
        mib: float = self.ask("peak_mib")
        return mib

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip()
            raise WorkerError(f"{self.name} has ended: {said[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()


@contextmanager
def workers(directory: Path, contenders: Sequence[Contender]) -> Iterator[list[Worker]]:
    """Contenders that are ready."""
    with ExitStack() as stack:
        opened = []
        for contender in contenders:
            opened.append(Worker(contender, directory))
            stack.callback(opened[-1].close)
        yield opened
