"""The target answers the training prompts itself: drafters learn from the very text that they will have to guess.

Here is what is asked for, in shards, so that a run that was stopped goes on with the first shard that is missing;
``crossspec train generate`` has vLLM answer it.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from vllm_crossspec.training.data import IM_END, Row, chat_prompt, read_rows
from vllm_crossspec.training.generations import claim
from vllm_crossspec.training.states import target_settings


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What is generated; two runs with equal configs, data and target write equal shards.

    Attributes:
        max_prompt_tokens: longer prompts are left out.
        max_new_tokens: a response is cut there if the target has not ended it.
        sampled_share: share of the training prompts that are answered by sampling; the rest, and all of the
            held-out ones, greedily.
        temperature: of the sampled ones.
        dtype: of the target's computation; "auto" is its checkpoint's.
        rows_per_batch: rows that are decoded together.
        shard_rows: prompts of one shard file.
        max_rows: at most so many training prompts (0: all).
        seed: of the order of the prompts and of the sampling.
    """

    max_prompt_tokens: int = 384
    max_new_tokens: int = 192
    sampled_share: float = 0.2
    temperature: float = 0.7
    dtype: str = "float32"
    rows_per_batch: int = 64
    shard_rows: int = 512
    max_rows: int = 0
    seed: int = 0


def plan(data: Path, target: Path, out: Path, config: GenerateConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What an engine is asked to generate, and claim ``out`` for it.

    Returns:
        What :mod:`vllm_crossspec.engine.jobs.generate` takes: a job without its engine and shards, and all shards,
        ``train-*.jsonl.gz`` and ``dev-*.jsonl.gz``.

    Raises:
        ValueError: no rows, no target, a target whose positions do not reach so far, or ``out`` holds shards of other
            settings.
    """
    splits = {"train": read_rows(data)}
    if list(data.glob("dev-*.jsonl*")):
        splits["dev"] = read_rows(data, "dev-*.jsonl*")
    length = config.max_prompt_tokens + config.max_new_tokens
    most = target_settings(target).get_text_config().max_position_embeddings
    if length > most:
        raise ValueError(
            f"--max-prompt-tokens and --max-new-tokens are {length} together, {target} has {most} positions"
        )
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    end_id = tokenizer.get_vocab().get(IM_END)
    if end_id is None:
        raise ValueError(f"--target {target}: its tokenizer has no {IM_END}; give a ChatML target")
    shards: list[dict[str, Any]] = []
    for split, rows in sorted(splits.items()):
        shards += _shards(tokenizer, split, rows, data, config)
    claim(out, "generate.json", asdict(config) | {"target": str(target.resolve())})
    job = {"out": str(out), "end_id": end_id, "max_new_tokens": config.max_new_tokens}
    return job, [{"number": number, **shard} for number, shard in enumerate(shards)]


def _shards(
    tokenizer: Any, split: str, rows: Sequence[Row], data: Path, config: GenerateConfig
) -> Iterator[dict[str, Any]]:
    prompts = _prompts(tokenizer, rows, config, config.sampled_share if split == "train" else 0.0)
    if split == "train" and config.max_rows:
        prompts = prompts[: config.max_rows]
    if not prompts:
        raise ValueError(f"--data {data}: no {split} prompt has at most {config.max_prompt_tokens} tokens")
    for number, start in enumerate(range(0, len(prompts), config.shard_rows)):
        chosen = prompts[start : start + config.shard_rows]
        yield {"file": f"{split}-{number:05d}.jsonl.gz", "num_texts": len(chosen), "prompts": chosen}


def _prompts(tokenizer: Any, rows: Sequence[Row], config: GenerateConfig, sampled_share: float) -> list[dict[str, Any]]:
    rng = random.Random(config.seed)
    encoded = tokenizer([chat_prompt(r.prompt) for r in rows], add_special_tokens=False)["input_ids"]
    prompts = [
        {
            "ids": ids,
            "category": row.category,
            "temperature": config.temperature if rng.random() < sampled_share else 0.0,
        }
        for ids, row in zip(encoded, rows, strict=True)
        if len(ids) <= config.max_prompt_tokens
    ]
    rng.shuffle(prompts)
    # Each draws by a seed of its own, whatever shard and batch it is in.
    return [{**prompt, "seed": config.seed * 1_000_003 + number} for number, prompt in enumerate(prompts)]
