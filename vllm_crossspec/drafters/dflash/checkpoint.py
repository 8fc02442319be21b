"""DFlash checkpoints in z-lab's format and in the speculators library's."""

from typing import Any

from vllm_crossspec.kinds.checkpoint import architectures, layer_config, require
from vllm_crossspec.kinds.tensors import (
    Layout,
    Shapes,
    Sizes,
    check_layout,
    decoder_layer,
    is_quantized,
    output_tensors,
)
from vllm_crossspec.types import DrafterFacts, TargetFacts

_ARCHITECTURES = ("DFlashDraftModel", "MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel")
_OF_SPECULATORS = ("DFlashDraftModel", "DFlashSpeculator")
_KNOWN = (
    "mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa", "swa_window_size", "attention_sink_bias",
    "attention_value_scale", "use_aux_hidden_state", "sample_from_anchor", "causal_head",
)  # fmt: skip
"""Fields of ``dflash_config`` that vLLM's model reads. Another field belongs to a drafter derived from DFlash."""
_OF_OTHER_KINDS = ("treeflash_config", "markov_rank", "selector_rank", "conv_kernel_size", "draft_length")


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """Read the facts of a DFlash config.json; z-lab counts target layers from 0, speculators and vLLM from 1."""
    _check_kind(config, key)
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


def _check_kind(config: dict[str, Any], key: str) -> None:
    """Refuse drafters derived from DFlash that draft differently: DFlash2, JetSpec, DSpark, ..."""
    of_speculators = config.get("speculators_model_type") == "dflash"
    dflash = config.get("dflash_config")
    if not of_speculators and not isinstance(dflash, dict):
        return  # `read_facts` refuses it
    for name in architectures(config, key, _ARCHITECTURES[0]):
        if name not in (_OF_SPECULATORS if of_speculators else _ARCHITECTURES):
            raise ValueError(f"{key}: config.json describes {name}, not a DFlash drafter that is known")
    inner = dflash if isinstance(dflash, dict) else {}
    if inner.get("causal_head"):
        raise ValueError(
            f"{key}: config.json has dflash_config.causal_head, so that this is a JetSpec drafter; give "
            '"jetspec" where "dflash" is'
        )
    foreign = [f"dflash_config.{name}" for name in inner if name not in _KNOWN]
    foreign += [name for name in _OF_OTHER_KINDS if name in config]
    for part, where in ((config, ""), (inner, "dflash_config.")):
        if part.get("sample_from_anchor"):
            foreign.append(f"{where}sample_from_anchor")
        if part.get("use_aux_hidden_state") is False:
            foreign.append(f"{where}use_aux_hidden_state")
    if foreign:
        raise ValueError(
            f"{key}: config.json has {foreign[0]}, so that this drafter drafts in another way than DFlash; give a "
            "plain DFlash drafter"
        )
    if not of_speculators:
        require(config, "model_type", key)


def check_tensors(shapes: Shapes | None, config: dict[str, Any], facts: DrafterFacts, key: str) -> DrafterFacts:
    """Check that the files hold the tensors that config.json describes."""
    if shapes:
        check_layout(shapes, _layout(config, facts, key), "DFlash", key)
    return facts


def _layout(config: dict[str, Any], facts: DrafterFacts, key: str) -> Layout:
    layer, dflash = layer_config(config), config.get("dflash_config") or {}
    hidden, read = require(layer, "hidden_size", key), facts.target_hidden_size
    assert read is not None
    needed, optional = output_tensors(hidden, facts.vocab_size, facts.draft_vocab_size)
    needed |= {
        "fc.weight": (hidden, len(facts.target_layers) * read),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    optional |= {"mask_embedding": (hidden,)}
    for index in range(require(layer, "num_hidden_layers", key)):
        own, may = decoder_layer(f"layers.{index}.", layer, reads=hidden, qk_norm=True)
        needed, optional = needed | own, optional | may
        if dflash.get("attention_sink_bias", config.get("add_swa_attention_sink_bias")):
            sinks: dict[str, Sizes] = {
                f"layers.{index}.self_attn.attention_sink_bias": (layer.get("num_attention_heads"),)
            }
            needed |= sinks
    aliases = {"midlayer.": "layers.0.", "encoder.output_norm_enc.": "hidden_norm.", "encoder.fc.": "fc."}
    return Layout(needed, optional, aliases, is_quantized(config, layer))
