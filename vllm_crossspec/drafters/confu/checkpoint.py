"""ConFu checkpoints: the format that ``crossspec train confu`` writes, in the style of the speculators library.

``docs/methods/confu.md`` has the format. A checkpoint belongs to one target: its soft prompts are keys and values for
every layer of that target's attention, and mean nothing to another one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_crossspec.drafters.checkpoint import layer_config, proposal_tokens, read_config, require
from vllm_crossspec.drafters.identity import Identity, known_model
from vllm_crossspec.types import DrafterFacts, TargetFacts

ARCHITECTURE = "ConfuSpeculator"
"""The name of the model, by which vLLM finds ours."""
MODEL_TYPE = "confu"
"""``speculators_model_type`` of these checkpoints."""

_REMEDY = "train one with `crossspec train confu`"


class ConfuShape(NamedTuple):
    """Sizes of what ConFu adds to EAGLE-3 (sections 3.1 and 3.2).

    Attributes:
        num_soft_prompts: s, learned keys and values in each layer of the target.
        num_experts: n, embeddings of each of the two mixtures.
        top_experts: K of them are mixed.
        num_layers, num_kv_heads, head_dim: of the target's attention, which the soft prompts are for.
    """

    num_soft_prompts: int
    num_experts: int
    top_experts: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """What a ConFu config.json says.

    Raises:
        ValueError: it is of another kind of drafter or of another number of target layers, lacks a field, or holds
            an impossible one.
    """
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
    return DrafterFacts(
        # It embeds tokens with the target's own embedding, so the widths cannot differ.
        target_hidden_size=require(layer, "hidden_size", key),
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        target_layers=tuple(sorted(require(config, "eagle_aux_hidden_state_layer_ids", key))),
        default_draft_tokens=proposal_tokens(config),
    )


def read_shape(config: dict[str, Any], key: str) -> ConfuShape:
    """The sizes that a ConFu config.json names.

    Raises:
        ValueError: one sentence naming ``key``: a size is missing, is no positive number, or more experts are mixed
            than there are.
    """
    target = require(config, "target", key)
    if not isinstance(target, Mapping):
        raise ValueError(f"{key}: 'target' in config.json is {target!r}, not the target's identity; {_REMEDY}")
    sizes = []
    for name in ("num_soft_prompts", "num_experts", "top_experts"):
        sizes.append(_positive(require(config, name, key), name, key))
    for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
        sizes.append(_positive(require(dict(target), name, key), f"target.{name}", key))
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


def check_target(config: dict[str, Any], key: str, target_model: str, revision: str | None = None) -> None:
    """See that the soft prompts are for the target that is to be served.

    Two targets are the same if their weight files are (``adaptive.calibration.identify``); where the files of either
    were not at hand, as with a hub repository that is not in the cache yet, only the shape of the attention counts.

    Args:
        config: of the drafter, that :func:`read_facts` accepted.
        key: of the setting that named the drafter, for messages.
        target_model: local folder or hub id of the target.
        revision: of its repository.

    Raises:
        ValueError: one sentence that names ``key``, both targets and the fix.
    """
    here = known_model(target_model, revision)
    if here is None:  # a single weights file or an object store: nothing can be read
        return
    shape, trained = read_shape(config, key), _identity(config["target"])
    remedy = f"train one for it with `crossspec train confu --target {target_model}`"
    found = _attention_shape(read_config(target_model, key, revision))
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
    """Layers, key/value heads and head size that a target's config.json names; None for what it does not."""
    text = config.get("text_config") or config
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    head_dim = text.get("head_dim") or (hidden // heads if heads and hidden else None)
    return text.get("num_hidden_layers"), text.get("num_key_value_heads") or heads, head_dim
