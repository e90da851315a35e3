"""One contender in a process of its own: `python -m tests.benchmarks.worker CONTENDER DIRECTORY`, a job a line.

A job is JSON: {"sources": [[ids]], "width": 1, "max_tokens": 25}. The answer is JSON as well: seconds, tokens of the
best outputs, and the process's peak resident memory in MiB. "load_s" comes first, when the contender is ready.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Outputs = list[list[int]]
Contender = Callable[[Job], Outputs]

CORES = len(os.sched_getaffinity(0))


def dragoman(directory: Path, precision: str, num_instances: int, num_threads: int) -> Contender:
    """Our engines as the server sets them up."""
    from dragoman_bundle.architecture import Architecture
    from dragoman_server.engine.async_engine import AsyncEngine
    from dragoman_server.engine.engine import Engine
    from dragoman_server.engine.model_runner import OnnxModelRunner
    from dragoman_server.engine.request import BeamSearch, DecodingOptions, GreedySearch, Search
    from dragoman_server.engine.scheduler import SchedulerLimits, WaitingLine
    from tests.bare_model import open_graphs

    settings = json.loads((directory / "settings.json").read_text())
    arch = Architecture(**settings["architecture"])
    model = open_graphs(directory / precision, arch, settings["max_tokens"], num_threads)
    slots = settings["max_rows"] // num_instances
    line = WaitingLine(100_000)
    limits = SchedulerLimits(max_rows=slots, max_encode_tokens=4096)
    engines = [Engine(OnnxModelRunner(model, slots), limits, line, 3) for _ in range(num_instances)]
    engine = AsyncEngine(engines, line, "benchmark")
    engine.start()

    async def decode(job: Job) -> Outputs:
        width = job["width"]
        search: Search = BeamSearch(width=width) if width > 1 else GreedySearch()
        options = DecodingOptions(max_target_tokens=job["max_tokens"], search=search)
        done = await engine.decode_all([(source, options) for source in job["sources"]])
        return [sequence.output_ids for sequence in done]

    loop = asyncio.new_event_loop()
    return lambda job: loop.run_until_complete(decode(job))


def ctranslate2(directory: Path, compute_type: str, inter_threads: int) -> Contender:
    """CTranslate2, with its batch spread over `inter_threads` workers that share the cores."""
    import ctranslate2 as ct2

    from tests.benchmarks.peers import token

    translator = ct2.Translator(
        str(directory / "ctranslate2"),
        compute_type=compute_type,
        inter_threads=inter_threads,
        intra_threads=max(1, CORES // inter_threads),
    )

    def decode(job: Job) -> Outputs:
        sources = [[token(i) for i in source] for source in job["sources"]]
        results = translator.translate_batch(
            sources,
            beam_size=job["width"],
            max_decoding_length=job["max_tokens"],
            max_batch_size=-(-len(sources) // inter_threads),
        )
        return [[int(t[1:]) if t[0] == "t" else 1 for t in result.hypotheses[0]] for result in results]

    return decode


def transformers(directory: Path, dtype: str) -> Contender:
    """transformers' generate on PyTorch."""
    import torch

    from dragoman_bundle.architecture import Architecture
    from dragoman_export.model import Transformer
    from tests.witnesses import to_transformers

    torch.set_num_threads(CORES)
    settings = json.loads((directory / "settings.json").read_text())
    model = Transformer(Architecture(**settings["architecture"]))
    model.load_state_dict(torch.load(directory / "weights.pt"))
    witness = to_transformers(model, settings["max_tokens"]).to(getattr(torch, dtype))

    def decode(job: Job) -> Outputs:
        ids = [torch.tensor(source) for source in job["sources"]]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        options: dict[str, Any] = {"num_beams": job["width"], "max_new_tokens": job["max_tokens"]}
        if job["width"] > 1:
            options["early_stopping"] = True
        with torch.inference_mode():
            outputs = witness.generate(input_ids=padded, attention_mask=(padded != 0).long(), **options)
        return [[t for t in row[1:] if t not in (0, 3)] for row in outputs.tolist()]

    return decode


def open_contender(name: str, directory: Path) -> Contender:
    """By name, such as dragoman:int8:2x1, ctranslate2:int8:1 or transformers:bfloat16."""
    kind, *options = name.split(":")
    if kind == "dragoman":
        instances, threads = map(int, options[1].split("x"))
        return dragoman(directory, options[0], instances, threads)
    if kind == "ctranslate2":
        return ctranslate2(directory, options[0], int(options[1]))
    return transformers(directory, options[0])


def _peak_mib() -> float:
    """Most memory that was ever resident. Not ru_maxrss, which a process inherits from the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def main() -> None:
    """Serve jobs until stdin ends."""
    begun = time.perf_counter()
    contender = open_contender(sys.argv[1], Path(sys.argv[2]))
    contender({"sources": [[5, 3]], "width": 1, "max_tokens": 1})
    print(json.dumps({"load_s": time.perf_counter() - begun}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        begun = time.perf_counter()
        outputs = contender(job)
        seconds = time.perf_counter() - begun
        peak = _peak_mib()
        print(json.dumps({"seconds": seconds, "outputs": outputs, "peak_mib": peak}), flush=True)


if __name__ == "__main__":
    main()
