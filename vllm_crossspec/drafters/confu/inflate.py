"""A ConFu drafter beside an inflated target: EAGLE-3's part, and what contemplates in every layer of the target."""

from pathlib import Path
from typing import Any

import torch

from vllm_crossspec.drafters.eagle3 import inflate as eagle3
from vllm_crossspec.drafters.identity import identify
from vllm_crossspec.shapes import matrices
from vllm_crossspec.shapes.growth import Growth
from vllm_crossspec.shapes.matrices import Maker, Read, Recipe
from vllm_crossspec.shapes.models import Recipes, Source


def recipes(source: Source, target: Growth) -> Recipes:
    """The drafter's tensors.

    The mixtures norm what they are gated by without weights: their gates take the norm's scale instead.
    """
    width = target.width
    made = eagle3.recipes(source, target)
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
        made[name] = _soft_prompts(source.reader(name), source.shape(name), target)
    return made


def _soft_prompts(read: Read, shape: tuple[int, ...], target: Growth) -> Recipe:
    """Keys or values [layers, kv heads, s, head size]: in the old layers' old heads what they were."""

    def make(maker: Maker) -> torch.Tensor:
        made = maker.random(target.new.layers, target.new.kv_heads, *shape[2:])
        made[list(target.places), : shape[1]] = read(maker)
        return made

    return Recipe((target.new.layers, target.new.kv_heads, *shape[2:]), make)


def config(source: Source, target: Growth, folder: Path) -> dict[str, Any]:
    """Its config.json, which names the inflated target as the one that it is for.

    Args:
        folder: of the inflated target, whose files must be there.
    """
    sizes = {"num_hidden_layers": target.new.layers, "num_key_value_heads": target.new.kv_heads}
    identity = identify(str(folder), source.key)._asdict()
    return {
        **eagle3.config(source, target, folder),
        "target": {**source.config["target"], **identity, **sizes},
    }
