"""CTranslate2 in every way that this machine allows; the best few go on to the benchmarks."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import ctranslate2

from tests.benchmarks import CORES
from tests.benchmarks.contenders import Contender, Worker, WorkerError, ct2
from tests.benchmarks.models import Model
from tests.benchmarks.stored import CTRANSLATE2

_ISAS = ("GENERIC", "AVX", "AVX2", "AVX512") if platform.machine() == "x86_64" else ()
"""Values of CT2_FORCE_CPU_ISA. Left alone, it is AVX2 at most, so that AVX512 has to be asked for."""
_VARIATIONS: Mapping[str, Mapping[str, str]] = {
    "oneDNN": {"CT2_USE_MKL": "0"},
    "unpacked": {"CT2_PACKED_GEMM": "0"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "active": {"OMP_WAIT_POLICY": "active"},
    "bound": {"OMP_PROC_BIND": "true"},
}
"""Tried on the best ones only."""
_ALONE, _TOGETHER = 1, 32
"""Batch sizes that stand for small and for large ones."""
_FINALISTS = 2
_TRIES = 2

Rates = Mapping[str, list[float]]


class Finalists(NamedTuple):
    """The best ways to run CTranslate2."""

    alone: list[Contender]
    """At batch 1, best first."""
    together: list[Contender]
    """At larger batches, best first."""

    def at(self, batch: int) -> list[Contender]:
        """Those for a batch size."""
        return self.alone if batch == _ALONE else self.together

    @property
    def all(self) -> list[Contender]:
        """All of them, each once."""
        return list({contender.name: contender for contender in (*self.alone, *self.together)}.values())


def qualify(model: Model) -> tuple[dict[str, Finalists], dict[str, list[float]]]:
    """Finalists for int8, which is any reduced precision, and fp32; and what everybody reached, in tokens/s."""
    types = _compute_types(model)
    groups = {"int8": [kind for kind in types if kind != "float32"], "fp32": ["float32"]}
    finalists: dict[str, Finalists] = {}
    rates: dict[str, list[float]] = {}
    for precision, kinds in groups.items():
        contenders = {contender.name: contender for contender in _candidates(kinds)}
        reached = _rates(model, contenders.values())
        best = _finalists(contenders, reached)
        varied = {
            c.name: c for first in {best.alone[0].name, best.together[0].name} for c in _varied(contenders[first])
        }
        reached |= _rates(model, varied.values())
        finalists[precision] = _finalists(contenders | varied, reached)
        rates |= reached
    return finalists, rates


def _compute_types(model: Model) -> list[str]:
    """All that do what no other does: int8, for one, is another name of int8_float32 on most CPUs."""
    path = str(model.directory / CTRANSLATE2)
    names = sorted(ctranslate2.get_supported_compute_types("cpu"))
    return list(dict.fromkeys(ctranslate2.Translator(path, compute_type=name).compute_type for name in names))


def _candidates(compute_types: Sequence[str]) -> Iterator[Contender]:
    for compute_type in compute_types:
        for inter_threads in sorted({1, CORES}):
            yield ct2(compute_type, inter_threads)
            for isa in _ISAS:
                yield ct2(compute_type, inter_threads, isa, CT2_FORCE_CPU_ISA=isa)


def _varied(contender: Contender) -> Iterator[Contender]:
    for label, variables in _VARIATIONS.items():
        environment = {**contender.environment, **variables}
        yield dataclasses.replace(contender, name=f"{contender.name} {label}", environment=environment)


def _rates(model: Model, contenders: Iterable[Contender]) -> dict[str, list[float]]:
    """Tokens/s at both batch sizes by name; without those that the machine does not allow."""
    rates = {}
    for contender in contenders:
        try:
            worker = Worker(contender, model.directory)
            try:
                rates[contender.name] = [_rate(worker, model, _ALONE), _rate(worker, model, _TOGETHER)]
            finally:
                worker.close()
        except WorkerError as error:
            print(f"left out: {str(error).splitlines()[-1]}", flush=True)
    return rates


def _rate(worker: Worker, model: Model, batch: int) -> float:
    """The best of few short tries, which is enough to tell the good from the bad."""
    batches = model.batches(batch)[: 4 if batch == _ALONE else 1]
    worker.decode(batches[:1], 1, model.max_tokens)
    rates = []
    for _ in range(_TRIES):
        seconds, outputs = worker.decode(batches, 1, model.max_tokens)
        rates.append(sum(len(ids) for group in outputs for ids in group) / seconds)
    return round(max(rates), 1)


def _finalists(contenders: Mapping[str, Contender], rates: Rates) -> Finalists:
    alone, together = (
        [contenders[name] for name in sorted(rates, key=lambda name: -rates[name][column])[:_FINALISTS]]
        for column in (0, 1)
    )
    return Finalists(alone, together)
