"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al., 2017).

Shapes use the names batch, src_len, tgt_len, d_model, num_heads, head_dim and vocab_size. Source rows are
padded on the right and described by their lengths; a padded position never influences a real one.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dragoman_bundle.architecture import Architecture
from dragoman_export.dropout import Dropout


def sinusoidal_positions(num_positions: int, d_model: int) -> Tensor:
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(same angle).

    Returns:
        float32 [num_positions, d_model], computed in float64.
    """
    positions = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1)
    frequencies = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    table = torch.empty(num_positions, d_model, dtype=torch.float64)
    table[:, 0::2] = torch.sin(positions * frequencies)
    table[:, 1::2] = torch.cos(positions * frequencies)
    return table.float()


class KeyValue(NamedTuple):
    """Keys and values of one attention layer, each [batch, num_heads, length, head_dim]."""

    key: Tensor
    value: Tensor


def attention(query: Tensor, memory: KeyValue, mask: Tensor | None) -> Tensor:
    """Section 3.2.1: softmax(Q K^T / sqrt(head_dim)) V.

    Written out because the backward pass of torch's fused kernel is seven times slower on a CPU with the short
    sequences of translation.

    Args:
        query: [batch, num_heads, length, head_dim].
        memory: keys and values, each [batch, num_heads, memory_len, head_dim].
        mask: bool, broadcastable to [batch, num_heads, length, memory_len]; True may be attended to.

    Returns:
        [batch, num_heads, length, head_dim].
    """
    scores = query @ memory.key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1).to(memory.value.dtype) @ memory.value


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.num_heads = arch.num_heads
        self.head_dim = arch.head_dim
        self.query = nn.Linear(arch.d_model, arch.d_attention)
        self.key_value = nn.Linear(arch.d_model, 2 * arch.d_attention)
        self.output = nn.Linear(arch.d_attention, arch.d_model)

    def project_memory(self, memory: Tensor) -> KeyValue:
        """Keys and values of `memory` [batch, length, d_model]."""
        key, value = self.key_value(memory).chunk(2, dim=-1)
        return KeyValue(self._split_heads(key), self._split_heads(value))

    def forward(self, x: Tensor, memory: KeyValue, mask: Tensor | None) -> Tensor:
        """Attend from `x` to `memory`.

        Args:
            x: [batch, length, d_model], what the queries are made from.
            memory: keys and values, each [batch, num_heads, memory_len, head_dim].
            mask: bool, broadcastable to [batch, num_heads, length, memory_len]; True may be attended to.

        Returns:
            [batch, length, d_model].
        """
        context = attention(self._split_heads(self.query(x)), memory, mask)
        merged: Tensor = self.output(context.transpose(1, 2).flatten(2))
        return merged

    def _split_heads(self, x: Tensor) -> Tensor:
        # [batch, length, num_heads * head_dim] -> [batch, num_heads, length, head_dim]
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


def future_mask(x: Tensor) -> Tensor:
    """Bool [tgt_len, tgt_len]: position i may attend to positions 0..i (section 3.2.3)."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


class FeedForward(nn.Module):
    """Section 3.3: max(0, x W_1 + b_1) W_2 + b_2."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.inner = nn.Linear(arch.d_model, arch.d_ff)
        self.outer = nn.Linear(arch.d_ff, arch.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_model] -> [..., d_model]."""
        outer: Tensor = self.outer(F.relu(self.inner(x)))
        return outer


class Residual(nn.Module):
    """LayerNorm and residual sum around a sub-layer: LayerNorm(x + f(x)) as published, or x + f(LayerNorm(x))."""

    def __init__(self, arch: Architecture, dropout: float) -> None:
        super().__init__()
        self.pre_norm = arch.norm == "pre"
        self.norm = nn.LayerNorm(arch.d_model)
        self.dropout = Dropout(dropout)

    def enter(self, x: Tensor) -> Tensor:
        """The sub-layer's input."""
        entrance: Tensor = self.norm(x) if self.pre_norm else x
        return entrance

    def leave(self, x: Tensor, sublayer: Tensor) -> Tensor:
        """The residual stream after the sub-layer."""
        summed = x + self.dropout(sublayer)
        stream: Tensor = summed if self.pre_norm else self.norm(summed)
        return stream


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each in its residual block (section 3.1)."""

    def __init__(self, arch: Architecture, dropout: float) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(arch)
        self.self_attention_residual = Residual(arch, dropout)
        self.feed_forward = FeedForward(arch)
        self.feed_forward_residual = Residual(arch, dropout)

    def forward(self, x: Tensor, source_mask: Tensor) -> Tensor:
        """[batch, src_len, d_model] -> [batch, src_len, d_model]."""
        residual = self.self_attention_residual
        inner = residual.enter(x)
        memory = self.self_attention.project_memory(inner)
        x = residual.leave(x, self.self_attention(inner, memory, source_mask))
        residual = self.feed_forward_residual
        return residual.leave(x, self.feed_forward(residual.enter(x)))


class DecoderLayer(nn.Module):
    """Masked self-attention, cross-attention and a feed-forward network (section 3.1)."""

    def __init__(self, arch: Architecture, dropout: float) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(arch)
        self.self_attention_residual = Residual(arch, dropout)
        self.cross_attention = MultiHeadAttention(arch)
        self.cross_attention_residual = Residual(arch, dropout)
        self.feed_forward = FeedForward(arch)
        self.feed_forward_residual = Residual(arch, dropout)

    def forward(
        self, x: Tensor, cross: KeyValue, source_mask: Tensor, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        """One layer over a whole target (`past` is None) or over one new position that follows `past`.

        Returns:
            [batch, tgt_len, d_model], and the keys and values of all positions so far.
        """
        residual = self.self_attention_residual
        inner = residual.enter(x)
        present = self.self_attention.project_memory(inner)
        if past is not None:
            present = KeyValue(torch.cat([past.key, present.key], 2), torch.cat([past.value, present.value], 2))
        attended = self.self_attention(inner, present, future_mask(x) if past is None else None)
        x = residual.leave(x, attended)
        residual = self.cross_attention_residual
        x = residual.leave(x, self.cross_attention(residual.enter(x), cross, source_mask))
        residual = self.feed_forward_residual
        return residual.leave(x, self.feed_forward(residual.enter(x))), present


class DecoderState(NamedTuple):
    """What incremental decoding carries from step to step."""

    cross: list[KeyValue]
    """Per layer, of the source: [batch, num_heads, src_len, head_dim]."""
    source_mask: Tensor
    """[batch, 1, 1, src_len]."""
    past: list[KeyValue] | None
    """Per layer, of the target so far: [batch, num_heads, past_len, head_dim]; None before the first step."""

    @property
    def past_len(self) -> int:
        """Target positions decoded so far."""
        return 0 if self.past is None else self.past[0].key.shape[2]


class Transformer(nn.Module):
    """Encoder, decoder and the generator over the vocabulary.

    Args:
        arch: sizes and options.
        dropout: probability of the paper's residual dropout (section 5.4): on the output of every sub-layer and
            on the sum of embedding and position. 0 turns it off.
        max_positions: longest source or target, in tokens; sinusoids are computed up to here.
    """

    def __init__(self, arch: Architecture, dropout: float = 0.0, max_positions: int = 1024) -> None:
        super().__init__()
        self.arch = arch
        self.embedding_dropout = Dropout(dropout)
        self.source_embedding = nn.Embedding(arch.vocab_size, arch.d_model)
        self.target_embedding = nn.Embedding(arch.vocab_size, arch.d_model)
        self.generator = nn.Linear(arch.d_model, arch.vocab_size, bias=False)
        if arch.tied_embeddings:
            self.target_embedding.weight = self.source_embedding.weight
            self.generator.weight = self.source_embedding.weight
        self.encoder = nn.ModuleList(EncoderLayer(arch, dropout) for _ in range(arch.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(arch, dropout) for _ in range(arch.decoder_layers))
        final_norm = nn.LayerNorm if arch.norm == "pre" else nn.Identity
        self.encoder_norm = final_norm(arch.d_model)
        self.decoder_norm = final_norm(arch.d_model)
        self.positions: Tensor
        self.register_buffer("positions", sinusoidal_positions(max_positions, arch.d_model), persistent=False)
        self._initialise()

    @property
    def max_positions(self) -> int:
        """Longest source or target, in tokens."""
        return self.positions.shape[0]

    def _initialise(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        # Embeddings are multiplied by sqrt(d_model) (section 3.4), so this gives them unit variance there.
        for table in (self.source_embedding, self.target_embedding, self.generator):
            nn.init.normal_(table.weight, std=self.arch.d_model**-0.5)

    def forward(self, source_ids: Tensor, source_lengths: Tensor, target_ids: Tensor) -> Tensor:
        """Teacher forcing: the decoder's output at every position of `target_ids`.

        Args:
            source_ids: int64 [batch, src_len], padded on the right.
            source_lengths: int64 [batch].
            target_ids: int64 [batch, tgt_len], starting with the start token.

        Returns:
            [batch, tgt_len, d_model]; `generator` turns it into logits.
        """
        state = self.start(source_ids, source_lengths)
        x = self._embed(self.target_embedding, target_ids)
        for layer, cross in zip(self._decoder_layers(), state.cross, strict=True):
            x, _ = layer(x, cross, state.source_mask)
        hidden: Tensor = self.decoder_norm(x)
        return hidden

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        """[batch, src_len] -> the encoder's output [batch, src_len, d_model]."""
        x = self._embed(self.source_embedding, source_ids)
        for layer in self.encoder:
            x = layer(x, source_mask)
        memory: Tensor = self.encoder_norm(x)
        return memory

    def start(self, source_ids: Tensor, source_lengths: Tensor) -> DecoderState:
        """Encode a batch of sources; what `step` needs to begin."""
        positions = torch.arange(source_ids.shape[1], device=source_ids.device)
        source_mask = (positions < source_lengths.unsqueeze(1))[:, None, None, :]
        memory = self.encode(source_ids, source_mask)
        cross = [layer.cross_attention.project_memory(memory) for layer in self._decoder_layers()]
        return DecoderState(cross, source_mask, None)

    def step(self, state: DecoderState, last_ids: Tensor) -> tuple[Tensor, DecoderState]:
        """Decode one position.

        Args:
            state: from `start` or the previous step.
            last_ids: int64 [batch], the token chosen last (the start token at first).

        Returns:
            logits [batch, vocab_size] for the next token, and the state after it.
        """
        x = self._embed(self.target_embedding, last_ids.unsqueeze(1), state.past_len)
        present = []
        for i, layer in enumerate(self._decoder_layers()):
            x, kept = layer(x, state.cross[i], state.source_mask, None if state.past is None else state.past[i])
            present.append(kept)
        return self.generator(self.decoder_norm(x)).squeeze(1), state._replace(past=present)

    def _decoder_layers(self) -> list[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.decoder))

    def _embed(self, table: nn.Embedding, ids: Tensor, first_position: int = 0) -> Tensor:
        last_position = first_position + ids.shape[1]
        if last_position > self.max_positions:
            raise ValueError(f"a sequence of {last_position} tokens is longer than max_positions {self.max_positions}")
        scaled = table(ids) * math.sqrt(self.arch.d_model)
        embedded: Tensor = self.embedding_dropout(scaled + self.positions[first_position:last_position])
        return embedded
