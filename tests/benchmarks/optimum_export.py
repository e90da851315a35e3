"""Writes a stored model as optimum exports it: `python -m tests.benchmarks.optimum_export DIRECTORY`.

Runs with the interpreter of `environments.optimum_python`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from optimum.exporters.onnx import onnx_export_from_model  # type: ignore[import-not-found]
from optimum.onnxruntime import AutoQuantizationConfig, ORTQuantizer  # type: ignore[import-not-found]

from tests.benchmarks.engines.transformers import witness
from tests.benchmarks.stored import OPTIMUM, OPTIMUM_INT8


def main() -> None:
    """Export in fp32, and quantise to int8 as optimum recommends for this kind of CPU."""
    directory = Path(sys.argv[1])
    exported, quantised = directory / OPTIMUM, directory / OPTIMUM_INT8
    onnx_export_from_model(witness(directory), exported, task="text2text-generation-with-past", do_validation=False)
    config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
    # Not the merged decoder: what it holds is inside the branches of an If, which the quantiser does not enter.
    for name in ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"):
        ORTQuantizer.from_pretrained(exported, file_name=name).quantize(config, save_dir=quantised, file_suffix="")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(exported / name, quantised)


if __name__ == "__main__":
    main()
