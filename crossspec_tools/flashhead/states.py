"""Hidden states that a model's output layer really sees: those of its own greedy answers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from crossspec_tools.flashhead.build import Progress

Draft = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Drafts from the tokens int64 [1, T] of prompt and answer, at the answer's places int64 [1, A]."""


def states_of(
    layer: torch.nn.Module,
    model: tuple[Any, Any],
    prompts: Sequence[str],
    new_tokens: int,
    progress: Progress | None,
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
        if progress is not None:
            progress("answers" if draft is None else "answers and drafts", done, len(prompts))
    hook.remove()
    return torch.cat(states)


def render(tokenizer: Any, prompt: str) -> Any:
    """The tokens of a user message in the model's chat format, where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
