"""ConFu for a frozen target: soft prompts, contemplate tokens and a drafter that sees the future (Qin et al. 2026).

Training does what inference does. A *contemplate token* follows position p in the target. It sees the soft prompts,
everything up to p and itself; no other token sees it. Its state after the target's last layer is the future f of p.
The drafter is EAGLE-3's (``train.eagle3``). A draft that begins at p keeps one more entry, (future embedding, f), at
the place after its last token, so that every step sees it. Both embeddings are mixtures of experts: the target's
states choose those of the contemplate token, the drafter's own states those of the future (section 3.2).

The paper inserts contemplate tokens into the training sequence. Here the frozen target first runs over the text
without gradients, then over the contemplate tokens alone, which read the soft prompts and the first pass's keys and
values. The numbers are the same, and only the anchors cost time.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, PreTrainedModel

from crossspec_tools.devices import choose_device
from crossspec_tools.flashhead.quality import Draft
from crossspec_tools.train import eagle3
from crossspec_tools.train.blocks import rotate, write_drafter
from crossspec_tools.train.drafter_run import Run, Trainee, train_drafter
from crossspec_tools.train.eagle3 import MAPS, Eagle3Drafter, read_start, unrolled_loss
from crossspec_tools.train.generations import Batch, at, read_generations, sample_anchors
from crossspec_tools.train.recipes import ConfuConfig, LoopConfig
from crossspec_tools.train.start import load_start
from crossspec_tools.train.states import FrozenTarget, States, load_target, target_settings
from vllm_crossspec.drafters.confu.checkpoint import ARCHITECTURE, MODEL_TYPE, check_target, read_shape
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.drafting.flashhead.embedding import tensor_files
from vllm_crossspec.kinds.checkpoint import check_drafter, read_config
from vllm_crossspec.kinds.identity import Identity, Target, identify
from vllm_crossspec.types import TargetFacts

Cache = list[tuple[torch.Tensor, torch.Tensor]]
NAMES = frozenset(
    (
        *(name.replace("midlayer.", "layers.0.") for name in eagle3.NAMES),
        *(f"soft_prompts.{x}" for x in ("keys", "values")),
        *(f"{embed}.{x}" for embed in ("contemplate_embed", "future_embed") for x in ("router", "experts")),
        "future_skip.weight",
        "no_future_embed",
    )
)
"""Tensors of a ConFu drafter, beside its maps of tokens."""


class Mixture(nn.Module):
    """An embedding mixed from the best ``top`` of some experts (section 3.2), in float32; their weights sum to 1.

    The states are normed before they are routed: a residual stream has no scale that a softmax could rely on.
    """

    def __init__(self, width: int, hidden: int, num_experts: int, top: int):
        super().__init__()
        self.router = nn.Parameter(torch.zeros(num_experts, width))
        self.experts = nn.Parameter(torch.zeros(num_experts, hidden))
        self.top = min(top, num_experts)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., H] by states [..., width]."""
        with torch.autocast(states.device.type, enabled=False):
            states = F.rms_norm(states.float(), states.shape[-1:])
            best = (states @ self.router.T).softmax(-1).topk(self.top, dim=-1)
            weights = best.values / best.values.sum(-1, keepdim=True)
            return (weights[..., None] * self.experts[best.indices]).sum(-2)


class SoftPrompts(nn.Module):
    """Learned keys (as after rotation) and values of every layer of the target: [layers, k, s, D] each."""

    def __init__(self, layers: int, kv_heads: int, num_prompts: int, dim: int):
        super().__init__()
        self.keys = nn.Parameter(torch.zeros(layers, kv_heads, num_prompts, dim))
        self.values = nn.Parameter(torch.zeros(layers, kv_heads, num_prompts, dim))


class ConfuDrafter(Eagle3Drafter):
    """EAGLE-3's drafter with what makes futures and what reads them."""

    def __init__(self, config: ConfuConfig, target: Any, kept: torch.Tensor, seed: int):
        super().__init__(config, target, kept, seed)
        hidden, experts = target.hidden_size, (config.num_experts, config.top_experts)
        sizes = (target.num_hidden_layers, self.shape.kv_heads, config.num_soft_prompts, self.dim)
        self.soft_prompts = SoftPrompts(*sizes)
        self.contemplate_embed = Mixture(3 * hidden, hidden, *experts)
        self.future_embed = Mixture(hidden, hidden, *experts)
        self.future_skip = nn.Linear(hidden, hidden, bias=False)
        self.no_future_embed = nn.Parameter(torch.zeros(hidden))
        nn.init.zeros_(self.future_skip.weight).requires_grad_(config.future_skip)
        for part in (self.soft_prompts, self.contemplate_embed, self.future_embed, self.future_skip):
            for parameter in part.parameters():
                parameter.lr_scale = config.new_rate
        self.no_future_embed.lr_scale = config.new_rate

    @torch.no_grad()
    def set_up(self, target: FrozenTarget, tokens: torch.Tensor, seed: int, aimed: bool) -> None:
        """Start the new parts from what the target knows: keys, values and embeddings of a text of its own.

        ``tokens``: int64 [at least s]; the text's own keys and values become the soft prompts.
        """
        generator = torch.Generator().manual_seed(seed + 7)
        num_prompts = self.soft_prompts.keys.shape[2]
        _, cache = target.states_and_cache(tokens[None, :num_prompts])
        for layer, (keys, values) in enumerate(cache):
            self.soft_prompts.keys[layer], self.soft_prompts.values[layer] = keys[0], values[0]
        mean, spread = target.embedding.mean(0), target.embedding.std(0)
        for mixture in (self.contemplate_embed, self.future_embed):
            noise = torch.randn(mixture.experts.shape, generator=generator).to(mean.device)
            mixture.experts.copy_(mean + 0.5 * spread * noise)
            router = torch.randn(mixture.router.shape, generator=generator) * mixture.router.shape[1] ** -0.5
            mixture.router.copy_(router)
        if aimed:
            self._aim(target, tokens, generator)

    def _aim(self, target: FrozenTarget, tokens: torch.Tensor, generator: torch.Generator) -> None:
        """Start future embeddings where the drafter looks: an entry without attention learns next to nothing.

        Their keys point along the mean query of a text, as seen from one place before. That gives them 5 to 15 % of the
        pocket drafter's attention. Embeddings like any other token's got none.
        """
        features = self.fc(target.states(tokens[None]).taps[:, :-1])
        entries = self.join(F.embedding(tokens[None, 1:], target.embedding), features)
        query = self.midlayer.self_attn.q_proj(entries).unflatten(-1, (-1, self.dim))[0].mean(0)
        query = query.unflatten(0, (self.shape.kv_heads, -1)).mean(1)
        query = rotate(query[None], torch.tensor([-1], device=query.device), self.theta)[0]
        hidden = features.shape[-1]
        keys = self.midlayer.self_attn.k_proj.weight[:, :hidden].unflatten(0, (self.shape.kv_heads, -1))
        aim = torch.einsum("kdh,kd->h", keys, query) / self.midlayer.input_layernorm.weight
        noise = torch.randn(self.future_embed.experts.shape, generator=generator).to(aim.device)
        aim = aim / aim.pow(2).mean().sqrt() + 0.3 * noise
        self.future_embed.experts.copy_(aim * target.embedding.std())

    def futures(self, target: FrozenTarget, cache: Cache, gates: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """[B, A, H] what the target's last layer makes of a contemplate token behind each anchor, normed as its own.

        Args:
            cache: keys and values [B, k, T, D] of every layer over the text.
            gates: [B, A, 3 H] concatenated states that choose the experts.
            anchors: int64 [B, A].
        """
        prompts, num_rows, layers = self.soft_prompts, len(anchors), []
        for *soft, own in zip(prompts.keys, prompts.values, cache, strict=True):
            pairs = zip(soft, own, strict=True)
            layers.append([torch.cat([p.to(x.dtype).expand(num_rows, -1, -1, -1), x], dim=2) for p, x in pairs])
        num_prompts, num_tokens = prompts.keys.shape[2], cache[0][0].shape[2]
        out = target.model.model(
            inputs_embeds=self.contemplate_embed(gates),
            position_ids=anchors + 1,
            attention_mask=contemplation_mask(anchors, num_prompts, num_tokens, as_blocks=target.reads_block_masks),
            past_key_values=DynamicCache(layers),
            use_cache=True,
        )
        return out.last_hidden_state

    def future_entries(self, states: States, futures: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """The entries [B, A, 2 H] of futures [B, A, H] whose embeddings the states at ``anchors`` choose."""
        return self.join(self.future_embed(self.fc(at(states.taps, anchors))), futures)


def contemplation_mask(anchors: torch.Tensor, num_prompts: int, num_tokens: int, *, as_blocks: bool) -> Any:
    """Which keys each contemplate token sees: the soft prompts, the text up to its anchor, itself (section 3.1).

    Returns what transformers takes as ``attention_mask``: a block mask, or bools [B, 1, A, s + T + A].

    Args:
        anchors: int64 [B, A].
        num_prompts: s, keys before the text.
        num_tokens: T, keys of the text; the A contemplate tokens' own follow.
        as_blocks: for FlexAttention, whose kernels skip hidden blocks.
    """
    rows, count = anchors.shape

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        behind = k - num_prompts
        return torch.where(behind < num_tokens, behind <= anchors[b, q], behind - num_tokens == q)

    num_keys = num_prompts + num_tokens + count
    if as_blocks:
        return create_block_mask(sees, rows, None, count, num_keys, device=anchors.device)
    every_b, every_q, every_k = (torch.arange(n, device=anchors.device) for n in (rows, count, num_keys))
    no_head = torch.zeros((), dtype=torch.int64, device=anchors.device)
    return sees(every_b[:, None, None], no_head, every_q[:, None], every_k)[:, None]


def replicate(
    anchors: torch.Tensor, real: torch.Tensor, batch: Batch, replicas: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The places that draft with each anchor's future: its own, and the ``replicas`` after it (equation 3).

    Returns (int64 [B, A * (replicas + 1)] places, clamped into the batch, anchor by anchor; bool, which of them count).
    Other anchors and places that no token follows do not count. ``anchors``, ``real``: as of ``sample_anchors``.
    """
    offsets = torch.arange(replicas + 1, device=anchors.device)
    places = anchors[..., None] + offsets
    is_free = (offsets == 0) | (places[..., None] != anchors[:, None, None]).all(-1)
    counts = real[..., None] & is_free & (places + 1 < batch.ends[:, None, None])
    return places.clamp(max=batch.tokens.shape[1] - 2).flatten(1), counts.flatten(1)


def future_loss(
    futures: torch.Tensor,
    target: FrozenTarget,
    states: States,
    batch: Batch,
    anchors: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, float]:
    """How well the target's own head reads the token after the next one out of the ``futures`` [B, A, H], in nats.

    The paper has no such loss. Without it some thousand steps hardly moved the soft prompts: the signal through a
    drafter of one layer is too faint. Returns the loss, and how often the likeliest token is the target's.
    ``anchors``: as of ``sample_anchors``.
    """
    places, real = anchors
    known = real & (places + 2 < batch.ends[:, None])
    after = at(states.last, places + 1)[known]
    wanted = F.linear(after, target.head).float().softmax(-1)
    logits = F.linear(futures[known], target.head).float()
    if not len(logits):
        return logits.sum(), 0.0
    hits = (logits.detach().argmax(-1) == wanted.argmax(-1)).float().mean().item()
    return F.cross_entropy(logits, wanted), hits


def confu_loss(
    model: ConfuDrafter, target: FrozenTarget, batch: Batch, config: ConfuConfig, generator: torch.Generator
) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross-entropy with the target at every unrolled step of every anchor and of its replicas (equation 3).

    Its gradient is that of the paper's KL divergence: the two differ by the target's entropy, which is constant.
    """
    states, cache = target.states_and_cache(batch.tokens)
    anchors, real = sample_anchors(batch, -1, config.anchors_per_row, generator)
    lag = torch.randint(1, config.max_lag + 2, anchors.shape, generator=generator).to(anchors.device)
    has_future = (torch.rand(anchors.shape, generator=generator) >= config.no_future).to(anchors.device)
    teacher = target.teach(states, batch, config.teacher_temperature, model.kept)
    with target.autocast():
        futures = model.futures(target, cache, at(states.taps, anchors - lag), anchors)
        own_loss, own_hits = future_loss(futures, target, states, batch, (anchors, real))
        futures = torch.where(has_future[..., None], futures, model.no_future_embed.to(futures.dtype))
        places, real = replicate(anchors, real, batch, config.replicas)
        futures, borrowed = (x.repeat_interleave(config.replicas + 1, dim=1) for x in (futures, anchors))
        choosing = places if config.replicas_choose else borrowed
        entries, skip = model.future_entries(states, futures, choosing), model.future_skip(futures)
        steps = model.unroll(
            states, batch.tokens, target.embedding, places, config.num_steps, last_entry=entries, skip=skip
        )
        loss, figures = unrolled_loss(steps, model.kept, teacher, batch, (places, real), config.step_decay)
        return loss + config.future_loss * own_loss, figures | {"future_hit": own_hits}


def checkpoint(
    model: ConfuDrafter, config: ConfuConfig, target: Any, identity: Identity
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration in the style of the ``speculators`` library, and tensors (docs/methods/confu.md has the format)."""
    layer, tensors = eagle3.checkpoint(model, target)
    layer = {k: v for k, v in layer.items() if k not in ("architectures", "draft_vocab_size", "torch_dtype")}
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
    settings = {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": MODEL_TYPE,
        "draft_vocab_size": len(model.kept),
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(default_target_layers(target.num_hidden_layers)),
        "norm_before_residual": False,
        "num_soft_prompts": config.num_soft_prompts,
        "num_experts": config.num_experts,
        "top_experts": config.top_experts,
        "target": {
            **identity._asdict(),
            "num_hidden_layers": target.num_hidden_layers,
            "num_key_value_heads": target.num_key_value_heads,
            "head_dim": model.dim,
        },
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_steps}],
            "verifier": {"architectures": target.architectures, "name_or_path": identity.name},
        },
        "torch_dtype": "bfloat16",
        "transformer_layer_config": layer,
    }
    return settings, tensors


def drafts(
    model: ConfuDrafter, target: FrozenTarget, batch: Batch, anchors: torch.Tensor, config: ConfuConfig
) -> torch.Tensor:
    """The greedy chains behind the tokens at ``anchors``: int64 [B, A, num_steps]."""
    states, cache = target.states_and_cache(batch.tokens)
    entries = anchors - 1
    gates = at(states.taps, entries - (1 + config.max_lag) // 2)  # of half a chain before
    futures = model.futures(target, cache, gates, entries)
    last, skip = model.future_entries(states, futures, entries), model.future_skip(futures)
    steps = model.unroll(
        states, batch.tokens, target.embedding, entries, config.num_steps, own_tokens=True, last_entry=last, skip=skip
    )
    return torch.stack([model.kept[logits.argmax(-1)] for logits in steps], dim=-1)


def check_drafter_format(folder: Path, key: str = "MODEL") -> None:
    """Raises ValueError: tensors are missing, or do not belong there."""
    odd = sorted((set(tensor_files(folder, key)) - MAPS) ^ NAMES)
    if odd:
        raise ValueError(
            f"{key} {folder} is no ConFu drafter of `crossspec train confu` ({odd[0]}); give one, or train it again"
        )


def load_confu(folder: Path, target_folder: Path, config: Any, key: str) -> ConfuDrafter:
    """A ConFu drafter as :func:`checkpoint` writes it, in float32.

    Raises ValueError: no ConFu drafter, or another target's.
    """
    facts = TargetFacts(str(target_folder), config.hidden_size, config.vocab_size, config.num_hidden_layers)
    found = check_drafter(MODEL_TYPE, str(folder.resolve()), key, facts)
    settings = read_config(str(folder.resolve()), key)
    check_target(settings, key, Target(facts, str(target_folder.resolve())))
    check_drafter_format(folder, key)
    tensors, shape = load_file(folder / "model.safetensors"), read_shape(settings, key)
    offsets = tensors.get("d2t", torch.zeros(found.draft_vocab_size, dtype=torch.int64))
    kept = offsets + torch.arange(len(offsets))
    sizes = ConfuConfig(
        intermediate_size=settings["transformer_layer_config"]["intermediate_size"],
        draft_vocab_size=len(kept),
        num_soft_prompts=shape.num_soft_prompts,
        num_experts=shape.num_experts,
        top_experts=shape.top_experts,
    )
    model = ConfuDrafter(sizes, config, kept, seed=0)
    weights = {name.replace("layers.0.", "midlayer."): x.float() for name, x in tensors.items() if name not in MAPS}
    model.load_state_dict(weights | {"kept": kept})
    return model.eval()


def drafting(folder: Path, target_folder: Path, target: PreTrainedModel) -> tuple[torch.nn.Module, Draft]:
    """As :func:`eagle3.drafting`, every draft with a future."""
    drafter = load_confu(folder, target_folder, target.config, "MODEL").to(target.device)
    frozen = FrozenTarget(target, default_target_layers(target.config.num_hidden_layers), bfloat16=False)
    config = ConfuConfig(num_steps=eagle3.DRAFT_STEPS)

    def draft(tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return drafts(drafter, frozen, Batch(tokens, anchors[:, 0], anchors[:, -1] + 1), anchors, config)

    return drafter.lm_head, draft


def train_confu(
    data: Path, target_folder: Path, out: Path, config: ConfuConfig, loop: LoopConfig, device: str = "cpu"
) -> dict[str, float]:
    """Train from the EAGLE-3 drafter ``config.start`` (section 4); see :func:`drafter_run.train_drafter`."""
    place = choose_device(device)
    settings = target_settings(target_folder)
    # A sliding window would end before the soft prompts, and keeps no keys and values of the whole text.
    usual = "sliding_attention" if getattr(settings, "sliding_window", None) else "full_attention"
    other = sorted(set(getattr(settings, "layer_types", None) or [usual]) - {"full_attention"})
    if other:
        raise ValueError(f"--target has layers of {other[0]}; contemplate tokens need full attention in every layer")
    if not config.start:
        raise ValueError("--start is missing; give an EAGLE-3 drafter that `crossspec train eagle3` made")
    start, kept = read_start(Path(config.start), settings)
    config = replace(config, intermediate_size=start.size("intermediate_size"), draft_vocab_size=len(kept))
    rows = read_generations(data, "train", settings.vocab_size)
    text = torch.tensor(rows[0].prompt_ids + rows[0].response_ids, device=place)
    if len(text) < config.num_soft_prompts:
        raise ValueError(
            f"--soft-prompts {config.num_soft_prompts} begin as the first text of --data, which has {len(text)} "
            f"tokens; give at most so many"
        )
    identity = identify(str(target_folder.resolve()), "--target")
    causal_lm, _ = load_target(target_folder, torch.float32, place)
    if place.type == "cuda":
        causal_lm.set_attn_implementation("flex_attention")
    target = FrozenTarget(causal_lm, default_target_layers(settings.num_hidden_layers), config.bfloat16)
    model = ConfuDrafter(config, settings, kept, loop.seed).to(place)
    load_start(model, start)
    model.set_up(target, text, loop.seed, config.aimed)
    trainee = Trainee(
        "confu",
        model,
        loss=lambda batch, generator: confu_loss(model, target, batch, config, generator),
        draft=lambda batch, anchors: drafts(model, target, batch, anchors, config),
        num_drafts=config.num_steps,
        write=lambda folder: write_drafter(folder, *checkpoint(model, config, settings, identity)),
    )
    return train_drafter(Run(data, target_folder, out, config, loop), trainee, target, rows)
