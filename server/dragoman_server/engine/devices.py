"""Which device serves a bundle, and what becomes of a GPU that is wanted and not there: one line in the log."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple

import onnxruntime

from dragoman_bundle.bundle import Bundle
from dragoman_bundle.manifest import BundleError, Device, Variant
from dragoman_server.engine import cuda
from dragoman_server.engine.device_model import DeviceModel
from dragoman_server.engine.device_runner import DeviceModelRunner
from dragoman_server.engine.model_runner import OnnxModel, OnnxModelRunner
from dragoman_server.engine.sessions import CUDA_PROVIDER, DeviceError

_LOG = logging.getLogger(__name__)

WantedDevice = Literal["auto", "cpu", "cuda"]


class DeviceChoice(NamedTuple):
    """Where a bundle is to be served."""

    device: Device
    reason: str = ""
    """Why it is not CUDA; empty if nobody asked for that."""


def choose_device(
    bundle: Bundle,
    precision: str | None,
    wanted: WantedDevice,
    available_providers: Iterable[str],
    num_cuda_devices: int,
) -> DeviceChoice:
    """CUDA if it is wanted and possible, else the CPU.

    Args:
        bundle: to be served.
        precision: of the variant; None for any.
        wanted: "auto" is CUDA where there is a GPU.
        available_providers: of this installation of ONNX Runtime, whether or not they find a device.
        num_cuda_devices: GPUs that CUDA finds.
    """
    if wanted == "cpu":
        return DeviceChoice("cpu")
    if CUDA_PROVIDER not in available_providers:
        return DeviceChoice("cpu", "onnxruntime-gpu is not installed")
    if not num_cuda_devices:
        return DeviceChoice("cpu", "no device was found")
    variant = bundle.variant("cuda", precision)
    if variant is None:
        return DeviceChoice("cpu", f"the bundle has no cuda variant{f' of precision {precision}' if precision else ''}")
    if variant.rows is None:
        return DeviceChoice("cpu", "the bundle's cuda variant has no rows graph, it was exported by an older version")
    return DeviceChoice("cuda")


def choose_variant(bundle: Bundle, precision: str | None, wanted: WantedDevice) -> Variant:
    """The variant of a bundle that is to be served on this machine.

    Args:
        bundle: verified.
        precision: of the variant; None for the fastest.
        wanted: where to serve it; without a GPU it is the CPU in any case.

    Raises:
        BundleError: it has no such variant.
    """
    num_gpus = 0 if wanted == "cpu" else usable_gpus()
    device, reason = choose_device(bundle, precision, wanted, onnxruntime.get_available_providers(), num_gpus)
    if reason:
        _report(bundle, reason, logging.WARNING if wanted == "cuda" else logging.INFO)
    return _variant(bundle, device, precision)


LEAST_SOLO_BYTES = 16 * 2**20
"""Of weights. Threads of one graph wait for each other at every operator: a smaller model loses more than it gains."""


def open_model(
    bundle: Bundle, variant: Variant, precision: str | None, num_threads: int, num_solo_threads: int = 0
) -> OnnxModel | DeviceModel:
    """Open a variant on the device that it is for; if that fails on a GPU, one for the CPU.

    Args:
        bundle: verified.
        variant: of the bundle.
        precision: that was asked for; None for any.
        num_threads: that one run of a graph uses on the CPU.
        num_solo_threads: likewise, while no other engine is at work; not used for small models.

    Raises:
        BundleError: ONNX Runtime cannot load it, or there is none for the CPU.
    """
    if variant.device == "cuda":
        try:
            return DeviceModel(bundle, variant, num_threads, "cuda")
        except DeviceError as error:
            _report(bundle, str(error), logging.WARNING)
            variant = _variant(bundle, "cpu", precision)
    is_large = bundle.manifest.files[variant.weights].size >= LEAST_SOLO_BYTES
    return OnnxModel(bundle, variant, num_threads, num_solo_threads if is_large else 0)


def _report(bundle: Bundle, reason: str, level: int) -> None:
    _LOG.log(level, "%s: no CUDA: %s; serving on the CPU", bundle.manifest.name, reason)


def new_runners(
    model: OnnxModel | DeviceModel, num_slots: int, num_instances: int
) -> Seq[OnnxModelRunner | DeviceModelRunner]:
    """Runners of a model for engines that work side by side.

    Args:
        model: opened.
        num_slots: of each.
        num_instances: how many; a device takes one, since its graphs share a stream.
    """
    if isinstance(model, DeviceModel):
        assert num_instances == 1
        return [DeviceModelRunner(model, num_slots)]
    return [OnnxModelRunner(model, num_slots) for _ in range(num_instances)]


def _variant(bundle: Bundle, device: Device, precision: str | None) -> Variant:
    variant = bundle.variant(device, precision)
    if variant is None:
        have = ", ".join(f"{v.device}-{v.precision}" for v in bundle.manifest.variants)
        problem = f"it has no {device} variant of precision {precision or 'any'}; it has {have}"
        raise BundleError(bundle.path, [problem])
    return variant


def usable_gpus() -> int:
    """How many GPUs CUDA finds, once its libraries are loaded: those from Python packages are on no search path."""
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        return 0
    with contextlib.redirect_stdout(io.StringIO()) as said:  # it prints what it does not find
        onnxruntime.preload_dlls()
    if said.getvalue():
        _LOG.warning("ONNX Runtime: %s", "; ".join(said.getvalue().splitlines()))
    return cuda.num_devices()
