"""Drafters beside an inflated target, each kind by what its checkpoint has: as wide, with as many heads, its layers.

A draft model of its own reads no states of the target. It grows, if it is to, to a shape of its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossspec_inflate import matrices
from crossspec_inflate.growth import Growth, grow, shape_of
from crossspec_inflate.matrices import Maker, Recipe
from crossspec_inflate.models import (
    Recipes,
    Source,
    decoder_layer,
    grown_config,
    language_model,
    language_model_config,
    vocabulary,
)
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.kinds.checkpoint import layer_config
from vllm_crossspec.kinds.identity import identify

_TAPS = "eagle_aux_hidden_state_layer_ids"


class Kind(NamedTuple):
    """How drafters of one kind grow.

    Attributes:
        recipes: the tensors, of the drafter's checkpoint and the target's growth.
        config: config.json, of these and the folder of the inflated target, whose files must be there.
    """

    recipes: Callable[[Source, Growth], Recipes]
    config: Callable[[Source, Growth, Path], dict[str, Any]]


def _growth(source: Source, target: Growth) -> Growth:
    return target.of_drafter(layer_config(source.config), source.key)


def _around_layers(source: Source, growth: Growth) -> Recipes:
    """What fuses the taps, the last norm, and what is about tokens."""
    width = growth.width
    return {
        "fc.weight": matrices.between(source.reader("fc.weight"), width, source.shape("fc.weight")[1] // width.old),
        "norm.weight": matrices.norm(source.reader("norm.weight"), width),
        **vocabulary(source, growth),
    }


def _config(source: Source, target: Growth) -> dict[str, Any]:
    """Of either format, with the taps that it had."""
    old, layer = source.config, layer_config(source.config)
    changed = grown_config(layer, target.of_drafter(layer, source.key))
    new = changed if layer is old else {**old, "transformer_layer_config": changed}
    if new.get("target_hidden_size") is not None:
        new["target_hidden_size"] = target.new.hidden
    return new


def check_default_taps(target: Growth, key: str) -> None:
    """See that the taps of a checkpoint that names none still show what they showed; ValueError where they do not."""
    shown = tuple(map(target.shown, default_target_layers(target.new.layers)))
    if shown != default_target_layers(target.old.layers):
        raise ValueError(f"{key} taps the states {shown} of a target of {target.old.layers} layers; leave it out")


# -- EAGLE-3 and ConFu ----------------------------------------------------------------------------------------


def eagle3(source: Source, target: Growth) -> Recipes:
    """One layer, of either format."""
    growth = _growth(source, target)
    prefix = "midlayer." if "midlayer.input_layernorm.weight" in source else "layers.0."
    layer = decoder_layer(source, growth, (prefix, prefix), blocks=2, has_hidden_norm=True)
    return _around_layers(source, growth) | layer


def eagle3_config(source: Source, target: Growth, folder: Path) -> dict[str, Any]:
    """Its taps see in the inflated target what they saw."""
    new = _config(source, target)
    nested = new.get("eagle_config") or {}
    if new.get(_TAPS):
        new[_TAPS] = [target.state(state) for state in new[_TAPS]]
    elif nested.get(_TAPS):
        new["eagle_config"] = {**nested, _TAPS: [target.state(state) for state in nested[_TAPS]]}
    else:
        check_default_taps(target, source.key)
    return new


def confu(source: Source, target: Growth) -> Recipes:
    """EAGLE-3's part, and what contemplates in every layer of the target.

    The mixtures norm what they are gated by without weights: their gates take the norm's scale instead.
    """
    width = target.width
    made = eagle3(source, target)
    for mixture in ("contemplate_embed", "future_embed"):
        router, experts = f"{mixture}.router", f"{mixture}.experts"
        num_experts, states = source.shape(router)
        rows, blocks = [(0, 0, num_experts)], states // width.old
        made[router] = matrices.inward(source.reader(router), rows, num_experts, width, blocks, width.scale)
        made[experts] = matrices.widened(source.reader(experts), source.shape(experts), width)
    made["future_skip.weight"] = matrices.between(source.reader("future_skip.weight"), width)
    name = "no_future_embed"
    made[name] = matrices.widened(source.reader(name), source.shape(name), width)
    for name in ("soft_prompts.keys", "soft_prompts.values"):
        made[name] = _soft_prompts(source, name, target)
    return made


def _soft_prompts(source: Source, name: str, target: Growth) -> Recipe:
    """Keys or values [layers, kv heads, s, head size]: in the old layers' old heads what they were."""
    old, read = source.shape(name), source.reader(name)
    shape = (target.new.layers, target.new.kv_heads, *old[2:])

    def make(maker: Maker) -> torch.Tensor:
        made = maker.random(*shape)
        made[list(target.places), : old[1]] = read(maker)
        return made

    return Recipe(shape, make)


def confu_config(source: Source, target: Growth, folder: Path) -> dict[str, Any]:
    """It names the inflated target as the one that it is for."""
    sizes = {"num_hidden_layers": target.new.layers, "num_key_value_heads": target.new.kv_heads}
    identity = identify(str(folder), source.key)._asdict()
    new = eagle3_config(source, target, folder)
    return {**new, "target": {**source.config["target"], **identity, **sizes}}


# -- parallel drafters ----------------------------------------------------------------------------------------


def dflash(source: Source, target: Growth) -> Recipes:
    """Its own layers, of either format."""
    growth = _growth(source, target)
    made = _around_layers(source, growth)
    made["hidden_norm.weight"] = matrices.norm(source.reader("hidden_norm.weight"), growth.width)
    for layer in range(growth.old.layers):
        made |= decoder_layer(source, growth, (f"layers.{layer}.", f"layers.{layer}."))
    return made


def dflash_config(source: Source, target: Growth, folder: Path) -> dict[str, Any]:
    """Its taps see in the inflated target what they saw."""
    new = _config(source, target)
    if new.get("num_target_layers") is not None:
        new["num_target_layers"] = target.new.layers
    if "aux_hidden_state_layer_ids" in new:
        new["aux_hidden_state_layer_ids"] = [target.state(state) for state in new["aux_hidden_state_layer_ids"]]
    else:  # z-lab numbers layers from 0, not states
        ids = [target.state(layer + 1) - 1 for layer in new["dflash_config"]["target_layer_ids"]]
        new["dflash_config"] = {**new["dflash_config"], "target_layer_ids": ids}
    return new


def dart(source: Source, target: Growth) -> Recipes:
    """One layer; the mask's place in its input and, by its first half, in the residual stream."""
    growth, prefix = _growth(source, target), "midlayer."
    mask = f"{prefix}mask_rep"
    made = _around_layers(source, growth)
    made[mask] = matrices.widened(source.reader(mask), source.shape(mask), growth.width, blocks=2)
    return made | decoder_layer(source, growth, (prefix, prefix), blocks=2, has_hidden_norm=True)


def dart_config(source: Source, target: Growth, folder: Path) -> dict[str, Any]:
    """The taps are the format's, which names none."""
    check_default_taps(target, source.key)
    return _config(source, target)


# -- draft models ---------------------------------------------------------------------------------------------


def _own_growth(source: Source, target: Growth) -> Growth:
    old, head_dim = shape_of(source.config, source.key)
    new = target.draft or old
    if new.layers < old.layers:
        raise ValueError(f"--draft-shape: {source.key} has {old.layers} layers; choose a shape of as many or more")
    return grow(old, new, head_dim, range(old.layers), source.key)


KINDS = {
    "eagle3": Kind(eagle3, eagle3_config),
    "confu": Kind(confu, confu_config),
    "dflash": Kind(dflash, dflash_config),
    "dart": Kind(dart, dart_config),
    "draft_model": Kind(
        lambda source, target: language_model(source, _own_growth(source, target)),
        lambda source, target, folder: language_model_config(source, _own_growth(source, target)),
    ),
}
