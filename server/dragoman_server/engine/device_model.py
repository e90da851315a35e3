"""A variant whose caches and logits stay on an ONNX Runtime device from step to step."""

from __future__ import annotations

import numpy as np
import onnxruntime

from dragoman_bundle.bundle import Bundle
from dragoman_bundle.manifest import Device, Variant
from dragoman_bundle.tensors import DType
from dragoman_server.engine.sessions import cuda_options, open_session


class DeviceModel:
    """A bundle's variant, opened on a device.

    On CUDA all graphs run in one stream, so that each finds what the one before it has made without anybody waiting.

    Args:
        bundle: verified.
        variant: of the bundle, with a rows graph.
        num_threads: that one run of a graph uses for what stays on the CPU.
        device: "cuda" to serve; "cpu" runs the same code without a GPU.

    Raises:
        DeviceError: the device cannot be used.
        BundleError: ONNX Runtime cannot load the graphs.
    """

    has_solo = False
    """Whether a runner that is alone has graphs of its own."""

    def __init__(self, bundle: Bundle, variant: Variant, num_threads: int, device: Device) -> None:
        assert variant.rows is not None
        self.manifest = bundle.manifest
        self.variant = variant
        self.device = device
        options = cuda_options() if device == "cuda" else {}
        self.encoder, self.decoder, self.search, self.rows = (
            open_session(bundle, graph, num_threads, device, options)
            for graph in (variant.encoder, variant.decoder, variant.search, variant.rows)
        )
        self.encoder_outputs = [output.name for output in self.encoder.get_outputs()]
        self.without_waiting = onnxruntime.RunOptions()
        """For runs whose results stay on the device: whoever fetches what they lead to waits for all of them."""
        if device == "cuda":
            self.without_waiting.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> onnxruntime.OrtValue:
        """New memory on the device. What no row has written is multiplied by 0 at times, and NaN would survive that."""
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), self.device, 0)
