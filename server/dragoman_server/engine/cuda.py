"""The two things that are asked of CUDA itself, through its runtime library: ONNX Runtime's Python has no way to."""

from __future__ import annotations

import ctypes
import functools

import onnxruntime


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """libcudart, of the version that ONNX Runtime was built with if it is there; None without any."""
    major = str(getattr(onnxruntime, "cuda_version", "")).partition(".")[0]
    for name in (f"libcudart.so.{major}", "libcudart.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def num_devices() -> int:
    """GPUs that can be used; 0 without CUDA's runtime library or its driver."""
    count = ctypes.c_int(0)
    runtime = _runtime()
    if runtime is None or runtime.cudaGetDeviceCount(ctypes.byref(count)):
        return 0
    return count.value


def new_stream() -> int:
    """The handle of a new stream on the first GPU. It lives as long as the process: sessions that use it may, too.

    It is a blocking one on purpose. What ONNX Runtime copies outside of a run goes through the default stream, which
    waits for the work in blocking streams, and they for it.

    Raises:
        OSError: there is no GPU.
    """
    stream = ctypes.c_void_p()
    runtime = _runtime()
    error = -1 if runtime is None else runtime.cudaStreamCreate(ctypes.byref(stream))
    if error or stream.value is None:
        raise OSError(f"cudaStreamCreate failed with error {error}")
    return stream.value
