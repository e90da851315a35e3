"""The graphs of a bundle, built node by node from an architecture and its weights.

The encoder runs once per sentence and emits what cross-attention needs of it. The decode step runs once per
token over rows of different ages: every row has its own past length, and its caches are updated in place. The search
graph turns logits into candidates; greedy search on a CPU does without it. The rows graph copies rows between caches
that are not in the processor's own memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from dragoman_bundle import tensors
from dragoman_bundle.architecture import Architecture
from dragoman_bundle.tensors import DType
from dragoman_export.linear import LinearLayer, LinearStyle
from dragoman_export.model import sinusoidal_positions
from dragoman_export.onnx_builder import MICROSOFT, GraphBuilder, WeightFile

Weights = Mapping[str, npt.NDArray[np.float32]]
"""A model's parameters under the names of `dragoman_export.model.Transformer`."""

_LAYER_NORM_EPSILON = 1e-5
"""torch.nn.LayerNorm's default."""


_SMALLEST_BLOCKWISE = 4096
"""Values from which on the largest are searched by blocks."""


@dataclass(frozen=True, slots=True)
class Graphs:
    """A model as ONNX: its graphs and the weight file that they share."""

    encoder: onnx.ModelProto
    decoder: onnx.ModelProto
    search: onnx.ModelProto
    rows: onnx.ModelProto
    weights: WeightFile

    def named(self) -> dict[str, onnx.ModelProto]:
        """The graphs under their names in a manifest."""
        return {"encoder": self.encoder, "decoder": self.decoder, "search": self.search, "rows": self.rows}


def build_graphs(
    arch: Architecture,
    weights: Weights,
    linear: LinearStyle,
    cache_dtype: DType,
    max_positions: int,
    weight_file: str,
) -> Graphs:
    """Build all graphs.

    Args:
        arch: of the model.
        weights: its parameters.
        linear: how matrix products are computed.
        cache_dtype: of keys and values. In int8 they are rounded to whole numbers, so the weights must give them in
            units of one level; see `quantization.with_int8_caches`.
        max_positions: longest source or target, in tokens.
        weight_file: name of the external data file.
    """
    file = WeightFile(weight_file)
    encoder = _EncoderGraph(arch, weights, linear, cache_dtype, max_positions, GraphBuilder("encoder", file)).build()
    step = GraphBuilder("decode_step", file)
    decoder = _DecoderGraph(arch, weights, linear, cache_dtype, max_positions, step).build()
    search = _search_graph(arch, GraphBuilder("search", file))
    return Graphs(encoder, decoder, search, _rows_graph(arch, cache_dtype, GraphBuilder("rows", file)), file)


def _search_graph(arch: Architecture, builder: GraphBuilder) -> onnx.ModelProto:
    log_probs = builder.op("LogSoftmax", tensors.LOGITS, axis=1)
    _top(builder, log_probs, arch.vocab_size)
    builder.node("GatherElements", log_probs, tensors.ASKED_IDS, outputs=[tensors.ASKED_LOG_PROBS], axis=1)
    return builder.model(tensors.search_inputs(arch), tensors.search_outputs())


def _top(builder: GraphBuilder, values: str, size: int) -> None:
    """The largest values [rows, count] of [rows, size], and where they are.

    They lie in the `count` blocks with the largest maxima, so that only those have to be searched; a maximum is found
    much faster than a place among the largest.
    """
    outputs = [tensors.TOP_LOG_PROBS, tensors.TOP_IDS]
    block = next((b for b in (128, 125, 100, 96, 80, 64) if not size % b), 0)
    if size < _SMALLEST_BLOCKWISE or not block:
        builder.node("TopK", values, tensors.COUNT, outputs=outputs, axis=1)
        return

    def integer(value: int) -> str:
        return builder.tensor(f"int64({value})", np.array(value, np.int64))

    def vector(*items: int) -> str:
        return builder.tensor(f"int64{list(items)}", np.array(items, np.int64))

    blocks = builder.op("Reshape", values, vector(0, -1, block))
    maxima = builder.op("ReduceMax", blocks, vector(2), keepdims=0)
    _, chosen = builder.node("TopK", maxima, tensors.COUNT, outputs=2, axis=1)
    # [rows, count] -> [rows, count, 1] -> GatherND over the blocks of each row -> [rows, count * block]
    index = builder.op("Unsqueeze", chosen, vector(2))
    candidates = builder.op("GatherND", blocks, index, batch_dims=1)
    flat = builder.op("Reshape", candidates, vector(0, -1))
    _, places = builder.node("TopK", flat, tensors.COUNT, outputs=[outputs[0], "places"], axis=1)
    which = builder.op("GatherElements", chosen, builder.op("Div", places, integer(block)), axis=1)
    start = builder.op("Mul", which, integer(block))
    builder.node("Add", start, builder.op("Mod", places, integer(block)), outputs=[outputs[1]])


def _rows_graph(arch: Architecture, cache_dtype: DType, builder: GraphBuilder) -> onnx.ModelProto:
    """target[to_lines] = source[from_lines], for all of a decoder's keys and values.

    Lines are read before any is written, so that source and target may be the same memory in another layout. ScatterND
    on CUDA has one thread per index: with whole rows as units one thread would copy a row.
    """
    for i in range(2 * arch.decoder_layers):
        lines = builder.op("Gather", tensors.copy_source(i), tensors.FROM_LINES)
        outputs = [tensors.copy_target(i, "after")]
        builder.node("ScatterND", tensors.copy_target(i), tensors.TO_LINES, lines, outputs=outputs)
    return builder.model(tensors.rows_inputs(arch, cache_dtype), tensors.rows_outputs(arch, cache_dtype))


@dataclass(slots=True)
class _Stream:
    """The residual stream between two sub-layers."""

    residual: str
    """What the next sub-layer's output is added to, [..., d_model]."""
    entrance: str
    """What the next sub-layer reads: the same value in a post-norm model, its LayerNorm in a pre-norm one."""


class _TransformerGraph:
    """What encoder and decoder have in common."""

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        linear: LinearStyle,
        cache_dtype: DType,
        max_positions: int,
        builder: GraphBuilder,
    ) -> None:
        self.arch = arch
        self.weights = weights
        self.linear_style = linear
        self.cache_dtype = cache_dtype
        self.dtype = tensors.activation_dtype(cache_dtype)
        self.np_dtype = np.dtype(self.dtype)
        self.max_positions = max_positions
        self.builder = builder

    def constant(self, name: str, value: Any) -> str:
        """A constant in the graph's dtype."""
        return self.builder.tensor(name, np.asarray(value, self.np_dtype))

    def unit(self) -> str:
        """The scale of what is in units of one level already."""
        return self.builder.tensor("float32(1)", np.array(1, np.float32))

    def integers(self, *values: int) -> str:
        """An int64 vector, for shapes and axes."""
        return self.builder.tensor(f"int64{list(values)}", np.array(values, np.int64))

    def linear(self, x: str, *names: str, relu_input: bool = False, bias: bool = True, output: str = "") -> str:
        """X W^T (+ b), for one torch Linear or for several side by side.

        Args:
            x: [..., in_features]
            names: of the Linear modules; their outputs are concatenated.
            relu_input: x is to be rectified first.
            bias: whether there is one.
            output: name of the result; made up if empty.
        """
        weight = np.concatenate([self.weights[f"{name}.weight"] for name in names]).T
        biases = [self.weights[f"{name}.bias"] for name in names] if bias else []
        layer = LinearLayer("+".join(names), weight, np.concatenate(biases) if biases else None, relu_input, output)
        return self.linear_style.apply(self.builder, x, layer)

    def embed(self, ids: str, table: str, positions: str) -> str:
        """Embedding * sqrt(d_model) + position, for `ids` [batch, length] and the sinusoids of their places."""
        embedded = self.linear_style.embed(self.builder, ids, table, self.weights[f"{table}.weight"])
        scaled = self.builder.op("Mul", embedded, self.constant("sqrt_d_model", math.sqrt(self.arch.d_model)))
        return self.builder.op("Add", scaled, positions, name=f"{table}.sum")

    def positions(self) -> str:
        """The sinusoids of every position, [max_positions, d_model]."""
        return self.constant("positions", sinusoidal_positions(self.max_positions, self.arch.d_model).numpy())

    def enter(self, x: str, first_norm: str) -> _Stream:
        """The stream before the first sub-layer."""
        if self.arch.norm == "post":
            return _Stream(x, x)
        gamma, beta = self._norm_parameters(first_norm)
        normalised = self.builder.op("LayerNormalization", x, gamma, beta, name=first_norm, epsilon=_LAYER_NORM_EPSILON)
        return _Stream(x, normalised)

    def leave(self, stream: _Stream, sublayer: str, own_norm: str, next_norm: str) -> _Stream:
        """Add a sub-layer's output to the residual and normalise.

        A post-norm model normalises the sum with the sub-layer's own norm; a pre-norm model keeps the sum, and
        normalises what the next sub-layer reads.
        """
        pre = self.arch.norm == "pre"
        norm = next_norm if pre else own_norm
        total, normalised = self._add_and_normalise(stream.residual, sublayer, norm)
        return _Stream(total if pre else normalised, normalised)

    def _add_and_normalise(self, residual: str, sublayer: str, norm: str) -> tuple[str, str]:
        parameters = self._norm_parameters(norm)
        if self.dtype == "float16":
            outputs = [f"{norm}.normalised", "", "", f"{norm}.sum"]  # the two between CUDA does not compute
            normalised, _, _, total = self.builder.node(
                "SkipLayerNormalization", residual, sublayer, *parameters,
                name=norm, outputs=outputs, domain=MICROSOFT, epsilon=_LAYER_NORM_EPSILON,
            )  # fmt: skip
            return total, normalised
        # On the CPU the fused operator computes number by number: it takes 4 to 6 times as long as these two.
        total = self.builder.op("Add", residual, sublayer, name=f"{norm}.sum")
        return total, self.builder.op("LayerNormalization", total, *parameters, name=norm, epsilon=_LAYER_NORM_EPSILON)

    def _norm_parameters(self, name: str) -> tuple[str, str]:
        weight, bias = f"{name}.weight", f"{name}.bias"
        return self.constant(weight, self.weights[weight]), self.constant(bias, self.weights[bias])

    def feed_forward(self, stream: _Stream, layer: str, next_norm: str) -> _Stream:
        """max(0, x W_1 + b_1) W_2 + b_2 in its residual block."""
        inner = self.linear(stream.entrance, f"{layer}.feed_forward.inner")
        outer = self.linear(inner, f"{layer}.feed_forward.outer", relu_input=True)
        return self.leave(stream, outer, f"{layer}.feed_forward_residual.norm", next_norm)


class _EncoderGraph(_TransformerGraph):
    def build(self) -> onnx.ModelProto:
        arch = self.arch
        one = self.builder.tensor("int32(1)", np.array(1, np.int32))
        self.last = self.builder.op("Sub", tensors.SOURCE_LENGTHS, one, name="last_source_position")
        length = self.builder.op("Shape", tensors.INPUT_IDS, name="src_len", start=1, end=2)
        scalar = self.builder.op("Reshape", length, self.builder.tensor("int64[]", np.empty(0, np.int64)))
        self.total = self.builder.op("Cast", scalar, to=onnx.TensorProto.INT32)
        positions = self.builder.op("Slice", self.positions(), self.integers(0), length, self.integers(0))
        self.padding = self._padding(length) if self.dtype == "float16" else ()
        x = self.embed(tensors.INPUT_IDS, "source_embedding", positions)
        stream = self.enter(x, "encoder.0.self_attention_residual.norm")
        for i in range(arch.encoder_layers):
            stream = self._layer(stream, i)
        for i in range(arch.decoder_layers):
            self._cross_memory(stream.entrance, i)
        return self.builder.model(tensors.encoder_inputs(), tensors.encoder_outputs(arch, self.cache_dtype))

    def _padding(self, length: str) -> tuple[str, ...]:
        """GroupQueryAttention's last inputs: a bias [batch, 1, src_len, src_len] that hides every row's padding.

        The lengths that it is given as well are not enough. Kernels for CUDA that know only causal prompts pad them, as
        no position sees those after it there.
        """
        places = self.builder.tensor("int32(places)", np.arange(self.max_positions, dtype=np.int32))
        zeros = self.constant("zeros", np.zeros((self.max_positions, 1)))
        cut = (self.integers(0), length, self.integers(0))
        lengths = self.builder.op("Unsqueeze", tensors.SOURCE_LENGTHS, self.integers(1, 2, 3))
        is_real = self.builder.op("Less", self.builder.op("Slice", places, *cut), lengths, name="is_real")
        nowhere = self.constant("nowhere", -1e4)  # its exponential is 0, and it is far from overflow
        bias = self.builder.op("Where", is_real, self.builder.op("Slice", zeros, *cut), nowhere, name="padding_bias")
        return "", "", "", bias

    def _layer(self, stream: _Stream, index: int) -> _Stream:
        layer = f"encoder.{index}"
        is_last = index + 1 == self.arch.encoder_layers
        following = "encoder_norm" if is_last else f"encoder.{index + 1}.self_attention_residual.norm"
        projected = self.linear(stream.entrance, f"{layer}.self_attention.query", f"{layer}.self_attention.key_value")
        context, _, _ = self.builder.node(
            "GroupQueryAttention", projected, "", "", "", "", self.last, self.total, *self.padding,
            name=f"{layer}.self_attention", outputs=3, domain=MICROSOFT,
            num_heads=self.arch.num_heads, kv_num_heads=self.arch.num_heads, causal=0,
        )  # fmt: skip
        attended = self.linear(context, f"{layer}.self_attention.output")
        stream = self.leave(
            stream, attended, f"{layer}.self_attention_residual.norm", f"{layer}.feed_forward_residual.norm"
        )
        return self.feed_forward(stream, layer, following)

    def _cross_memory(self, memory: str, index: int) -> None:
        heads, dim = self.arch.num_heads, self.arch.head_dim
        projected = self.linear(memory, f"decoder.{index}.cross_attention.key_value")
        if self.cache_dtype == "int8":
            zero = self.builder.tensor("int8(0)", np.array(0, np.int8))
            projected = self.builder.op("QuantizeLinear", projected, self.unit(), zero, name=f"decoder.{index}.memory")
        halves = self.builder.node("Split", projected, outputs=2, axis=-1, num_outputs=2)
        for half, name in zip(halves, (tensors.cross_key, tensors.cross_value), strict=True):
            split = self.builder.op("Reshape", half, self.integers(0, 0, heads, dim))
            self.builder.node("Transpose", split, outputs=[name(index, "present")], perm=[0, 2, 1, 3])


class _DecoderGraph(_TransformerGraph):
    def build(self) -> onnx.ModelProto:
        arch = self.arch
        # [rows] -> [rows, 1]: one new position each.
        ids = self.builder.op("Unsqueeze", tensors.INPUT_IDS, self.integers(1))
        column = self.builder.op("Unsqueeze", tensors.PAST_LENGTHS, self.integers(1))
        positions = self.builder.op("Gather", self.positions(), column, name="positions")
        one = self.builder.tensor("int32(1)", np.array(1, np.int32))
        self.last_source = self.builder.op("Sub", tensors.SOURCE_LENGTHS, one, name="last_source_position")
        stream = self.enter(self.embed(ids, "target_embedding", positions), "decoder.0.self_attention_residual.norm")
        for i in range(arch.decoder_layers):
            stream = self._layer(stream, i)
        # Reshaped before and not after the generator: the logits are large, and to copy them takes time.
        rows = self.builder.op("Reshape", stream.entrance, self.integers(-1, arch.d_model), name="generator.rows")
        if self.dtype == "float32":
            self.linear(rows, "generator", bias=False, output=tensors.LOGITS)
        else:
            logits = self.linear(rows, "generator", bias=False)
            self.builder.node("Cast", logits, outputs=[tensors.LOGITS], to=onnx.TensorProto.FLOAT)
        return self.builder.model(
            tensors.decoder_inputs(arch, self.cache_dtype), tensors.decoder_outputs(arch, self.cache_dtype)
        )

    def _layer(self, stream: _Stream, index: int) -> _Stream:
        layer = f"decoder.{index}"
        is_last = index + 1 == self.arch.decoder_layers
        following = "decoder_norm" if is_last else f"decoder.{index + 1}.self_attention_residual.norm"
        for kind, attend, next_norm in (
            ("self_attention", self._attend_self, f"{layer}.cross_attention_residual.norm"),
            ("cross_attention", self._attend_source, f"{layer}.feed_forward_residual.norm"),
        ):
            attended = self.linear(attend(stream.entrance, index), f"{layer}.{kind}.output")
            stream = self.leave(stream, attended, f"{layer}.{kind}_residual.norm", next_norm)
        return self.feed_forward(stream, layer, following)

    def _attend_self(self, x: str, index: int) -> str:
        layer = f"decoder.{index}.self_attention"
        projected = self.linear(x, f"{layer}.query", f"{layer}.key_value")
        caches = (tensors.self_key, tensors.self_value)
        return self._attend(
            (projected, "", ""), [name(index) for name in caches], [name(index, "present") for name in caches],
            tensors.PAST_LENGTHS, tensors.TOTAL_SEQUENCE_LENGTH, layer,
        )  # fmt: skip

    def _attend_source(self, x: str, index: int) -> str:
        # GroupQueryAttention wants a new position. It is given the last source position again, which it writes
        # where it already is; so every row pays for its own source and none for padding.
        layer = f"decoder.{index}.cross_attention"
        query = self.linear(x, f"{layer}.query", output=tensors.cross_query(index))
        again = [tensors.last_cross_key(index), tensors.last_cross_value(index)]
        caches = [tensors.cross_key(index), tensors.cross_value(index)]
        present = [tensors.cross_key(index, "present"), tensors.cross_value(index, "present")]
        return self._attend(
            (query, *again), caches, present, self.last_source, tensors.MAX_SOURCE_LENGTH, layer, causal=0
        )

    def _attend(
        self,
        query_key_value: tuple[str, ...],
        past: list[str],
        present: list[str],
        past_lengths: str,
        longest: str,
        name: str,
        causal: int = 1,
    ) -> str:
        scales: list[str] = []
        types: dict[str, Any] = {}
        if self.cache_dtype == "int8":
            scales = ["", "", "", "", "", self.unit(), self.unit()]  # of keys and values, after what is not used
            types = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
        context, *_ = self.builder.node(
            "GroupQueryAttention", *query_key_value, *past, past_lengths, longest, *scales,
            name=name, outputs=[f"{name}.context", *present], domain=MICROSOFT,
            num_heads=self.arch.num_heads, kv_num_heads=self.arch.num_heads, causal=causal, **types,
        )  # fmt: skip
        return context
