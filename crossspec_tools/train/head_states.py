"""Hidden states that the output layer of an EAGLE-3 drafter sees while it drafts beside its target."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from crossspec_tools.flashhead.files import read_target_ids
from crossspec_tools.flashhead.states import Draft
from crossspec_tools.train.eagle3 import NAMES, Eagle3Drafter, drafts
from crossspec_tools.train.generations import Batch
from crossspec_tools.train.recipes import Eagle3Config
from crossspec_tools.train.states import FrozenTarget
from vllm_crossspec.drafters.eagle3.checkpoint import read_facts
from vllm_crossspec.drafting.flashhead.embedding import open_rows, tensor_files
from vllm_crossspec.types import TargetFacts

DRAFT_STEPS = 7
"""Tokens of a draft."""
MAPS = {"d2t", "t2d"}


def check_drafter_format(folder: Path) -> None:
    """Raises ValueError: the folder holds no EAGLE-3 drafter in SafeAILab's format."""
    odd = sorted((set(tensor_files(folder, "MODEL")) - MAPS) ^ NAMES)
    if odd:
        raise ValueError(
            f"MODEL {folder} is no EAGLE-3 drafter in SafeAILab's format ({odd[0]}), so that its states cannot be had "
            "here; leave out --recall and choose --probes"
        )


def drafting(folder: Path, target_folder: Path, target: PreTrainedModel) -> tuple[torch.nn.Module, Draft]:
    """The drafter's output layer, and what drafts :data:`DRAFT_STEPS` tokens of its own choice, as in decoding.

    Raises ValueError: no drafter, or another target's.
    """
    config, settings = json.loads((folder / "config.json").read_text()), target.config
    known = TargetFacts(str(folder), settings.hidden_size, settings.vocab_size, settings.num_hidden_layers)
    facts = read_facts(config, "MODEL", known)
    own: dict[str, torch.Tensor] = {}
    for name, file in tensor_files(folder, "MODEL").items():
        if name not in MAPS:
            with open_rows(file, name, "MODEL") as rows:
                own[name] = rows[:].float()
    kept = read_target_ids(folder)
    recipe = Eagle3Config(intermediate_size=config.get("intermediate_size", 0))
    drafter = Eagle3Drafter(recipe, settings, torch.arange(settings.vocab_size) if kept is None else kept, seed=0)
    try:
        drafter.load_state_dict(own | {"kept": drafter.kept})
    except RuntimeError as error:
        why = str(error).splitlines()[-1].strip()
        raise ValueError(f"MODEL {folder} does not fit --target ({why}); give the target it was trained for") from None
    frozen = FrozenTarget(target, facts.target_layers, bfloat16=False)
    drafter.to(target.device).eval()

    def draft(tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return drafts(drafter, frozen, Batch(tokens, anchors[:, 0], anchors[:, -1] + 1), anchors, DRAFT_STEPS)

    return drafter.lm_head, draft
