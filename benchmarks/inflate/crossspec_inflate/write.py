"""Writing checkpoints file by file: no more of a model is in memory than one of its files."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from crossspec_inflate.matrices import Maker, Recipe

SHARD_BYTES = 10**9
"""Most bytes of a file, unless a single tensor is larger."""

Report = Callable[[int], None]
"""Takes the bytes that were made."""


def num_bytes(recipe: Recipe, dtype: torch.dtype) -> int:
    """Of a tensor; floating-point tensors become ``dtype``."""
    return math.prod(recipe.shape) * (recipe.dtype or dtype).itemsize


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], recipes: Mapping[str, Recipe], maker: Maker, report: Report
) -> None:
    """Write config.json and the weights, in files of at most a gigabyte with an index where it takes several."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(recipes, maker.dtype)
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": sum(num_bytes(recipe, maker.dtype) for recipe in recipes.values())},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for file, shard in zip(files, shards, strict=True):
        tensors = {}
        for name, recipe in shard.items():
            tensors[name] = maker.make(name, recipe).cpu().contiguous()
            assert tensors[name].dtype == (recipe.dtype or maker.dtype), (name, tensors[name].dtype)
            report(tensors[name].nbytes)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    dtype = str(maker.dtype).removeprefix("torch.")
    named = {name: dtype for name in ("dtype", "torch_dtype") if name in config} or {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps({**config, **named}, indent=2) + "\n")


def _shards(recipes: Mapping[str, Recipe], dtype: torch.dtype) -> list[dict[str, Recipe]]:
    shards: list[dict[str, Recipe]] = [{}]
    filled = 0
    for name, recipe in recipes.items():
        size = num_bytes(recipe, dtype)
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = recipe
        filled += size
    return shards
