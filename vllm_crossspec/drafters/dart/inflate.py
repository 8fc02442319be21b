"""A DART drafter beside an inflated target: as wide, with as many heads, its one layer."""

from pathlib import Path
from typing import Any

from vllm_crossspec.drafters.eagle3.inflate import check_default_taps
from vllm_crossspec.shapes import matrices
from vllm_crossspec.shapes.growth import Growth
from vllm_crossspec.shapes.models import Recipes, Source, decoder_layer, grown_config, vocabulary


def recipes(source: Source, target: Growth) -> Recipes:
    """The drafter's tensors."""
    growth = target.of_drafter(source.config, source.key)
    width = growth.width
    prefix = "midlayer."
    mask = f"{prefix}mask_rep"
    return {
        "fc.weight": matrices.between(source.reader("fc.weight"), width, source.shape("fc.weight")[1] // width.old),
        # The mask's place in the layer's input and, by its first half, in the residual stream.
        mask: matrices.widened(source.reader(mask), source.shape(mask), width, blocks=2),
        **decoder_layer(source, growth, (prefix, prefix), blocks=2, has_hidden_norm=True),
        "norm.weight": matrices.norm(source.reader("norm.weight"), width),
        **vocabulary(source, growth),
    }


def config(source: Source, target: Growth, folder: Path) -> dict[str, Any]:
    """Its config.json; the taps are the format's, which names none.

    Args:
        folder: of the inflated target.
    """
    check_default_taps(target, source.key)
    return grown_config(source.config, target.of_drafter(source.config, source.key))
