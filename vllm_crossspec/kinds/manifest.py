"""What a loaded drafter's checkpoint said, so that another can be compared with it before it takes its place.

What is wrong is a ValueError of one sentence that begins with ``key``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_crossspec.files import bin_files, load_bin, open_tensors
from vllm_crossspec.kinds.checkpoint import check_weight_files, loaded_files, read_config

_VOLATILE_KEYS = ("_name_or_path", "name_or_path", "transformers_version")
"""Of a config.json: where models lie, and what saved them."""

MASK_FILE = "mask_embedding.pt"
"""A tensor that some checkpoints have in a file of its own."""


class Shape(NamedTuple):
    """Of one tensor of a checkpoint."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.sizes)}"


class Manifest(NamedTuple):
    """Of one checkpoint.

    Attributes:
        config: of its config.json what does not change when it is moved or saved again; None where it is not known.
        constants: its tensors of whole numbers and truth values, by name: which tokens it can draft.
    """

    config: dict[str, Any] | None
    shapes: dict[str, Shape]
    constants: dict[str, torch.Tensor]
    has_mask_file: bool

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], folder: Path | None, key: str) -> "Manifest":
        """Of tensors, and of the folder that they are from; without one its config is not known."""
        config = None if folder is None else _lasting(read_config(str(folder), key))
        return cls(
            config,
            {name: Shape(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()},
            {name: tensor.clone() for name, tensor in tensors.items() if not tensor.is_floating_point()},
            folder is not None and (folder / MASK_FILE).is_file(),
        )

    def check(self, other: "Manifest", key: str) -> None:
        """See that ``other`` can take this one's place."""
        if self.config is not None and other.config is not None:
            names = sorted(self.config.keys() | other.config.keys())
            for name in (name for name in names if self.config.get(name) != other.config.get(name)):
                raise ValueError(
                    f"{key}: its config.json says {name} {other.config.get(name)!r}, and the loaded drafter's "
                    f"{self.config.get(name)!r}; start an engine with it"
                )
            if self.has_mask_file != other.has_mask_file:
                raise ValueError(f"{key}: of it and the loaded drafter one has a {MASK_FILE}; start an engine with it")
        if missing := sorted(self.shapes.keys() - other.shapes.keys()):
            raise ValueError(f"{key}: it has no tensor {missing[0]}{_more(missing)}, as the loaded drafter has")
        if new := sorted(other.shapes.keys() - self.shapes.keys()):
            raise ValueError(f"{key}: it has a tensor {new[0]}{_more(new)}, which the loaded drafter has not")
        for name, shape in self.shapes.items():
            if other.shapes[name] != shape:
                raise ValueError(f"{key}: its {name} is {other.shapes[name]}, and the loaded drafter's {shape}")
        for name, constant in self.constants.items():
            if not torch.equal(constant, other.constants[name]):
                raise ValueError(
                    f"{key}: its {name} differs from the loaded drafter's, so that it drafts other tokens; start an "
                    "engine with it"
                )


def _more(names: list[str]) -> str:
    return f" (nor {len(names) - 1} more)" if len(names) > 1 else ""


def _lasting(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _lasting(inner) for name, inner in value.items() if name not in _VOLATILE_KEYS}


def read_tensors(folder: Path, key: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, which the system reads from its files when they are used."""
    check_weight_files(folder, key)
    files = loaded_files(folder, key)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with open_tensors(file, f"{key}: {file}") as opened:
            names = opened.keys()
            tensors.update({name: opened.get_tensor(name) for name in names})
    for file in bin_files(folder) if not files else []:
        tensors.update(load_bin(file, f"{key}: {file}"))
    return tensors
