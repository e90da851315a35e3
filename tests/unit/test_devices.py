"""Which device serves, how ONNX Runtime is set up for it, and what happens without it. No GPU is needed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from dragoman_bundle.architecture import Architecture
from dragoman_bundle.manifest import BundleError, FileDigest
from dragoman_export.linear import FloatLinear
from dragoman_export.model import Transformer
from dragoman_server.engine import cuda, devices
from dragoman_server.engine.device_model import DeviceModel
from dragoman_server.engine.devices import (
    LEAST_SOLO_BYTES,
    DeviceChoice,
    WantedDevice,
    choose_device,
    choose_variant,
    open_model,
)
from dragoman_server.engine.model_runner import OnnxModel
from tests.bare_model import write_graphs

CPU, BOTH = ["CPUExecutionProvider"], ["CUDAExecutionProvider", "CPUExecutionProvider"]
ARCH = Architecture(vocab_size=20, d_model=16, num_heads=2, d_ff=16, encoder_layers=1, decoder_layers=1)


class StubBundle:
    """A bundle as far as devices are concerned."""

    def __init__(self, directory: Path, *variants: str, has_rows: bool = True, weight_bytes: int = 1000) -> None:
        self.path = directory
        self.variants = [self._variant(*kind.split("-"), has_rows=has_rows) for kind in variants]
        files = {"weights.bin": FileDigest(size=weight_bytes, sha256="")}
        self.manifest = SimpleNamespace(name="stub", architecture=ARCH, variants=self.variants, files=files)

    @staticmethod
    def _variant(device: str, precision: str, *, has_rows: bool) -> Any:
        graphs = {name: f"{name}.onnx" for name in ("encoder", "decoder", "search")}
        rows = "rows.onnx" if device == "cuda" and has_rows else None
        own = {"device": device, "precision": precision, "cache_dtype": "float32", "weights": "weights.bin"}
        return SimpleNamespace(**own, rows=rows, **graphs)

    def variant(self, device: str, precision: str | None = None) -> Any:
        matching = [v for v in self.variants if v.device == device and precision in (None, v.precision)]
        return matching[0] if matching else None

    def file(self, name: str) -> Path:
        return self.path / name


def stub(*variants: str, directory: Path = Path(), has_rows: bool = True, weight_bytes: int = 1000) -> Any:
    return StubBundle(directory, *variants, has_rows=has_rows, weight_bytes=weight_bytes)


@pytest.mark.parametrize(
    ("wanted", "variants", "precision", "providers", "num_devices", "expected"),
    [
        ("auto", ["cpu-int8", "cuda-fp16"], None, BOTH, 1, DeviceChoice("cuda")),
        ("cuda", ["cpu-int8", "cuda-fp16"], None, BOTH, 2, DeviceChoice("cuda")),
        ("auto", ["cuda-fp16"], "fp16", BOTH, 1, DeviceChoice("cuda")),
        ("cpu", ["cpu-int8", "cuda-fp16"], None, BOTH, 1, DeviceChoice("cpu")),
        ("auto", ["cpu-int8", "cuda-fp16"], None, CPU, 0, DeviceChoice("cpu", "onnxruntime-gpu is not installed")),
        ("cuda", ["cpu-int8", "cuda-fp16"], None, CPU, 1, DeviceChoice("cpu", "onnxruntime-gpu is not installed")),
        ("cuda", ["cpu-int8", "cuda-fp16"], None, BOTH, 0, DeviceChoice("cpu", "no device was found")),
        ("auto", ["cpu-int8"], None, BOTH, 1, DeviceChoice("cpu", "the bundle has no cuda variant")),
        (
            "cuda", ["cpu-int8", "cuda-fp16"], "int8", BOTH, 1,
            DeviceChoice("cpu", "the bundle has no cuda variant of precision int8"),
        ),
    ],
)  # fmt: skip
def test_cuda_is_chosen_where_it_can_be(
    wanted: WantedDevice,
    variants: list[str],
    precision: str | None,
    providers: list[str],
    num_devices: int,
    expected: DeviceChoice,
) -> None:
    assert choose_device(stub(*variants), precision, wanted, providers, num_devices) == expected


def test_a_cuda_variant_without_a_rows_graph_is_not_chosen() -> None:
    choice = choose_device(stub("cpu-int8", "cuda-fp16", has_rows=False), None, "auto", BOTH, 1)
    assert choice.device == "cpu"
    assert "no rows graph" in choice.reason


@pytest.mark.parametrize(("wanted", "level"), [("auto", logging.INFO), ("cuda", logging.WARNING)])
def test_one_line_says_why_the_cpu_serves(
    wanted: WantedDevice, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: CPU)
    with caplog.at_level(logging.INFO):
        variant = choose_variant(stub("cpu-int8", "cuda-fp16"), None, wanted)
    assert variant.device == "cpu"
    line = "stub: no CUDA: onnxruntime-gpu is not installed; serving on the CPU"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, line)]


def test_nothing_is_said_when_the_cpu_is_what_was_wanted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choose_variant(stub("cpu-int8", "cuda-fp16"), None, "cpu")
    assert not caplog.records


def test_a_bundle_for_cuda_alone_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: CPU)
    with pytest.raises(BundleError, match="it has no cpu variant of precision any; it has cuda-fp16"):
        choose_variant(stub("cuda-fp16"), None, "auto")


def test_what_preload_prints_is_logged_and_a_missing_driver_is_no_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: BOTH)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print("Failed to load libcublas.so.13"))
    runtime = SimpleNamespace(cudaGetDeviceCount=lambda _: 35, cudaStreamCreate=lambda _: 35)
    monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
    with caplog.at_level(logging.INFO):
        choose_variant(stub("cpu-int8", "cuda-fp16"), None, "cuda")
    assert "Failed to load libcublas.so.13" in caplog.text
    assert "no CUDA: no device was found" in caplog.text
    assert capsys.readouterr().out == ""
    with pytest.raises(OSError, match="cudaStreamCreate failed with error 35"):
        cuda.new_stream()


class FakeSession:
    """What `InferenceSession` was asked for; it claims to run on `providers`."""

    made: list[FakeSession]
    providers: list[str]

    def __init__(self, path: str, options: Any, providers: list[Any], **others: Any) -> None:
        self.path, self.options, self.wanted, self.others = path, options, providers, others
        self.made.append(self)

    def get_providers(self) -> list[str]:
        return self.providers

    def get_outputs(self) -> list[Any]:
        return []


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeSession]:
    """ONNX Runtime with a GPU."""
    monkeypatch.setattr(FakeSession, "made", [], raising=False)
    monkeypatch.setattr(FakeSession, "providers", BOTH, raising=False)
    monkeypatch.setattr(onnxruntime, "InferenceSession", FakeSession)
    monkeypatch.setattr(cuda, "new_stream", lambda: 4711)
    return FakeSession


def disabled_optimisers(session: FakeSession) -> str | None:
    try:
        found: str = session.options.get_session_config_entry("optimization.disable_specified_optimizers")
    except RuntimeError:
        return None
    return found


def test_on_cuda_all_graphs_share_a_stream_and_nothing_is_left_unfused(fake: type[FakeSession]) -> None:
    bundle = stub("cuda-fp16")
    model = open_model(bundle, bundle.variants[0], None, 3)
    assert isinstance(model, DeviceModel)
    assert [Path(session.path).name for session in fake.made] == [
        "encoder.onnx", "decoder.onnx", "search.onnx", "rows.onnx",
    ]  # fmt: skip
    for session in fake.made:
        options = {"user_compute_stream": "4711"}
        assert session.wanted == [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
        assert session.others == {"enable_fallback": False}
        assert disabled_optimisers(session) is None
        assert session.options.intra_op_num_threads == 3
    assert model.without_waiting.get_run_config_entry("disable_synchronize_execution_providers") == "1"


def test_on_the_cpu_no_provider_is_asked_for_a_stream(fake: type[FakeSession]) -> None:
    bundle = stub("cpu-fp32")
    assert isinstance(open_model(bundle, bundle.variants[0], None, 1), OnnxModel)
    for session in fake.made:
        assert session.wanted == CPU
        assert disabled_optimisers(session) == "SkipLayerNormFusion"


@pytest.mark.parametrize(
    ("weight_bytes", "num_solo_threads", "expected"),
    [(LEAST_SOLO_BYTES, 4, [1, 1, 4, 4, 1]), (LEAST_SOLO_BYTES, 1, [1, 1, 1]), (LEAST_SOLO_BYTES - 1, 4, [1, 1, 1])],
)
def test_a_large_model_is_opened_again_for_an_engine_that_is_alone(
    fake: type[FakeSession], weight_bytes: int, num_solo_threads: int, expected: list[int]
) -> None:
    bundle = stub("cpu-int8", weight_bytes=weight_bytes)
    model = open_model(bundle, bundle.variants[0], None, 1, num_solo_threads)
    assert model.has_solo == (len(expected) > 3)
    assert [session.options.intra_op_num_threads for session in fake.made] == expected


def test_the_code_for_devices_runs_on_the_cpu_with_the_cpus_settings(fake: type[FakeSession]) -> None:
    bundle = stub("cuda-fp16")
    model = DeviceModel(bundle, bundle.variants[0], 1, "cpu")
    assert all(session.wanted == CPU and disabled_optimisers(session) for session in fake.made)
    with pytest.raises(RuntimeError):
        model.without_waiting.get_run_config_entry("disable_synchronize_execution_providers")


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    """A bundle with graphs that can be opened."""
    write_graphs(Transformer(ARCH), tmp_path, FloatLinear("float32"), 16)
    return stub("cpu-fp32", "cuda-fp16", directory=tmp_path)


def test_a_session_that_silently_stays_on_the_cpu_is_not_used(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This is what ONNX Runtime does when one of CUDA's libraries is missing."""
    monkeypatch.setattr(cuda, "new_stream", lambda: 4711)
    real = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda path, options, **_: real(path, options, providers=CPU))
    model = open_model(tiny, tiny.variant("cuda"), None, 1)
    assert isinstance(model, OnnxModel)
    assert model.variant.device == "cpu"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("stub: no CUDA: ONNX Runtime does not use it")


def test_a_session_that_cannot_be_made_is_done_without(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "new_stream", lambda: 4711)
    real = onnxruntime.InferenceSession

    def refuse(path: str, options: Any, providers: list[Any], **_: Any) -> Any:
        if providers != CPU:
            raise RuntimeError("CUDA failure 2: out of memory")
        return real(path, options, providers=CPU)

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    assert isinstance(open_model(tiny, tiny.variant("cuda"), None, 1), OnnxModel)
    [record] = caplog.records
    assert "CUDA failure 2: out of memory; serving on the CPU" in record.getMessage()


def test_without_a_stream_there_is_no_cuda(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "_runtime", lambda: None)
    assert isinstance(open_model(tiny, tiny.variant("cuda"), None, 1), OnnxModel)
    assert "cudaStreamCreate failed" in caplog.text


def test_a_device_takes_one_instance(tiny: Any) -> None:
    model = DeviceModel(tiny, tiny.variant("cuda"), 1, "cpu")
    with pytest.raises(AssertionError):
        devices.new_runners(model, 4, 2)
