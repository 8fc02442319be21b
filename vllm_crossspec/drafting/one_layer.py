"""Drafters of one layer: an accepted token's keys and values follow from its inputs alone."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.llama_eagle3 import LlamaDecoderLayer


def write_entries(
    model: nn.Module,
    features: torch.Tensor,
    next_tokens: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor | None,
) -> None:
    """Write cache entries of EAGLE-3's form: two norms, one projection, rotation, one cache write.

    Args:
        model: with ``embed_tokens`` and one layer in ``layers``.
        features: [n, H] fused states of the target.
        next_tokens: int64 [n] id of the token after each.
        positions: int64 [n].
        kv_slots: int64 [n] cache slots; None: compute, but write nothing (memory profile).
    """
    layer: LlamaDecoderLayer = model.layers[0]
    attention = layer.self_attn
    embeds = layer.input_layernorm(model.embed_tokens(next_tokens))
    states, _ = layer._residual_norm(hidden_states=features)
    key, value = _keys_and_values(attention, torch.cat([embeds, states], dim=-1))
    key, _ = attention.rotary_emb(positions, key, None)
    if kv_slots is None:
        return
    paged, shape = attention.attn, (features.shape[0], attention.num_kv_heads, attention.head_dim)
    paged.impl.do_kv_cache_update(paged, key.view(shape), value.view(shape), paged.kv_cache, kv_slots)


def _keys_and_values(attention: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, kv size] each; if the weight is a plain matrix, queries are not computed."""
    projection, queries = attention.qkv_proj, attention.q_size
    # On a CPU vLLM may have packed the weight.
    is_plain = isinstance(projection.quant_method, UnquantizedLinearMethod) and not inputs.is_cpu
    if is_plain:
        bias = None if projection.bias is None else projection.bias[queries:]
        both = nn.functional.linear(inputs, projection.weight[queries:], bias)
    else:
        both = projection(inputs)[0][:, queries:]
    key, value = both.split(attention.kv_size, dim=-1)
    return key.contiguous(), value.contiguous()
