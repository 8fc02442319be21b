"""DART for a frozen target: prefix-shared masked training on the target's own responses (section 3.3 of the paper).

Training does what inference does. The entry at position p joins the target's features of p with the embedding of the
token at p + 1. The features are the residual stream after layers 2, n//2 and n-3, fused by ``fc``. A draft that begins
at p is that entry followed by masks at p + 1, p + 2, ..., causal among themselves and blind to every other draft.
Logits are shifted: the entry predicts the token at p + 2, the mask at p + i the one at p + 2 + i. All masks share one
learned vector, which enters after the norms. As in the reference (``fvliang/DART``), whose checkpoint format this is,
its first half is their residual, and ``norm`` is applied twice before the head.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from crossspec_tools.devices import choose_device
from crossspec_tools.train.blocks import EntryDrafter, draft_attention, write_drafter
from crossspec_tools.train.drafter_run import Run, Trainee, open_target, read_responses, train_drafter
from crossspec_tools.train.generations import Batch, at, draft_vocabulary, sample_anchors
from crossspec_tools.train.losses import block_loss, drafted_places
from crossspec_tools.train.recipes import DartConfig, LoopConfig
from crossspec_tools.train.states import FrozenTarget, States, target_settings
from vllm_crossspec.drafters.dart.checkpoint import ARCHITECTURE
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers

Attention = Literal["dense", "flex"]


class DartDrafter(EntryDrafter):
    """EAGLE-3's parts and the vector that all masks share, with the parameter names of the public format."""

    def __init__(self, config: DartConfig, target: Any, kept: torch.Tensor, seed: int):
        super().__init__(config, target, kept, seed)
        self.num_drafts, self.is_shifted = config.num_drafts, config.is_shifted
        mask = torch.empty(2 * self.shape.hidden).normal_(generator=torch.Generator().manual_seed(seed + 1))
        self.midlayer.mask_rep = nn.Parameter(mask)

    def forward(
        self,
        states: States,
        tokens: torch.Tensor,
        embedding: torch.Tensor,
        anchors: torch.Tensor,
        attention: Attention | None = None,
    ) -> torch.Tensor:
        """Logits [B, A, num_drafts, draft vocabulary] in one pass; row i is about the token at p + 2 + i.

        Args:
            tokens: int64 [B, T].
            embedding: the target's, [V, H].
            anchors: int64 [B, A]; anchor p stands for the entry (features of p, token p + 1), p + 1 < T.
            attention: both compute the same; ``flex`` has no backward pass on a CPU. None: ``flex`` on a GPU.
        """
        layer, projections = self.midlayer, self.midlayer.self_attn
        features = self.fc(states.taps[:, :-1])
        entries = self.join(F.embedding(tokens[:, 1:], embedding), features)
        num_masks = self.num_drafts - 1 if self.is_shifted else self.num_drafts
        masks = layer.mask_rep.expand(*anchors.shape, num_masks, -1)
        block, residual = masks, masks[..., : features.shape[-1]]
        mask_places = places = anchors[..., None] + 1 + torch.arange(num_masks, device=tokens.device)
        if self.is_shifted:
            block = torch.cat([at(entries, anchors)[:, :, None], masks.to(entries.dtype)], dim=2)
            residual = torch.cat([at(features, anchors)[:, :, None], residual.to(features.dtype)], dim=2)
            places = torch.cat([anchors[..., None], mask_places], dim=-1)

        entry_places = torch.arange(entries.shape[1], device=tokens.device)
        context = projections.keys_values(entries, entry_places, self.theta)
        own = projections.keys_values(masks, mask_places, self.theta)
        attention = attention or ("flex" if tokens.is_cuda else "dense")
        attend = flex_draft_attention if attention == "flex" else draft_attention
        queries = projections.queries(block, places, self.theta)
        seen = attend(queries, context, anchors + 1, own, is_causal=True)
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

    Compiled (on a GPU) it keeps a block mask, where the dense form keeps every score. On a CPU it is for comparing.
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
    states = target.states_of(batch)
    # The first draft starts when the first response token is known: its entry stands one position earlier.
    count = config.anchors_per_row or batch.tokens.shape[1]
    anchors, real = sample_anchors(batch, -1, count, generator)
    teacher = target.teach(states, batch, config.teacher_temperature, model.kept)
    known = torch.isin(teacher.top, model.kept)
    steps = torch.arange(config.num_drafts, device=anchors.device)
    places, valid = drafted_places(teacher, batch, anchors + 1, steps)
    valid = valid & real[..., None] & known[places]
    places = places[valid]
    with target.autocast():
        logits = model(states, batch.tokens, target.embedding, anchors)[valid].float()
    losses = F.kl_div(logits.log_softmax(-1), teacher.probs[places], reduction="none").sum(-1)
    hits = model.kept[logits.detach().argmax(-1)] == teacher.top[places]
    return block_loss(losses, hits, valid, config.gamma**steps)


def checkpoint(model: DartDrafter, target: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors in the format of the public checkpoints (``fvliang/qwen8b-dart``).

    An unshifted drafter has no ``draft_length``, so that engines refuse to draft with it as DART.
    """
    if model.is_shifted:
        settings = model.settings(target, ARCHITECTURE) | {"draft_length": model.num_drafts - 1}
    else:
        settings = model.settings(target, ARCHITECTURE + "Unshifted") | {"num_masks": model.num_drafts}
    return settings, model.tensors(target.vocab_size)


def drafts(model: DartDrafter, target: FrozenTarget, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
    """The first choices behind the tokens at ``anchors``, as a chain: int64 [B, A, num_drafts]."""
    logits = model(target.states_of(batch), batch.tokens, target.embedding, anchors - 1)
    return model.kept[logits.argmax(-1)]


def train_dart(
    data: Path, target_folder: Path, out: Path, config: DartConfig, loop: LoopConfig, device: str = "cpu"
) -> dict[str, float]:
    """Train on the generations in ``data`` and write ``out/model``; see :func:`drafter_run.train_drafter`."""
    place = choose_device(device)
    settings = target_settings(target_folder)
    run, taps = Run(data, target_folder, out, config, loop), default_target_layers(settings.num_hidden_layers)
    rows = read_responses(run, "train", taps)
    target = open_target(run, taps, place)
    kept = draft_vocabulary(rows, config.draft_vocab_size, settings.vocab_size)
    model = DartDrafter(config, settings, kept, loop.seed).to(place)
    if config.head == "target":
        model.take_head(target.head)
    trainee = Trainee(
        "dart",
        model,
        loss=lambda batch, generator: dart_loss(model, target, batch, config, generator),
        draft=lambda batch, anchors: drafts(model, target, batch, anchors),
        num_drafts=config.num_drafts,
        write=lambda folder: write_drafter(folder, *checkpoint(model, settings)),
    )
    return train_drafter(run, trainee, target, rows)
