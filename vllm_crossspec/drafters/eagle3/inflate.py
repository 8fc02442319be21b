"""An EAGLE-3 drafter beside an inflated target: as wide, with as many heads, its one layer; either format."""

from pathlib import Path
from typing import Any

from vllm_crossspec.drafters.checkpoint import layer_config
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.shapes import matrices
from vllm_crossspec.shapes.growth import Growth
from vllm_crossspec.shapes.models import Recipes, Source, decoder_layer, grown_config, vocabulary

_TAPS = "eagle_aux_hidden_state_layer_ids"


def recipes(source: Source, target: Growth) -> Recipes:
    """The drafter's tensors."""
    growth = target.of_drafter(layer_config(source.config), source.key)
    width = growth.width
    prefix = "midlayer." if "midlayer.input_layernorm.weight" in source else "layers.0."
    num_taps = source.shape("fc.weight")[1] // width.old
    return {
        "fc.weight": matrices.between(source.reader("fc.weight"), width, num_taps),
        **decoder_layer(source, growth, (prefix, prefix), blocks=2, has_hidden_norm=True),
        "norm.weight": matrices.norm(source.reader("norm.weight"), width),
        **vocabulary(source, growth),
    }


def config(source: Source, target: Growth, folder: Path) -> dict[str, Any]:
    """Its config.json, whose taps see in the inflated target what they saw.

    Args:
        folder: of the inflated target.
    """
    old = source.config
    layer = layer_config(old)
    changed = grown_config(layer, target.of_drafter(layer, source.key))
    new = changed if layer is old else {**old, "transformer_layer_config": changed}
    if "target_hidden_size" in old:
        new["target_hidden_size"] = target.new.hidden
    nested = new.get("eagle_config") or {}
    if new.get(_TAPS):
        new[_TAPS] = [target.state(state) for state in new[_TAPS]]
    elif nested.get(_TAPS):
        new["eagle_config"] = {**nested, _TAPS: [target.state(state) for state in nested[_TAPS]]}
    else:
        check_default_taps(target, source.key)
    return new


def check_default_taps(target: Growth, key: str) -> None:
    """See that the taps of a checkpoint that names none still show what they showed; ValueError where they do not."""
    shown = tuple(map(target.shown, default_target_layers(target.new.layers)))
    if shown != default_target_layers(target.old.layers):
        raise ValueError(f"{key} taps the states {shown} of a target of {target.old.layers} layers; leave it out")
