"""How often the head finds the dense head's token, by number of probes, on states of a model's own greedy answers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from crossspec_tools.flashhead.build import Progress
from vllm_crossspec.drafting.flashhead.assets import Assets

_ROWS = 256
Draft = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Drafts from the tokens int64 [1, T] of prompt and answer, at the answer's places int64 [1, A]."""


def states_of(
    layer: torch.nn.Module,
    model: tuple[Any, Any],
    prompts: Sequence[str],
    new_tokens: int,
    progress: Progress,
    draft: Draft | None = None,
) -> torch.Tensor:
    """What an output layer takes in along a model's greedy answers: float32 [n, D] on the CPU.

    The ``layer`` is the model's own, and the states those of the answers' tokens. With ``draft`` it is a drafter's, and
    the states those of the drafts. ``model``: with its tokenizer.
    """
    answers, tokenizer = model
    states: list[torch.Tensor] = []

    def note(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        seen = arguments[0][:, -1] if draft is None else arguments[0].flatten(0, -2)
        states.append(seen.float().cpu())

    hook = layer.register_forward_pre_hook(note)
    for done, prompt in enumerate(prompts, 1):
        inputs = render(tokenizer, prompt).to(answers.device)
        with torch.no_grad():
            tokens = answers.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
            if draft is not None:
                begin = inputs["input_ids"].shape[1]
                draft(tokens, torch.arange(begin, tokens.shape[1], device=answers.device)[None])
        progress("answers" if draft is None else "answers and drafts", done, len(prompts))
    hook.remove()
    return torch.cat(states)


def render(tokenizer: Any, prompt: str) -> Any:
    """The tokens of a user message in the model's chat format, where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def rank_clusters(weight: torch.Tensor, assets: Assets, hidden: torch.Tensor) -> torch.Tensor:
    """int64 [n] clusters that come before the one with the dense arg-max; 0 for special tokens, always candidates.

    Args:
        weight: float [V, D] output embedding.
        hidden: float [n, D] final hidden states, as the dense head takes them.
    """
    device, dtype = weight.device, torch.float32
    centroids = F.normalize(assets.centroids.to(device, dtype), dim=1)
    clusters = assets.assignments.to(device)
    rows = weight.to(dtype)
    special = torch.zeros(len(weight), dtype=torch.bool, device=device)
    special[list(assets.special_token_ids)] = True
    ranks = []
    for part in hidden.to(device, dtype).split(_ROWS):
        best = (part @ rows.t()).argmax(dim=1)
        found = (F.normalize(part, dim=1) @ centroids.t()).sort(dim=1, descending=True, stable=True).indices
        rank = (found == clusters[best][:, None]).int().argmax(dim=1)
        ranks.append(rank.masked_fill(special[best], 0).cpu())
    return torch.cat(ranks)


def recall(ranks: torch.Tensor, num_probes: int) -> float:
    """Share of the states whose dense arg-max is a candidate; ``ranks`` of :func:`rank_clusters`."""
    return float((ranks < num_probes).float().mean())


def least_probes(ranks: torch.Tensor, wanted: float) -> int:
    """The smallest number of probes whose recall is at least ``wanted``, a share of the states up to 1."""
    needed = min(len(ranks), max(1, math.ceil(wanted * len(ranks))))
    return int(ranks.sort().values[needed - 1]) + 1
