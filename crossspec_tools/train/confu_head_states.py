"""A trained ConFu drafter read back, and the hidden states that its output layer sees while it drafts."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from crossspec_tools.flashhead.states import Draft
from crossspec_tools.train.confu import ConfuDrafter, drafts
from crossspec_tools.train.eagle3 import NAMES as EAGLE3_NAMES
from crossspec_tools.train.generations import Batch
from crossspec_tools.train.head_states import DRAFT_STEPS, MAPS
from crossspec_tools.train.recipes import ConfuConfig
from crossspec_tools.train.states import FrozenTarget
from vllm_crossspec.drafters.confu.checkpoint import MODEL_TYPE, check_target, read_shape
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.drafting.flashhead.embedding import tensor_files
from vllm_crossspec.kinds.checkpoint import check_drafter, read_config
from vllm_crossspec.kinds.identity import Target
from vllm_crossspec.types import TargetFacts

NAMES = frozenset(
    (
        *(name.replace("midlayer.", "layers.0.") for name in EAGLE3_NAMES),
        *(f"soft_prompts.{x}" for x in ("keys", "values")),
        *(f"{embed}.{x}" for embed in ("contemplate_embed", "future_embed") for x in ("router", "experts")),
        "future_skip.weight",
        "no_future_embed",
    )
)
"""Tensors of a ConFu drafter, beside ``d2t`` and ``t2d``."""


def check_drafter_format(folder: Path, key: str = "MODEL") -> None:
    """Raises ValueError: tensors are missing, or do not belong there."""
    odd = sorted((set(tensor_files(folder, key)) - MAPS) ^ NAMES)
    if odd:
        raise ValueError(
            f"{key} {folder} is no ConFu drafter of `crossspec train confu` ({odd[0]}); give one, or train it again"
        )


def load_confu(folder: Path, target_folder: Path, config: Any, key: str) -> ConfuDrafter:
    """A ConFu drafter as :func:`crossspec_tools.train.confu.checkpoint` writes it, in float32.

    Raises ValueError: no ConFu drafter, or another target's.
    """
    facts = TargetFacts(str(target_folder), config.hidden_size, config.vocab_size, config.num_hidden_layers)
    found = check_drafter(MODEL_TYPE, str(folder.resolve()), key, facts)
    settings = read_config(str(folder.resolve()), key)
    check_target(settings, key, Target(facts, str(target_folder.resolve())))
    check_drafter_format(folder, key)
    tensors, shape = load_file(folder / "model.safetensors"), read_shape(settings, key)
    offsets = tensors.get("d2t", torch.zeros(found.draft_vocab_size, dtype=torch.int64))
    kept = offsets + torch.arange(len(offsets))
    sizes = ConfuConfig(
        intermediate_size=settings["transformer_layer_config"]["intermediate_size"],
        draft_vocab_size=len(kept),
        num_soft_prompts=shape.num_soft_prompts,
        num_experts=shape.num_experts,
        top_experts=shape.top_experts,
    )
    model = ConfuDrafter(sizes, config, kept, seed=0)
    weights = {name.replace("layers.0.", "midlayer."): x.float() for name, x in tensors.items() if name not in MAPS}
    model.load_state_dict(weights | {"kept": kept})
    return model.eval()


def drafting(folder: Path, target_folder: Path, target: PreTrainedModel) -> tuple[torch.nn.Module, Draft]:
    """As :func:`head_states.drafting`, every draft with a future."""
    drafter = load_confu(folder, target_folder, target.config, "MODEL").to(target.device)
    frozen = FrozenTarget(target, default_target_layers(target.config.num_hidden_layers), bfloat16=False)
    config = ConfuConfig(num_steps=DRAFT_STEPS)

    def draft(tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return drafts(drafter, frozen, Batch(tokens, anchors[:, 0], anchors[:, -1] + 1), anchors, config)

    return drafter.lm_head, draft
