"""The few layers that both drafters are made of, in plain torch, named as in the public checkpoints.

Shapes: B rows, T tokens of a row, A anchors (drafts) of a row, S query tokens of a draft, J key tokens of a draft,
h query heads, k key/value heads, D head size, H hidden size.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _EntryAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int):
        super().__init__()
        self.q_proj = nn.Linear(2 * hidden, heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)


class EntryLayer(nn.Module):
    """The one layer of EAGLE-3 and DART, over entries that join a token's embedding with the target's features."""

    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int, dim: int, eps: float):
        super().__init__()
        self.self_attn = _EntryAttention(hidden, heads, kv_heads, dim)
        self.mlp = MLP(hidden, inner)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding in the half-split ("neox") layout: x [..., heads, D] at positions [...]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = positions.float()[..., None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    low, high = x[..., :half].float(), x[..., half:].float()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def draft_attention(
    query: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    limits: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention of many drafts over one shared context and, each, over its own tokens.

    Every query token of draft a sees the context positions below ``limits[a]`` and all tokens of ``own`` of its
    draft, and nothing of another draft. This is what a paged cache gives at inference, where the accepted prefix is
    shared and the speculative tail is private.

    Args:
        query: [B, A, S, h, D].
        context: keys and values [B, T, k, D].
        limits: int64 [B, A].
        own: keys and values [B, A, J, k, D], or None.
        is_causal: query token s sees ``own`` tokens up to s + J - S only, so that the last one sees them all.

    Returns:
        [B, A, S, h * D].
    """
    rows, drafts, length, heads, dim = query.shape
    keys, values = context
    kv_heads, tokens = keys.shape[2], keys.shape[1]
    group = heads // kv_heads
    # Query heads that share a key head become rows of one matrix: [B, k, A, S * group, D].
    folded = query.view(rows, drafts, length, kv_heads, group, dim).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
    folded = folded * dim**-0.5
    scores = folded.flatten(2, 3) @ keys.permute(0, 2, 3, 1)
    scores = scores.view(rows, kv_heads, drafts, length * group, tokens).float()
    hidden = torch.arange(tokens, device=limits.device) >= limits[..., None]
    scores = scores.masked_fill(hidden[:, None, :, None], -torch.inf)
    if own is not None:
        own_keys, own_values = (x.permute(0, 3, 1, 2, 4) for x in own)
        own_scores = (folded @ own_keys.transpose(-1, -2)).float()
        if is_causal:
            own_length = own_keys.shape[-2]
            ahead = torch.ones(length, own_length, dtype=torch.bool, device=query.device).triu(own_length - length + 1)
            own_scores = own_scores.masked_fill(ahead.repeat_interleave(group, dim=0), -torch.inf)
        scores = torch.cat([scores, own_scores], dim=-1)
    weights = scores.softmax(-1).to(values.dtype)
    out = weights[..., :tokens].flatten(2, 3) @ values.transpose(1, 2)
    out = out.view(rows, kv_heads, drafts, length * group, dim)
    if own is not None:
        out = out + weights[..., tokens:] @ own_values
    out = out.view(rows, kv_heads, drafts, length, group, dim).permute(0, 2, 3, 1, 4, 5)
    return out.reshape(rows, drafts, length, heads * dim)


def initialise(model: nn.Module, seed: int, scale: float = 0.02) -> None:
    """Normal weights for every linear layer; projections into the residual stream start at a tenth of that."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, scale * (0.1 if small else 1.0), generator=generator)


def write_drafter(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors`` (bfloat16), replacing ``folder`` in one rename."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    half = {
        name: (x.detach().to(torch.bfloat16) if x.is_floating_point() else x.detach()).contiguous().clone()
        for name, x in tensors.items()
    }
    save_file(half, fresh / "model.safetensors", metadata={"format": "pt"})
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
