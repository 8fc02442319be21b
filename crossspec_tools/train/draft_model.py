"""A standalone draft model for a frozen target: a small model of its own, distilled on the target's responses.

It reads no states of the target, only text; what it learns is the target's next-token distribution at every token of
the target's own responses (sequence-level and word-level distillation, Kim and Rush 2016).
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from crossspec_tools.devices import choose_device
from crossspec_tools.train.blocks import head_dim
from crossspec_tools.train.drafter_run import Run, Trainee, train_drafter
from crossspec_tools.train.generations import Batch, at, read_generations
from crossspec_tools.train.loop import LoopConfig
from crossspec_tools.train.recipes import DraftModelConfig
from crossspec_tools.train.states import FrozenTarget, load_target
from crossspec_tools.train.target import export


def build_draft_model(config: DraftModelConfig, target: FrozenTarget, seed: int) -> Qwen3ForCausalLM:
    """A model that begins as a few layers of a Qwen3 target: the first, the last and what lies evenly between.

    Embeddings are tied and begin as the target's output layer; of an MLP the neurons with the largest weights stay.
    Raises ValueError: the target is of another architecture, or has too few layers or neurons.
    """
    if target.config.model_type != "qwen3":
        raise ValueError(f"--target is a {target.config.model_type} model; a draft model is made for qwen3 ones so far")
    if config.num_layers > target.config.num_hidden_layers:
        raise ValueError(f"--layers {config.num_layers} must be at most the target's {target.config.num_hidden_layers}")
    if config.intermediate_size > target.config.intermediate_size:
        raise ValueError(
            f"--intermediate-size {config.intermediate_size} must be at most the target's "
            f"{target.config.intermediate_size}"
        )
    torch.manual_seed(seed)
    settings = target.config
    shared = (
        "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
        "rope_parameters", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **{name: getattr(settings, name) for name in shared},
            head_dim=head_dim(settings),
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            tie_word_embeddings=True,
        )
    )
    depth = settings.num_hidden_layers
    chosen = [round(i * (depth - 1) / max(1, config.num_layers - 1)) for i in range(config.num_layers)]
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(target.head)
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
    mlp.gate_proj.weight.copy_(wide.gate_proj.weight[kept])
    mlp.up_proj.weight.copy_(wide.up_proj.weight[kept])
    mlp.down_proj.weight.copy_(wide.down_proj.weight[:, kept])


def distillation_loss(
    model: Qwen3ForCausalLM, target: FrozenTarget, batch: Batch, config: DraftModelConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross-entropy with the target's distribution at every response token, in nats a token."""
    teacher = target.teach(target.states(batch.tokens), batch, config.teacher_temperature)
    with target.autocast():
        states = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[batch.is_asked]
        logits = model.lm_head(states).float()
    hit = (logits.detach().argmax(-1) == teacher.top).float().mean().item()
    return F.cross_entropy(logits, teacher.probs), {"hit": hit}


def drafts(model: Qwen3ForCausalLM, batch: Batch, anchors: torch.Tensor, num_drafts: int) -> torch.Tensor:
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
    target = FrozenTarget(causal_lm, (0,), config.bfloat16)  # a tap is asked for, and none is read
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    model = build_draft_model(config, target, loop.seed).to(place)
    trainee = Trainee(
        "draft model",
        model,
        loss=lambda batch, _: distillation_loss(model, target, batch, config),
        draft=lambda batch, anchors: drafts(model, batch, anchors, config.num_drafts),
        num_drafts=config.num_drafts,
        write=lambda folder: export(model, tokenizer, folder),
    )
    rows = read_generations(data, "train", target.config.vocab_size)
    return train_drafter(Run(data, target_folder, out, config, loop), trainee, target, rows)
