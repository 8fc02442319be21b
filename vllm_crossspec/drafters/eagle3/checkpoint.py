"""EAGLE-3 checkpoints in the format of SafeAILab, AngelSlim and SpecForge, and in the speculators library's."""

import logging
from types import MappingProxyType
from typing import Any

from vllm_crossspec.kinds.checkpoint import architectures, layer_config, proposal_tokens, require
from vllm_crossspec.kinds.tensors import (
    Layout,
    Shapes,
    Sizes,
    check_layout,
    decoder_layer,
    is_quantized,
    layers_in,
    output_tensors,
)
from vllm_crossspec.types import DrafterFacts, TargetFacts

logger = logging.getLogger("vllm.crossspec")

USUAL = "LlamaForCausalLMEagle3"
_OF_LLAMA = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)  # fmt: skip
_OF_QWEN3 = ("Eagle3Qwen3ForCausalLM",)
_OF_OTHER_LAYERS = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
"""Architectures for which vLLM has EAGLE-3 models, by the form of their layers."""
_OF_OTHER_KINDS = ("dflash_config", "draft_length", "markov_rank", "parallel_drafting", "pard_token", "ptd_token_id")
"""Fields of other kinds of drafters."""


def default_target_layers(num_layers: int) -> tuple[int, int, int]:
    """The low, middle and high layer that EAGLE-3 taps if its config names none (vLLM's numbering)."""
    return (2, num_layers // 2, num_layers - 3)


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """Read the facts of an EAGLE-3 config.json."""
    _check_kind(config, key)
    layer = layer_config(config)
    hidden_size = require(layer, "hidden_size", key)
    vocab_size = require(layer, "vocab_size", key)
    eagle_config = config.get("eagle_config") or {}
    if eagle_config.get("use_aux_hidden_state") is False:
        raise ValueError(
            f"{key}: config.json has eagle_config.use_aux_hidden_state false, so that this drafter reads the target's "
            "last state; give an EAGLE-3 drafter that reads several layers"
        )
    layers = config.get("eagle_aux_hidden_state_layer_ids") or eagle_config.get("eagle_aux_hidden_state_layer_ids")
    tapped = tuple(sorted(layers or default_target_layers(target.num_layers)))
    return DrafterFacts(
        target_hidden_size=config.get("target_hidden_size") or hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        target_layers=tapped,
        default_draft_tokens=proposal_tokens(config),
        # vLLM's model reads only one of the two places.
        overrides=MappingProxyType({"num_aux_hidden_states": len(tapped)}),
    )


def _check_kind(config: dict[str, Any], key: str) -> None:
    kind = config.get("speculators_model_type")
    named = kind or config.get("architectures")
    foreign = next((field for field in _OF_OTHER_KINDS if config.get(field)), None)
    if kind not in (None, "eagle3") or foreign:
        shown = f" with {foreign}" if foreign else ""
        raise ValueError(f"{key}: config.json describes {named}{shown}, not an EAGLE-3 drafter")
    if kind is None:
        for name in architectures(config, key, USUAL):
            if _model_of(name) not in (*_OF_LLAMA, *_OF_QWEN3, *_OF_OTHER_LAYERS):
                raise ValueError(f"{key}: config.json describes {name}, not an EAGLE-3 drafter that is known")
        require(config, "model_type", key)


def _model_of(architecture: str) -> str:
    """vLLM's name of the architecture for this method."""
    is_named = architecture.startswith("Eagle3") or architecture.endswith("Eagle3")
    return architecture if is_named else f"Eagle3{architecture}"


def check_tensors(shapes: Shapes | None, config: dict[str, Any], facts: DrafterFacts, key: str) -> DrafterFacts:
    """Check that the files hold the tensors that config.json describes; its number of layers may be the target's."""
    layer, is_published = layer_config(config), config.get("speculators_model_type") is None
    num_layers = layer.get("num_hidden_layers", 1)
    if num_layers > 1 and shapes and layers_in(shapes) == {0}:
        logger.warning(
            "crossspec: config.json of this drafter (%s) says num_hidden_layers %d, and its files hold one layer, as "
            "EAGLE-3 drafters do; it is read as 1",
            key,
            num_layers,
        )
        num_layers, facts = 1, facts._replace(overrides=MappingProxyType({**facts.overrides, "num_hidden_layers": 1}))
    elif is_published and num_layers > 2:
        raise ValueError(
            f"{key}: config.json describes a model of {num_layers} layers, not an EAGLE-3 drafter; if its files hold "
            "one layer, set num_hidden_layers to 1 there"
        )
    layout = layout_of(config, facts, num_layers)
    if shapes and layout is not None:
        check_layout(shapes, layout, "EAGLE-3", key)
    return facts


def layout_of(config: dict[str, Any], facts: DrafterFacts, num_layers: int = 1) -> Layout | None:
    """The tensors of an EAGLE-3 drafter; None for layers unlike Llama's and Qwen3's."""
    layer, taps = layer_config(config), len(facts.target_layers)
    hidden, read = layer["hidden_size"], facts.target_hidden_size
    assert read is not None
    if config.get("speculators_model_type") is None:
        model = _model_of(config["architectures"][0])
        qk_norm, has_layout = model in _OF_QWEN3, model not in _OF_OTHER_LAYERS
    else:
        model_type = layer.get("model_type", "llama")
        qk_norm, has_layout = model_type == "qwen3", model_type in ("llama", "qwen3")
    if not has_layout:
        return None
    needed, optional = output_tensors(hidden, facts.vocab_size, facts.draft_vocab_size)
    needed |= {"fc.weight": (hidden, taps * read), "norm.weight": (hidden,)}
    for index in range(num_layers):
        own, may = decoder_layer(f"layers.{index}.", layer, reads=(1 if index else 2) * hidden, qk_norm=qk_norm)
        hidden_norm: dict[str, Sizes] = {f"layers.{index}.hidden_norm.weight": (hidden,)}
        needed |= own | ({} if index else hidden_norm)
        optional |= may | (hidden_norm if index else {})
    needed |= _norms_before_fusing(config, taps, read)
    optional |= {"input_norm.weight": (taps * read,)}
    return Layout(needed, optional, is_quantized=is_quantized(config, layer))


def _norms_before_fusing(config: dict[str, Any], taps: int, read: int) -> dict[str, Sizes]:
    """Optional norms of the tapped states: one of all together, or one of each."""
    eagle_config = config.get("eagle_config") or {}
    needed: dict[str, Sizes] = {}
    if eagle_config.get("norm_before_fc", config.get("norm_before_fc")):
        needed["input_norm.weight"] = (taps * read,)
    if config.get("fc_norm"):
        needed |= {f"fc_norm.{index}.weight": (read,) for index in range(taps)}
    return needed
