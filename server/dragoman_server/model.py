"""A served model: a bundle, its tokenizer and its engine; and the check that it answers as it should."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dragoman_bundle.bundle import Bundle
from dragoman_bundle.manifest import BundleError, DirectionSpec, Golden, Variant
from dragoman_server.engine.async_engine import AsyncEngine
from dragoman_server.engine.engine import Engine, EngineObserver
from dragoman_server.engine.model_runner import OnnxModel, OnnxModelRunner
from dragoman_server.engine.pace import Pace
from dragoman_server.engine.request import DecodingOptions, Sequence, SequenceTimes
from dragoman_server.engine.scheduler import SchedulerLimits
from dragoman_server.engine.waiting_line import WaitingLine
from dragoman_server.tokenizer import SentencePieceTokenizer, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How much a model may take."""

    num_slots: int
    """Rows decoded side by side, all instances together."""
    max_waiting: int
    """Texts that may wait for a slot."""
    max_encode_tokens: int
    """Padded source tokens encoded between two decode steps."""
    max_bulk_rows: int
    """Rows of bulk work that may go along while interactive work runs."""
    num_instances: int
    """Engines, each on a thread of its own."""
    num_threads: int
    """Threads of a graph, per instance."""
    max_hypotheses: int
    """Widest beam, most alternatives, most samples of one text."""
    precision: str | None = None
    """Of the variant to serve; None takes the fastest."""

    @property
    def slots_per_instance(self) -> int:
        """Rows of one engine; the widest request must fit into them."""
        return -(-self.num_slots // self.num_instances)


Observe = Callable[[str, int], EngineObserver | None]
"""Gives the observer for a model's name and the number of an instance."""


class ServedModel:
    """One version of one model, verified and ready.

    Args:
        version: name of the bundle's directory.
        bundle: verified.
        variant: of the bundle, the one to run.
        settings: of its engines.
        observe: gives the observer for each instance.
    """

    def __init__(
        self, version: str, bundle: Bundle, variant: Variant, settings: EngineSettings, observe: Observe
    ) -> None:
        manifest = bundle.manifest
        self.name = manifest.name
        self.version = version
        self.manifest = manifest
        self.variant = variant
        self.settings = settings
        self.max_hypotheses = min(settings.max_hypotheses, settings.slots_per_instance)
        self.pace = Pace()
        self.tokenizer: Tokenizer = SentencePieceTokenizer(bundle.file(manifest.tokenizer))
        model = OnnxModel(bundle, variant, settings.num_threads)
        runners = [OnnxModelRunner(model, settings.slots_per_instance) for _ in range(settings.num_instances)]
        self.cache_bytes = sum(runner.cache.num_bytes for runner in runners)
        limits = SchedulerLimits(
            max_rows=settings.slots_per_instance,
            max_encode_tokens=settings.max_encode_tokens,
            max_bulk_rows=settings.max_bulk_rows,
        )
        end_id = manifest.special_ids.end
        for runner in runners:
            self._check_goldens(Engine(runner, limits, WaitingLine(len(variant.goldens)), end_id), bundle.path)
        line = WaitingLine(settings.max_waiting)
        engines = [
            Engine(runner, limits, line, end_id, self.pace, observe(self.name, instance))
            for instance, runner in enumerate(runners)
        ]
        self.engine = AsyncEngine(engines, line, manifest.name)

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

    def _check_goldens(self, engine: Engine, path: Path) -> None:
        """Decode the golden requests side by side, with the graphs and caches that will serve; also their warm-up."""
        sequences = {i: self._golden_sequence(i, golden) for i, golden in enumerate(self.variant.goldens)}
        for sequence in sequences.values():
            engine.scheduler.line.add(sequence)
        while engine.has_work:
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
