"""Writing checkpoints tensor by tensor: no more of a model is in memory than one of its tensors."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_crossspec.shapes.matrices import Maker, Recipe

SHARD_BYTES = 10**9
"""Most bytes of a file, but for a single tensor that is larger."""

Report = Callable[[int], None]
"""Takes the bytes that were written."""

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def num_bytes(recipe: Recipe, dtype: torch.dtype) -> int:
    """Of a tensor, of which ``dtype`` is what floating-point tensors become."""
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
        _write_shard(folder / file, shard, maker, report)
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


def _write_shard(path: Path, recipes: Mapping[str, Recipe], maker: Maker, report: Report) -> None:
    """A file of safetensors: the length of the header, the header in JSON, the tensors' bytes one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, recipe in recipes.items():
        start, end = end, end + num_bytes(recipe, maker.dtype)
        dtype = _NAMES[recipe.dtype or maker.dtype]
        header[name] = {"dtype": dtype, "shape": list(recipe.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, recipe in recipes.items():
            tensor = maker.make(name, recipe)
            assert tensor.dtype == (recipe.dtype or maker.dtype), (name, tensor.dtype)
            file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            report(tensor.nbytes)
