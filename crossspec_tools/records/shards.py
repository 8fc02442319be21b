"""Folders of what engines recorded: an index in JSON (how it was made), and shards of safetensors beside it.

A shard holds the tensors of some texts; its metadata says in JSON what they are of. A stopped collection goes on with
the first missing shard.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from vllm_crossspec.files import replacing, write_tensors

FORMAT_VERSION = 1

Steps = Sequence[tuple[Sequence[str], bytes]]
"""What the engine hands out: request ids, which begin with a text's number and a hyphen, and tensors."""

Facts = TypeVar("Facts")


class Shard(NamedTuple):
    """One file: a list for each of its texts, as given to :func:`write_shard`, and tensors by name."""

    path: Path
    texts: list[list[Any]]
    tensors: dict[str, torch.Tensor]


def joined_steps(steps: Steps) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """int64 [M] text numbers and the tensors of all steps' rows; none without a step."""
    numbers = torch.tensor([int(name.split("-")[0]) for ids, _ in steps for name in ids], dtype=torch.int64)
    loaded = [load(content) for _, content in steps]
    return numbers, {name: torch.cat([part[name] for part in loaded]) for name in (loaded[0] if loaded else ())}


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """Files of the finished shards, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], facts: Any, texts: Sequence[Any]) -> None:
    """Write a shard whole or not at all; ``facts`` and ``texts`` become JSON."""
    metadata = {"format_version": str(FORMAT_VERSION), "facts": json.dumps(facts), "texts": json.dumps(texts)}
    with replacing(path) as partial:
        write_tensors(partial, {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)


def read_shards(
    index: Path, key: str, command: str, names: Sequence[str], facts: Callable[[Any], Facts]
) -> tuple[Facts, list[Shard]]:
    """All finished shards beside an index, in the order of their numbers, and what they have in common.

    Raises ValueError: no such folder, nothing in it, a damaged shard, or shards of different facts. ``key`` (the option
    that named the folder) and ``command`` (which writes it) are for messages; ``names``: of the tensors to load.
    """
    folder, found = index.parent, []
    if not index.is_file():
        raise ValueError(f"{key} {folder} holds no {index.name}; give a folder that `crossspec {command}` wrote")
    for path in shard_paths(folder):
        try:
            with safe_open(path, "pt") as file:
                metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in names}
            found.append((facts(json.loads(metadata["facts"])), Shard(path, json.loads(metadata["texts"]), tensors)))
        except (SafetensorError, KeyError, TypeError, ValueError) as problem:
            what = f"{path} is no whole shard of {index.stem}"
            raise ValueError(f"{what} ({problem}); delete it and collect again") from None
        if found[-1][0] != found[0][0]:
            first = found[0][1].path
            raise ValueError(f"{key}: {path} and {first} are of different models or trees; keep them apart")
    if not found:
        raise ValueError(f"{key} {folder} holds no finished shard yet; let `crossspec {command}` go on")
    return found[0][0], [shard for _, shard in found]
