"""A trained router for the states of an inflated target."""

import dataclasses
import json
from pathlib import Path

import torch

from vllm_crossspec.router.checkpoint import (
    FACTS_FILE,
    RouterCheckpoint,
    middle_size,
    read_router,
    save_router,
)
from vllm_crossspec.shapes import matrices
from vllm_crossspec.shapes.growth import Width
from vllm_crossspec.shapes.matrices import Maker


def inflate(folder: Path, width: Width, out: Path, key: str) -> None:
    """Write the router of ``folder`` for wide states: its middle layer grows with them, and its gains stay.

    Raises:
        ValueError: it is another target's, or damaged.
    """
    try:
        drafters = tuple(json.loads((folder / FACTS_FILE).read_text())["drafters"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{key}: {folder / FACTS_FILE} cannot be read ({problem}); copy it again") from None
    old = read_router(folder, hidden_size=width.old, drafters=drafters, key=key)
    few, many = middle_size(width.old), middle_size(width.new)
    bias, gains = torch.zeros(many), torch.zeros(len(old.gain_weight), many)
    bias[:few], gains[:, :few] = old.hidden_bias, old.gain_weight
    maker = Maker(torch.float32, torch.device("cpu"))
    hidden = maker.make(
        "hidden.weight", matrices.inward(lambda _: old.hidden_weight.float(), [(0, 0, few)], many, width)
    )
    facts = dataclasses.replace(old.facts, hidden_size=width.new)
    save_router(out, RouterCheckpoint(facts, hidden, bias, gains, old.gain_bias))
