"""A served model: a bundle, its tokenizer and its engine; and the check that it answers as it should."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dragoman_bundle.bundle import Bundle
from dragoman_bundle.manifest import BundleError, DirectionSpec, Golden, Variant
from dragoman_server.engine.async_engine import AsyncEngine
from dragoman_server.engine.engine import Engine, EngineObserver
from dragoman_server.engine.model_runner import OnnxModelRunner
from dragoman_server.engine.request import DecodingOptions, Sequence, SequenceTimes
from dragoman_server.engine.scheduler import Scheduler, SchedulerLimits
from dragoman_server.tokenizer import SentencePieceTokenizer, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How much a model may take."""

    num_slots: int
    """Texts decoded side by side."""
    max_waiting: int
    """Texts that may wait for a slot."""
    max_encode_tokens: int
    """Padded source tokens encoded between two decode steps."""
    num_threads: int
    """Threads of a graph."""
    precision: str | None = None
    """Of the variant to serve; None takes the fastest."""


class ServedModel:
    """One version of one model, verified and ready.

    Args:
        version: name of the bundle's directory.
        bundle: verified.
        variant: of the bundle, the one to run.
        settings: of its engine.
        observer: of its engine.
    """

    def __init__(
        self, version: str, bundle: Bundle, variant: Variant, settings: EngineSettings, observer: EngineObserver | None
    ) -> None:
        manifest = bundle.manifest
        self.name = manifest.name
        self.version = version
        self.manifest = manifest
        self.variant = variant
        self.tokenizer: Tokenizer = SentencePieceTokenizer(bundle.file(manifest.tokenizer))
        self.runner = OnnxModelRunner(bundle, variant, settings.num_slots, settings.num_threads)
        limits = SchedulerLimits(
            max_rows=settings.num_slots,
            max_encode_tokens=settings.max_encode_tokens,
            max_waiting=settings.max_waiting,
        )
        ids = manifest.special_ids
        engine = Engine(self.runner, Scheduler(limits), ids.start, ids.end)
        self._check_goldens(engine, bundle.path)
        engine.observer = observer
        self.engine = AsyncEngine(engine, manifest.name)

    def direction(self, source: str, target: str) -> DirectionSpec | None:
        """How it translates a pair; None if it does not."""
        return next((d for d in self.manifest.directions if (d.source, d.target) == (source, target)), None)

    def source_ids(self, text: str, direction: DirectionSpec) -> list[int]:
        """Token ids of a text as the encoder wants them."""
        return direction.wrap_source(self.tokenizer.encode(text), self.manifest.special_ids.end)

    def default_max_target_tokens(self, num_source_tokens: int) -> int:
        """How long a translation may get if the caller does not say: it grows with the source."""
        length = self.manifest.generated_length
        return min(self.manifest.limits.max_target_tokens, int(length.factor * num_source_tokens) + length.extra)

    async def decode(self, source_ids: list[int], max_target_tokens: int, deadline: float | None) -> Sequence:
        """Decode one source; see `AsyncEngine.decode`."""
        return await self.engine.decode(source_ids, DecodingOptions(max_target_tokens=max_target_tokens), deadline)

    def _check_goldens(self, engine: Engine, path: Path) -> None:
        """Decode the golden requests side by side, in the engine that will serve; also its warm-up."""
        sequences = {i: self._golden_sequence(i, golden) for i, golden in enumerate(self.variant.goldens)}
        waiting = [*sequences.values()]
        while waiting or not engine.scheduler.is_idle:
            while waiting and engine.scheduler.num_waiting < engine.scheduler.limits.max_waiting:
                engine.add(waiting.pop(0))
            engine.step()
        if problems := list(self._golden_problems(sequences)):
            raise BundleError(path, problems)

    def _golden_sequence(self, index: int, golden: Golden) -> Sequence:
        direction = self.direction(golden.source, golden.target)
        assert direction is not None
        ids = self.source_ids(golden.text, direction)
        options = DecodingOptions(max_target_tokens=self.default_max_target_tokens(len(ids)))
        return Sequence(
            sequence_id=-index, source_ids=ids, options=options, times=SequenceTimes(arrived=time.monotonic())
        )

    def _golden_problems(self, sequences: dict[int, Sequence]) -> Iterator[str]:
        for index, golden in enumerate(self.variant.goldens):
            if tuple(sequences[index].output_ids) != golden.token_ids:
                found = self.tokenizer.decode(sequences[index].output_ids)
                yield f"golden request {golden.text!r} gives {found!r}, not {golden.translation!r}"
