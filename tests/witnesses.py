"""Our models as transformers has them: the same weights in an independent implementation."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from dragoman_export.model import Transformer, sinusoidal_positions
from dragoman_export.tokenization import END_ID, PADDING_ID, START_ID


def to_transformers(model: Transformer, max_positions: int = 1024) -> Any:
    """A post-norm model as a MarianMTModel, a pre-norm one as an M2M100ForConditionalGeneration; in fp32."""
    arch = model.arch
    sizes: dict[str, Any] = {
        "vocab_size": arch.vocab_size,
        "d_model": arch.d_model,
        "encoder_layers": arch.encoder_layers,
        "decoder_layers": arch.decoder_layers,
        "encoder_attention_heads": arch.num_heads,
        "decoder_attention_heads": arch.num_heads,
        "encoder_ffn_dim": arch.d_ff,
        "decoder_ffn_dim": arch.d_ff,
        "max_position_embeddings": max_positions,
        "activation_function": "relu",
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "pad_token_id": PADDING_ID,
        "eos_token_id": END_ID,
        "bos_token_id": START_ID,
        "decoder_start_token_id": START_ID,
        "forced_eos_token_id": None,
    }
    if arch.norm == "post":
        witness: Any = transformers.MarianMTModel(transformers.MarianConfig(**sizes))
    else:
        witness = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**sizes))
    witness.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=START_ID, eos_token_id=END_ID, pad_token_id=PADDING_ID
    )
    state = dict(_weights(model))
    missing, unexpected = witness.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all(any(word in name for word in ("embed_positions", "final_logits_bias")) for name in missing), missing
    _set_positions(witness, sinusoidal_positions(max_positions, arch.d_model))
    return witness.eval()


def _weights(model: Transformer) -> Any:
    own = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    yield "model.shared.weight", own["source_embedding.weight"]
    yield "model.encoder.embed_tokens.weight", own["source_embedding.weight"]
    yield "model.decoder.embed_tokens.weight", own["target_embedding.weight"]
    yield "lm_head.weight", own["generator.weight"]
    names = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}
    for side, count in (("encoder", model.arch.encoder_layers), ("decoder", model.arch.decoder_layers)):
        kinds = ("self_attention", "cross_attention") if side == "decoder" else ("self_attention",)
        for i in range(count):
            theirs, ours = f"model.{side}.layers.{i}", f"{side}.{i}"
            for kind in kinds:
                yield from _attention(own, f"{ours}.{kind}", f"{theirs}.{names[kind]}")
                yield from _both(own, f"{ours}.{kind}_residual.norm", f"{theirs}.{names[kind]}_layer_norm")
            yield from _both(own, f"{ours}.feed_forward.inner", f"{theirs}.fc1")
            yield from _both(own, f"{ours}.feed_forward.outer", f"{theirs}.fc2")
            yield from _both(own, f"{ours}.feed_forward_residual.norm", f"{theirs}.final_layer_norm")
        if model.arch.norm == "pre":
            yield from _both(own, f"{side}_norm", f"model.{side}.layer_norm")


def _attention(own: dict[str, torch.Tensor], ours: str, theirs: str) -> Any:
    yield from _both(own, f"{ours}.query", f"{theirs}.q_proj")
    yield from _both(own, f"{ours}.output", f"{theirs}.out_proj")
    for role in ("weight", "bias"):
        key, value = own[f"{ours}.key_value.{role}"].chunk(2)
        yield f"{theirs}.k_proj.{role}", key
        yield f"{theirs}.v_proj.{role}", value


def _both(own: dict[str, torch.Tensor], ours: str, theirs: str) -> Any:
    for role in ("weight", "bias"):
        yield f"{theirs}.{role}", own[f"{ours}.{role}"]


def _set_positions(witness: Any, positions: torch.Tensor) -> None:
    for side in (witness.model.encoder, witness.model.decoder):
        embedding = side.embed_positions
        with torch.no_grad():
            if hasattr(embedding, "weights"):  # M2M100 counts from the padding id + 1
                embedding.weights = torch.cat([torch.zeros(PADDING_ID + 1, positions.shape[1]), positions])
            else:
                embedding.weight.copy_(positions)
