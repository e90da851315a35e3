"""What a model may take: memory, and the time of others."""

from __future__ import annotations

import dataclasses

import pytest

from dragoman_bundle.architecture import PRESETS, Architecture
from dragoman_bundle.tensors import DType
from dragoman_server.engine.engine import Engine
from dragoman_server.engine.kv_cache import KVCache
from dragoman_server.engine.scheduler import SchedulerLimits
from dragoman_server.engine.waiting_line import WaitingLine
from dragoman_server.model import EngineSettings
from dragoman_server.settings import ServerSettings
from tests.doubles import END, EchoRunner, make_sequence

ARCH = Architecture(vocab_size=100, **PRESETS["tiny"])


def engine_settings(*flags: str) -> EngineSettings:
    return ServerSettings.load([*flags, "--instances", "2"]).engine_settings(1)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(("max_target", "max_source"), [(64, 64), (100, 77), (512, 1024)])
def test_a_slot_takes_what_it_is_said_to_take(max_target: int, max_source: int, dtype: DType) -> None:
    cache = KVCache(ARCH, dtype, 6, max_target, max_source)
    assert cache.num_bytes == 6 * KVCache.slot_bytes(ARCH, dtype, max_target, max_source)


def test_memory_bounds_the_slots() -> None:
    settings = engine_settings("--slots", "64", "--memory-mib", "10")
    assert settings.within_memory(2**20).num_slots == 10
    assert settings.within_memory(3 * 2**20).num_slots == 2, "as many for each instance"
    assert settings.within_memory(2**10).num_slots == 64, "--slots is a bound as well"
    assert engine_settings("--slots", "64").within_memory(2**40).num_slots == 64, "0 is no limit"
    with pytest.raises(ValueError, match="takes 12 MiB; raise --memory-mib"):
        settings.within_memory(6 * 2**20)


def test_newcomers_take_no_more_time_from_running_texts_than_allowed() -> None:
    limits = SchedulerLimits(max_rows=64, max_encode_tokens=1000, max_encode_s=0.1)
    runner = EchoRunner()
    engine = Engine(runner, limits, WaitingLine(100), END)
    engine.pace.encode_tokens_per_s = 200.0  # so 20 tokens while others run
    engine.scheduler.line.add(*(make_sequence(i, [5] * 10) for i in range(3)))
    assert len(engine.scheduler.plan(200.0)[0].newcomers) == 3, "nobody runs yet"
    engine.scheduler.line.add(*(make_sequence(i, [5] * 10) for i in range(10, 15)))
    assert len(engine.scheduler.plan(200.0)[0].newcomers) == 2
    engine.scheduler.limits = dataclasses.replace(limits, max_encode_s=0.0)
    assert len(engine.scheduler.plan(200.0)[0].newcomers) == 3
