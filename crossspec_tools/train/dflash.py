"""DFlash for a frozen target: blocks of masks over the target's own responses, z-lab's checkpoint format.

The recipe is our own, for the reason that ``train.eagle3`` gives.

Training does what inference does. The drafter has no context tokens of its own. In each layer the keys and values
before the block come from the target's features: the residual stream after some layers, fused by ``fc``, normed by
``hidden_norm``. The block is the token that the target has just emitted at position a (the anchor), then masks at
a + 1, a + 2, ... Its tokens see one another in both directions and the context before a. The output at a mask is the
draft of its own position. Embedding and head are the target's.

JetSpec's blocks are causal: a token sees those before it only. All else is the same.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoTokenizer

from crossspec_tools.devices import choose_device
from crossspec_tools.train import blocks
from crossspec_tools.train.blocks import Attention, Drafter, RMSNorm, Shape, draft_attention, write_drafter
from crossspec_tools.train.drafter_run import Run, Trainee, open_target, read_responses, train_drafter
from crossspec_tools.train.generations import Batch, sample_anchors
from crossspec_tools.train.losses import block_loss, drafted_places
from crossspec_tools.train.recipes import DFlashConfig, LoopConfig
from crossspec_tools.train.start import Start, check_names, load_start, read_drafter
from crossspec_tools.train.states import FrozenTarget, States, target_settings
from vllm_crossspec.kinds.checkpoint import read_config


class _Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.self_attn = Attention(shape.hidden, shape, has_norms=True)
        self.mlp = blocks.MLP(shape.hidden, shape.inner)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)


def target_layer_ids(depth: int, count: int) -> list[int]:
    """``count`` layers spread evenly from 1 to ``depth - 3`` (z-lab's rule; id i is the output of layer i).

    Raises ValueError: the target has fewer layers there.
    """
    first, last = 1, depth - 3
    if not 1 <= count <= last - first + 1:
        raise ValueError(f"--target-layers {count} must lie within 1..{last - first + 1} for {depth} target layers")
    if count == 1:
        return [depth // 2]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


class DFlashDrafter(Drafter):
    """The drafter, with the parameter names of the public format; the head stays the target's, too."""

    def __init__(self, config: DFlashConfig, target: Any, mask_id: int, seed: int):
        super().__init__(config.intermediate_size, target)
        self.block_size, self.mask_id, self.is_causal = config.block_size, mask_id, config.kind == "jetspec"
        hidden, eps = self.shape.hidden, self.shape.eps
        self.fc = nn.Linear(config.num_target_layers * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(_Layer(self.shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps)
        blocks.initialise(self, seed)

    def forward(
        self, states: States, tokens: torch.Tensor, embedding: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Normed outputs [B, A, block size - 1, H] of the masks of every block, ready for the target's head.

        Args:
            tokens: int64 [B, T].
            embedding: the target's, [V, H].
            anchors: int64 [B, A], position of each block's first token, which masks follow.
        """
        context = self.hidden_norm(self.fc(states.taps))
        places = torch.arange(context.shape[1], device=anchors.device)
        positions = anchors[..., None] + torch.arange(self.block_size, device=anchors.device)
        ids = torch.full(positions.shape, self.mask_id, device=anchors.device)
        ids[..., 0] = tokens.gather(1, anchors)
        x = F.embedding(ids, embedding)
        for layer in self.layers:
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            seen = draft_attention(
                attention.queries(normed, positions, self.theta),
                attention.keys_values(context, places, self.theta),
                anchors,
                attention.keys_values(normed, positions, self.theta),
                is_causal=self.is_causal,
            )
            x = x + attention.o_proj(seen)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x[:, :, 1:])


def dflash_loss(
    model: DFlashDrafter, target: FrozenTarget, batch: Batch, config: DFlashConfig, generator: torch.Generator
) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross-entropy with the target's distribution at every mask, earlier masks weighing more, in nats a token."""
    states = target.states_of(batch)
    anchors, real = sample_anchors(batch, 0, config.anchors_per_row, generator)
    teacher = target.teach(states, batch, config.teacher_temperature)
    steps = torch.arange(config.block_size - 1, device=anchors.device)
    places, valid = drafted_places(teacher, batch, anchors, steps)
    valid = valid & real[..., None]
    places = places[valid]
    with target.autocast():
        logits = F.linear(model(states, batch.tokens, target.embedding, anchors)[valid], target.head).float()
    losses = F.cross_entropy(logits, teacher.probs[places], reduction="none")
    hits = logits.detach().argmax(-1) == teacher.top[places]
    return block_loss(losses, hits, valid, torch.exp(-steps / config.decay))


def checkpoint(
    model: DFlashDrafter, config: DFlashConfig, target: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors in z-lab's format, which vLLM's own ``dflash`` method reads; JetSpec's has one more."""
    layers = target_layer_ids(target.num_hidden_layers, config.num_target_layers)
    causal = {"causal_head": True} if model.is_causal else {}
    own = {
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": model.mask_id, "target_layer_ids": layers, **causal},
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * config.num_layers,
        "max_window_layers": config.num_layers,
        "num_hidden_layers": config.num_layers,
        "num_target_layers": target.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    settings = model.layer_settings(target, "DFlashDraftModel", "qwen3", **own)
    return settings, {name: x.cpu() for name, x in model.state_dict().items()}


def drafts(model: DFlashDrafter, target: FrozenTarget, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
    """The greedy blocks behind the tokens at ``anchors``: int64 [B, A, block size - 1]."""
    states = target.states_of(batch)
    return F.linear(model(states, batch.tokens, target.embedding, anchors), target.head).argmax(-1)


def read_start(config: DFlashConfig, target: Any, mask_id: int) -> Start:
    """Read the drafter in ``config.start``. Raises ValueError: not a DFlash drafter of this target and shape."""
    made = "a DFlash drafter that `crossspec train dflash` made"
    folder = Path(config.start)
    found = read_config(str(folder.resolve()), "--start").get("dflash_config") if folder.is_dir() else None
    kind = "jetspec" if isinstance(found, dict) and found.get("causal_head") else "dflash"
    start = read_drafter(folder, target, kind, made)
    sliding = sorted(set(start.settings.get("layer_types") or ()) - {"full_attention"})
    if sliding:
        raise ValueError(f"{start.name} has layers of {sliding[0]}; {start.remedy}")
    if start.facts.mask_token_id != mask_id:
        mask = f"token {start.facts.mask_token_id} as its mask"
        raise ValueError(f"{start.name} has {mask}, but --mask-token {config.mask_token} is {mask_id}; {start.remedy}")
    ids = target_layer_ids(target.num_hidden_layers, config.num_target_layers)
    taps = [i - 1 for i in start.facts.target_layers]  # as config.json counts: one lower than vLLM
    inner, layers = start.size("intermediate_size"), start.size("num_hidden_layers")
    if taps != ids:
        what = f"--target-layers {config.num_target_layers} reads {ids} of the target, but {start.name} {taps}"
        raise ValueError(f"{what}; give as many as it reads, or another drafter")
    if config.intermediate_size != inner:
        what = f"--intermediate-size {config.intermediate_size}: {start.name} has {inner}"
        raise ValueError(f"{what}, which stays; leave the option out")
    if config.num_layers < layers:
        raise ValueError(
            f"--layers {config.num_layers}: {start.name} has {layers}, which all stay; give as many or more"
        )
    return start


@torch.no_grad()
def begin_as(model: DFlashDrafter, start: Start) -> None:
    """Give ``model`` the weights of ``start``; its further layers begin without an effect.

    Their two projections into the residual stream are zero. These learn from the first step on, the parts before them
    from the second. Raises ValueError: ``start`` lacks a weight, or has one too many or of another shape.
    """
    further = tuple(f"layers.{i}." for i in range(start.size("num_hidden_layers"), len(model.layers)))
    check_names(start, {name for name in model.state_dict() if not name.startswith(further)})
    load_start(model, start)
    for name, parameter in model.named_parameters():
        if name.startswith(further) and name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()


def train_dflash(
    data: Path, target_folder: Path, out: Path, config: DFlashConfig, loop: LoopConfig, device: str = "cpu"
) -> dict[str, float]:
    """Train on the generations in ``data`` and write ``out/model``; see :func:`drafter_run.train_drafter`."""
    place = choose_device(device)
    settings = target_settings(target_folder)
    mask_id = AutoTokenizer.from_pretrained(target_folder, trust_remote_code=False).get_vocab().get(config.mask_token)
    if mask_id is None:
        raise ValueError(
            f"--mask-token {config.mask_token}: the target's tokenizer has no such token; give one that no text has"
        )
    ids = target_layer_ids(settings.num_hidden_layers, config.num_target_layers)
    start = read_start(config, settings, mask_id) if config.start else None
    model = DFlashDrafter(config, settings, mask_id, loop.seed)
    if start is not None:
        begin_as(model, start)
    run, taps = Run(data, target_folder, out, config, loop), [i + 1 for i in ids]
    rows = read_responses(run, "train", taps)
    target = open_target(run, taps, place)
    model.to(place)
    trainee = Trainee(
        config.kind,
        model,
        loss=lambda batch, generator: dflash_loss(model, target, batch, config, generator),
        draft=lambda batch, anchors: drafts(model, target, batch, anchors),
        num_drafts=config.block_size - 1,
        write=lambda folder: write_drafter(folder, *checkpoint(model, config, settings)),
    )
    return train_drafter(run, trainee, target, rows)
