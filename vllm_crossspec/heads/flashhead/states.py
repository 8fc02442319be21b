"""Hidden states that a model's output layer really sees: those of its own greedy answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_crossspec.heads.flashhead.build import Progress


def answer_states(
    folder: Path, prompts: Sequence[str], *, new_tokens: int, device: torch.device, progress: Progress | None = None
) -> torch.Tensor:
    """What the output layer takes in while the model answers.

    Args:
        folder: of a Hugging Face model.
        prompts: single user messages; rendered by the model's chat template, where it has one.
        new_tokens: most tokens of an answer.
        device: that runs the model, in float32.
        progress: told after every prompt.

    Returns:
        float32 [n, D] on the CPU, one row a token.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    states: list[torch.Tensor] = []

    def note(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        states.append(arguments[0][0, -1].float().cpu())

    hook = model.get_output_embeddings().register_forward_pre_hook(note)
    for done, prompt in enumerate(prompts, 1):
        inputs = render(tokenizer, prompt).to(device)
        with torch.no_grad():
            model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        if progress is not None:
            progress("answers", done, len(prompts))
    hook.remove()
    return torch.stack(states)


def render(tokenizer: Any, prompt: str) -> Any:
    """The tokens of a user message in the model's chat format, where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
