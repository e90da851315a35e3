"""How ONNX Runtime has to be set up for a bundle's graphs: they are proved with the settings they are served with."""

from __future__ import annotations

from dragoman_bundle.manifest import Device


def session_config(device: Device) -> dict[str, str]:
    """Entries for `SessionOptions.add_session_config_entry`."""
    if device == "cuda":
        return {}
    # It would fuse what the exporter has left apart on purpose: the fused operator is several times slower on a CPU.
    return {"optimization.disable_specified_optimizers": "SkipLayerNormFusion"}
