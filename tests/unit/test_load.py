"""The load generator without a server: schedules, percentiles, the knee search, judgements, what is told and drawn."""

from __future__ import annotations

import io
import itertools
import json
import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dragoman_client.credentials import Security
from dragoman_client.errors import OverloadedError
from dragoman_client.load import report
from dragoman_client.load.distribution import Distribution
from dragoman_client.load.generator import Outcome, Recorder
from dragoman_client.load.knee import TOLERANCE, Knee, find_knee
from dragoman_client.load.options import (
    ClosedLoop,
    KneeSearch,
    LoadArguments,
    LoadUsageError,
    OpenLoop,
    parse_arguments,
)
from dragoman_client.load.plot import plot_knee, plot_run
from dragoman_client.load.report import ProbeReport, RunReport, judge
from dragoman_client.load.schedule import poisson_arrivals, shuffled_texts
from dragoman_client.load.table import knee_table, knee_text, run_table
from dragoman_client.types import BeamSearch
from dragoman_protos.v1 import translation_pb2 as pb

durations = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=300)


def test_arrivals_are_those_of_a_poisson_process() -> None:
    arrivals = poisson_arrivals(50.0, 400.0, seed=3)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *arrivals])]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < 400.0
    # 20,000 exponential gaps: mean and deviation are the same, to within three standard errors.
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05)


def test_arrivals_are_drawn_by_seed_and_stretched_by_rate() -> None:
    assert poisson_arrivals(10.0, 5.0, seed=1) == poisson_arrivals(10.0, 5.0, seed=1)
    assert poisson_arrivals(10.0, 5.0, seed=1) != poisson_arrivals(10.0, 5.0, seed=2)
    slow, fast = poisson_arrivals(10.0, 5.0, seed=1), poisson_arrivals(20.0, 2.5, seed=1)
    assert slow == pytest.approx([2 * moment for moment in fast])


def test_every_stretch_of_texts_has_the_lengths_of_the_file() -> None:
    texts = ["a", "bb", "bb", "ccc"]
    drawn = list(itertools.islice(shuffled_texts(texts, seed=5), 400))
    for start in range(0, 400, 4):
        assert Counter(drawn[start : start + 4]) == Counter(texts)
    assert drawn == list(itertools.islice(shuffled_texts(texts, seed=5), 400))
    assert drawn[:40] != drawn[40:80]


@settings(deadline=None)
@given(durations, st.sampled_from([0.1, 1, 50, 90, 95, 99, 99.9, 100]))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    expected = np.percentile(values, percent, method="inverted_cdf")
    assert Distribution(values).percentile(percent) == expected


@settings(deadline=None)
@given(st.integers(1, 5000))
def test_a_percentile_is_the_rank_that_it_says(size: int) -> None:
    values = Distribution(range(1, size + 1))
    assert values.percentile(99.9) == -(-999 * size // 1000)
    assert values.percentile(50) == -(-size // 2)


@settings(deadline=None)
@given(durations)
def test_the_curve_is_made_of_percentiles(values: list[float]) -> None:
    curve = Distribution(values).curve()
    percents = [percent for percent, _ in curve]
    assert percents == sorted(set(percents))
    assert percents[-1] < 100
    assert curve[-1][1] == max(values)
    for percent, seconds in curve[:-1]:
        assert seconds == sorted(values)[round(percent * len(values) / 100) - 1]


def test_a_distribution_counts_what_comes_after_it_was_asked() -> None:
    distribution = Distribution([3.0])
    assert distribution.percentile(100) == 3.0
    distribution.add(1.0)
    assert (distribution.percentile(50), distribution.percentile(100)) == (1.0, 3.0)
    assert Distribution().percentiles() is None
    assert Distribution().curve() == ()


def test_correction_is_that_of_gil_tenes_example() -> None:
    """100 s of a call every 10 ms, answered in 1 ms; then 100 s of silence: 10,000 calls and a single long one."""
    corrected = Distribution([0.001] * 10_000 + [100.0]).corrected(0.01)
    assert len(corrected) == 20_000
    assert corrected.percentile(50) == 0.001
    assert corrected.percentile(75) == pytest.approx(50.0, abs=0.02)
    assert corrected.percentile(99) == pytest.approx(98.0, abs=0.02)


@settings(deadline=None)
@given(durations, st.floats(min_value=1e3, max_value=1e6))
def test_correction_only_adds_what_a_caller_would_have_seen(values: list[float], interval: float) -> None:
    corrected = Distribution(values).corrected(interval)
    added = Counter(corrected._values) - Counter(values)
    assert Counter(corrected._values) - added == Counter(values)
    assert added.total() == sum(max(0, int(value / interval) - 1) for value in values)
    assert all(0 < value < max(values) for value in added)


class SyntheticProbe:
    def __init__(self, held: bool) -> None:
        self.held = held


@settings(deadline=None)
@given(
    capacity=st.floats(min_value=0.01, max_value=1e5),
    start_rate=st.floats(min_value=0.5, max_value=1000),
    min_rate=st.floats(min_value=0.01, max_value=0.5),
)
def test_the_knee_of_a_server_with_a_known_capacity_is_found(
    capacity: float, start_rate: float, min_rate: float
) -> None:
    measured: list[float] = []

    def measure(rate: float) -> SyntheticProbe:
        measured.append(rate)
        return SyntheticProbe(rate <= capacity)

    knee = find_knee(measure, start_rate=start_rate, min_rate=min_rate)
    assert list(knee.probes) == measured
    assert len(set(measured)) == len(measured)
    assert len(measured) <= abs(math.log2(capacity / start_rate)) + 7
    if knee.rate is None:
        assert capacity < 2 * min_rate
        assert not any(probe.held for probe in knee.probes.values())
    else:
        assert knee.first_broken is not None
        assert knee.rate <= capacity < knee.first_broken <= knee.rate * (1 + TOLERANCE)


def test_a_server_without_a_knee_ends_the_search_at_its_bound() -> None:
    knee = find_knee(lambda _: SyntheticProbe(held=True), start_rate=16, min_rate=1, max_rate=100)
    assert (knee.rate, knee.first_broken) == (64, None)


def run_of(latencies: list[float], *, rate: float = 100.0) -> RunReport:
    """A run of an open loop in which everything was answered."""
    latency = Distribution(latencies)
    return RunReport(
        num_sent=len(latency),
        num_ok=len(latency),
        failures={},
        achieved_rate=rate,
        target_tokens_per_s=None,
        loop="open",
        rate=rate,
        concurrency=None,
        duration_s=10.0,
        offered_rate=rate,
        latency_s=latency.percentiles(),
        uncorrected_latency_s=latency.percentiles(),
        server_queue_s=None,
        server_first_token_s=None,
        server_total_s=None,
        lateness_s=Distribution([0.001]).percentiles(),
        generator_cpu=0.1,
        generator_problems=(),
        bulk=None,
        latency_curve=latency.curve(),
        uncorrected_latency_curve=latency.curve(),
    )


QUICK = run_of([0.05] * 1000)


def test_a_rate_holds_only_within_every_limit() -> None:
    def held(run: RunReport) -> bool:
        return judge(100.0, run, slo_s=0.3).held

    assert held(QUICK)
    assert held(run_of([0.05] * 990 + [0.5] * 10))
    assert not held(run_of([0.05] * 989 + [0.5] * 11))
    assert held(replace(QUICK, achieved_rate=95.1))
    assert not held(replace(QUICK, achieved_rate=94.9))
    assert held(replace(QUICK, failures={"INTERNAL": 1}))
    assert not held(replace(QUICK, failures={"INTERNAL": 2}))
    assert not held(replace(QUICK, generator_problems=("it fell behind",)))
    assert not held(run_of([]))


def test_all_reasons_are_told() -> None:
    run = replace(run_of([0.5] * 1000), achieved_rate=50.0, failures={"INTERNAL": 20})
    assert judge(100.0, run, slo_s=0.3).problems == (
        "p99 is 500 ms, above 300 ms",
        "50.0 of 100.0 requests/s were answered",
        "20 of 1000 requests failed",
    )


def knee_of(measure: dict[float, RunReport]) -> Knee[ProbeReport]:
    return find_knee(
        lambda rate: judge(rate, measure[min(measure, key=lambda r: abs(r - rate))], 0.3), start_rate=16, min_rate=1
    )


SLOW = run_of([0.05] * 900 + [0.5] * 100)
TYPICAL_KNEE = knee_of({16.0: QUICK, 64.0: SLOW})


def test_a_generator_that_breaks_first_is_told_from_a_server_that_does() -> None:
    behind = replace(QUICK, generator_problems=("it fell behind",))
    assert not report.is_limited_by_generator(TYPICAL_KNEE)
    assert "held" in knee_text(TYPICAL_KNEE)
    limited = knee_of({16.0: QUICK, 64.0: behind})
    assert report.is_limited_by_generator(limited)
    assert "the generator could not keep up" in knee_text(limited)
    # Where the server broke as well, its knee is known.
    both = replace(SLOW, generator_problems=("it fell behind",))
    assert not report.is_limited_by_generator(knee_of({16.0: QUICK, 64.0: both}))


def test_a_search_in_which_nothing_held_says_so() -> None:
    knee = knee_of({16.0: SLOW})
    assert knee.rate is None
    assert knee_text(knee) == "no rate held, not even 1 requests/s: p99 is 500 ms, above 300 ms"
    assert report.knee_as_json(knee, {})["knee"]["run"] is None


TIMINGS = pb.Timings(queue_seconds=0.001, total_seconds=0.01)
ANSWER = pb.TranslateResponse(translations=[pb.Translation(target_tokens=5)], timings=TIMINGS)


def test_only_the_window_counts() -> None:
    recorder = Recorder(start_s=1.0, end_s=3.0)
    for scheduled, ended in [(0.2, 0.4), (0.5, 1.5), (1.0, 1.2), (2.9, 3.4), (3.1, 3.2)]:
        recorder.add(Outcome(scheduled, scheduled + 0.01, ended, ANSWER))
    overloaded = OverloadedError("too much", grpc.StatusCode.RESOURCE_EXHAUSTED)
    recorder.add(Outcome(2.0, 2.0, 2.1, overloaded))
    throughput = recorder.throughput()
    assert (throughput.num_sent, throughput.num_ok, throughput.failures) == (3, 2, {"RESOURCE_EXHAUSTED": 1})
    # Answers within the window, whenever they were asked for: 0.5 and 1.0.
    assert (throughput.achieved_rate, throughput.target_tokens_per_s) == (1.0, 5.0)
    assert recorder.latency.percentile(100) == pytest.approx(0.5)
    assert recorder.uncorrected.percentile(100) == pytest.approx(0.49)
    assert recorder.total.percentile(50) == 0.01
    assert not len(recorder.first_token)  # 0 on the wire: not measured


def arguments(path: Path, **changes: object) -> LoadArguments:
    given: dict[str, object] = {
        "source": "zh",
        "target": "en",
        "input": path,
        "server": "localhost:1",
        "model": "",
        "rate": None,
        "concurrency": None,
        "find_knee": False,
        "slo_ms": None,
        "start_rate": None,
        "duration": 30.0,
        "warmup": 5.0,
        "seed": 0,
        "priority": "interactive",
        "bulk_concurrency": 0,
        "beam": 1,
        "split": True,
        "timeout": 30.0,
        "json": None,
        "plot": None,
    }
    return LoadArguments(**(given | changes))  # type: ignore[arg-type]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts"
    path.write_text("一\r\n\n 二三 \n", encoding="utf-8")
    return path


def test_arguments_become_a_measurement(texts: Path) -> None:
    options = parse_arguments(arguments(texts, rate=12.5, beam=4, timeout=3.0))
    assert options.mode == OpenLoop(12.5)
    assert options.traffic.texts == ("一", "二三")
    assert options.traffic.end_s == 35.0
    assert options.traffic.target.timeout_s == 3.0
    assert options.traffic.target.decoding.search == BeamSearch(width=4)
    assert options.slo_s is None
    assert options.settings["num_texts"] == 2
    secured = parse_arguments(arguments(texts, rate=12.5, security=Security(api_key="secret")))
    assert secured.traffic.target.security["api_key"] == "secret"
    assert "secret" not in repr(secured)
    assert parse_arguments(arguments(texts, concurrency=3)).mode == ClosedLoop(3)
    assert parse_arguments(arguments(texts, find_knee=True)).mode == KneeSearch(0.3, 16.0, 10 / 30)
    search = parse_arguments(arguments(texts, find_knee=True, slo_ms=50.0, start_rate=4.0, duration=5.0))
    assert search.mode == KneeSearch(0.05, 4.0, 2.0)


def test_every_problem_is_told_at_once(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    wrong = arguments(
        texts.with_name("missing"),
        source="",
        rate=math.nan,
        concurrency=0,
        duration=math.inf,
        warmup=-1.0,
        start_rate=1.0,
        priority="urgent",
        json=texts.parent,
        plot=texts.parent / "no" / "plot.gif",
    )
    with pytest.raises(LoadUsageError) as error:
        parse_arguments(wrong)
    expected = [
        "give one of", "--start-rate", "--source", "--rate", "--concurrency", "--duration", "--warmup", "--priority",
        "--json", "--plot cannot be written", "must end in .png or .svg", "pip install 'dragoman[load]'", "--input",
    ]  # fmt: skip
    assert len(error.value.problems) == len(expected)
    for problem, words in zip(error.value.problems, expected, strict=True):
        assert words in problem


@pytest.mark.parametrize(
    ("content", "changes", "words"),
    [
        (b"\n \n", {"rate": 1.0}, "has no text"),
        (b"caf\xe9", {"rate": 1.0}, "cannot be read"),
        (b"a", {}, "there is none of them"),
        (b"a", {"rate": 1.0, "find_knee": True}, "there is --rate and --find-knee"),
        (b"a", {"rate": 1.0, "priority": "bulk", "bulk_concurrency": 2}, "leave out --priority bulk"),
        (b"a", {"rate": 1.0, "slo_ms": 0.0}, "--slo-ms"),
    ],
)
def test_a_wrong_call_says_what_to_change(texts: Path, content: bytes, changes: dict[str, object], words: str) -> None:
    texts.write_bytes(content)
    with pytest.raises(LoadUsageError) as error:
        parse_arguments(arguments(texts, **changes))
    [problem] = error.value.problems
    assert words in problem


def test_the_json_is_documented_and_complete() -> None:
    knee = json.loads(json.dumps(report.knee_as_json(TYPICAL_KNEE, {"server": "localhost:1"})))
    run = json.loads(json.dumps(report.run_as_json(QUICK, {"server": "localhost:1"})))
    assert (run["schema"], run["kind"], knee["kind"]) == (1, "run", "knee")
    assert run["run"]["latency_s"] == {
        "count": 1000, "p50": 0.05, "p90": 0.05, "p95": 0.05, "p99": 0.05, "p99_9": 0.05, "max": 0.05,
    }  # fmt: skip
    assert run["run"]["valid"]
    assert [probe["held"] for probe in knee["knee"]["probes"]].count(True) >= 2
    documented = report.__doc__ or ""
    for name in [*run, *run["run"], *knee["knee"], *knee["knee"]["probes"][0], *run["run"]["latency_s"]]:
        assert name in documented, name


def shown(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_say_what_was_measured() -> None:
    table = shown(run_table(replace(QUICK, failures={"DEADLINE_EXCEEDED": 3})))
    assert "Open loop, 100 requests/s for 10 s" in table
    assert "from scheduled arrival" in table
    assert "failed: 3 DEADLINE_EXCEEDED" in table
    table = shown(knee_table(TYPICAL_KNEE, 0.3))
    assert "p99 ≤ 300 ms" in table
    assert "did not: p99 is 500 ms, above 300 ms" in table
    assert "nothing was answered" in shown(knee_table(knee_of({16.0: run_of([])}), 0.3))


def test_pictures_are_drawn(tmp_path: Path) -> None:
    plot_knee(TYPICAL_KNEE, 0.3, "a server", tmp_path / "knee.svg")
    svg = (tmp_path / "knee.svg").read_text(encoding="utf-8")
    for words in ("Latency against rate: a server", "SLO", "knee", "p99.9", "latency from scheduled arrival (ms)"):
        assert f"<!-- {words}" in svg, words
    slow = Distribution([0.05] * 990 + [2.0] * 10)
    closed = replace(QUICK, loop="closed", concurrency=4, rate=None, latency_curve=slow.curve())
    plot_run(closed, 0.3, "a server", tmp_path / "run.svg")
    assert "<!-- from sending: p99 50.0 ms -->" in (tmp_path / "run.svg").read_text(encoding="utf-8")


def test_a_picture_of_nothing_is_drawn_too(tmp_path: Path) -> None:
    plot_run(run_of([]), None, "a server", tmp_path / "run.png")
    plot_knee(knee_of({16.0: run_of([])}), 0.3, "a server", tmp_path / "knee.png")
    for name in ("run.png", "knee.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
