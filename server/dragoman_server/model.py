"""A served model: a bundle, its tokenizer and its engine; and the check that it answers as it should."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from dragoman_bundle.bundle import Bundle, load_bundle
from dragoman_bundle.manifest import BundleError, DirectionSpec, Golden, Variant
from dragoman_server.engine.async_engine import AsyncEngine
from dragoman_server.engine.devices import WantedDevice, choose_variant, new_runners, open_model
from dragoman_server.engine.engine import Engine, EngineObserver
from dragoman_server.engine.kv_cache import KVCache
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
    memory_bytes: int
    """For the caches of all instances: as many of those rows as fit; 0 is no limit."""
    max_waiting: int
    """Texts of each priority that may wait for a slot."""
    max_waiting_tokens: int
    """Source tokens of each priority that may wait, each row of a search counted."""
    max_encode_tokens: int
    """Padded source tokens encoded between two decode steps."""
    max_encode_s: float
    """Seconds that encoding may take between two decode steps; 0 is no limit."""
    max_bulk_rows: int
    """Rows of bulk work that may go along while interactive work runs."""
    num_instances: int
    """Engines, each on a thread of its own."""
    num_threads: int
    """Threads of a graph, per instance."""
    num_solo_threads: int
    """Likewise, of a large model's, while the other instances have no work."""
    max_hypotheses: int
    """Widest beam, most alternatives, most samples of one text."""
    device: WantedDevice = "auto"
    """Where it runs; auto prefers CUDA."""
    precision: str | None = None
    """Of the variant to serve; None takes the fastest."""

    @property
    def slots_per_instance(self) -> int:
        """Rows of one engine; the widest request must fit into them."""
        return -(-self.num_slots // self.num_instances)

    def within_memory(self, slot_bytes: int) -> EngineSettings:
        """The same with as many slots as there is memory for.

        Args:
            slot_bytes: of the caches of one row.

        Raises:
            ValueError: there is too little for any.
        """
        if not self.memory_bytes:
            return self
        fitting = self.memory_bytes // slot_bytes // self.num_instances * self.num_instances
        if not fitting:
            needed = -(-slot_bytes * self.num_instances // 2**20)
            raise ValueError(
                f"a slot for each of {self.num_instances} instances takes {needed} MiB; raise --memory-mib"
            )
        return dataclasses.replace(self, num_slots=min(self.num_slots, fitting))


Observe = Callable[[str, str, int], EngineObserver | None]
"""Gives the observer for a model's name and version and the number of an instance."""


def load_model(path: Path, settings: EngineSettings, observe: Observe) -> ServedModel:
    """Load a bundle and check that it answers as it should.

    Args:
        path: `<name>/<version>` in a repository.
        settings: of its engines.
        observe: gives the observers of its engines.

    Raises:
        BundleError: it is refused.
    """
    bundle = load_bundle(path)
    if bundle.manifest.name != path.parent.name:
        raise BundleError(path, [f"it is called {bundle.manifest.name!r}; its directory must have the same name"])
    variant = choose_variant(bundle, settings.precision, settings.device)
    return ServedModel(path.name, bundle, variant, settings, observe)


def _within_memory(settings: EngineSettings, bundle: Bundle, variant: Variant) -> EngineSettings:
    manifest = bundle.manifest
    limits = manifest.limits
    slot_bytes = KVCache.slot_bytes(
        manifest.architecture, variant.cache_dtype, limits.max_target_tokens, limits.max_source_tokens
    )
    try:
        return settings.within_memory(slot_bytes)
    except ValueError as error:
        raise BundleError(bundle.path, [str(error)]) from error


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
        model = open_model(bundle, variant, settings.precision, settings.num_threads, settings.num_solo_threads)
        self.variant = variant = model.variant
        if variant.device == "cuda":  # a second instance would wait for the first one's kernels
            settings = dataclasses.replace(settings, num_instances=1)
        self.settings = settings = _within_memory(settings, bundle, variant)
        self.max_hypotheses = min(settings.max_hypotheses, settings.slots_per_instance)
        self.pace = Pace()
        try:
            self.tokenizer: Tokenizer = SentencePieceTokenizer(bundle.file(manifest.tokenizer))
        except ValueError as error:
            raise BundleError(bundle.path, [str(error)]) from error
        runners = new_runners(model, settings.slots_per_instance, settings.num_instances)
        self.num_slots = settings.slots_per_instance * settings.num_instances
        self.cache_bytes = sum(runner.cache.num_bytes for runner in runners)
        limits = SchedulerLimits(
            max_rows=settings.slots_per_instance,
            max_encode_tokens=settings.max_encode_tokens,
            max_encode_s=settings.max_encode_s,
            max_bulk_rows=settings.max_bulk_rows,
        )
        end_id = manifest.special_ids.end
        for runner in runners:
            for rows_elsewhere in (0, 1) if model.has_solo else (1,):
                line = WaitingLine(len(variant.goldens))
                line.loads.append(partial(int, rows_elsewhere))
                self._check_goldens(Engine(runner, limits, line, end_id), bundle.path)
        line = WaitingLine(settings.max_waiting, settings.max_waiting_tokens)
        engines = [
            Engine(runner, limits, line, end_id, self.pace, observe(self.name, version, instance))
            for instance, runner in enumerate(runners)
        ]
        self.engine = AsyncEngine(engines, line, manifest.name)
        self._num_users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def __enter__(self) -> Self:
        """Begin a call that the model works on; only on the event loop."""
        self._num_users += 1
        self._unused.clear()
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._num_users -= 1
        if not self._num_users:
            self._unused.set()

    async def wait_until_unused(self) -> None:
        """Return once no call is being worked on."""
        await self._unused.wait()

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
