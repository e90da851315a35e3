"""optimum's ONNX Runtime models; runs with the interpreter of `environments.optimum_python`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
from optimum.onnxruntime import ORTModelForSeq2SeqLM  # type: ignore[import-not-found]

from tests.benchmarks import CORES
from tests.benchmarks.engines.transformers import Generator
from tests.benchmarks.stored import settings


def open_engine(directory: Path, options: Mapping[str, Any]) -> Generator:
    """Options: model (a directory inside), merged (whether one decoder graph serves the first and the later steps)."""
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = CORES
    model = ORTModelForSeq2SeqLM.from_pretrained(
        directory / options["model"], session_options=session_options, use_merged=options["merged"]
    )
    special = settings(directory)["special_ids"]
    return Generator(model, special["padding"], special["end"])
