"""How the graphs multiply matrices: in floating point, or in int8 with scales fixed at export.

Both are batch-invariant: no number in a row depends on another row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import onnx

from dragoman_bundle.tensors import DType
from dragoman_export.onnx_builder import MICROSOFT, GraphBuilder

Array = npt.NDArray[Any]


class LinearLayer(NamedTuple):
    """relu?(x) W (+ b)."""

    name: str
    weight: Array
    """float32 [in_features, out_features]."""
    bias: Array | None
    """float32 [out_features]."""
    relu_input: bool
    """Whether x is to be rectified first."""
    output: str = ""
    """Name of the result; made up if empty."""


class LinearStyle(Protocol):
    """A way to compute linear layers and to look up embeddings."""

    def apply(self, builder: GraphBuilder, x: str, layer: LinearLayer) -> str:
        """Add nodes for a layer over x [..., in_features] and return the result's name."""

    def embed(self, builder: GraphBuilder, ids: str, name: str, table: Array) -> str:
        """Add nodes for table[ids]; `table` is float32 [vocab_size, d_model]."""


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """Matrix products in the dtype of the activations."""

    dtype: DType

    def apply(self, builder: GraphBuilder, x: str, layer: LinearLayer) -> str:
        """See `LinearStyle`."""
        name = layer.name
        rectified = builder.op("Relu", x, name=f"{name}.relu") if layer.relu_input else x
        weight = builder.tensor(f"{name}.weight", layer.weight.astype(self.dtype))
        if layer.bias is None:
            return builder.op("MatMul", rectified, weight, name=name, output=layer.output)
        product = builder.op("MatMul", rectified, weight, name=name)
        bias = builder.tensor(f"{name}.bias", layer.bias.astype(self.dtype))
        return builder.op("Add", product, bias, name=f"{name}.biased", output=layer.output)

    def embed(self, builder: GraphBuilder, ids: str, name: str, table: Array) -> str:
        """See `LinearStyle`."""
        return builder.op("Gather", builder.tensor(f"{name}.weight", table.astype(self.dtype)), ids, name=name)


@dataclass(frozen=True, slots=True)
class ActivationRange:
    """The values a linear layer reads, as seen in calibration; beyond them the input saturates."""

    maximum: float
    """Largest magnitude; after a rectifier, largest value."""


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """u8 activations times s8 weights, accumulated in int32.

    Weights have one symmetric scale per output channel. Activations have one scale per layer, fixed at export: a
    scale taken from the batch, as ONNX dynamic quantisation does, would let neighbours change a row's result.
    """

    ranges: Mapping[str, ActivationRange]
    """Per layer name, as given to `apply`."""

    def apply(self, builder: GraphBuilder, x: str, layer: LinearLayer) -> str:
        """See `LinearStyle`. A rectifier costs nothing: with zero point 0, negative values saturate at 0."""
        name = layer.name
        zero, levels = (0, 255) if layer.relu_input else (128, 127)
        maximum = self.ranges[name.partition("+")[0]].maximum
        scale = builder.tensor(f"{name}.input_scale", np.array(maximum / levels, np.float32))
        zero_point = builder.tensor(f"uint8({zero})", np.array(zero, np.uint8))
        quantised = builder.op("QuantizeLinear", x, scale, zero_point, name=f"{name}.input")
        integers, scales = quantise_weight(layer.weight)
        inputs = [
            quantised,
            builder.tensor(f"{name}.weight", integers),
            scale,
            builder.tensor(f"{name}.weight_scale", scales),
            zero_point,
            builder.tensor("int8(0)", np.array(0, np.int8)),
        ]
        if layer.bias is not None:
            inputs.append(builder.tensor(f"{name}.bias", layer.bias))
        return builder.op("MatMulIntegerToFloat", *inputs, name=name, domain=MICROSOFT, output=layer.output)

    def embed(self, builder: GraphBuilder, ids: str, name: str, table: Array) -> str:
        """See `LinearStyle`. Rows are stored as such, beside the generator's columns: to gather columns is slow."""
        integers, scales = quantise_weight(table.T)
        gathered = builder.op("Gather", builder.tensor(f"{name}.weight", integers.T), ids, name=name)
        scale = builder.op("Gather", builder.tensor(f"{name}.weight_scale", scales[:, None]), ids, name=f"{name}.scale")
        floats = builder.op("Cast", gathered, name=f"{name}.float", to=onnx.TensorProto.FLOAT)
        return builder.op("Mul", floats, scale, name=f"{name}.dequantised")


def quantise_weight(weight: Array) -> tuple[Array, Array]:
    """Symmetric s8 with one scale per output channel.

    Args:
        weight: float32 [in_features, out_features].

    Returns:
        int8 [in_features, out_features] in -127..127 and float32 scales [out_features].
    """
    scales = np.maximum(np.abs(weight).max(0), 1e-8) / 127.0
    return np.clip(np.rint(weight / scales), -127, 127).astype(np.int8), scales.astype(np.float32)
