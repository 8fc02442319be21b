"""DART for a frozen target: prefix-shared masked training on the target's own responses (section 3.3 of the paper).

What inference does, and training therefore too. The entry at position p joins the target's features of p (the
residual stream after layers 2, n//2 and n-3, fused by ``fc``) with the embedding of the token at p + 1; a draft that
begins at p is that entry followed by masks at p + 1, p + 2, ..., causal among themselves and blind to every other
draft. Logits are shifted: the entry predicts the token at p + 2, the mask at p + i the one at p + 2 + i. All masks
share one learned vector, which enters after the norms; its first half is their residual, and ``norm`` is applied
twice before the head, both as in the reference (``fvliang/DART``), whose checkpoint format this is.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from vllm_crossspec.devices import choose_device
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.training.acceptance import measure
from vllm_crossspec.training.blocks import EntryLayer, RMSNorm, draft_attention, initialise, rotate, write_drafter
from vllm_crossspec.training.drafter_run import run_training
from vllm_crossspec.training.eagle3 import draft_vocabulary
from vllm_crossspec.training.generations import (
    Batch,
    Generation,
    read_generations,
    sample_anchors,
)
from vllm_crossspec.training.loop import LoopConfig
from vllm_crossspec.training.states import FrozenTarget, States, load_target

Attention = Literal["dense", "flex"]


@dataclass(frozen=True, kw_only=True)
class DartConfig:
    """Shape and recipe of the drafter; what is not here (hidden size, heads, rotary base) is the target's.

    Attributes:
        intermediate_size: of the MLP.
        draft_vocab_size: the drafter knows only the so many most frequent tokens of the responses.
        num_drafts: tokens of a draft, the paper's d: the entry and ``num_drafts - 1`` masks.
        gamma: draft i (from 1) weighs ``gamma ** (i - 1)``.
        is_shifted: whether a row predicts the token after its own place; False is the ablation in which the entry
            predicts nothing and every mask its own token, as diffusion language models do.
        teacher_temperature: the target's distribution is sharpened with it; 1 is the target's own.
        rows_per_step: responses of one optimizer step.
        anchors_per_row: drafts of one response in one optimizer step; 0 takes every place, as the paper.
        bfloat16: compute under bfloat16 autocast (weights stay float32).
        eval_rows: at most so many held-out responses.
    """

    intermediate_size: int = 1024
    draft_vocab_size: int = 3072
    num_drafts: int = 8
    gamma: float = 0.6
    is_shifted: bool = True
    teacher_temperature: float = 1.0
    rows_per_step: int = 16
    anchors_per_row: int = 32
    bfloat16: bool = True
    eval_rows: int = 96


class _Layer(EntryLayer):
    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int, dim: int, eps: float):
        super().__init__(hidden, inner, heads, kv_heads, dim, eps)
        self.mask_rep = nn.Parameter(torch.empty(2 * hidden))


class DartDrafter(nn.Module):
    """The drafter, with the parameter names of the public format. The embedding is the target's and stays outside.

    Args:
        target: configuration of the target (transformers).
        kept: int64 [draft vocabulary], the target's ids of the drafter's tokens, rising.
    """

    def __init__(self, config: DartConfig, target: Any, kept: torch.Tensor, seed: int):
        super().__init__()
        hidden, self.heads, self.kv_heads = (
            target.hidden_size,
            target.num_attention_heads,
            target.num_key_value_heads,
        )
        self.dim = getattr(target, "head_dim", None) or hidden // self.heads
        self.theta = target.rope_parameters["rope_theta"]
        self.num_drafts, self.is_shifted = config.num_drafts, config.is_shifted
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = _Layer(
            hidden, config.intermediate_size, self.heads, self.kv_heads, self.dim, target.rms_norm_eps
        )
        self.norm = RMSNorm(hidden, target.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(kept), bias=False)
        self.register_buffer("kept", kept)
        initialise(self, seed)
        with torch.no_grad():
            self.midlayer.mask_rep.normal_(generator=torch.Generator().manual_seed(seed + 1))

    def forward(
        self,
        states: States,
        tokens: torch.Tensor,
        embedding: torch.Tensor,
        anchors: torch.Tensor,
        attention: Attention | None = None,
    ) -> torch.Tensor:
        """Draft ``num_drafts`` tokens at every anchor, all in one pass.

        Args:
            states: of ``tokens``.
            tokens: int64 [B, T].
            embedding: the target's, [V, H].
            anchors: int64 [B, A]; anchor p stands for the entry (features of p, token p + 1), p + 1 < T.
            attention: ``flex`` (FlexAttention, which has no backward pass on a CPU) or ``dense``; they compute the
                same. None: ``flex`` on a GPU.

        Returns:
            Logits [B, A, num_drafts, draft vocabulary]; row i is about the token at p + 2 + i.
        """
        layer, projections = self.midlayer, self.midlayer.self_attn
        features = self.fc(states.taps[:, :-1])
        embedded = layer.input_layernorm(F.embedding(tokens[:, 1:], embedding))
        entries = torch.cat([embedded, layer.hidden_norm(features)], dim=-1)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        num_masks = self.num_drafts - 1 if self.is_shifted else self.num_drafts
        masks = layer.mask_rep.expand(*anchors.shape, num_masks, -1)
        residual = masks[..., : features.shape[-1]]
        block = masks
        steps = torch.arange(num_masks, device=tokens.device)
        mask_places = anchors[..., None] + 1 + steps
        places = mask_places
        if self.is_shifted:
            block = torch.cat([entries[rows, anchors][:, :, None], masks.to(entries.dtype)], dim=2)
            residual = torch.cat([features[rows, anchors][:, :, None], residual.to(features.dtype)], dim=2)
            places = torch.cat([anchors[..., None], mask_places], dim=-1)

        def heads(projection: nn.Linear, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
            x = projection(x).unflatten(-1, (-1, self.dim))
            return x if positions is None else rotate(x, positions, self.theta)

        entry_places = torch.arange(entries.shape[1], device=tokens.device)
        context = (heads(projections.k_proj, entries, entry_places), heads(projections.v_proj, entries, None))
        own = (heads(projections.k_proj, masks, mask_places), heads(projections.v_proj, masks, None))
        attention = attention or ("flex" if tokens.is_cuda else "dense")
        attend = flex_draft_attention if attention == "flex" else draft_attention
        seen = attend(heads(projections.q_proj, block, places), context, anchors + 1, own, is_causal=True)
        x = residual + projections.o_proj(seen)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.lm_head(self.norm(self.norm(x)))


@functools.cache
def _flex(is_compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``create_block_mask`` and ``flex_attention``; compiled, they never hold the mask or the scores as a whole."""
    if not is_compiled:
        return create_block_mask, flex_attention
    # Dynamic: every batch has another length.
    return torch.compile(create_block_mask, dynamic=True), torch.compile(flex_attention, dynamic=True)


def flex_draft_attention(
    query: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    limits: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    *,
    is_causal: bool,
) -> torch.Tensor:
    """:func:`blocks.draft_attention` through FlexAttention: the sparse mask of the paper's appendix B.

    Memory is that of the keys and of a block mask, where the dense form keeps every score. That holds on a GPU, where
    it is compiled; on a CPU it is for comparing.
    """
    rows, drafts, length, _, _ = query.shape
    tokens, own_length = context[0].shape[1], own[0].shape[2]
    lag = own_length - length

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        draft, step = q // length, q % length
        behind = k - tokens
        is_own = (behind // own_length == draft) & ((behind % own_length <= step + lag) | (not is_causal))
        return torch.where(k < tokens, k < limits[b, draft], is_own)

    keys, values = (torch.cat([a, b.flatten(1, 2)], dim=1).transpose(1, 2) for a, b in zip(context, own, strict=True))
    folded = query.flatten(1, 2).transpose(1, 2)
    make_mask, attend = _flex(query.is_cuda)
    mask = make_mask(sees, rows, None, folded.shape[2], keys.shape[2], device=query.device)
    out = attend(folded, keys, values, block_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).unflatten(1, (drafts, length)).flatten(-2)


def dart_loss(
    model: DartDrafter, target: FrozenTarget, batch: Batch, config: DartConfig, generator: torch.Generator
) -> tuple[torch.Tensor, dict[str, float]]:
    """Annealed KL(target | drafter) at every drafted position, in nats a token.

    As in EAGLE-3's recipe a place counts only where the target's most likely token is in the draft vocabulary.
    """
    states = target.states(batch.tokens)
    # The first draft starts when the first response token is known: its entry stands one position earlier.
    count = config.anchors_per_row or batch.tokens.shape[1]
    anchors, real = sample_anchors(batch, -1, count, generator)
    teacher = target.teach(states, batch, config.teacher_temperature, model.kept)
    known = torch.isin(teacher.top, model.kept)
    steps = torch.arange(config.num_drafts, device=anchors.device)
    source = anchors[..., None] + 1 + steps
    rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    places = teacher.index[rows, source.clamp(max=batch.tokens.shape[1] - 1)]
    valid = real[..., None] & (source + 1 < batch.ends[:, None, None]) & known[places]
    places = places[valid]
    with torch.autocast(anchors.device.type, dtype=torch.bfloat16, enabled=config.bfloat16):
        logits = model(states, batch.tokens, target.embedding, anchors)[valid].float()
    weight = (config.gamma**steps).expand(valid.shape)[valid]
    divergence = F.kl_div(logits.log_softmax(-1), teacher.probs[places], reduction="none").sum(-1)
    loss = (divergence * weight).sum() / weight.sum().clamp(min=1e-6)
    hits = model.kept[logits.detach().argmax(-1)] == teacher.top[places]
    step = steps.expand(valid.shape)[valid]
    shares = {f"hit_{i + 1}": hits[step == i].float().mean().item() for i in (0, len(steps) - 1) if (step == i).any()}
    return loss, shares


def checkpoint(model: DartDrafter, config: DartConfig, target: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors in the format of the public checkpoints (``fvliang/qwen8b-dart``).

    An unshifted drafter has no ``draft_length``: whoever would draft with it as if it were DART refuses it.
    """
    tensors = {name: x.cpu() for name, x in model.state_dict().items() if name != "kept"}
    kept = model.kept.cpu()
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    settings = {
        "architectures": ["LlamaForCausalLMDart" if config.is_shifted else "LlamaForCausalLMDartUnshifted"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": target.bos_token_id,
        "draft_vocab_size": len(model.kept),
        "eos_token_id": target.eos_token_id,
        "head_dim": model.dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": target.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": model.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": model.kv_heads,
        "pad_token_id": target.pad_token_id,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": model.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": target.vocab_size,
    }
    settings |= {"draft_length": config.num_drafts - 1} if config.is_shifted else {"num_masks": config.num_drafts}
    return settings, tensors


def offline_acceptance(
    model: DartDrafter, target: FrozenTarget, rows: list[Generation], config: DartConfig
) -> dict[str, float]:
    """Held-out acceptance of the first choices alone (a chain); see :func:`acceptance.measure`."""
    model.eval()

    def draft(batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        tokens, anchors = batch.tokens.to(target.device), anchors.to(target.device)
        with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=config.bfloat16):
            logits = model(target.states(tokens), tokens, target.embedding, anchors - 1)
        return model.kept[logits.argmax(-1)].cpu()

    return measure(rows, draft, config.num_drafts)


def train_dart(
    data: Path, target_folder: Path, out: Path, config: DartConfig, loop: LoopConfig, device: str = "cpu"
) -> dict[str, float]:
    """Train on the generations in ``data`` and write the drafter to ``out/model``; resumes from ``out/state.pt``.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``; not part of what the run is, so that it may go on elsewhere.

    Returns:
        The held-out acceptance at the end, also in ``out/acceptance.json`` (empty without ``dev-*`` shards).
    """
    place = choose_device(device)
    causal_lm, _ = load_target(target_folder, torch.float32, place)
    settings = causal_lm.config
    if not 0 < config.draft_vocab_size <= settings.vocab_size:
        raise ValueError(f"--draft-vocab {config.draft_vocab_size} must lie within 1..{settings.vocab_size}")
    if config.num_drafts < 2:
        raise ValueError(f"--num-drafts {config.num_drafts} must be at least 2: an entry and one mask")
    target = FrozenTarget(causal_lm, default_target_layers(settings.num_hidden_layers), config.bfloat16)
    rows = read_generations(data, "train", settings.vocab_size)
    kept, _ = draft_vocabulary(rows, config.draft_vocab_size, settings.vocab_size)
    model = DartDrafter(config, settings, kept, loop.seed).to(place)
    with torch.no_grad():
        model.lm_head.weight.copy_(target.head[model.kept])

    return run_training(
        "dart",
        model,
        rows=rows,
        data=data,
        target_folder=target_folder,
        vocab_size=settings.vocab_size,
        out=out,
        config=config,
        loop=loop,
        place=place,
        loss=lambda batch, generator: dart_loss(model, target, batch, config, generator),
        write=lambda: write_drafter(out / "model", *checkpoint(model, config, settings)),
        acceptance=lambda rows: offline_acceptance(model, target, rows, config),
    )
