"""The peer: CTranslate2 behind gRPC, with the dynamic batching that its users write around it.

`python -m tests.benchmarks.ct2_server --model DIRECTORY --bundle DIRECTORY` speaks dragoman.v1.TranslationService as
far as Translate with greedy search, so that `dragoman load` drives it like our own server. The model is what
`peers.to_ctranslate2` writes; tokenizer and language tags are the bundle's. A text is one sequence, never split.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ctranslate2
import grpc
import sentencepiece
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dragoman_bundle.bundle import Bundle, load_bundle
from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from tests.benchmarks.stored import token

Tokens = list[str]
TranslateBatch = Callable[[Sequence[Tokens]], list[Tokens]]

_SERVICE = pb.DESCRIPTOR.services_by_name["TranslationService"].full_name
_OPTIONS = [
    ("grpc.so_reuseport", 0),
    # gRPC refuses what Python has not accepted yet beyond 1,000 calls; the queue here has no bound.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
]


@dataclass(slots=True, eq=False)
class Job:
    """A text that waits for its translation."""

    source: Tokens
    arrived: float
    done: asyncio.Future[Tokens]
    started: float = 0.0


class DynamicBatcher:
    """Puts texts of many calls into batches.

    A batch starts when a worker is free and either `max_batch` texts wait or the oldest has waited for `max_wait_s`.
    What comes while all workers are busy makes the next batch larger.

    Args:
        translate_batch: runs on a thread; releases the GIL.
        max_batch: texts of a batch.
        max_wait_s: how long an incomplete batch waits for more, in seconds.
        num_workers: batches that run at once.
    """

    def __init__(self, translate_batch: TranslateBatch, *, max_batch: int, max_wait_s: float, num_workers: int) -> None:
        self._translate_batch = translate_batch
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._threads = ThreadPoolExecutor(num_workers)
        self._waiting: deque[Job] = deque()
        self._has_any = asyncio.Event()
        self._is_full = asyncio.Event()
        self._collecting = asyncio.Lock()
        self._workers = [asyncio.create_task(self._work()) for _ in range(num_workers)]

    async def translate(self, sources: Sequence[Tokens]) -> list[Job]:
        """Translate texts, together with whatever else waits; jobs in their order, done."""
        loop = asyncio.get_running_loop()
        jobs = [Job(source, time.monotonic(), loop.create_future()) for source in sources]
        self._waiting += jobs
        self._announce()
        await asyncio.gather(*(job.done for job in jobs))
        return jobs

    def _announce(self) -> None:
        for event, is_so in (
            (self._has_any, bool(self._waiting)),
            (self._is_full, len(self._waiting) >= self._max_batch),
        ):
            if is_so:
                event.set()
            else:
                event.clear()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            jobs = await self._collect()
            results: Sequence[Tokens | Exception]
            try:
                results = await loop.run_in_executor(self._threads, self._translate_batch, [j.source for j in jobs])
            except Exception as error:  # noqa: BLE001 - whatever it is, the callers shall know
                results = [error] * len(jobs)
            for job, result in zip(jobs, results, strict=True):
                _settle(job, result)

    async def _collect(self) -> list[Job]:
        """The next batch, without those whose callers have gone, longest first."""
        async with self._collecting:
            jobs: list[Job] = []
            while not jobs:
                await self._has_any.wait()
                left_s = self._waiting[0].arrived + self._max_wait_s - time.monotonic()
                if left_s > 0 and len(self._waiting) < self._max_batch:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._is_full.wait(), left_s)
                taken = [self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))]
                self._announce()
                jobs = [job for job in taken if not job.done.done()]
        now = time.monotonic()
        for job in jobs:
            job.started = now
        return sorted(jobs, key=lambda job: len(job.source), reverse=True)


def _settle(job: Job, result: Tokens | Exception) -> None:
    """Give a caller, if still there, its result."""
    if job.done.done():
        return
    if isinstance(result, Exception):
        job.done.set_exception(result)
    else:
        job.done.set_result(result)


class Model:
    """A translator, its tokenizer, and what the bundle says of both.

    Args:
        translator: of a model that `peers.to_ctranslate2` wrote.
        bundle: that the model came from.
    """

    def __init__(self, translator: ctranslate2.Translator, bundle: Bundle) -> None:
        self.manifest = bundle.manifest
        self._translator = translator
        self._tokenizer: Any = sentencepiece.SentencePieceProcessor(
            model_file=str(bundle.file(self.manifest.tokenizer))
        )
        self._tokens = [token(index) for index in range(self.manifest.architecture.vocab_size)]
        self._ids = {name: index for index, name in enumerate(self._tokens)}

    def encode(self, text: str, source: str, target: str) -> Tokens:
        """A text as the translator wants it."""
        [direction] = (d for d in self.manifest.directions if (d.source, d.target) == (source, target))
        ids = direction.wrap_source(self._tokenizer.encode(text.strip()), self.manifest.special_ids.end)
        return [self._tokens[index] for index in ids]

    def decode(self, tokens: Tokens) -> str:
        """The text of a translation."""
        text: str = self._tokenizer.decode([self._ids[name] for name in tokens])
        return text

    def translate_batch(self, sources: Sequence[Tokens]) -> list[Tokens]:
        """Greedy search; no longer than our server lets the longest of them get."""
        length = self.manifest.generated_length
        limit = int(length.factor * max(map(len, sources))) + length.extra
        results = self._translator.translate_batch(
            sources, beam_size=1, max_decoding_length=min(limit, self.manifest.limits.max_target_tokens)
        )
        return [result.hypotheses[0] for result in results]


class Service(pb_grpc.TranslationServiceServicer):
    """Translate, greedily, whatever the priority."""

    def __init__(self, model: Model, batcher: DynamicBatcher) -> None:
        self._model = model
        self._batcher = batcher

    async def Translate(  # noqa: N802 - the name is the RPC's
        self, request: pb.TranslateRequest, context: grpc.aio.ServicerContext[pb.TranslateRequest, pb.TranslateResponse]
    ) -> pb.TranslateResponse:
        arrived = time.monotonic()
        pair = request.source_language, request.target_language
        if pair not in [(d.source, d.target) for d in self._model.manifest.directions]:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model translates {pair[0]}→{pair[1]}")
        if request.options.WhichOneof("search"):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "only greedy search")
        jobs = await self._batcher.translate([self._model.encode(text, *pair) for text in request.texts])
        return pb.TranslateResponse(
            translations=[self._translation(job) for job in jobs],
            model=self._model.manifest.name,
            timings=pb.Timings(
                queue_seconds=max(job.started - job.arrived for job in jobs),
                total_seconds=time.monotonic() - arrived,
            ),
        )

    def _translation(self, job: Job) -> pb.Translation:
        target = job.done.result()
        return pb.Translation(
            text=self._model.decode(target),
            finish_reason=pb.FINISH_REASON_EOS,
            source_tokens=len(job.source),
            target_tokens=len(target),
        )


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    translator = ctranslate2.Translator(
        str(arguments.model),
        compute_type=arguments.compute_type,
        inter_threads=arguments.inter_threads,
        intra_threads=arguments.intra_threads,
    )
    model = Model(translator, load_bundle(arguments.bundle))
    batcher = DynamicBatcher(
        model.translate_batch,
        max_batch=arguments.max_batch,
        max_wait_s=arguments.max_wait_ms / 1000,
        num_workers=arguments.inter_threads,
    )
    server = grpc.aio.server(options=_OPTIONS)
    pb_grpc.add_TranslationServiceServicer_to_server(Service(model, batcher), server)
    healthy = health.aio.HealthServicer()
    await healthy.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    port = server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    await server.start()
    print(f"serving on 127.0.0.1:{port}", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(1.0)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ct2_server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory that peers.to_ctranslate2 wrote")
    parser.add_argument("--bundle", type=Path, required=True, help="that the model came from")
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--compute-type", default="int8")
    parser.add_argument("--inter-threads", type=int, default=2, help="batches at once")
    parser.add_argument("--intra-threads", type=int, default=1, help="threads of each")
    parser.add_argument("--max-batch", type=int, default=32, help="texts")
    parser.add_argument("--max-wait-ms", type=float, default=5.0, help="of an incomplete batch")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(serve(parse()))
