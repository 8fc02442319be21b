"""DFlash checkpoints: z-lab's format, and that of the speculators library."""

from typing import Any

from vllm_crossspec.drafters.checkpoint import layer_config, require
from vllm_crossspec.types import DrafterFacts, TargetFacts


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """What a DFlash config.json says.

    z-lab counts target layers from 0 (the output of the first layer), speculators and vLLM from 1.

    Raises:
        ValueError: it is of another kind of drafter, lacks a field, or counts another number of target layers.
    """
    layer = layer_config(config)
    block_size = config.get("block_size") or layer.get("block_size")
    if config.get("speculators_model_type") == "dflash":
        layers = tuple(require(config, "aux_hidden_state_layer_ids", key))
        mask_token_id = require(config, "mask_token_id", key)
    else:
        dflash = config.get("dflash_config")
        if not isinstance(dflash, dict):
            kind = config.get("speculators_model_type") or config.get("architectures")
            raise ValueError(f"{key}: config.json has no dflash_config ({kind}); it is not a DFlash drafter")
        layers = tuple(i + 1 for i in require(dflash, "target_layer_ids", key))
        mask_token_id = require(dflash, "mask_token_id", key)
        block_size = block_size or dflash.get("block_size")
    counted = config.get("num_target_layers")
    if counted is not None and counted != target.num_layers:
        raise ValueError(
            f"{key}: this drafter was trained for a target of {counted} layers, but {target.name} has "
            f"{target.num_layers}"
        )
    if not block_size or block_size < 2:
        raise ValueError(f"{key}: config.json has no block_size of at least 2; it is not a DFlash drafter")
    vocab_size = require(layer, "vocab_size", key)
    return DrafterFacts(
        target_hidden_size=config.get("target_hidden_size") or require(layer, "hidden_size", key),
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        target_layers=tuple(sorted(layers)),
        max_draft_tokens=block_size - 1,
        default_draft_tokens=block_size - 1,
        mask_token_id=mask_token_id,
    )
