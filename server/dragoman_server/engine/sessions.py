"""Opening graphs on ONNX Runtime, on the processor or on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnxruntime

from dragoman_bundle.bundle import Bundle
from dragoman_bundle.manifest import BundleError, Device
from dragoman_bundle.runtime import session_config
from dragoman_server.engine import cuda

CPU_PROVIDER: Final = "CPUExecutionProvider"
CUDA_PROVIDER: Final = "CUDAExecutionProvider"


class DeviceError(Exception):
    """A device that cannot be used."""


def open_session(
    bundle: Bundle, graph: str, num_threads: int, device: Device = "cpu", cuda_options: Mapping[str, str] | None = None
) -> onnxruntime.InferenceSession:
    """Open one of a bundle's graphs.

    Args:
        bundle: verified.
        graph: file name.
        num_threads: that one run uses on the processor.
        device: to run on; CUDA leaves to the processor what it has no kernels for.
        cuda_options: of the CUDA provider.

    Raises:
        DeviceError: the graph cannot be run on CUDA.
        BundleError: it cannot be run on the processor.
    """
    providers = [*([(CUDA_PROVIDER, dict(cuda_options or {}))] if device == "cuda" else []), CPU_PROVIDER]
    try:
        session = onnxruntime.InferenceSession(
            str(bundle.file(graph)), _options(num_threads, device), providers=providers, enable_fallback=False
        )
    except Exception as error:  # ONNX Runtime's errors have no base class of their own
        if device == "cuda":
            raise DeviceError(f"ONNX Runtime cannot open {graph} there: {error}") from error
        raise BundleError(bundle.path, [f"ONNX Runtime cannot load {graph}: {error}"]) from error
    if device == "cuda" and CUDA_PROVIDER not in session.get_providers():
        # A library is missing; that is only a warning to ONNX Runtime.
        raise DeviceError("ONNX Runtime does not use it; its own messages say why")
    return session


def cuda_options() -> dict[str, str]:
    """Options of the CUDA provider for all sessions of one model: they run in one stream.

    Raises:
        DeviceError: there is no stream to be had.
    """
    try:
        return {"user_compute_stream": str(cuda.new_stream())}
    except OSError as error:
        raise DeviceError(str(error)) from error


def _options(num_threads: int, device: Device) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    for key, value in session_config(device).items():
        options.add_session_config_entry(key, value)
    # A thread that spins for long takes the processor from the other graphs' threads.
    options.add_session_config_entry("session.intra_op.spin_duration_us", "100")
    return options
