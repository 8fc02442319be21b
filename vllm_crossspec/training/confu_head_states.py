"""A trained ConFu drafter read back, and the hidden states that its output layer sees while it drafts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vllm_crossspec.drafters.checkpoint import check_drafter, read_config
from vllm_crossspec.drafters.confu.checkpoint import MODEL_TYPE, check_target, read_shape
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.heads.flashhead.build import Progress
from vllm_crossspec.heads.flashhead.embedding import tensor_files
from vllm_crossspec.training.confu import ConfuConfig, ConfuDrafter, drafts
from vllm_crossspec.training.eagle3 import NAMES as EAGLE3_NAMES
from vllm_crossspec.training.generations import Batch
from vllm_crossspec.training.head_states import DRAFT_STEPS, states_of_drafts
from vllm_crossspec.training.states import FrozenTarget, load_target
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
_MAPS = {"d2t", "t2d"}


def check_drafter_format(folder: Path, key: str = "MODEL") -> None:
    """Refuse drafters whose states cannot be had here.

    Raises:
        ValueError: one sentence: tensors are missing, or do not belong there.
    """
    odd = sorted((set(tensor_files(folder, key)) - _MAPS) ^ NAMES)
    if odd:
        raise ValueError(
            f"{key} {folder} is no ConFu drafter of `crossspec train confu` ({odd[0]}); give one, or train it again"
        )


def load_confu(folder: Path, target_folder: Path, config: Any, key: str) -> ConfuDrafter:
    """A ConFu drafter as :func:`vllm_crossspec.training.confu.checkpoint` writes it, in float32.

    Args:
        config: of the target in ``target_folder`` (transformers).
        key: of the option that named ``folder``, for messages.

    Raises:
        ValueError: one sentence: no ConFu drafter, or another target's.
    """
    facts = TargetFacts(str(target_folder), config.hidden_size, config.vocab_size, config.num_hidden_layers)
    found = check_drafter(MODEL_TYPE, str(folder.resolve()), key, facts)
    settings = read_config(str(folder.resolve()), key)
    check_target(settings, key, str(target_folder.resolve()))
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
    weights = {name.replace("layers.0.", "midlayer."): x.float() for name, x in tensors.items() if name not in _MAPS}
    model.load_state_dict(weights | {"kept": kept})
    return model.eval()


def drafted_states(
    folder: Path,
    target_folder: Path,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    device: torch.device,
    progress: Progress | None = None,
) -> torch.Tensor:
    """What the drafter's output layer takes in along the target's greedy answers, every draft with a future.

    From every token of an answer the drafter drafts :data:`head_states.DRAFT_STEPS` tokens, its own choices, as in
    decoding; see :func:`head_states.drafted_states`.
    """
    target, tokenizer = load_target(target_folder, torch.float32, device)
    drafter = load_confu(folder, target_folder, target.config, "MODEL").to(device)
    frozen = FrozenTarget(target, default_target_layers(target.config.num_hidden_layers), bfloat16=False)
    config = ConfuConfig(num_steps=DRAFT_STEPS)

    def draft(tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return drafts(drafter, frozen, Batch(tokens, anchors[:, 0], anchors[:, -1] + 1), anchors, config)

    return states_of_drafts(drafter, draft, (target, tokenizer), prompts, new_tokens, progress)
