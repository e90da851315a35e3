"""The runner for GPUs, on the CPU: the same answers as the CPU's own runner, whatever is decoded side by side."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from dragoman_bundle import tensors
from dragoman_bundle.architecture import PRESETS, Architecture
from dragoman_bundle.bundle import Bundle
from dragoman_bundle.manifest import Device, Variant
from dragoman_export.checkpoint import load_model
from dragoman_export.evaluation import encode_source
from dragoman_export.linear import FloatLinear
from dragoman_export.runs import open_run
from dragoman_export.tokenization import load_tokenizer
from dragoman_server.engine import devices
from dragoman_server.engine.device_cache import DeviceCache
from dragoman_server.engine.device_model import DeviceModel
from dragoman_server.engine.device_runner import DeviceModelRunner
from dragoman_server.engine.engine import Engine
from dragoman_server.engine.invariants import violations
from dragoman_server.engine.model_runner import ModelRunner, OnnxModel, OnnxModelRunner
from dragoman_server.engine.request import (
    Alternatives,
    BeamSearch,
    FinishReason,
    GreedySearch,
    Hypothesis,
    Priority,
    Row,
    Sampling,
    Scoring,
    Sequence,
)
from dragoman_server.engine.scheduler import SchedulerLimits
from dragoman_server.engine.waiting_line import WaitingLine
from dragoman_server.model import load_model as served_model
from dragoman_server.settings import ServerSettings
from tests.bare_model import open_graphs, open_on_device, write_graphs
from tests.benchmarks import gpu
from tests.doubles import END, make_sequence
from tests.reversal import DIRECTION, sentences

MAX_TOKENS = 160
SLOTS = 12
Request = dict[str, Any]


class Case(NamedTuple):
    """One model, opened in both ways."""

    on_cpu: OnnxModel
    on_device: DeviceModel
    sources: list[list[int]]


@pytest.fixture(scope="module")
def case(reversal_run: Path, reversal_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = load_model(open_run(reversal_run).weights()).eval()
    directory = tmp_path_factory.mktemp("graphs")
    write_graphs(model, directory, FloatLinear("float32"), MAX_TOKENS)
    tokenizer = load_tokenizer(reversal_bundle.file("tokenizer.model"))
    texts = sentences(30, seed=12, shortest=1, longest=14)
    return Case(
        open_graphs(directory, model.arch, MAX_TOKENS),
        open_on_device(directory, model.arch, MAX_TOKENS, "cpu"),
        [encode_source(tokenizer, text, DIRECTION).tolist() for text in texts],
    )


SEARCHES: list[Callable[[random.Random], Request]] = [
    lambda _: {"search": GreedySearch()},
    lambda _: {"search": BeamSearch(width=4, num_hypotheses=4, coverage_penalty=0.2), "alignment": True},
    lambda rng: {"search": BeamSearch(width=rng.randint(2, 3), length_penalty=0.0, early_stopping=False)},
    lambda rng: {"search": Sampling(seed=rng.randint(0, 9), temperature=2.0, num_hypotheses=rng.randint(1, 3))},
    lambda rng: {"search": Alternatives(count=rng.randint(1, 4))},
    lambda rng: {"target_prefix": tuple(rng.choices(range(6, 20), k=rng.randint(1, 6))), "log_probs": True},
    lambda rng: {"search": Scoring(), "target_prefix": tuple(rng.choices(range(6, 20), k=40))},
    lambda _: {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "suppressed": ((7,), (9, 12))},
]


def requests(seed: int, count: int) -> list[Request]:
    """A mixture; some outputs are made longer than 64 positions."""
    rng = random.Random(seed)
    found: list[Request] = []
    for i in range(count):
        request: Request = {"max_target_tokens": rng.choice([1, 5, 30, 50]), "priority": rng.choice(list(Priority))}
        request |= rng.choice(SEARCHES)(rng)
        if isinstance(request.get("search"), Scoring):
            request["max_target_tokens"] = 50
        elif i % 5 == 0:
            request |= {"min_target_tokens": 80, "max_target_tokens": 90}
        found.append(request)
    return found


def make_engine(runner: ModelRunner) -> Engine:
    limits = SchedulerLimits(max_rows=SLOTS, max_encode_tokens=60, max_bulk_rows=3)
    return Engine(runner, limits, WaitingLine(1000), END)


def decode(engine: Engine, sources: list[list[int]], wanted: list[Request], seed: int = 0) -> list[Sequence]:
    """Let sequences join at different steps and cancel some."""
    rng = random.Random(seed)
    sequences = [make_sequence(i, sources[i % len(sources)], **options) for i, options in enumerate(wanted)]
    pending = [(rng.randint(0, 4), sequence) for sequence in sequences]
    cancelled = set(rng.sample(range(len(sequences)), len(sequences) // 6))
    waited = 0
    while pending or engine.has_work:
        while pending and pending[0][0] <= waited:
            engine.scheduler.line.add(pending.pop(0)[1])
            waited = 0
        engine.step()
        waited += 1
        assert list(violations(engine.scheduler)) == []
        for i in cancelled:
            if len(sequences[i].output_ids) == 2:
                engine.drop(sequences[i], FinishReason.CANCELLED)
    return sequences


def assert_close(found: list[Hypothesis], expected: list[Hypothesis], tolerance: float) -> None:
    """The same tokens and reasons; numbers may differ by `tolerance`."""
    assert [(h.ids, h.finish_reason) for h in found] == [(h.ids, h.finish_reason) for h in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose([a.score, a.log_prob], [b.score, b.log_prob], rtol=0, atol=tolerance)
        np.testing.assert_allclose(a.token_log_probs, b.token_log_probs, rtol=0, atol=tolerance)
        assert (a.attention is None) == (b.attention is None)
        if a.attention is not None and b.attention is not None:
            np.testing.assert_allclose(a.attention, b.attention, rtol=0, atol=tolerance)


@pytest.mark.parametrize("seed", range(6))
def test_every_mixture_gives_what_the_cpu_runner_gives(case: Case, seed: int) -> None:
    wanted = requests(seed, 25)
    on_device = decode(make_engine(DeviceModelRunner(case.on_device, SLOTS)), case.sources, wanted, seed)
    on_cpu = decode(make_engine(OnnxModelRunner(case.on_cpu, SLOTS)), case.sources, wanted, seed)
    for found, expected in zip(on_device, on_cpu, strict=True):
        assert found.finish_reason is expected.finish_reason
        if found.finish_reason is not FinishReason.CANCELLED:
            assert_close(found.hypotheses, expected.hypotheses, tolerance=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_company_changes_no_bit_of_a_result(case: Case, seed: int) -> None:
    wanted = requests(seed, 20)
    together = decode(make_engine(DeviceModelRunner(case.on_device, SLOTS)), case.sources, wanted, seed)
    runner = DeviceModelRunner(case.on_device, SLOTS)
    for i, found in enumerate(together):
        if found.finish_reason is not FinishReason.CANCELLED:
            [alone] = decode(make_engine(runner), [case.sources[i % len(case.sources)]], [wanted[i]])
            assert_close(found.hypotheses, alone.hypotheses, tolerance=0.0)


def test_caches_grow_with_the_longest_row_and_shrink_when_all_have_gone(case: Case) -> None:
    runner = DeviceModelRunner(case.on_device, SLOTS)
    engine, capacities = make_engine(runner), set()
    for i, length in enumerate((20, 40, 130)):
        engine.scheduler.line.add(
            make_sequence(i, case.sources[i], min_target_tokens=length, max_target_tokens=length + 5)
        )
    while engine.has_work:
        engine.step()
        capacities.add(runner.cache.capacity)
    assert capacities == {32, 64, 128, MAX_TOKENS}
    assert runner.cache.capacity == 32
    assert runner.cache.num_in_use == 0


def test_half_precision_says_nearly_the_same(reversal_bundle: Bundle, case: Case) -> None:
    """The variant for CUDA as it was exported, with its rows graph."""
    variant = reversal_bundle.variant("cuda", "fp16")
    assert variant is not None
    model = DeviceModel(reversal_bundle, variant, 1, "cpu")
    wanted: list[Request] = [{"max_target_tokens": 40} for _ in case.sources]
    wanted[::3] = [{"max_target_tokens": 40, "search": BeamSearch(width=3)} for _ in wanted[::3]]
    halves = decode(make_engine(DeviceModelRunner(model, SLOTS)), case.sources, wanted, seed=1)
    floats = decode(make_engine(OnnxModelRunner(case.on_cpu, SLOTS)), case.sources, wanted, seed=1)
    same = [a.output_ids == b.output_ids for a, b in zip(halves, floats, strict=True)]
    assert sum(same) >= 0.9 * len(same)


class OnCpu(DeviceModel):
    """Takes the CPU for a GPU."""

    def __init__(self, bundle: Bundle, variant: Variant, num_threads: int, _device: Device) -> None:
        super().__init__(bundle, variant, num_threads, "cpu")


def test_with_a_gpu_the_server_takes_the_variant_for_it(reversal_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it gives the golden answers, without which it would not be served."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(devices, "usable_gpus", lambda: 1)
    monkeypatch.setattr(devices, "DeviceModel", OnCpu)
    settings = ServerSettings.model_validate({"instances": 2}).engine_settings(1)
    model = served_model(reversal_models / "reversal" / "1", settings, lambda *_: None)
    assert (model.variant.device, model.variant.precision) == ("cuda", "fp16")
    assert model.settings.num_instances == 1
    assert model.cache_bytes > 0


class Recorder:
    """A session that notes its runs."""

    def __init__(self, name: str, session: onnxruntime.InferenceSession, runs: list[tuple[str, Any]]) -> None:
        self._name, self._session, self._runs = name, session, runs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: onnxruntime.IOBinding, options: Any = None) -> None:
        self._runs.append((self._name, options))
        self._session.run_with_iobinding(binding, options)


@pytest.fixture
def runs(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Graphs that are run, with their run options."""
    found: list[tuple[str, Any]] = []
    for name in ("encoder", "decoder", "search", "rows"):
        monkeypatch.setattr(case.on_device, name, Recorder(name, getattr(case.on_device, name), found))
    return found


def test_a_step_waits_once_whatever_its_rows_want(case: Case, runs: list[tuple[str, Any]]) -> None:
    """Rows that want candidates and rows that want the best token share one run of the search graph."""
    engine = make_engine(DeviceModelRunner(case.on_device, SLOTS))
    wanted: list[Request] = [
        {"max_target_tokens": 50},
        {"max_target_tokens": 50, "search": BeamSearch(width=4)},
        {"max_target_tokens": 50, "repetition_penalty": 1.2},
        {"max_target_tokens": 50, "target_prefix": (8, 9, 10), "log_probs": True},
    ]
    source = max((s for s in case.sources if len(s) <= 15), key=len)  # four of them can be encoded together
    for i, options in enumerate(wanted):
        engine.scheduler.line.add(make_sequence(i, source, **options))
    engine.step()
    without = case.on_device.without_waiting
    # The source and its last position are stored; the search is waited for, and so is the encoder, to be timed.
    assert runs == [("encoder", None), ("rows", without), ("rows", without), ("decoder", without), ("search", None)]
    runs.clear()
    engine.step()  # the beams have forked into new slots, which need keys and values of the source too
    assert runs == [("rows", without)] * 3 + [("decoder", without), ("search", None)]
    runs.clear()
    for _ in range(4):
        engine.step()
    assert [name for name, _ in runs].count("search") == 4
    assert [name for name, _ in runs].count("rows") <= 4  # within a source, its keys and values stay where they are


def test_changed_logits_are_what_is_searched_and_any_token_can_be_asked_for(case: Case) -> None:
    runner, width = DeviceModelRunner(case.on_device, SLOTS), case.on_device.manifest.architecture.vocab_size
    sequences = [make_sequence(i, case.sources[i], 50) for i in range(3)]
    for slot, sequence in enumerate(sequences):
        sequence.rows = [Row(sequence=sequence, slot=slot)]
    runner.encode(sequences)
    runner.decode_step([sequence.rows[0] for sequence in sequences])
    first = runner.best(3)
    [found] = runner.top([1], 2, [17])
    assert found.ids[0] == first[1]
    runner.logits[1, first[1]] = -np.inf
    assert runner.best(3) == [first[0], found.ids[1], first[2]]
    every = runner.top([0, 2], 10**6, [5, 9])
    assert [len(row.ids) for row in every] == [width, width]
    for row, token in zip(every, (5, 9), strict=True):
        assert row.asked == row.log_probs[row.ids.index(token)]


def test_a_lost_copy_is_not_forgotten(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = DeviceModelRunner(case.on_device, SLOTS)
    engine = make_engine(runner)
    engine.scheduler.line.add(make_sequence(0, case.sources[0], 50, search=BeamSearch(width=2)))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(case.on_device.rows, "run_with_iobinding", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        [failed] = engine.step().finished
    assert isinstance(failed.error, MemoryError)
    engine.scheduler.line.add(make_sequence(1, case.sources[0], 50))
    [failed] = engine.step().finished
    assert "an earlier copy" in str(failed.error)


def test_the_benchmark_for_gpus_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "usable_gpus", lambda: 0)
    assert gpu.main() == 1
    assert capsys.readouterr().err == "no GPU: this needs onnxruntime-gpu, CUDA and a device\n"
    for name, value in (("_ROUNDS", 1), ("BATCHES", (1, 4))):
        monkeypatch.setattr(gpu, name, value)
    results = gpu.measure(Architecture(vocab_size=300, **PRESETS["tiny"]), "cpu", "float32", 4, 3)
    assert set(results["checks"].values()) == {1.0}
    assert [(row["beam"], row["batch"]) for row in results["rows"]] == [(1, 1), (1, 4), (4, 1), (4, 4)]


State = dict[str, npt.NDArray[Any]]
"""What a row has in the caches, by their names: [num_heads, positions, head_dim]."""


class Slots:
    """A cache, and what should be in it: a model of it that copies at once."""

    def __init__(self, model: DeviceModel, seed: int) -> None:
        self.cache, self.arch, self.num_outputs = DeviceCache(model, SLOTS), model.manifest.architecture, 4
        self.rng, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.states: list[State] = []

    def join(self) -> None:
        """A row comes with a source, which is encoded together with one that is not kept."""
        slot, length = len(self.states), self.rng.randint(1, 9)
        if slot + 1 < SLOTS:
            shape = (2, self.arch.num_heads, 9, self.arch.head_dim)
            made = [self.numbers.normal(size=shape).astype(np.float32) for _ in range(self.num_outputs)]
            values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in made]
            self.cache.store_sources([slot + 1, slot], values, [3, length])
            self.cache.claim(slot)
            self.states.append(self._source([array[1] for array in made], length) | self._target(slot))

    def fork(self) -> None:
        """A row gets a copy."""
        if 0 < len(self.states) < SLOTS:
            parent = self.rng.randrange(len(self.states))
            self.cache.fork(parent, len(self.states), self.rng.randint(32, self.cache.capacity))
            self.states.append(self.states[parent])

    def leave(self) -> None:
        """A row goes, and the last one takes its slot."""
        if self.states:
            slot = self.rng.randrange(len(self.states))
            self.cache.release(slot)
            last = self.states.pop()
            if slot < len(self.states):
                self.cache.move(len(self.states), slot, 32)
                self.states[slot] = last

    def end(self) -> None:
        """All go."""
        while self.states:
            self.states.pop()
            self.cache.release(len(self.states))

    def grow(self) -> None:
        """A row has become long."""
        self.cache.settle()
        if self.states:
            self.cache.make_room(self.rng.choice([33, 65, 129]))

    def check(self) -> None:
        """Everything is where it should be."""
        self.cache.settle()
        for slot, state in enumerate(self.states):
            for name, array in state.items():
                found = self._inside(name)[slot, :, : array.shape[1]]
                np.testing.assert_array_equal(found, array, err_msg=f"{name} in slot {slot}")

    def _inside(self, name: str) -> npt.NDArray[Any]:
        """A cache as [num_slots, num_heads, positions, head_dim]; on the CPU one can look into it."""
        blocks = {**self.cache._own.values, **self.cache._source.values, **self.cache._last.values}
        memory: npt.NDArray[Any] = blocks[name].numpy().reshape(-1)
        if name in self.cache._own.values:
            memory = memory[: SLOTS * self.arch.num_heads * self.cache.capacity * self.arch.head_dim]
        return memory.reshape(SLOTS, self.arch.num_heads, -1, self.arch.head_dim)

    def _target(self, slot: int) -> State:
        """What 32 decode steps leave in the self-attention caches."""
        written = {}
        for name in self.cache._own.values:
            part = self._inside(name)[slot, :, :32]
            part[...] = self.numbers.normal(size=part.shape)
            written[name] = part.copy()
        return written

    def _source(self, made: list[npt.NDArray[Any]], length: int) -> State:
        """What a source leaves in the cross-attention caches."""
        whole = [f(i) for i in range(2) for f in (tensors.cross_key, tensors.cross_value)]
        last = [f(i) for i in range(2) for f in (tensors.last_cross_key, tensors.last_cross_value)]
        state = {name: array[:, :length] for name, array in zip(whole, made, strict=True)}
        return state | {name: array[:, length - 1 : length] for name, array in zip(last, made, strict=True)}


@pytest.mark.parametrize("seed", range(10))
def test_rows_keep_their_state_through_forks_moves_and_growth(case: Case, seed: int) -> None:
    slots = Slots(case.on_device, seed)
    actions = [slots.join, slots.join, slots.fork, slots.fork, slots.fork, slots.leave, slots.grow, slots.end]
    for _ in range(80):
        slots.rng.choice(actions)()
        if slots.rng.random() < 0.3:
            slots.check()
    slots.check()
