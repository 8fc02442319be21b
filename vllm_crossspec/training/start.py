"""A trained EAGLE-3 drafter that training goes on from: SafeAILab's format, read back."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from vllm_crossspec.drafters.checkpoint import check_drafter, read_config, require
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.training.blocks import head_dim
from vllm_crossspec.types import TargetFacts

KEY = "--start"
_REMEDY = "give an EAGLE-3 drafter that `crossspec train eagle3` made for this target"
NAMES = frozenset(
    (
        "fc.weight",
        "lm_head.weight",
        "norm.weight",
        *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        *(f"midlayer.{x}.weight" for x in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    )
)
"""Tensors of a drafter in SafeAILab's format, beside ``d2t`` and ``t2d``."""


class Start(NamedTuple):
    """A trained drafter to go on from.

    Attributes:
        folder: where it was read, for messages.
        intermediate_size: of its MLP.
        kept: int64 [draft vocabulary], the target's ids of its tokens, rising.
        tensors: its weights by name, float32.
    """

    folder: Path
    intermediate_size: int
    kept: torch.Tensor
    tensors: dict[str, torch.Tensor]


def read_start(folder: Path, target: Any, key: str = KEY) -> Start:
    """Read a drafter as ``crossspec train eagle3`` writes it.

    Args:
        folder: its ``config.json`` and ``model.safetensors``.
        target: configuration of the target (transformers) that it must fit.
        key: the option that named the folder, for messages.

    Raises:
        ValueError: one sentence naming ``key`` and what is wrong.
    """
    if not folder.is_dir():
        raise ValueError(f"{key} {folder} is not a folder; {_REMEDY}")
    settings = read_config(str(folder.resolve()), key)
    kind = settings.get("speculators_model_type")
    if kind is not None:
        raise ValueError(f"{key} {folder} is a drafter of kind {kind} in speculators' format; {_REMEDY}")
    name = str(target.name_or_path)
    facts = TargetFacts(name, target.hidden_size, target.vocab_size, target.num_hidden_layers)
    found = check_drafter("eagle3", str(folder.resolve()), key, facts)
    taps = default_target_layers(target.num_hidden_layers)
    if found.target_layers != taps:
        raise ValueError(f"{key} {folder} reads target layers {list(found.target_layers)}, not {list(taps)}; {_REMEDY}")
    _check_attention(settings, folder, target, key)
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{key} {folder} has no {weights.name}; {_REMEDY}")
    tensors = load_file(weights)
    tensors.pop("t2d", None)
    if "d2t" not in tensors and found.draft_vocab_size < target.vocab_size:
        raise ValueError(f"{key} {folder}: d2t is missing in {weights.name}, which tells its tokens; {_REMEDY}")
    offsets = tensors.pop("d2t", torch.zeros(target.vocab_size, dtype=torch.int64))
    wrong = sorted(NAMES ^ tensors.keys())
    if wrong:
        what = "does not belong there" if wrong[0] in tensors else "is missing"
        raise ValueError(f"{key} {folder}: {wrong[0]} {what} in {weights.name}; {_REMEDY}")
    tensors = {name: x.float() for name, x in tensors.items()}
    inner = tensors["midlayer.mlp.gate_proj.weight"].shape[0]
    return Start(folder, inner, offsets + torch.arange(len(offsets)), tensors)


def _check_attention(settings: dict[str, Any], folder: Path, target: Any, key: str) -> None:
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
            raise ValueError(f"{key} {folder} has {name} {found[name]}, but the target has {value}; {_REMEDY}")


def load_start(model: torch.nn.Module, start: Start) -> None:
    """Give ``model`` the weights of ``start``; parts that only the model has stay as they are.

    Raises:
        ValueError: a weight has not the shape that this target gives it.
    """
    own = model.state_dict()
    for name, x in start.tensors.items():
        if x.shape != own[name].shape:
            raise ValueError(
                f"{KEY} {start.folder}: {name} is {list(x.shape)}, but {list(own[name].shape)} for this target; "
                f"{_REMEDY}"
            )
    model.load_state_dict(start.tensors, strict=False)
