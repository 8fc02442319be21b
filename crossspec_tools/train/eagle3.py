"""EAGLE-3 for a frozen target: training-time test over the target's own responses, SafeAILab's checkpoint format.

Our own recipe, because the ``speculators`` library (0.9.0) trains on accelerators only: its trainer moves model and
batches to device 0 and its default attention, FlexAttention, has no backward pass on CPU.

Training does what inference does. The entry at position p joins the target's features of p with the embedding of the
token at p + 1. The features are the residual stream after layers 2, n//2 and n-3, fused by ``fc``. The entry is rotated
to position p and predicts the token at p + 2. A draft that begins at p sees the entries of all positions up to p, and
the steps of its own draft. Step s > 0 stands at position p + s, and its features are the un-normed output of step
s - 1. The output is normed for the head alone.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from crossspec_tools.devices import choose_device
from crossspec_tools.flashhead.quality import Draft
from crossspec_tools.train.blocks import EntryDrafter, draft_attention, rotate, write_drafter
from crossspec_tools.train.drafter_run import Run, Trainee, open_target, read_responses, train_drafter
from crossspec_tools.train.generations import Batch, at, draft_vocabulary, sample_anchors
from crossspec_tools.train.recipes import Eagle3Config, LoopConfig
from crossspec_tools.train.start import KEY, Start, check_names, load_start, read_drafter, read_tensors
from crossspec_tools.train.states import FrozenTarget, States, Teacher, target_settings
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers, read_facts
from vllm_crossspec.drafting.flashhead.embedding import tensor_files
from vllm_crossspec.types import TargetFacts

NAMES = frozenset(
    (
        "fc.weight",
        "lm_head.weight",
        "norm.weight",
        *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        *(f"midlayer.{x}.weight" for x in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    )
)
"""Tensors of a drafter in SafeAILab's format, beside its :data:`MAPS`."""
MAPS = {"d2t", "t2d"}
DRAFT_STEPS = 7
"""Tokens of a draft whose states :func:`drafting` shows."""


class Eagle3Drafter(EntryDrafter):
    """The drafter, with the parameter names of the public format."""

    def unroll(
        self, states: States, tokens: torch.Tensor, embedding: torch.Tensor, anchors: torch.Tensor, num_steps: int,
        *, own_tokens: bool = False, last_entry: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> Iterator[torch.Tensor]:  # fmt: skip
        """Draft ``num_steps`` tokens; at step s logits [B, A, draft vocabulary] of the token at p + 2 + s.

        Args:
            tokens: int64 [B, T].
            embedding: the target's, [V, H].
            anchors: int64 [B, A]; anchor p stands for the entry (features of p, token p + 1), p + 1 < T.
            own_tokens: feed back the drafter's own choices, as inference does, instead of the response's tokens.
            last_entry: [B, A, 2 H] of :meth:`join`, seen by every step of its draft from the place after it.
            skip: [B, A, H], added to the state that every step of its draft starts from.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        features = self.fc(states.taps[:, :-1])
        joined = self.join(F.embedding(tokens[:, 1:], embedding), features)
        places = torch.arange(joined.shape[1], device=tokens.device)
        context = attention.keys_values(joined, places, self.theta)
        current, x = at(features, anchors), at(joined, anchors)
        last = None if last_entry is None else attention.bare_keys_values(last_entry)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        following = at(tokens, anchors + 1)
        for step in range(num_steps):
            if skip is not None:
                current = current + skip
            if step or skip is not None:
                x = self.join(F.embedding(following, embedding), current)
            if step:
                own.append(attention.keys_values(x, anchors + step, self.theta))
            query = attention.queries(x, anchors + step, self.theta)[:, :, None]
            after = [] if last is None else [(rotate(last[0], anchors + step + 1, self.theta), last[1])]
            keys_values = [torch.stack(x, 2) for x in zip(*own, *after, strict=True)]
            seen = draft_attention(query, context, anchors + 1, keys_values or None)[:, :, 0]
            current = current + attention.o_proj(seen)
            current = current + layer.mlp(layer.post_attention_layernorm(current))
            logits = self.lm_head(self.norm(current))
            yield logits
            following = self.kept[logits.argmax(-1)] if own_tokens else at(tokens, anchors + 2 + step)


def eagle3_loss(
    model: Eagle3Drafter, target: FrozenTarget, batch: Batch, config: Eagle3Config, generator: torch.Generator
) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross-entropy with the target's distribution at every unrolled step, in nats a token.

    As in the public recipe a place counts only where the target's most likely token is in the draft vocabulary.
    """
    states = target.states_of(batch)
    # The first draft starts when the first response token is known: its entry stands one position earlier.
    anchors, real = sample_anchors(batch, -1, config.anchors_per_row, generator)
    teacher = target.teach(states, batch, config.teacher_temperature, model.kept)
    with target.autocast():
        steps = model.unroll(states, batch.tokens, target.embedding, anchors, config.num_steps)
        return unrolled_loss(steps, model.kept, teacher, batch, (anchors, real), config.step_decay)


def unrolled_loss(
    steps: Iterator[torch.Tensor],
    kept: torch.Tensor,
    teacher: Teacher,
    batch: Batch,
    drafts: tuple[torch.Tensor, torch.Tensor],
    step_decay: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean loss of all steps in nats a token, step s weighing ``step_decay ** s``; shares of right drafts.

    Args:
        kept: int64 [draft vocabulary], the target's ids of the drafter's tokens.
        drafts: the anchors, int64 [B, A], and which of them are real, bool [B, A].
    """
    anchors, real = drafts
    known = torch.isin(teacher.top, kept)
    total, weight, hits = torch.zeros((), device=anchors.device), 0.0, []
    for step, logits in enumerate(steps):
        places = at(teacher.index, anchors + 1 + step)
        valid = real & (anchors + 2 + step < batch.ends[:, None]) & known[places]
        places, logits = places[valid], logits[valid].float()
        loss = F.cross_entropy(logits, teacher.probs[places], reduction="sum")
        total = total + step_decay**step * loss / valid.sum().clamp(min=1)
        weight += step_decay**step
        hit = kept[logits.detach().argmax(-1)] == teacher.top[places]
        hits.append(hit.float().mean().item() if len(hit) else 0.0)
    return total / weight, {"hit_1": hits[0], f"hit_{len(hits)}": hits[-1]}


def checkpoint(model: EntryDrafter, target: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors in SafeAILab's format, which vLLM's own ``eagle3`` method reads.

    With a full vocabulary ``d2t`` and ``t2d`` are left out: vLLM then has no place for them.
    """
    tensors = model.tensors(target.vocab_size)
    if len(model.kept) == target.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    return model.settings(target, "LlamaForCausalLMEagle3"), tensors


def drafts(
    model: Eagle3Drafter, target: FrozenTarget, batch: Batch, anchors: torch.Tensor, num_steps: int
) -> torch.Tensor:
    """The greedy chains behind the tokens at ``anchors``: int64 [B, A, num_steps]."""
    states = target.states_of(batch)
    # An entry stands one position before the token that it brings.
    steps = model.unroll(states, batch.tokens, target.embedding, anchors - 1, num_steps, own_tokens=True)
    return torch.stack([model.kept[logits.argmax(-1)] for logits in steps], dim=-1)


def read_start(folder: Path, target: Any, key: str = KEY) -> tuple[Start, torch.Tensor]:
    """A drafter as :func:`train_eagle3` writes it, and its tokens' ids of the target, int64 [draft vocabulary], rising.

    Raises ValueError as :func:`start.read_drafter`, or its target layers or tensors are others.
    """
    made = "an EAGLE-3 drafter that `crossspec train eagle3` made"
    start = read_drafter(folder, target, "eagle3", made, key)
    facts, taps = start.facts, default_target_layers(target.num_hidden_layers)
    if facts.target_layers != taps:
        read = list(facts.target_layers)
        raise ValueError(f"{start.name} reads target layers {read}, not {list(taps)}; {start.remedy}")
    tensors = {name: x for name, x in start.tensors.items() if name != "t2d"}
    if "d2t" not in tensors and facts.draft_vocab_size < target.vocab_size:
        raise ValueError(f"{start.name}: d2t is missing among its weights, which tells its tokens; {start.remedy}")
    offsets = tensors.pop("d2t", torch.zeros(target.vocab_size, dtype=torch.int64))
    start = start._replace(tensors=tensors)
    check_names(start, NAMES)
    return start, offsets + torch.arange(len(offsets))


def check_drafter_format(folder: Path) -> None:
    """Raises ValueError: the folder holds no EAGLE-3 drafter in SafeAILab's format."""
    odd = sorted((set(tensor_files(folder, "MODEL")) - MAPS) ^ NAMES)
    if odd:
        raise ValueError(
            f"MODEL {folder} is no EAGLE-3 drafter in SafeAILab's format ({odd[0]}), so that its states cannot be had "
            "here; leave out --recall and choose --probes"
        )


def drafting(folder: Path, target_folder: Path, target: PreTrainedModel) -> tuple[torch.nn.Module, Draft]:
    """The drafter's output layer, and what drafts :data:`DRAFT_STEPS` tokens of its own choice, as in decoding.

    Raises ValueError: no drafter, or another target's.
    """
    config, settings = json.loads((folder / "config.json").read_text()), target.config
    known = TargetFacts(str(folder), settings.hidden_size, settings.vocab_size, settings.num_hidden_layers)
    facts = read_facts(config, "MODEL", known)
    tensors = read_tensors(folder, "MODEL")
    offsets = tensors.pop("d2t", torch.zeros(settings.vocab_size)).long()
    tensors.pop("t2d", None)
    recipe = Eagle3Config(intermediate_size=config.get("intermediate_size", 0))
    drafter = Eagle3Drafter(recipe, settings, offsets + torch.arange(len(offsets)), seed=0)
    try:
        drafter.load_state_dict(tensors | {"kept": drafter.kept})
    except RuntimeError as error:
        why = str(error).splitlines()[-1].strip()
        raise ValueError(f"MODEL {folder} does not fit --target ({why}); give the target it was trained for") from None
    frozen = FrozenTarget(target, facts.target_layers, bfloat16=False)
    drafter.to(target.device).eval()

    def draft(tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return drafts(drafter, frozen, Batch(tokens, anchors[:, 0], anchors[:, -1] + 1), anchors, DRAFT_STEPS)

    return drafter.lm_head, draft


def train_eagle3(
    data: Path, target_folder: Path, out: Path, config: Eagle3Config, loop: LoopConfig, device: str = "cpu"
) -> dict[str, float]:
    """Train on the generations in ``data`` and write ``out/model``; see :func:`drafter_run.train_drafter`."""
    place = choose_device(device)
    settings = target_settings(target_folder)
    start = kept = None
    if config.start:
        start, kept = read_start(Path(config.start), settings)
        config = replace(config, intermediate_size=start.size("intermediate_size"), draft_vocab_size=len(kept))
    run, taps = Run(data, target_folder, out, config, loop), default_target_layers(settings.num_hidden_layers)
    rows = read_responses(run, "train", taps)
    if kept is None:
        kept = draft_vocabulary(rows, config.draft_vocab_size, settings.vocab_size)
    target = open_target(run, taps, place)
    model = Eagle3Drafter(config, settings, kept, loop.seed).to(place)
    model.take_head(target.head)
    if start is not None:
        load_start(model, start)
    trainee = Trainee(
        "eagle3",
        model,
        loss=lambda batch, generator: eagle3_loss(model, target, batch, config, generator),
        draft=lambda batch, anchors: drafts(model, target, batch, anchors, config.num_steps),
        num_drafts=config.num_steps,
        write=lambda folder: write_drafter(folder, *checkpoint(model, settings)),
    )
    return train_drafter(run, trainee, target, rows)
