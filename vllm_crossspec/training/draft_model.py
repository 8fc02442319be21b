"""A standalone draft model for a frozen target: a small model of its own, distilled on the target's responses.

It reads no states of the target, only text; what it learns is the target's next-token distribution at every token of
the target's own responses (sequence-level and word-level distillation, Kim and Rush 2016).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from vllm_crossspec.devices import choose_device
from vllm_crossspec.training.acceptance import measure
from vllm_crossspec.training.drafter_run import run_training
from vllm_crossspec.training.generations import Batch, Generation, read_generations
from vllm_crossspec.training.loop import LoopConfig
from vllm_crossspec.training.states import FrozenTarget, load_target
from vllm_crossspec.training.target import export


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig:
    """Shape and recipe of the draft model; what is not here (width, heads, vocabulary, rotary base) is the target's.

    Attributes:
        num_layers: decoder layers.
        intermediate_size: of their MLPs.
        num_drafts: tokens of a draft with which the held-out acceptance is measured.
        teacher_temperature: the target's distribution is sharpened with it; 1 is the target's own.
        rows_per_step: responses of one optimizer step.
        bfloat16: compute under bfloat16 autocast (weights stay float32).
        eval_rows: at most so many held-out responses.
    """

    num_layers: int = 2
    intermediate_size: int = 576
    num_drafts: int = 7
    teacher_temperature: float = 1.0
    rows_per_step: int = 16
    bfloat16: bool = True
    eval_rows: int = 96


def build_draft_model(config: DraftModelConfig, target: FrozenTarget, seed: int) -> Qwen3ForCausalLM:
    """A model that begins as a few layers of a Qwen3 target: the first, the last and what lies evenly between.

    Embeddings are tied and begin as the target's output layer; of an MLP the neurons with the largest weights stay.

    Raises:
        ValueError: the target is of another architecture, or has too few layers or neurons.
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
    shape = {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads,
        "max_position_embeddings": settings.max_position_embeddings,
        "rope_parameters": settings.rope_parameters,
        "rms_norm_eps": settings.rms_norm_eps,
        "bos_token_id": settings.bos_token_id,
        "eos_token_id": settings.eos_token_id,
        "pad_token_id": settings.pad_token_id,
    }
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **shape,
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
    columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    wanted = (columns >= batch.starts[:, None] - 1) & (columns < batch.ends[:, None] - 1)
    with torch.autocast(batch.tokens.device.type, dtype=torch.bfloat16, enabled=config.bfloat16):
        states = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[wanted]
        logits = model.lm_head(states).float()
    hit = (logits.detach().argmax(-1) == teacher.top).float().mean().item()
    return F.cross_entropy(logits, teacher.probs), {"hit": hit}


def offline_acceptance(
    model: Qwen3ForCausalLM, target: FrozenTarget, rows: list[Generation], config: DraftModelConfig
) -> dict[str, float]:
    """Held-out acceptance of greedy chains of ``config.num_drafts`` tokens; see :func:`acceptance.measure`.

    Draft i counts only where the drafts before it are the response's tokens, and there the draft model sees nothing
    but the response: one pass over it gives every draft that can count.
    """
    model.eval()

    def draft(batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        tokens = batch.tokens.to(target.device)
        with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=config.bfloat16):
            following = model(input_ids=tokens, use_cache=False).logits.argmax(-1).cpu()
        columns = (anchors[..., None] + torch.arange(config.num_drafts)).clamp(max=tokens.shape[1] - 1)
        return following.gather(1, columns.flatten(1)).view(columns.shape)

    return measure(rows, draft, config.num_drafts)


def train_draft_model(
    data: Path, target_folder: Path, out: Path, config: DraftModelConfig, loop: LoopConfig, device: str = "cpu"
) -> dict[str, float]:
    """Train on the generations in ``data`` and write a Hugging Face folder to ``out/model``; resumes.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``; not part of what the run is, so that it may go on elsewhere.

    Returns:
        The held-out acceptance at the end, also in ``out/acceptance.json`` (empty without ``dev-*`` shards).
    """
    place = choose_device(device)
    causal_lm, tokenizer = load_target(target_folder, torch.float32, place)
    vocab_size = causal_lm.config.vocab_size
    target = FrozenTarget(causal_lm, (0,), config.bfloat16)  # a tap is asked for, and none is read
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    model = build_draft_model(config, target, loop.seed).to(place)

    return run_training(
        "draft model",
        model,
        rows=read_generations(data, "train", vocab_size),
        data=data,
        target_folder=target_folder,
        vocab_size=vocab_size,
        out=out,
        config=config,
        loop=loop,
        place=place,
        loss=lambda batch, generator: distillation_loss(model, target, batch, config),
        write=lambda: export(model, tokenizer, out / "model"),
        acceptance=lambda rows: offline_acceptance(model, target, rows, config),
    )
