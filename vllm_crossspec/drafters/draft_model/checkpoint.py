"""Checkpoints of standalone draft models: plain causal language models with the target's vocabulary."""

from typing import Any

from vllm_crossspec.drafters.checkpoint import require
from vllm_crossspec.ranks import step_together
from vllm_crossspec.types import DrafterFacts, TargetFacts

_OF_OTHER_DRAFTERS = (
    "speculators_model_type", "draft_vocab_size", "dflash_config", "draft_length", "eagle_config", "n_predict",
)  # fmt: skip
"""Fields that drafters have which read the target's states."""
_OF_OTHER_INPUTS = ("vision_config", "audio_config", "text_config", "thinker_config")
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """What a language model's config.json says.

    Raises:
        ValueError: it is no causal language model of text alone, or lacks a field.
    """
    architectures = config.get("architectures") or []
    name = architectures[0] if architectures else "no architecture"
    foreign = [field for field in _OF_OTHER_DRAFTERS if field in config]
    if foreign or "Eagle" in name:
        raise ValueError(
            f"{key}: config.json ({name}) describes a drafter that reads the target's states, which {foreign or name} "
            "shows; name its own method, or give a language model of its own as the draft model"
        )
    if name.startswith("FlashHead"):
        raise ValueError(
            f"{key}: config.json describes {name}, clusters and a model in one folder; give the plain model as model "
            "and this folder as head.model"
        )
    other = [field for field in _OF_OTHER_INPUTS if field in config]
    is_causal = name.endswith(_CAUSAL) and not config.get("is_encoder_decoder")
    if other or not is_causal:
        raise ValueError(
            f"{key}: config.json describes {name}{f' with {other[0]}' if other else ''}, but a draft model is a causal "
            "language model of text alone; give one like Qwen3ForCausalLM"
        )
    vocab_size = require(config, "vocab_size", key)
    return DrafterFacts(
        target_hidden_size=None,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        target_layers=(),
    )


def check_follows(config: Any, target: Any, parallel: Any, path: str) -> None:
    """Refuse a draft model that cannot follow the target wherever it goes.

    Args:
        config: vLLM's own speculative config of the drafter.
        target, parallel: vLLM's model and parallel config of the target.
        path: of the drafter's keys, for messages.

    Raises:
        ValueError: one sentence that names the key and the fix.
    """
    model = config.draft_model_config
    if model.max_model_len < target.max_model_len:
        raise ValueError(
            f"{path}model: {model.model} knows {model.max_model_len} positions, but the target is to have "
            f"{target.max_model_len}; set --max-model-len {model.max_model_len} or less, or give another draft model"
        )
    found = [
        what
        for what, present in (
            ("recurrent (mamba) layers", model.is_hybrid or model.is_attention_free),
            ("M-RoPE positions", model.uses_mrope),
            ("inputs beside text", model.is_multimodal_model),
        )
        if present
    ]
    if found:
        raise ValueError(f"{path}model: {model.model} has {' and '.join(found)}; give a plain transformer of text")
    if model.is_moe and step_together(parallel):
        raise ValueError(
            f"{path}model: {model.model} has experts, which this target's data-parallel ranks would share; "
            "give a dense model"
        )
