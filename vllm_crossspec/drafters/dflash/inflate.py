"""A DFlash drafter beside an inflated target: as wide, with as many heads, its own layers; either format."""

from pathlib import Path
from typing import Any

from vllm_crossspec.drafters.checkpoint import layer_config
from vllm_crossspec.shapes import matrices
from vllm_crossspec.shapes.growth import Growth
from vllm_crossspec.shapes.models import Recipes, Source, decoder_layer, grown_config, vocabulary


def recipes(source: Source, target: Growth) -> Recipes:
    """The drafter's tensors."""
    growth = target.of_drafter(layer_config(source.config), source.key)
    width = growth.width
    num_taps = source.shape("fc.weight")[1] // width.old
    made = {
        "fc.weight": matrices.between(source.reader("fc.weight"), width, num_taps),
        "hidden_norm.weight": matrices.norm(source.reader("hidden_norm.weight"), width),
        "norm.weight": matrices.norm(source.reader("norm.weight"), width),
        **vocabulary(source, growth),
    }
    for layer in range(growth.old.layers):
        made |= decoder_layer(source, growth, (f"layers.{layer}.", f"layers.{layer}."))
    return made


def config(source: Source, target: Growth, folder: Path) -> dict[str, Any]:
    """Its config.json, whose taps see in the inflated target what they saw.

    Args:
        folder: of the inflated target.
    """
    old = source.config
    layer = layer_config(old)
    changed = grown_config(layer, target.of_drafter(layer, source.key))
    new = changed if layer is old else {**old, "transformer_layer_config": changed}
    if new.get("num_target_layers") is not None:
        new["num_target_layers"] = target.new.layers
    if new.get("target_hidden_size") is not None:
        new["target_hidden_size"] = target.new.hidden
    if "aux_hidden_state_layer_ids" in new:
        new["aux_hidden_state_layer_ids"] = [target.state(state) for state in new["aux_hidden_state_layer_ids"]]
    else:  # z-lab numbers layers from 0, not states
        ids = [target.state(layer + 1) - 1 for layer in new["dflash_config"]["target_layer_ids"]]
        new["dflash_config"] = {**new["dflash_config"], "target_layer_ids": ids}
    return new
