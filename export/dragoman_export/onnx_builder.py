"""A small builder of ONNX graphs: nodes by call, weights in one external file that several graphs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from dragoman_bundle.tensors import TensorSpec

Array = npt.NDArray[Any]

OPSET = 21
MICROSOFT = "com.microsoft"
_IR_VERSION = 10
_INLINE_BYTES = 1024
"""Tensors up to this size stay inside the graph, where shape inference can read them."""
_ALIGNMENT = 64


@dataclass
class WeightFile:
    """The external data of a bundle's graphs: a tensor that two graphs use is stored once."""

    name: str
    _chunks: list[bytes] = field(default_factory=list)
    _size: int = 0
    _offsets: dict[bytes, int] = field(default_factory=dict)

    def add(self, content: bytes) -> int:
        """Store bytes (once) and return their offset."""
        known = self._offsets.get(content)
        if known is not None:
            return known
        padding = -self._size % _ALIGNMENT
        self._chunks += [b"\0" * padding, content]
        offset = self._size + padding
        self._offsets[content] = offset
        self._size = offset + len(content)
        return offset

    def write(self, directory: Path) -> None:
        """Write the file."""
        (directory / self.name).write_bytes(b"".join(self._chunks))


class GraphBuilder:
    """Collects the nodes and weights of one graph.

    Args:
        name: of the graph.
        weights: where large tensors go.
    """

    def __init__(self, name: str, weights: WeightFile) -> None:
        self._name = name
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._num_values = 0

    def node(
        self,
        op: str,
        *inputs: str,
        name: str = "",
        outputs: Sequence[str] | int = 1,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node.

        Args:
            op: operator.
            inputs: value names; "" leaves an optional input out.
            name: where in the model this is; names the outputs too.
            outputs: their names, or how many to make up.
            domain: of the operator.
            attributes: of the node.

        Returns:
            The names of its outputs.
        """
        self._num_values += 1
        label = f"{name or op}#{self._num_values}"
        if isinstance(outputs, int):
            outputs = [label if i == 0 else f"{label}.{i}" for i in range(outputs)]
        self._nodes.append(helper.make_node(op, list(inputs), list(outputs), name=label, domain=domain, **attributes))
        return list(outputs)

    def op(self, op: str, *inputs: str, name: str = "", domain: str = "", output: str = "", **attributes: Any) -> str:
        """Add a node with one output, called `output` or else as `node` does, and return its name."""
        return self.node(op, *inputs, name=name, domain=domain, outputs=[output] if output else 1, **attributes)[0]

    def tensor(self, name: str, value: Array) -> str:
        """Add a constant, once per name, and return its name."""
        if name not in self._initializers:
            self._initializers[name] = self._store(name, np.ascontiguousarray(value))
        return name

    def _store(self, name: str, value: Array) -> TensorProto:
        proto: TensorProto = onnx.numpy_helper.from_array(value, name)
        if value.nbytes <= _INLINE_BYTES:
            return proto
        content = proto.raw_data
        offset = self._weights.add(content)
        proto.ClearField("raw_data")
        proto.data_location = TensorProto.EXTERNAL
        for key, text in (("location", self._weights.name), ("offset", offset), ("length", len(content))):
            proto.external_data.add(key=key, value=str(text))
        return proto

    def model(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> onnx.ModelProto:
        """The finished graph."""
        graph = helper.make_graph(
            self._nodes,
            self._name,
            [_value_info(spec) for spec in inputs],
            [_value_info(spec) for spec in outputs],
            list(self._initializers.values()),
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, producer_name="dragoman", ir_version=_IR_VERSION)


def _value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
    return helper.make_tensor_value_info(spec.name, element_type, list(spec.axes))
