"""Our engines on bare graphs, set up as the server sets them up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dragoman_bundle.architecture import Architecture
from dragoman_bundle.manifest import FileDigest, Limits, SpecialIds
from dragoman_server.engine.async_engine import AsyncEngine
from dragoman_server.engine.devices import open_model
from dragoman_server.engine.engine import Engine as StepEngine
from dragoman_server.engine.model_runner import OnnxModel, OnnxModelRunner
from dragoman_server.engine.request import BeamSearch, DecodingOptions, GreedySearch
from dragoman_server.engine.scheduler import SchedulerLimits
from dragoman_server.engine.waiting_line import WaitingLine
from tests.benchmarks.engines import Engine, Ids, Outputs
from tests.benchmarks.stored import settings


class Dragoman(Engine):
    """An engine with a loop of its own."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        engine.start()

    def decode(self, sources: Sequence[Ids], width: int, max_tokens: int) -> Outputs:
        search = BeamSearch(width=width) if width > 1 else GreedySearch()
        options = DecodingOptions(max_target_tokens=max_tokens, search=search)
        works = [(source, options) for source in sources]
        return [s.output_ids for s in self._loop.run_until_complete(self._engine.decode_all(works))]

    def first_token_s(self, source: Ids) -> float:
        """As a streaming caller sees it: there are more tokens to come."""
        begun = time.perf_counter()
        [first, *_] = self._loop.run_until_complete(self._stream(source, max_tokens=3))
        return first - begun

    def join(
        self, running: Sequence[Ids], max_tokens: int, newcomers: Sequence[Ids], newcomer_tokens: int, every_s: float
    ) -> dict[str, list[float]]:
        """Stream `running` side by side, and let newcomers join one by one while they run.

        Args:
            running: sources.
            max_tokens: of their outputs.
            newcomers: sources; empty lets nobody join.
            newcomer_tokens: of the newcomers' outputs.
            every_s: seconds between two newcomers.

        Returns:
            gaps_s: between two tokens of a running stream, all streams together, while all of them run.
            first_tokens_s: of the newcomers, each from its arrival until its first token.
        """
        return self._loop.run_until_complete(self._join(running, max_tokens, newcomers, newcomer_tokens, every_s))

    async def _join(
        self, running: Sequence[Ids], max_tokens: int, newcomers: Sequence[Ids], newcomer_tokens: int, every_s: float
    ) -> dict[str, list[float]]:
        streams = [asyncio.create_task(self._stream(source, max_tokens)) for source in running]
        visits: list[asyncio.Task[float]] = []
        for source in newcomers:
            await asyncio.sleep(every_s)
            if any(stream.done() for stream in streams):
                break
            visits.append(asyncio.create_task(self._visit(source, newcomer_tokens)))
        moments = await asyncio.gather(*streams)
        steady = max(times[0] for times in moments), min(times[-1] for times in moments)
        gaps = [b - a for times in moments for a, b in pairwise(times) if steady[0] <= a and b <= steady[1]]
        return {"gaps_s": gaps, "first_tokens_s": await asyncio.gather(*visits)}

    async def _visit(self, source: Ids, max_tokens: int) -> float:
        begun = time.perf_counter()
        [first, *_] = await self._stream(source, max_tokens)
        return first - begun

    async def _stream(self, source: Ids, max_tokens: int) -> list[float]:
        """When each event of a stream came."""
        options = DecodingOptions(max_target_tokens=max_tokens)
        return [time.perf_counter() async for _ in self._engine.stream(source, options)]


def open_graphs(directory: Path, precision: str, num_threads: int, num_solo_threads: int) -> OnnxModel:
    """What `tests.bare_model.write_graphs` wrote, opened by the server, without PyTorch in the process."""
    stored = settings(directory)
    path = directory / precision
    weights = "weights.bin"
    manifest = SimpleNamespace(
        architecture=Architecture(**stored["architecture"]),
        limits=Limits(max_source_tokens=stored["max_tokens"], max_target_tokens=stored["max_tokens"]),
        special_ids=SpecialIds(**stored["special_ids"]),
        alignment_layer=0,
        files={weights: FileDigest(size=(path / weights).stat().st_size, sha256="")},
    )
    bundle: Any = SimpleNamespace(manifest=manifest, path=path, file=lambda name: path / name)
    graphs = {name: f"{name}.onnx" for name in ("encoder", "decoder", "search")}
    cache_dtype = stored["cache_dtypes"][precision]
    variant: Any = SimpleNamespace(**graphs, device="cpu", weights=weights, cache_dtype=cache_dtype)
    model = open_model(bundle, variant, None, num_threads, num_solo_threads)
    assert isinstance(model, OnnxModel)
    return model


def open_engine(directory: Path, options: Mapping[str, Any]) -> Dragoman:
    """Options: precision, instances, threads, solo_threads, slots (of all instances), max_encode_tokens."""
    stored = settings(directory)
    model = open_graphs(directory, options["precision"], options["threads"], options["solo_threads"])
    slots = -(-options["slots"] // options["instances"])
    line = WaitingLine(100_000)
    limits = SchedulerLimits(max_rows=slots, max_encode_tokens=options["max_encode_tokens"])
    engines = [
        StepEngine(OnnxModelRunner(model, slots), limits, line, stored["special_ids"]["end"])
        for _ in range(options["instances"])
    ]
    return Dragoman(AsyncEngine(engines, line, "benchmark"))
