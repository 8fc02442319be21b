"""DART checkpoints: the format of ``fvliang/qwen*-dart``, which ``crossspec train dart`` writes, too."""

from typing import Any

from vllm_crossspec.drafters.checkpoint import require
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.types import DrafterFacts, TargetFacts

ARCHITECTURE = "LlamaForCausalLMDart"
"""The reference's name of the model, by which vLLM finds ours."""


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """What a DART config.json says.

    ``draft_length`` counts the masks; the entry before them drafts a token, too. The tapped layers are EAGLE-3's.

    Raises:
        ValueError: it is of another kind of drafter, or lacks a field.
    """
    if "draft_length" not in config or "dflash_config" in config or "speculators_model_type" in config:
        kind = config.get("speculators_model_type") or config.get("architectures")
        raise ValueError(f"{key}: config.json has no draft_length ({kind}); it is not a DART drafter")
    layers = config.get("num_hidden_layers", 1)
    if layers != 1:
        raise ValueError(f"{key}: config.json describes {layers} layers; a DART drafter has one")
    draft_length = config["draft_length"]
    if not isinstance(draft_length, int) or draft_length < 1:
        raise ValueError(
            f"{key}: draft_length in config.json is {draft_length!r}; a DART drafter has at least one mask"
        )
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise ValueError(f'{key}: set "architectures" in config.json to ["{ARCHITECTURE}"] (it is {architectures})')
    hidden_size, vocab_size = require(config, "hidden_size", key), require(config, "vocab_size", key)
    return DrafterFacts(
        # It embeds tokens with the target's own embedding, so the widths cannot differ.
        target_hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        target_layers=default_target_layers(target.num_layers),
        max_draft_tokens=draft_length + 1,
        default_draft_tokens=draft_length + 1,
    )
