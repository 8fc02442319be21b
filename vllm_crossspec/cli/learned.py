"""Which prompts the drafters know: what they learned from, they draft better than they will draft anything else."""

from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.runner import Prompt


def learned_prompts(sources: Sequence[Path], model: str) -> Callable[[Prompt], bool]:
    """Whether a drafter learned from a prompt.

    Args:
        sources: folders of responses that ``crossspec train generate`` wrote, whose prompts are token ids of ``model``
            as its chat template has them; and files of prompts.
        model: the target's folder or name, for its tokenizer.

    Raises:
        ValueError: one sentence: no such folder or file, no responses in it, a damaged one, no tokenizer.
    """
    texts: set[str] = set()
    folders = [source for source in sources if source.is_dir()]
    for file in sources:
        if file not in folders:
            texts |= {prompt.turns[0].strip() for prompt in _read(file)}
    if not folders:
        return lambda prompt: prompt.turns[0].strip() in texts

    from transformers import AutoTokenizer

    from vllm_crossspec.training.generations import read_generations

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        raise ValueError(
            f"--learned-from: {model} has no tokenizer to read the responses with ({problem})"
        ) from problem
    rendered = {
        tuple(row.prompt_ids)
        for folder in folders
        for row in read_generations(folder, "train", len(tokenizer), option="--learned-from")
    }

    def is_known(prompt: Prompt) -> bool:
        text = prompt.turns[0].strip()
        if text in texts:
            return True
        ids = [tokenizer.encode(text, add_special_tokens=False)]
        if tokenizer.chat_template:
            message = [{"role": "user", "content": text}]
            whole = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids.append(tokenizer.encode(whole, add_special_tokens=False))
        return any(tuple(one) in rendered for one in ids)

    return is_known


def _read(file: Path) -> list[Prompt]:
    try:
        return read_prompts(file)
    except OSError as problem:
        raise ValueError(
            f"--learned-from {file}: give a folder of responses or a file of prompts ({problem})"
        ) from problem
