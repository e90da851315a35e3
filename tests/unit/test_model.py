"""The model is the paper's: each claim is checked against a reference that shares no code with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dragoman_bundle.architecture import PRESETS, Architecture, ArchitectureError
from dragoman_export.model import KeyValue, MultiHeadAttention, Transformer, attention, sinusoidal_positions

NORMS = ["post", "pre"]


def small(norm: str = "post", **changes: object) -> Architecture:
    sizes: dict[str, object] = {"vocab_size": 40, "d_model": 32, "num_heads": 4, "d_ff": 48, "norm": norm}
    return Architecture(**(sizes | {"encoder_layers": 2, "decoder_layers": 2} | changes))  # type: ignore[arg-type]


def make(arch: Architecture, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(arch)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, or a mix-up of them would not show
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def test_attention_is_the_formula_in_float64() -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 3, n, 8)) for n in (5, 7, 7))
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(8)
    mask = rng.random((2, 1, 5, 7)) > 0.3
    mask[..., 0] = True
    weights = np.where(mask, np.exp(scores), 0.0)
    expected = weights / weights.sum(-1, keepdims=True) @ value
    memory = KeyValue(torch.from_numpy(key), torch.from_numpy(value))
    found = attention(torch.from_numpy(query), memory, torch.from_numpy(mask))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def torch_attention(own: MultiHeadAttention, width: int) -> nn.MultiheadAttention:
    """torch's layer with our weights."""
    theirs = nn.MultiheadAttention(width, own.num_heads, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([own.query.weight, own.key_value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([own.query.bias, own.key_value.bias]))
        theirs.out_proj.weight.copy_(own.output.weight)
        theirs.out_proj.bias.copy_(own.output.bias)
    return theirs


@torch.inference_mode()
def test_multi_head_attention_is_torchs() -> None:
    own = MultiHeadAttention(small())
    theirs = torch_attention(own, 32)
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    expected, _ = theirs(x, memory, memory, key_padding_mask=padding)
    found = own(x, own.project_memory(memory), ~padding[:, None, None, :])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def torch_transformer(own: Transformer) -> nn.Transformer:
    """torch's Transformer with our weights."""
    arch = own.arch
    theirs = nn.Transformer(
        arch.d_model, arch.num_heads, arch.encoder_layers, arch.decoder_layers, arch.d_ff,
        dropout=0.0, batch_first=True, norm_first=arch.norm == "pre",
    )  # fmt: skip
    for stack in ("encoder", "decoder"):
        theirs_stack, own_layers = getattr(theirs, stack), getattr(own, stack)
        for target, source in zip(theirs_stack.layers, own_layers, strict=True):
            target.self_attn = torch_attention(source.self_attention, arch.d_model)
            target.linear1, target.linear2 = source.feed_forward.inner, source.feed_forward.outer
            norms = [source.self_attention_residual.norm, source.feed_forward_residual.norm]
            if stack == "decoder":
                target.multihead_attn = torch_attention(source.cross_attention, arch.d_model)
                norms.insert(1, source.cross_attention_residual.norm)
            for index, norm in enumerate(norms, start=1):
                setattr(target, f"norm{index}", norm)
        theirs_stack.norm = getattr(own, f"{stack}_norm")
    theirs.encoder.use_nested_tensor = False  # a prototype that warns
    return theirs.eval()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm", NORMS)
@torch.inference_mode()
def test_transformer_is_torchs(norm: str) -> None:
    own = make(small(norm))
    theirs = torch_transformer(own)
    source, target = torch.randint(4, 40, (3, 6)), torch.randint(4, 40, (3, 5))
    lengths = torch.tensor([6, 4, 2])
    padding = torch.arange(6) >= lengths.unsqueeze(1)
    positions = sinusoidal_positions(10, 32)
    embed = lambda ids: own.source_embedding(ids) * math.sqrt(32) + positions[: ids.shape[1]]  # noqa: E731
    expected = theirs(
        embed(source),
        embed(target),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(5),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    torch.testing.assert_close(own(source, lengths, target), expected, atol=1e-5, rtol=1e-5)


@given(offset=st.integers(0, 400), width=st.sampled_from([2, 8, 64, 512]))
@settings(deadline=None)
def test_a_shifted_position_is_a_rotation(offset: int, width: int) -> None:
    table = sinusoidal_positions(512, width).double()
    frequencies = torch.exp(torch.arange(0, width, 2).double() * (-math.log(10000.0) / width))
    cos, sin = torch.cos(offset * frequencies), torch.sin(offset * frequencies)
    start = table[: 512 - offset]
    rotated = torch.stack(
        [start[:, 0::2] * cos + start[:, 1::2] * sin, start[:, 1::2] * cos - start[:, 0::2] * sin], -1
    ).flatten(1)
    torch.testing.assert_close(rotated, table[offset:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm", NORMS)
@torch.inference_mode()
def test_a_future_token_never_changes_an_earlier_output(norm: str) -> None:
    model = make(small(norm))
    source, lengths = torch.randint(4, 40, (1, 6)), torch.tensor([6])
    target = torch.randint(4, 40, (1, 8))
    before = model(source, lengths, target)
    for position in range(1, 8):
        changed = target.clone()
        changed[0, position:] = torch.randint(4, 40, (8 - position,))
        assert torch.equal(model(source, lengths, changed)[:, :position], before[:, :position])


@pytest.mark.parametrize("norm", NORMS)
@torch.inference_mode()
def test_padding_never_changes_a_real_row(norm: str) -> None:
    model = make(small(norm))
    source, target = torch.randint(4, 40, (1, 5)), torch.randint(4, 40, (1, 4))
    expected = model(source, torch.tensor([5]), target)
    for filler in (0, 17):
        padded = torch.full((2, 9), filler)
        padded[0, :5] = source
        found = model(padded, torch.tensor([5, 9]), target.expand(2, 4))
        torch.testing.assert_close(found[:1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@torch.inference_mode()
def test_incremental_decoding_is_teacher_forcing(norm: str) -> None:
    model = make(small(norm, head_dim=12))
    source, lengths, target = torch.randint(4, 40, (3, 6)), torch.tensor([6, 3, 1]), torch.randint(4, 40, (3, 7))
    whole = model.generator(model(source, lengths, target))
    state = model.start(source, lengths)
    for position in range(7):
        logits, state = model.step(state, target[:, position])
        torch.testing.assert_close(logits, whole[:, position], atol=1e-5, rtol=1e-5)


def test_tied_embeddings_are_one_matrix() -> None:
    tied, untied = Transformer(small()), Transformer(small(tied_embeddings=False))
    assert tied.generator.weight is tied.source_embedding.weight is tied.target_embedding.weight
    assert untied.generator.weight is not untied.source_embedding.weight
    size = 40 * 32
    assert num_parameters(untied) == num_parameters(tied) + 2 * size


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_presets_are_as_published() -> None:
    base = Architecture(vocab_size=37000, **PRESETS["base"])
    big = Architecture(vocab_size=37000, **PRESETS["big"])
    assert (base.d_model, base.d_ff, base.num_heads, base.head_dim) == (512, 2048, 8, 64)
    assert (big.d_model, big.d_ff, big.num_heads, big.head_dim) == (1024, 4096, 16, 64)
    with torch.device("meta"):
        # Table 3: 65 and 213 million parameters.
        assert 60e6 < num_parameters(_without_positions(base)) < 68e6
        assert 205e6 < num_parameters(_without_positions(big)) < 220e6


def _without_positions(arch: Architecture) -> Transformer:
    return Transformer(arch, max_positions=1)


def test_every_problem_of_an_architecture_is_reported() -> None:
    with pytest.raises(ArchitectureError) as caught:
        Architecture(vocab_size=0, d_model=30, num_heads=4, d_ff=-1)
    message = str(caught.value)
    assert "d_model 30 is not divisible by num_heads 4" in message
    assert "set head_dim" in message
    assert "vocab_size must be at least 1" in message
    assert "d_ff must be at least 1" in message


def test_head_dim_need_not_divide_d_model() -> None:
    arch = Architecture(vocab_size=10, d_model=30, num_heads=4, head_dim=16, d_ff=8)
    assert arch.d_attention == 64
    out: Tensor = MultiHeadAttention(arch).output.weight
    assert out.shape == (30, 64)


def test_a_sequence_beyond_max_positions_is_an_error() -> None:
    model = Transformer(small(), max_positions=4)
    with pytest.raises(ValueError, match="5 tokens is longer than max_positions 4"):
        model(torch.zeros(1, 5, dtype=torch.int64), torch.tensor([5]), torch.zeros(1, 1, dtype=torch.int64))
