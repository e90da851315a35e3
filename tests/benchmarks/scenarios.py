"""What is measured, scenario by scenario; each yields rows."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dragoman_bundle.bundle import load_bundle
from tests.benchmarks.comparison import REST_S, measure
from tests.benchmarks.contenders import (
    Contender,
    Sources,
    Worker,
    ours,
    ours_by_default,
    served,
    transformers,
    workers,
)
from tests.benchmarks.models import BUNDLE, Model, random_sources
from tests.benchmarks.qualifying import Finalists
from tests.benchmarks.results import OURS, Row, compared, under_roof
from tests.benchmarks.roofline import Machine, roofline, texts

_SAME_TOKENS = 0.97
"""Least share of texts with the same tokens from everybody: near-ties may fall either way in floating point."""
_NUM_COMPARED = 64
_NUM_FIRST_TOKENS = 200
_LENGTHS = (16, 64, 128, 256, 512)
_OTHER_LENGTH = 32
"""Of the target while the source grows, and the other way round."""
_LENGTHS_BATCH = 8
_NUM_RUNNING, _RUNNING_TOKENS = 31, 100
_NUM_NEWCOMERS, _NEWCOMER_TOKENS, _NEWCOMER_EVERY_S = 100, 25, 0.05

Targets = Mapping[int, float | None]
"""By batch size."""
_AGAINST_CT2: Mapping[str, Mapping[int, Targets]] = {
    "int8": {
        1: {1: 2.0, 8: 2.0, 32: 2.0, 64: 1.5, 128: 1.5},
        4: {1: 1.5, 8: 1.5, 32: 1.5, 64: None, 128: None},
    },
    "fp32": {1: {1: 1.3, 8: 1.3, 32: 1.3, 64: 1.3, 128: 1.3}},
}
"""By precision and beam width."""
_AGAINST_OTHERS: Mapping[str, float | None] = {
    "transformers bfloat16": 2.5,
    "transformers float32": 5.0,
    "optimum": None,
}
"""For int8, by the beginning of the peer's name."""
_OTHERS_BATCHES: Mapping[int, Sequence[int]] = {1: (1, 8, 32), 4: (8,)}
"""By beam width."""
_OTHERS_TEXTS = 16
"""At most, in batches one after the other: they take their time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A model and everybody who decodes it."""

    model: Model
    machine: Machine
    rounds: int
    ct2: Mapping[str, Finalists]
    """By precision."""
    optimum: Sequence[Contender]

    @property
    def others(self) -> list[Contender]:
        """The peers besides CTranslate2."""
        return [transformers("bfloat16"), transformers("float32"), *self.optimum]


def agreement(field: Field) -> Iterator[dict[str, Any]]:
    """Share of texts to which all contenders give the same tokens in fp32.

    Raises:
        RuntimeError: it is too small; nothing else would mean anything.
    """
    model = field.model
    floats = [c for c in field.others if c.name in ("transformers float32", "optimum fp32")]
    contenders = [ours("fp32"), *field.ct2["fp32"].together[:1], *floats]
    with workers(model.directory, contenders) as opened:
        for width, search in ((1, "greedy"), (4, "beam 4")):
            sources = model.sources[:_NUM_COMPARED]
            answers = [worker.decode([sources], width, model.max_tokens)[1][0] for worker in opened]
            shares = {
                worker.name: round(float(np.mean([a == b for a, b in zip(answers[0], answer, strict=True)])), 3)
                for worker, answer in zip(opened[1:], answers[1:], strict=True)
            }
            print(f"{model.name}, {search}, fp32: same tokens as ours {shares}", flush=True)
            yield {"model": model.name, "search": search, "texts": len(sources), "same as ours": shares}
            if min(shares.values()) < _SAME_TOKENS:
                raise RuntimeError(f"{model.name}, {search}: the contenders do not compute the same: {shares}")


class Job(NamedTuple):
    """What everybody decodes in turn, for rows in tokens/s."""

    benchmark: str
    settings: dict[str, Any]
    """Of its rows; model, batch, beam and precision among them."""
    batches: Sequence[Sources]
    max_tokens: int


def _speed_rows(
    field: Field, opened: Sequence[Worker], mine: Contender, job: Job, goals: Mapping[str, float | None]
) -> Iterator[Row]:
    """Measure once; a row against each kind of peer.

    Args:
        field: of contenders.
        opened: who takes part.
        mine: which of them is ours.
        job: to do.
        goals: ratio to reach, by the beginning of the peer's name.
    """
    settings, precision = job.settings, job.settings["precision"]
    found = measure(opened, job.batches, settings["beam"], job.max_tokens, field.rounds)
    workload = field.model.workload(precision, settings["beam"], settings["batch"], mine.options["instances"])
    decoded = [texts(*pair, job.max_tokens) for pair in zip(job.batches, found.our_outputs, strict=True)]
    roof = roofline(workload, decoded, field.machine)
    for peers, goal in goals.items():
        values = _among(found.tokens_per_s, peers)
        if len(values) > 1:
            row = compared(job.benchmark, settings | {"against": peers}, values, better="more", target=goal)
            yield under_roof(row, roof, precision)


def _among(values: Mapping[str, float], peers: str) -> dict[str, float]:
    """Ours, and those whose names begin with `peers`."""
    return {name: value for name, value in values.items() if name.startswith((OURS, peers))}


def _job(model: Model, width: int, batch: int, precision: str) -> Job:
    search = "greedy" if width == 1 else f"beam {width}"
    settings = {"model": model.name, "batch": batch, "beam": width, "precision": precision}
    return Job(f"{search} tokens/s", settings, model.batches(batch), model.max_tokens)


def throughput(field: Field) -> Iterator[Row]:
    """Greedy search and beam 4 against CTranslate2."""
    model = field.model
    for precision, searches in _AGAINST_CT2.items():
        mine, finalists = ours(precision), field.ct2[precision]
        with workers(model.directory, [mine, *finalists.all]) as opened:
            for width, targets in searches.items():
                for batch, target in targets.items():
                    names = {mine.name, *(contender.name for contender in finalists.at(batch))}
                    in_turn = [worker for worker in opened if worker.name in names]
                    job = _job(model, width, batch, precision)
                    yield from _speed_rows(field, in_turn, mine, job, {"CTranslate2": target})


def others(field: Field) -> Iterator[Row]:
    """int8 against transformers and optimum."""
    model, mine = field.model, ours("int8")
    with workers(model.directory, [mine, *field.others]) as opened:
        for width, sizes in _OTHERS_BATCHES.items():
            goals = _AGAINST_OTHERS if width == 1 else dict.fromkeys(_AGAINST_OTHERS)
            for batch in sizes:
                job = _job(model, width, batch, "int8")
                yield from _speed_rows(
                    field, opened, mine, job._replace(batches=job.batches[: max(1, _OTHERS_TEXTS // batch)]), goals
                )


def first_token(field: Field) -> Iterator[Row]:
    """Encoder and first step of one text on an idle engine."""
    model = field.model
    sources = (model.sources * (1 + _NUM_FIRST_TOKENS // len(model.sources)))[:_NUM_FIRST_TOKENS]
    seconds: dict[str, list[float]] = defaultdict(list)
    with workers(model.directory, [ours("int8"), *field.ct2["int8"].alone, *field.others]) as opened:
        for worker in opened:
            worker.first_tokens_s(sources[:10])
        for start in range(field.rounds):
            for worker in opened:
                time.sleep(REST_S)
                seconds[worker.name] += worker.first_tokens_s(sources[start :: field.rounds])
    for percentile in (50, 99):
        values = {name: 1000 * float(np.percentile(values, percentile)) for name, values in seconds.items()}
        for peers in ("CTranslate2", "transformers", "optimum"):
            if len(_among(values, peers)) > 1:
                settings = {"model": model.name, "precision": "int8", "against": peers, "percentile": percentile}
                settings["texts"] = len(sources)
                yield compared("first token, ms", settings, _among(values, peers), better="less")


def lengths(field: Field) -> Iterator[Row]:
    """Batches of 8 of growing sources, then of growing targets, against CTranslate2."""
    model, mine = field.model, ours("int8")
    pairs = [(length, _OTHER_LENGTH) for length in _LENGTHS] + [(_OTHER_LENGTH, length) for length in _LENGTHS]
    with workers(model.directory, [mine, *field.ct2["int8"].together]) as opened:
        for source, target in pairs:
            count = max(1, 4 * _OTHER_LENGTH // max(target, _OTHER_LENGTH))  # short ones are over in no time
            batches = [random_sources(model.arch.vocab_size, _LENGTHS_BATCH, source, seed) for seed in range(count)]
            settings = _job(model, 1, _LENGTHS_BATCH, "int8").settings | {"source": source, "target": target}
            job = Job("tokens/s by length", settings, batches, target)
            yield from _speed_rows(field, opened, mine, job, {"CTranslate2": None})


def joining(field: Field) -> Iterator[Row]:
    """What newcomers cost those who run, and how long they wait themselves.

    31 texts are being streamed. The gaps between their tokens are compared with and without newcomers. A newcomer's
    first token is compared with the time until CTranslate2 has ended the batch of 31 that runs when it comes, at any
    moment of that batch; its own decoding is not even counted.
    """
    gaps: dict[str, list[list[float]]] = defaultdict(list)
    first_tokens: list[float] = []
    batch_s: dict[str, list[float]] = defaultdict(list)
    model, mine = field.model, ours_by_default("int8")
    sources = model.sources[:_NUM_RUNNING]
    with workers(model.directory, [mine, *field.ct2["int8"].together]) as [engine, *peers]:
        for worker in (engine, *peers):
            worker.decode([sources], 1, _RUNNING_TOKENS)
        for _ in range(field.rounds):
            for name, newcomers in (("nobody joins", []), (mine.name, model.sources[:_NUM_NEWCOMERS])):
                time.sleep(REST_S)
                answer = engine.ask(
                    "join", running=sources, max_tokens=_RUNNING_TOKENS, newcomers=newcomers,
                    newcomer_tokens=_NEWCOMER_TOKENS, every_s=_NEWCOMER_EVERY_S,
                )  # fmt: skip
                gaps[name].append(answer["gaps_s"])
                first_tokens += answer["first_tokens_s"]
            for peer in peers:
                time.sleep(REST_S)
                batch_s[peer.name].append(peer.decode([sources], 1, _RUNNING_TOKENS)[0])
    yield from _joining_rows(model, mine, gaps, first_tokens, batch_s)


def _joining_rows(
    model: Model,
    mine: Contender,
    gaps: Mapping[str, Sequence[Sequence[float]]],
    first_tokens: Sequence[float],
    batch_s: Mapping[str, Sequence[float]],
) -> Iterator[Row]:
    situation = {
        "running": f"{_NUM_RUNNING} texts, {_RUNNING_TOKENS} tokens out",
        "newcomers": f"one every {1000 * _NEWCOMER_EVERY_S:.0f} ms, {_NEWCOMER_TOKENS} tokens out",
    }
    for percentile in (50, 99):
        settings = {"model": model.name, "precision": "int8", "percentile": percentile, **situation}
        values = {
            name: 1000 * statistics.median(float(np.percentile(round_, percentile)) for round_ in rounds)
            for name, rounds in gaps.items()
        }
        yield compared("gap between tokens of running texts, ms", settings, values, better="less")
        values = {name: 1000 * statistics.median(rounds) * percentile / 100 for name, rounds in batch_s.items()}
        values[mine.name] = 1000 * float(np.percentile(first_tokens, percentile))
        settings = settings | {"against": "the running batch's end, CTranslate2"}
        yield compared("newcomer's first token, ms", settings, values, better="less")


def memory(field: Field) -> Iterator[Row]:
    """Peak memory after a batch of 64, in fresh processes."""
    model = field.model
    peaks = {}
    for contender in (ours("int8"), *field.ct2["int8"].all):
        with workers(model.directory, [contender]) as [worker]:
            worker.decode([model.sources[:64]], 1, model.max_tokens)
            peaks[contender.name] = worker.peak_mib()
    settings = {"model": model.name, "batch": 64, "precision": "int8", "against": "CTranslate2"}
    yield compared("peak resident MiB", settings, peaks, better="less", target=1.0)


def loading(field: Field) -> Iterator[Row]:
    """The bundle behind the server's own loading, against CTranslate2's constructor, in fresh processes."""
    times: dict[str, list[dict[str, float]]] = defaultdict(list)
    entrants = [(served(), BUNDLE), *((peer, field.model.directory) for peer in field.ct2["int8"].together)]
    for _ in range(field.rounds):
        for contender, directory in entrants:
            with workers(directory, [contender]) as [worker]:
                times[contender.name].append(worker.times)
    settings = {"model": field.model.name, "precision": "int8", "against": "CTranslate2"}
    for benchmark, key, target in (
        ("bundle loaded and ready, s", "open_s", 1.0),
        ("libraries imported, s", "import_s", None),
    ):
        values = {name: statistics.median(one[key] for one in found) for name, found in times.items()}
        yield compared(benchmark, settings, values, better="less", target=target, target_of="ours")


def quality(field: Field) -> Iterator[Row]:
    """BLEU that int8 costs: the most over all test sets and directions, from the bundle's own report."""
    scores = load_bundle(BUNDLE).manifest.quality
    bleu = {(s.search, s.test_set, s.direction, s.precision): s.bleu for s in scores}
    for search in dict.fromkeys(score.search for score in scores):
        losses = {
            f"{test_set}, {direction}": bleu[search, test_set, direction, "fp32"] - value
            for (found, test_set, direction, precision), value in bleu.items()
            if (found, precision) == (search, "int8")
        }
        worst = max(losses, key=lambda name: losses[name])
        yield Row(
            benchmark="BLEU lost to int8",
            settings={"model": field.model.name, "precision": "int8", "search": search, "worst of": worst},
            ours=round(losses[worst], 2), peer=None, peer_name="", ratio=None, target=0.3, target_of="ours",
        )  # fmt: skip
