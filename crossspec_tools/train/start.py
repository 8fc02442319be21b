"""A trained drafter that training begins with: its folder read back, whichever its kind."""

from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossspec_tools.train.blocks import head_dim
from vllm_crossspec.drafting.flashhead.embedding import open_rows, tensor_files
from vllm_crossspec.kinds.checkpoint import check_drafter, read_config, require
from vllm_crossspec.types import DrafterFacts, TargetFacts

KEY = "--start"


class Start(NamedTuple):
    """A trained drafter that training begins with."""

    name: str  # the option that named the folder and where it was read, for messages
    remedy: str  # what to give in its place, for messages
    settings: dict[str, Any]  # its `config.json`
    facts: DrafterFacts  # what they say of the drafter
    tensors: dict[str, torch.Tensor]  # its weights by name, float32; token maps as they are

    def size(self, setting: str) -> int:
        """A number that its settings have to name, as the ``intermediate_size``."""
        return int(require(self.settings, setting, self.name))


def read_drafter(folder: Path, target: Any, kind: str, made: str, key: str = KEY) -> Start:
    """Read a drafter as ``crossspec train`` writes it, or as it was published. Raises ValueError.

    ``folder``: its ``config.json`` and weights: .safetensors files, or .bin ones that hold tensors and nothing else.
    """
    remedy = f"give {made} for this target"
    if not folder.is_dir():
        raise ValueError(f"{key} {folder} is not a folder; {remedy}")
    settings = read_config(str(folder.resolve()), key)
    other = settings.get("speculators_model_type")
    if other is not None:
        raise ValueError(f"{key} {folder} is a drafter of kind {other} in speculators' format; {remedy}")
    name = str(target.name_or_path)
    facts = TargetFacts(name, target.hidden_size, target.vocab_size, target.num_hidden_layers)
    _check_attention(settings, folder, target, key, remedy)
    found = check_drafter(kind, str(folder.resolve()), key, facts)
    return Start(f"{key} {folder}", remedy, settings, found, read_tensors(folder, key))


def read_tensors(folder: Path, key: str) -> dict[str, torch.Tensor]:
    """All tensors of a drafter by name: weights as float32, token maps as they are."""
    tensors = {}
    for name, file in tensor_files(folder, key).items():
        with open_rows(file, name, key) as rows:
            x = rows[:]
        tensors[name] = x.float() if x.is_floating_point() else x
    return tensors


def _check_attention(settings: dict[str, Any], folder: Path, target: Any, key: str, remedy: str) -> None:
    """The drafter that goes on has the target's heads, positions and norms: shapes alone would not show others."""
    rope, heads = settings.get("rope_parameters") or {}, require(settings, "num_attention_heads", key)
    found = {
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("num_key_value_heads", heads),
        "head_dim": settings.get("head_dim") or settings["hidden_size"] // heads,
        "rope_theta": settings.get("rope_theta") or rope.get("rope_theta"),
        "rms_norm_eps": settings.get("rms_norm_eps"),
    }
    given = {"head_dim": head_dim(target), "rope_theta": target.rope_parameters["rope_theta"]}
    for name in found:
        value = given[name] if name in given else getattr(target, name)
        if found[name] != value:
            raise ValueError(f"{key} {folder} has {name} {found[name]}, but the target has {value}; {remedy}")


def check_names(start: Start, names: Set[str]) -> None:
    """See that ``start`` has the tensors ``names`` and no others. Raises ValueError."""
    wrong = sorted(names ^ start.tensors.keys())
    if wrong:
        what = "does not belong" if wrong[0] in start.tensors else "is missing"
        raise ValueError(f"{start.name}: {wrong[0]} {what} among its weights; {start.remedy}")


def load_start(model: torch.nn.Module, start: Start) -> None:
    """Give ``model`` the weights of ``start``; parts that only the model has stay as they are.

    Raises ValueError: a weight has not the shape that this target gives it.
    """
    own = model.state_dict()
    for name, x in start.tensors.items():
        if x.shape != own[name].shape:
            raise ValueError(
                f"{start.name}: {name} is {list(x.shape)}, but {list(own[name].shape)} for this target; {start.remedy}"
            )
    model.load_state_dict(start.tensors, strict=False)
