"""What this machine can do: `python -m tests.benchmarks.machine` measures it and prints JSON.

In a process of its own, so that no library's threads are at work beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from tests.benchmarks import CORES, ROOT
from tests.benchmarks.roofline import Machine

_SIZES = tuple(mib * 2**20 for mib in (4, 16, 32, 64, 128, 256, 1024))
"""Bytes read again and again: small ones stay in a cache, as the weights of a small model do."""
_SECONDS = 0.25
"""That one measurement takes; the best of several counts, since it is to be a bound."""
_TRIES = 3
_MATRIX_ROWS = (64, 256)
_MATRIX_WIDTH = 2048

Call = Callable[[], object]


def measured() -> Machine:
    """Measure in a fresh process in which BLAS has one thread."""
    output = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.machine"],
        cwd=ROOT, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    fields = json.loads(output)
    reads = {who: {int(n): rate for n, rate in rates.items()} for who, rates in fields["read_bytes_per_s"].items()}
    return Machine(**fields | {"read_bytes_per_s": reads})


def together(calls: Sequence[Call], seconds: float = _SECONDS) -> float:
    """Calls per second, each made again and again by a thread of its own."""
    counts = [0.0] * len(calls)
    start = threading.Barrier(len(calls))

    def repeat(index: int) -> None:
        start.wait()
        begun = time.perf_counter()
        done = 0
        while time.perf_counter() < begun + seconds:
            calls[index]()
            done += 1
        counts[index] = done / (time.perf_counter() - begun)

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def _best(calls: Sequence[Call]) -> float:
    for call in calls:
        call()
    return max(together(calls) for _ in range(_TRIES))


def _read_rate(size: int, cores: int) -> float:
    """Bytes per second when every core reads its part of `size` bytes; a dot product reads each once."""
    parts = [np.ones(size // cores // 4, np.float32) for _ in range(cores)]
    return _best([lambda part=part: part.dot(part) for part in parts]) * parts[0].nbytes  # type: ignore[misc]


def _copy_rate(size: int, cores: int) -> float:
    parts = [np.ones(size // cores // 8, np.float32) for _ in range(cores)]
    copies = [np.empty_like(part) for part in parts]
    calls: list[Call] = [
        lambda part=part, copy=copy: np.copyto(copy, part)  # type: ignore[misc]
        for part, copy in zip(parts, copies, strict=True)
    ]
    return _best(calls) * parts[0].nbytes * 2


def _product(precision: str) -> bytes:
    """A graph that multiplies with a constant square matrix, as our linear layers do."""
    shape = (_MATRIX_WIDTH, _MATRIX_WIDTH)
    rng = np.random.default_rng(0)
    if precision == "int8":
        weight: npt.NDArray[Any] = rng.integers(-127, 128, shape).astype(np.int8)
        kinds, operator = (TensorProto.UINT8, TensorProto.INT32), "MatMulInteger"
    else:
        weight = rng.standard_normal(shape).astype(np.float32)
        kinds, operator = (TensorProto.FLOAT, TensorProto.FLOAT), "MatMul"
    x, y = (
        helper.make_tensor_value_info(name, kind, [None, _MATRIX_WIDTH]) for name, kind in zip("xy", kinds, strict=True)
    )
    node = helper.make_node(operator, ["x", "w"], ["y"])
    graph = helper.make_graph([node], "product", [x], [y], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    serialised: bytes = model.SerializeToString()
    return serialised


def _product_rate(precision: str, rows: int, cores: int) -> float:
    """Multiplications per second; every core has a session of its own, since threads of one wait for each other."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    graph = _product(precision)
    x = np.ones((rows, _MATRIX_WIDTH), np.uint8 if precision == "int8" else np.float32)
    sessions = [onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"]) for _ in range(cores)]
    calls: list[Call] = [lambda session=session: session.run(None, {"x": x}) for session in sessions]  # type: ignore[misc]
    return _best(calls) * rows * _MATRIX_WIDTH**2


def _measure() -> Machine:
    cores = {"one core": 1, "all cores": CORES}
    return Machine(
        cores=CORES,
        read_bytes_per_s={who: {size: _read_rate(size, count) for size in _SIZES} for who, count in cores.items()},
        copy_bytes_per_s={who: _copy_rate(_SIZES[-1], count) for who, count in cores.items()},
        products_per_s={
            who: {
                f"{precision} x {rows} rows": _product_rate(precision, rows, count)
                for precision in ("int8", "fp32")
                for rows in _MATRIX_ROWS
            }
            for who, count in cores.items()
        },
    )


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_measure())))
