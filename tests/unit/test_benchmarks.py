"""What `make bench` computes from what it measures: bounds, medians, rows, the README's table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dragoman_bundle.architecture import Architecture
from tests.benchmarks import comparison
from tests.benchmarks.comparison import Batch, measure
from tests.benchmarks.results import Row, compared, under_roof
from tests.benchmarks.roofline import Machine, Text, Workload, roofline, texts
from tests.readme import benchmark_table

ARCH = Architecture(vocab_size=10, d_model=4, num_heads=2, d_ff=8, encoder_layers=1, decoder_layers=1)
MACHINE = Machine(
    cores=2,
    read_bytes_per_s={"one core": {1000: 400.0, 10_000: 300.0}, "all cores": {1000: 800.0, 10_000: 500.0}},
    copy_bytes_per_s={"one core": 100.0, "all cores": 200.0},
    products_per_s={
        "one core": {"int8 x 64 rows": 1e6, "fp32 x 64 rows": 1e5},
        "all cores": {"int8 x 64 rows": 2e6, "fp32 x 64 rows": 2e5},
    },
)


def test_a_workload_counts_what_the_architecture_says() -> None:
    workload = Workload(arch=ARCH, precision="int8", cache_bytes=4, width=2)
    assert workload.decoder_weights == 4 * 16 + 2 * 16 + 2 * 32 + 40  # self, cross, feed-forward, generator
    assert workload.encoder_weights == 4 * 16 + 2 * 32 + 2 * 16  # self, feed-forward, what the decoder will read
    batch = [Text(source_tokens=3, target_tokens=2, steps=2)]
    weights = 2 * 200
    own = 2 * (1 + 2) * (2 * 4 * 4)  # two beams look at one position, then at two; keys and values of width 4
    source = 2 * 3 * (2 * 4 * 4)  # shared by the beams
    logits = 2 * 2 * 10 * 4 * 2
    assert workload.decode_bytes(batch) == weights + own + source + logits
    assert workload.decode_macs(batch) == 2 * 2 * 200
    assert workload.encode_macs(batch) == 3 * 160


def test_every_instance_reads_the_weights_as_long_as_its_longest_text_runs() -> None:
    batch = [Text(1, steps, steps) for steps in (5, 1, 2, 4)]
    one, two = (
        Workload(arch=ARCH, precision="fp32", cache_bytes=0, instances=instances).decode_bytes(batch)
        for instances in (1, 2)
    )
    assert two - one == 2 * 200 * 4  # the short texts run together: 5 + 2 steps of all weights instead of 5


def test_the_bound_is_what_memory_or_products_allow() -> None:
    workload = Workload(arch=ARCH, precision="int8", cache_bytes=4)
    batch = [Text(3, 2, 2)]
    roof = roofline(workload, [batch, batch], MACHINE)
    assert (roof.num_steps, roof.num_bytes, roof.num_macs) == (4, 2 * 848, 2 * 400)
    assert roof.bound_tokens_per_s == pytest.approx(4 / (2 * 848 / 800 + 2 * 160 / 800))
    fast = dataclasses.replace(MACHINE, read_bytes_per_s={"one core": {1: 1e9}, "all cores": {1: 1e9}})
    roof = roofline(workload, [batch], fast)
    assert roof.bound_tokens_per_s == pytest.approx(2 / (400 / 2e6 + 480 / 2e6))


def test_reading_is_as_fast_as_the_cache_that_holds_it() -> None:
    assert MACHINE.bytes_per_s(1) == MACHINE.bytes_per_s(9999) == 800
    assert MACHINE.bytes_per_s(10_000) == MACHINE.bytes_per_s(1e9) == 500


def test_an_end_token_takes_a_step_and_a_cut_output_has_none() -> None:
    assert texts([[7, 8], [9]], [[5], [5, 6, 7]], 3) == [Text(2, 1, 2), Text(1, 3, 3)]


class Clock:
    """A contender that takes a given time for each call."""

    def __init__(self, name: str, *seconds: float) -> None:
        self.name = name
        self._seconds = list(seconds)

    def decode(self, batches: Sequence[Batch], width: int, max_tokens: int) -> tuple[float, list[list[list[int]]]]:
        assert width == 1
        return self._seconds.pop(0), [[[1] * max_tokens for _ in batch] for batch in batches]


def test_the_median_of_the_rounds_after_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "REST_S", 0)
    contenders = [Clock("Dragoman", 100, 1, 2, 4), Clock("peer", 100, 8, 1, 4)]
    found = measure(contenders, [[[5]], [[6], [7]]], 1, 4, 3)
    assert found.tokens_per_s == {"Dragoman": 12 / 2, "peer": 12 / 4}
    assert found.our_outputs == [[[1] * 4], [[1] * 4, [1] * 4]]


def row(**changes: object) -> Row:
    values = {"Dragoman int8": 20.0, "a": 5.0, "b": 10.0}
    settings = {"model": "base", "precision": "int8", "batch": 8}
    made = compared("greedy tokens/s", settings, values, better="more", target=1.5)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_the_best_peer_counts() -> None:
    assert (row().ours, row().peer, row().peer_name, row().ratio) == (20.0, 10.0, "b", 2.0)
    less = compared("ms", {}, {"Dragoman": 20.0, "a": 5.0, "b": 10.0}, better="less")
    assert (less.peer_name, less.ratio) == ("a", 0.25)


def test_a_target_is_reached_or_not_exceeded() -> None:
    assert row().meets_target
    assert not row(target=2.1).meets_target
    assert row(target=None).meets_target
    assert row(target=20.0, target_of="ours").meets_target
    assert not row(target=19.9, target_of="ours").meets_target


def test_a_row_says_what_a_step_costs_and_how_far_the_bound_is() -> None:
    workload = Workload(arch=ARCH, precision="int8", cache_bytes=4)
    roof = roofline(workload, [[Text(3, 2, 2)]], MACHINE)
    bounded = under_roof(row(ours=1.0), roof, "int8").roofline
    assert bounded is not None
    assert bounded["bytes_per_step"] == 424
    assert bounded["int8_macs_per_step"] == 200
    assert bounded["share"] == pytest.approx(1 / roof.bound_tokens_per_s, abs=1e-3)


def test_the_table_has_a_line_for_each_case_and_models_side_by_side(tmp_path: Path) -> None:
    other = row(settings={"model": "small", "precision": "int8", "batch": 8}, target=3.0, roofline={"share": 0.255})
    report = {
        "date": "2026-01-02",
        "machine": "2 cores",
        "commit": {"id": "0123456789abcdef", "dirty": False},
        "rows": [dataclasses.asdict(one) for one in (row(), other)],
    }
    (tmp_path / "results.json").write_text(json.dumps(report))
    lines = benchmark_table(tmp_path / "results.json").splitlines()
    assert lines[0] == "Measured 2026-01-02 on 2 cores, commit 0123456789:"
    assert lines[4] == "| **greedy tokens/s, int8** | | | | | | | | |"
    assert lines[5] == "| batch 8 | 20 | 10 (b) | 2.00 ✓ |  | 20 | 10 (b) | 2.00 [of 3][tried] | 26% |"
