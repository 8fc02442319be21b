"""DFlash for a frozen target: blocks of masks over the target's own responses, z-lab's checkpoint format.

Our own recipe, because the ``speculators`` library (0.9.0) trains on accelerators only: its trainer moves model and
batches to device 0 and its default attention, FlexAttention, has no backward pass on CPU.

What inference does, and training therefore too. The drafter has no context tokens of its own: in each layer the
keys and values of the positions before the block come from the target's features there (the residual stream after
some layers, fused by ``fc``, normed by ``hidden_norm``). The block is the token that the target has just emitted at
position a (the anchor), then masks at a + 1, a + 2, ...; its tokens see one another in both directions and the
context before a. The output at a mask is the draft of its own position. Embedding and head are the target's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_crossspec.devices import choose_device
from vllm_crossspec.training.acceptance import measure
from vllm_crossspec.training.blocks import MLP, RMSNorm, draft_attention, initialise, rotate, write_drafter
from vllm_crossspec.training.data import MASK
from vllm_crossspec.training.drafter_run import run_training
from vllm_crossspec.training.generations import (
    Batch,
    Generation,
    read_generations,
    sample_anchors,
)
from vllm_crossspec.training.loop import LoopConfig
from vllm_crossspec.training.states import FrozenTarget, States, load_target


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Shape and recipe of the drafter; what is not here (hidden size, heads, rotary base) is the target's.

    Attributes:
        num_layers: of the drafter.
        intermediate_size: of its MLPs.
        block_size: the anchor and ``block_size - 1`` drafts.
        num_target_layers: how many layers of the target are tapped, spread evenly as z-lab does.
        decay: draft i (from 1) weighs ``exp(-(i - 1) / decay)``; z-lab takes 7, 5, 4 for blocks of 16, 10, 8.
        teacher_temperature: the target's distribution is sharpened with it; 1 is the target's own.
        rows_per_step: responses of one optimizer step.
        anchors_per_row: blocks of one response in one optimizer step.
        bfloat16: compute under bfloat16 autocast (weights stay float32).
        eval_rows: at most so many held-out responses.
    """

    num_layers: int = 2
    intermediate_size: int = 1024
    block_size: int = 8
    num_target_layers: int = 5
    decay: float = 4.0
    teacher_temperature: float = 1.0
    rows_per_step: int = 16
    anchors_per_row: int = 24
    bfloat16: bool = True
    eval_rows: int = 96


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int, eps: float):
        super().__init__()
        self.q_proj = nn.Linear(hidden, heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, eps)
        self.k_norm = RMSNorm(dim, eps)
        self.dim = dim

    def queries(self, x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))), positions, theta)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor, theta: float) -> Any:
        keys = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.dim))), positions, theta)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.dim))


class _Layer(nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int, dim: int, eps: float):
        super().__init__()
        self.self_attn = _Attention(hidden, heads, kv_heads, dim, eps)
        self.mlp = MLP(hidden, inner)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)


def target_layer_ids(depth: int, count: int) -> list[int]:
    """``count`` layers spread evenly from 1 to ``depth - 3`` (z-lab's rule; id i is the output of layer i).

    Raises:
        ValueError: the target has fewer layers there.
    """
    first, last = 1, depth - 3
    if not 1 <= count <= last - first + 1:
        raise ValueError(f"--target-layers {count} must lie within 1..{last - first + 1} for {depth} target layers")
    if count == 1:
        return [depth // 2]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


class DFlashDrafter(nn.Module):
    """The drafter, with the parameter names of the public format; embedding and head stay the target's.

    Args:
        target: configuration of the target (transformers).
    """

    def __init__(self, config: DFlashConfig, target: Any, seed: int):
        super().__init__()
        hidden, self.heads, self.kv_heads = (
            target.hidden_size,
            target.num_attention_heads,
            target.num_key_value_heads,
        )
        self.dim = getattr(target, "head_dim", None) or hidden // self.heads
        self.theta = target.rope_parameters["rope_theta"]
        eps = target.rms_norm_eps
        self.fc = nn.Linear(config.num_target_layers * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(
            _Layer(hidden, config.intermediate_size, self.heads, self.kv_heads, self.dim, eps)
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, eps)
        initialise(self, seed)

    def forward(self, states: States, block: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Draft a block at every anchor.

        Args:
            states: of the tokens that the anchors point into.
            block: embeddings [B, A, S, H] of the anchor token and the masks.
            anchors: int64 [B, A], position of the anchor token.

        Returns:
            Normed outputs [B, A, S - 1, H] of the masks, ready for the target's head.
        """
        context = self.hidden_norm(self.fc(states.taps))
        places = torch.arange(context.shape[1], device=anchors.device)
        positions = anchors[..., None] + torch.arange(block.shape[2], device=anchors.device)
        x = block
        for layer in self.layers:
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            seen = draft_attention(
                attention.queries(normed, positions, self.theta),
                attention.keys_values(context, places, self.theta),
                anchors,
                attention.keys_values(normed, positions, self.theta),
            )
            x = x + attention.o_proj(seen)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x[:, :, 1:])


def mask_blocks(
    tokens: torch.Tensor, anchors: torch.Tensor, embedding: torch.Tensor, block_size: int, mask_id: int
) -> torch.Tensor:
    """Embeddings [B, A, block_size, H] of blocks that begin with the token at each anchor and go on with masks."""
    ids = torch.full((*anchors.shape, block_size), mask_id, device=tokens.device)
    ids[..., 0] = tokens.gather(1, anchors)
    return F.embedding(ids, embedding)


def dflash_loss(
    model: DFlashDrafter,
    target: FrozenTarget,
    batch: Batch,
    config: DFlashConfig,
    mask_id: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross-entropy with the target's distribution at every mask, earlier masks weighing more, in nats a token."""
    states = target.states(batch.tokens)
    anchors, real = sample_anchors(batch, 0, config.anchors_per_row, generator)
    steps = torch.arange(config.block_size - 1, device=anchors.device)
    source = anchors[..., None] + steps
    valid = real[..., None] & (source + 1 < batch.ends[:, None, None])
    source = source.clamp(max=batch.tokens.shape[1] - 1)
    teacher = target.teach(states, batch, config.teacher_temperature)
    rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    places = teacher.index[rows, source][valid]
    with torch.autocast(anchors.device.type, dtype=torch.bfloat16, enabled=config.bfloat16):
        block = mask_blocks(batch.tokens, anchors, target.embedding, config.block_size, mask_id)
        logits = F.linear(model(states, block, anchors)[valid], target.head).float()
    weight = torch.exp(-steps / config.decay).expand(valid.shape)[valid]
    loss = (F.cross_entropy(logits, teacher.probs[places], reduction="none") * weight).sum() / weight.sum().clamp(
        min=1e-6
    )
    hits = logits.detach().argmax(-1) == teacher.top[places]
    step = steps.expand(valid.shape)[valid]
    shares = {f"hit_{i + 1}": hits[step == i].float().mean().item() for i in (0, len(steps) - 1) if (step == i).any()}
    return loss, shares


def checkpoint(
    model: DFlashDrafter, config: DFlashConfig, target: Any, mask_id: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors in z-lab's format, which vLLM's own ``dflash`` method reads."""
    settings = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "bos_token_id": target.bos_token_id,
        "dflash_config": {
            "mask_token_id": mask_id,
            "target_layer_ids": target_layer_ids(target.num_hidden_layers, config.num_target_layers),
        },
        "dtype": "bfloat16",
        "eos_token_id": target.eos_token_id,
        "head_dim": model.dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": target.max_position_embeddings,
        "max_window_layers": config.num_layers,
        "num_attention_heads": model.heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": model.kv_heads,
        "num_target_layers": target.num_hidden_layers,
        "pad_token_id": target.pad_token_id,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": model.theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
    }
    return settings, {name: x.cpu() for name, x in model.state_dict().items()}


def offline_acceptance(
    model: DFlashDrafter, target: FrozenTarget, rows: list[Generation], config: DFlashConfig, mask_id: int
) -> dict[str, float]:
    """Held-out acceptance of greedy blocks; see :func:`acceptance.measure`."""
    model.eval()

    def draft(batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        tokens, anchors = batch.tokens.to(target.device), anchors.to(target.device)
        states = target.states(tokens)
        with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=config.bfloat16):
            block = mask_blocks(tokens, anchors, target.embedding, config.block_size, mask_id)
            return F.linear(model(states, block, anchors), target.head).argmax(-1).cpu()

    return measure(rows, draft, config.block_size - 1)


def train_dflash(
    data: Path, target_folder: Path, out: Path, config: DFlashConfig, loop: LoopConfig, device: str = "cpu"
) -> dict[str, float]:
    """Train on the generations in ``data`` and write the drafter to ``out/model``; resumes from ``out/state.pt``.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``; not part of what the run is, so that it may go on elsewhere.

    Returns:
        The held-out acceptance at the end, also in ``out/acceptance.json`` (empty without ``dev-*`` shards).
    """
    place = choose_device(device)
    causal_lm, tokenizer = load_target(target_folder, torch.float32, place)
    settings = causal_lm.config
    mask_id = tokenizer.get_vocab().get(MASK)
    if mask_id is None:
        raise ValueError(f"--target {target_folder}: its tokenizer has no {MASK} token, which DFlash needs")
    if config.block_size < 2:
        raise ValueError(f"--block-size {config.block_size} must be at least 2: an anchor and one mask")
    ids = target_layer_ids(settings.num_hidden_layers, config.num_target_layers)
    target = FrozenTarget(causal_lm, [i + 1 for i in ids], config.bfloat16)
    model = DFlashDrafter(config, settings, loop.seed).to(place)

    return run_training(
        "dflash",
        model,
        rows=read_generations(data, "train", settings.vocab_size),
        data=data,
        target_folder=target_folder,
        vocab_size=settings.vocab_size,
        out=out,
        config=config,
        loop=loop,
        place=place,
        loss=lambda batch, generator: dflash_loss(model, target, batch, config, mask_id, generator),
        write=lambda: write_drafter(out / "model", *checkpoint(model, config, settings, mask_id)),
        acceptance=lambda rows: offline_acceptance(model, target, rows, config, mask_id),
    )
