"""Hidden states that the output layer of an EAGLE-3 drafter sees while it drafts beside its target."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from vllm_crossspec.drafters.eagle3.checkpoint import read_facts
from vllm_crossspec.heads.flashhead.build import Progress
from vllm_crossspec.heads.flashhead.embedding import open_rows, read_target_ids, tensor_files
from vllm_crossspec.heads.flashhead.states import render
from vllm_crossspec.training.eagle3 import NAMES, Eagle3Config, Eagle3Drafter, drafts
from vllm_crossspec.training.states import FrozenTarget, load_target
from vllm_crossspec.types import TargetFacts

DRAFT_STEPS = 7
"""Tokens of a draft."""
_UNUSED = {"d2t", "t2d"}


def check_drafter_format(folder: Path) -> None:
    """Refuse drafters whose states cannot be had here.

    Raises:
        ValueError: one sentence: the folder holds no EAGLE-3 drafter in SafeAILab's format.
    """
    odd = sorted((set(tensor_files(folder, "MODEL")) - _UNUSED) ^ NAMES)
    if odd:
        raise ValueError(
            f"MODEL {folder} is no EAGLE-3 drafter in SafeAILab's format ({odd[0]}), so that its states cannot be had "
            "here; leave out --recall and choose --probes"
        )


def drafted_states(
    folder: Path,
    target_folder: Path,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    device: torch.device,
    progress: Progress | None = None,
) -> torch.Tensor:
    """What the drafter's output layer takes in along the target's greedy answers.

    From every token of an answer the drafter drafts :data:`DRAFT_STEPS` tokens, its own choices, as in decoding.

    Args:
        folder: of the drafter, SafeAILab's format.
        target_folder: of its target, a Hugging Face model.
        prompts: single user messages; rendered by the target's chat template, where it has one.
        new_tokens: most tokens of an answer.
        device: that runs both, in float32.
        progress: told after every prompt.

    Returns:
        float32 [n, D] on the CPU, one row a drafted token.

    Raises:
        ValueError: one sentence: no model, or a drafter of another target.
    """
    target, tokenizer = load_target(target_folder, torch.float32, device)
    drafter, taps = _load(folder, target, device)
    frozen = FrozenTarget(target, taps, bfloat16=False)
    draft = lambda tokens, anchors: drafts(drafter, frozen, tokens, anchors, DRAFT_STEPS)  # noqa: E731
    return states_of_drafts(drafter, draft, (target, tokenizer), prompts, new_tokens, progress)


def states_of_drafts(
    drafter: Eagle3Drafter,
    draft: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    target: tuple[PreTrainedModel, Any],
    prompts: Sequence[str],
    new_tokens: int,
    progress: Progress | None,
) -> torch.Tensor:
    """:func:`drafted_states` of a drafter at hand.

    Args:
        draft: given the tokens int64 [1, T] of prompt and answer, and where it begins, int64 [1, A].
        target: the model and its tokenizer.
    """
    model, tokenizer = target
    states: list[torch.Tensor] = []

    def note(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        states.append(arguments[0].flatten(0, -2).float().cpu())

    hook = drafter.lm_head.register_forward_pre_hook(note)
    for done, prompt in enumerate(prompts, 1):
        inputs = render(tokenizer, prompt).to(model.device)
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
            draft(tokens, torch.arange(inputs["input_ids"].shape[1], tokens.shape[1], device=model.device)[None])
        if progress is not None:
            progress("answers and drafts", done, len(prompts))
    hook.remove()
    return torch.cat(states)


def _load(folder: Path, target: PreTrainedModel, device: torch.device) -> tuple[Eagle3Drafter, tuple[int, ...]]:
    """The drafter, and the target layers that it taps."""
    config, settings = json.loads((folder / "config.json").read_text()), target.config
    known = TargetFacts(str(folder), settings.hidden_size, settings.vocab_size, settings.num_hidden_layers)
    facts = read_facts(config, "MODEL", known)
    own: dict[str, torch.Tensor] = {}
    for name, file in tensor_files(folder, "MODEL").items():
        if name not in _UNUSED:
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
    return drafter.to(device).eval(), facts.target_layers
