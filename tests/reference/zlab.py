"""DFlash as z-lab's code drafts it: the loop ``dflash_generate`` of ``dflash/model.py``, unchanged."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from reference.compare import Draft
from reference.target import ScriptedTarget

VARIABLE = "CROSSSPEC_DFLASH_REFERENCE"
HOW_TO_GET = f"git clone https://github.com/z-lab/dflash and set {VARIABLE} to that folder"


def module(checkout: Path) -> ModuleType:
    """The reference's module."""
    sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module("dflash.model")
    finally:
        sys.path.remove(str(checkout))


def load(checkout: Path, drafter: Path) -> Any:
    """The drafter's model."""
    model_class = module(checkout).DFlashDraftModel
    model, report = model_class.from_pretrained(drafter, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return model.eval()


def drafts(
    checkout: Path, model: Any, target: nn.Module, tokens: list[int], num_prompt_tokens: int, block_size: int
) -> dict[int, Draft]:
    """Every round of one request, the loop's own caches included.

    Args:
        checkout: of the reference.
        model: from :func:`load`.
        target: in transformers.
        tokens: the text, prompt included.
        num_prompt_tokens: how many of them the loop gets as its prompt.
        block_size: draft tokens + 1.
    """
    scripted = ScriptedTarget(target, tokens)
    module(checkout).dflash_generate(
        model,
        target=scripted,
        input_ids=torch.tensor([tokens[:num_prompt_tokens]]),
        max_new_tokens=len(tokens) - num_prompt_tokens,
        stop_token_ids=None,
        temperature=0.0,
        block_size=block_size,
    )
    return scripted.drafts
