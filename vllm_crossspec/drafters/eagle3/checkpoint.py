"""EAGLE-3 checkpoints: SafeAILab's, AngelSlim's and SpecForge's format, and that of the speculators library."""

from typing import Any

from vllm_crossspec.drafters.checkpoint import layer_config, proposal_tokens, require
from vllm_crossspec.types import DrafterFacts, TargetFacts


def default_target_layers(num_layers: int) -> tuple[int, int, int]:
    """The low, middle and high layer that EAGLE-3 taps where its config names none (vLLM's numbering)."""
    return (2, num_layers // 2, num_layers - 3)


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """What an EAGLE-3 config.json says.

    Raises:
        ValueError: it is of another kind of drafter, or lacks a field.
    """
    kind = config.get("speculators_model_type")
    architectures = config.get("architectures") or []
    if kind not in (None, "eagle3") or "dflash_config" in config or any("DFlash" in a for a in architectures):
        raise ValueError(f"{key}: config.json describes {kind or architectures}, not an EAGLE-3 drafter")
    layer = layer_config(config)
    if kind is None and layer.get("num_hidden_layers", 1) > 2:
        raise ValueError(
            f"{key}: config.json describes a model of {layer['num_hidden_layers']} layers, not an EAGLE-3 drafter"
        )
    hidden_size = require(layer, "hidden_size", key)
    vocab_size = require(layer, "vocab_size", key)
    eagle_config = config.get("eagle_config") or {}
    layers = config.get("eagle_aux_hidden_state_layer_ids") or eagle_config.get("eagle_aux_hidden_state_layer_ids")
    return DrafterFacts(
        target_hidden_size=config.get("target_hidden_size") or hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        target_layers=tuple(sorted(layers or default_target_layers(target.num_layers))),
        default_draft_tokens=proposal_tokens(config),
    )
