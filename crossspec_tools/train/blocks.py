"""The few layers that drafters are made of, in plain torch, named as in the public checkpoints.

Shapes: B rows, T tokens of a row, A anchors (drafts) of a row, S query tokens of a draft, J key tokens of a draft,
h query heads, k key/value heads, D head size, H hidden size.
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from vllm_crossspec.files import write_json, write_tensors


class RMSNorm(nn.RMSNorm):
    """torch's norm over the last dimension, computed in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Shape(NamedTuple):
    """Sizes of a drafter's layers: H, inner size of the MLP, h, k, D, and the norms' epsilon."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    eps: float


class Attention(nn.Module):
    """Projections of an attention over inputs of ``width``; in Qwen3's layers every head is normed, too."""

    def __init__(self, width: int, shape: Shape, has_norms: bool = False):
        super().__init__()
        self.q_proj = nn.Linear(width, shape.heads * shape.dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.dim, shape.hidden, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(shape.dim, shape.eps) if has_norms else nn.Identity() for _ in range(2))
        self.dim = shape.dim

    def queries(self, x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
        """[..., h, D] of x [..., width]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))), positions, theta)

    def bare_keys_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., k, D] each, of x [..., width]; the keys are not rotated yet."""
        keys, values = (projection(x).unflatten(-1, (-1, self.dim)) for projection in (self.k_proj, self.v_proj))
        return self.k_norm(keys), values

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., k, D] each, of x [..., width]."""
        keys, values = self.bare_keys_values(x)
        return rotate(keys, positions, theta), values


class EntryLayer(nn.Module):
    """The one layer of EAGLE-3 and DART, over entries that join a token's embedding with the target's features."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.self_attn = Attention(2 * shape.hidden, shape)
        self.mlp = MLP(shape.hidden, shape.inner)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)


def head_dim(target: Any) -> int:
    """D of a model, by its configuration (transformers)."""
    return getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads


class Drafter(nn.Module):
    """A drafter with the target's width, heads, positions and norms. The embedding stays the target's."""

    def __init__(self, inner: int, target: Any):
        super().__init__()
        self.dim, self.theta = head_dim(target), target.rope_parameters["rope_theta"]
        heads, kv_heads = target.num_attention_heads, target.num_key_value_heads
        self.shape = Shape(target.hidden_size, inner, heads, kv_heads, self.dim, target.rms_norm_eps)

    def layer_settings(self, target: Any, architecture: str, model_type: str, **own: Any) -> dict[str, Any]:
        """Its ``config.json``: what all formats say of the layers, and ``own``."""
        shared = {
            "attention_bias": False,
            "head_dim": self.dim,
            "hidden_act": "silu",
            "hidden_size": self.shape.hidden,
            "intermediate_size": self.shape.inner,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.kv_heads,
            "rms_norm_eps": self.shape.eps,
            "rope_scaling": None,
            "rope_theta": self.theta,
            "tie_word_embeddings": False,
        }
        for name in ("bos_token_id", "eos_token_id", "max_position_embeddings", "pad_token_id", "vocab_size"):
            shared[name] = getattr(target, name)
        return {"architectures": [architecture], "model_type": model_type, **dict(sorted((shared | own).items()))}


class EntryDrafter(Drafter):
    """What EAGLE-3 and DART are made of, with the parameter names of their public formats.

    ``config``: of their training, which has the ``intermediate_size``. ``kept``: int64 [draft vocabulary], the target's
    ids of the drafter's tokens, rising.
    """

    def __init__(self, config: Any, target: Any, kept: torch.Tensor, seed: int):
        super().__init__(config.intermediate_size, target)
        hidden, eps = self.shape.hidden, self.shape.eps
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = EntryLayer(self.shape)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(kept), bias=False)
        self.register_buffer("kept", kept)
        initialise(self, seed)

    def join(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Entries [..., 2 H] of token embeddings and features, [..., H] each."""
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(features)], dim=-1)

    @torch.no_grad()
    def take_head(self, head: torch.Tensor) -> None:
        """Begin with the target's own output layer [V, H]."""
        self.lm_head.weight.copy_(head[self.kept])

    def settings(self, target: Any, architecture: str) -> dict[str, Any]:
        """The ``config.json`` of the public formats."""
        own = {"draft_vocab_size": len(self.kept), "mlp_bias": False, "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
        return self.layer_settings(target, architecture, "llama", **own)

    def tensors(self, vocab_size: int) -> dict[str, torch.Tensor]:
        """Those of a checkpoint, with the maps ``d2t`` and ``t2d`` between the vocabularies."""
        tensors = {name: x.cpu() for name, x in self.state_dict().items() if name != "kept"}
        kept = self.kept.cpu()
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, kept, True)
        return tensors


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
    own: Sequence[torch.Tensor] | None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention of many drafts over one shared context and, each, over its own tokens. Returns [B, A, S, h * D].

    Every query token of draft a sees the context positions below ``limits[a]`` and all tokens of ``own`` of its
    draft. A paged cache gives the same at inference: a shared accepted prefix, and a private speculative tail.

    Args:
        query: [B, A, S, h, D].
        context: keys and values [B, T, k, D].
        limits: int64 [B, A].
        own: keys and values [B, A, J, k, D], or None.
        is_causal: query token s sees ``own`` tokens up to s + J - S only, so that the last one sees them all.
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


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A fresh folder to write into, which then replaces ``folder`` in one rename."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def write_drafter(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors`` (bfloat16) in place of ``folder``."""
    half = {
        name: (x.detach().to(torch.bfloat16) if x.is_floating_point() else x.detach()).contiguous().clone()
        for name, x in tensors.items()
    }
    with replacing(folder) as fresh:
        write_tensors(fresh / "model.safetensors", half, {"format": "pt"})
        write_json(fresh / "config.json", config)
