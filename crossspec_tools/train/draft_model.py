"""A standalone draft model for a frozen target: a small model of its own, distilled on the target's responses.

It reads no states of the target, only text; what it learns is the target's next-token distribution at every token of
the target's own responses (sequence-level and word-level distillation, Kim and Rush 2016).
"""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from crossspec_tools.devices import choose_device
from crossspec_tools.train.drafter_run import Run, Trainee, read_responses, train_drafter
from crossspec_tools.train.generations import Batch, at
from crossspec_tools.train.recipes import DraftModelConfig, LoopConfig
from crossspec_tools.train.states import FrozenTarget, load_target
from crossspec_tools.train.target import export

ARCHITECTURES = ("llama", "qwen3")
"""Model types of the targets that a draft model is made for."""


def build_draft_model(config: DraftModelConfig, target: FrozenTarget, seed: int) -> PreTrainedModel:
    """A model of the target's architecture that begins as a few of its layers: the first, the last, and evenly between.

    Embeddings are tied and begin as the target's output layer; of an MLP the neurons with the largest weights stay.
    Raises ValueError: the target is not of :data:`ARCHITECTURES`, or has too few layers or neurons.
    """
    if target.config.model_type not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise ValueError(f"--target is a {target.config.model_type} model; draft models are made for {known} ones")
    if config.num_layers > target.config.num_hidden_layers:
        raise ValueError(f"--layers {config.num_layers} must be at most the target's {target.config.num_hidden_layers}")
    if config.intermediate_size > target.config.intermediate_size:
        raise ValueError(
            f"--intermediate-size {config.intermediate_size} must be at most the target's "
            f"{target.config.intermediate_size}"
        )
    torch.manual_seed(seed)
    depth, settings = target.config.num_hidden_layers, copy.deepcopy(target.config)
    chosen = [round(i * (depth - 1) / max(1, config.num_layers - 1)) for i in range(config.num_layers)]
    settings.num_hidden_layers, settings.intermediate_size = config.num_layers, config.intermediate_size
    settings.tie_word_embeddings = True
    if types := getattr(settings, "layer_types", None):
        settings.layer_types = [types[index] for index in chosen]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.copy_(target.head).requires_grad_(config.trains_embedding)
        model.model.norm.load_state_dict(target.model.model.norm.state_dict())
        for layer, index in zip(model.model.layers, chosen, strict=True):
            _begin_as(layer, target.model.model.layers[index])
    return model


def _begin_as(layer: torch.nn.Module, source: torch.nn.Module) -> None:
    """Attention and norms of ``source``, and the heaviest neurons of its MLP."""
    for part in ("self_attn", "input_layernorm", "post_attention_layernorm"):
        getattr(layer, part).load_state_dict(getattr(source, part).state_dict())
    mlp, wide = layer.mlp, source.mlp
    weight = wide.gate_proj.weight.norm(dim=1) * wide.up_proj.weight.norm(dim=1) * wide.down_proj.weight.norm(dim=0)
    kept = weight.topk(mlp.gate_proj.weight.shape[0]).indices.sort().values
    for name, weights in mlp.named_parameters():
        found = wide.get_parameter(name)
        if name != "down_proj.bias":  # which has no neurons
            found = found[:, kept] if name == "down_proj.weight" else found[kept]
        weights.copy_(found)


def distillation_loss(
    model: PreTrainedModel, target: FrozenTarget, batch: Batch, config: DraftModelConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross-entropy with the target's distribution at every response token, in nats a token."""
    teacher = target.teach(target.states_of(batch), batch, config.teacher_temperature)
    with target.autocast():
        states = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[batch.is_asked]
        logits = model.lm_head(states).float()
    hit = (logits.detach().argmax(-1) == teacher.top).float().mean().item()
    return F.cross_entropy(logits, teacher.probs), {"hit": hit}


def drafts(model: PreTrainedModel, batch: Batch, anchors: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """The greedy chains behind the tokens at ``anchors``, as far as they can count: int64 [B, A, num_drafts].

    Draft i counts only where the drafts before it are the response's tokens, and there the draft model sees nothing
    but the response: one pass over it gives every draft that can count.
    """
    following = model(input_ids=batch.tokens, use_cache=False).logits.argmax(-1)
    return at(following, anchors[..., None] + torch.arange(num_drafts, device=anchors.device))


def train_draft_model(
    data: Path, target_folder: Path, out: Path, config: DraftModelConfig, loop: LoopConfig, device: str = "cpu"
) -> dict[str, float]:
    """Train on the generations in ``data`` and write ``out/model``; see :func:`drafter_run.train_drafter`."""
    place = choose_device(device)
    causal_lm, tokenizer = load_target(target_folder, torch.float32, place)
    target = FrozenTarget(causal_lm, (), config.bfloat16)
    model = build_draft_model(config, target, loop.seed).to(place)
    trainee = Trainee(
        "draft model",
        model,
        loss=lambda batch, _: distillation_loss(model, target, batch, config),
        draft=lambda batch, anchors: drafts(model, batch, anchors, config.num_drafts),
        num_drafts=config.num_drafts,
        write=lambda folder: export(model, tokenizer, folder),
    )
    run = Run(data, target_folder, out, config, loop)
    return train_drafter(run, trainee, target, read_responses(run, "train", ()))
