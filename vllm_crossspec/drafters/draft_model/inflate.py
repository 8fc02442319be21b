"""A draft model of its own: it reads no states of the target, and grows, if it is to, to a shape of its own."""

from pathlib import Path
from typing import Any

from vllm_crossspec.shapes.growth import Growth, grow, shape_of
from vllm_crossspec.shapes.models import Recipes, Source, language_model, language_model_config


def recipes(source: Source, target: Growth) -> Recipes:
    """The model's tensors."""
    return language_model(source, _growth(source, target))


def config(source: Source, target: Growth, folder: Path) -> dict[str, Any]:
    """Its config.json.

    Args:
        folder: of the inflated target, which it does not depend on.
    """
    return language_model_config(source, _growth(source, target))


def _growth(source: Source, target: Growth) -> Growth:
    old, head_dim = shape_of(source.config, source.key)
    new = target.draft or old
    if new.layers < old.layers:
        raise ValueError(f"--draft-shape: {source.key} has {old.layers} layers; choose a shape of as many or more")
    return grow(old, new, head_dim, range(old.layers), source.key)
