"""ConFu checkpoints as ``crossspec train confu`` writes them, in the style of the speculators library.

``docs/methods/confu.md`` has the format. A checkpoint fits one target: its soft prompts are keys and values for every
layer of that target's attention.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_crossspec.drafters.eagle3.checkpoint import layout_of
from vllm_crossspec.kinds.checkpoint import layer_config, proposal_tokens, require
from vllm_crossspec.kinds.identity import Identity, Target
from vllm_crossspec.kinds.tensors import Shapes, check_layout
from vllm_crossspec.types import DrafterFacts, TargetFacts

ARCHITECTURE = "ConfuSpeculator"  # vLLM finds our model by it
MODEL_TYPE = "confu"  # ``speculators_model_type`` of these checkpoints

_REMEDY = "train one with `crossspec train confu`"
_SIZES = ("num_soft_prompts", "num_experts", "top_experts")
_SIZES_OF_TARGET = ("num_hidden_layers", "num_key_value_heads", "head_dim")


class ConfuShape(NamedTuple):
    """Sizes of ConFu's additions to EAGLE-3 (sections 3.1 and 3.2).

    Attributes:
        num_soft_prompts: s, learned keys and values in each target layer.
        num_experts: n, embeddings in each of the two mixtures.
        top_experts: K, number of mixed experts.
        num_layers, num_kv_heads, head_dim: of the target's attention.
    """

    num_soft_prompts: int
    num_experts: int
    top_experts: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """Read the facts of a ConFu config.json."""
    kind = config.get("speculators_model_type")
    if kind != MODEL_TYPE:
        found = kind or config.get("architectures")
        raise ValueError(f"{key}: config.json describes {found}, not a ConFu drafter; {_REMEDY}")
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise ValueError(f'{key}: set "architectures" in config.json to ["{ARCHITECTURE}"] (it is {architectures})')
    if config.get("norm_before_residual"):
        raise ValueError(f"{key}: config.json has norm_before_residual, which no ConFu drafter has; {_REMEDY}")
    shape = read_shape(config, key)
    if shape.num_layers != target.num_layers:
        raise ValueError(
            f"{key}: this drafter has soft prompts for {shape.num_layers} layers, but {target.name} has "
            f"{target.num_layers}; {_REMEDY} for this target"
        )
    layer = layer_config(config)
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(
            f"{key}: config.json describes {layer['num_hidden_layers']} layers; a ConFu drafter has one, {_REMEDY}"
        )
    vocab_size = require(layer, "vocab_size", key)
    tapped = tuple(sorted(require(config, "eagle_aux_hidden_state_layer_ids", key)))
    return DrafterFacts(
        # It embeds tokens with the target's own embedding, so the widths cannot differ.
        target_hidden_size=require(layer, "hidden_size", key),
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        target_layers=tapped,
        default_draft_tokens=proposal_tokens(config),
        overrides=MappingProxyType({"num_aux_hidden_states": len(tapped)}),
    )


def check_tensors(shapes: Shapes | None, config: dict[str, Any], facts: DrafterFacts, key: str) -> DrafterFacts:
    """Check that the files hold the tensors that config.json describes."""
    layout = layout_of(config, facts)
    if not shapes or layout is None:
        return facts
    shape, hidden = read_shape(config, key), layer_config(config)["hidden_size"]
    prompts = (shape.num_layers, shape.num_kv_heads, shape.num_soft_prompts, shape.head_dim)
    experts = (shape.num_experts, hidden)
    layout.needed.update({"soft_prompts.keys": prompts, "soft_prompts.values": prompts, "no_future_embed": (hidden,)})
    layout.needed["contemplate_embed.router"] = (shape.num_experts, len(facts.target_layers) * hidden)
    for name in ("contemplate_embed.experts", "future_embed.router", "future_embed.experts"):
        layout.needed[name] = experts
    layout.optional["future_skip.weight"] = (hidden, hidden)
    check_layout(shapes, layout, "ConFu", key)
    return facts


def read_shape(config: dict[str, Any], key: str) -> ConfuShape:
    """Read the sizes in a ConFu config.json; error messages begin with ``key``."""
    target = require(config, "target", key)
    if not isinstance(target, Mapping):
        raise ValueError(f"{key}: 'target' in config.json is {target!r}, not the target's identity; {_REMEDY}")
    sizes = [_positive(require(config, name, key), name, key) for name in _SIZES]
    sizes += [_positive(require(dict(target), name, key), f"target.{name}", key) for name in _SIZES_OF_TARGET]
    shape = ConfuShape(*sizes)
    if shape.top_experts > shape.num_experts:
        raise ValueError(
            f"{key}: top_experts in config.json is {shape.top_experts}, but there are {shape.num_experts} experts; "
            f"{_REMEDY}"
        )
    return shape


def _positive(value: Any, name: str, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}: {name} in config.json is {value!r}; it must be 1 or more, {_REMEDY}")
    return value


def check_target(config: dict[str, Any], key: str, target: Target) -> None:
    """Check that the soft prompts were made for the served target.

    Targets are the same if their weight files are (``kinds.identity``). If the files of either are not available, as
    with an uncached hub repository, only the attention's shape is compared.
    """
    here = target.identity
    if here is None or target.config is None:  # a single weights file or an object store: nothing can be read
        return
    shape, trained = read_shape(config, key), _identity(config["target"])
    remedy = f"train one for it with `crossspec train confu --target {target.model}`"
    found = _attention_shape(target.config)
    for name, wanted in zip(("num_layers", "num_kv_heads", "head_dim"), found, strict=True):
        if wanted is not None and getattr(shape, name) != wanted:
            raise ValueError(
                f"{key}: this drafter was trained for another target ({trained.name}, with {name} "
                f"{getattr(shape, name)}) than {here.name}, which has {wanted}; {remedy}"
            )
    if trained.weights is not None and here.weights is not None and trained.weights != here.weights:
        raise ValueError(
            f"{key}: this drafter was trained for another target ({trained.name}) than {here.name}, whose weight files "
            f"are not the same; {remedy}"
        )


def _identity(target: Mapping[str, Any]) -> Identity:
    weights = target.get("weights")
    return Identity(str(target.get("name", "unnamed")), str(target.get("config", "")), weights and str(weights))


def _attention_shape(config: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Layers, key/value heads and head size in a target's config.json; None if missing."""
    text = config.get("text_config") or config
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    head_dim = text.get("head_dim") or (hidden // heads if heads and hidden else None)
    return text.get("num_hidden_layers"), text.get("num_key_value_heads") or heads, head_dim
