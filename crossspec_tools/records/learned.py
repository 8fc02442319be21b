"""Which prompts the drafters know: what they learned from, they draft better than they will draft anything else."""

from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.runner import Prompt


def learned_prompts(sources: Sequence[Path], model: str) -> Callable[[Prompt], bool]:
    """Whether a drafter learned from a prompt.

    Raises ValueError: no such folder or file, no responses in it, a damaged one, no tokenizer. ``sources``: files of
    prompts, and folders of responses to prompts in ``model``'s chat format (``crossspec train generate``).
    """
    texts: set[str] = set()
    folders = [source for source in sources if source.is_dir()]
    for file in (source for source in sources if source not in folders):
        try:
            texts |= {prompt.turns[0].strip() for prompt in read_prompts(file)}
        except OSError as problem:
            raise ValueError(
                f"--learned-from {file}: give a folder of responses or a file of prompts ({problem})"
            ) from problem
    if not folders:
        return lambda prompt: prompt.turns[0].strip() in texts

    from transformers import AutoTokenizer

    from crossspec_tools.train.generations import read_generations

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"--learned-from: {model} has no tokenizer to read the responses with ({error})") from error
    rendered = {
        tuple(row.prompt_ids)
        for folder in folders
        for row in read_generations(folder, "train", len(tokenizer), option="--learned-from")
    }

    def is_known(prompt: Prompt) -> bool:
        text = prompt.turns[0].strip()
        if text in texts:
            return True
        forms = [text]
        if tokenizer.chat_template:
            message = [{"role": "user", "content": text}]
            forms.append(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        return any(tuple(tokenizer.encode(form, add_special_tokens=False)) in rendered for form in forms)

    return is_known
