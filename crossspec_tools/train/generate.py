"""The target answers the training prompts itself: drafters learn from the very text that they will have to guess.

Here is what is asked for, in shards, so that a run that was stopped goes on with the first shard that is missing;
engines of vLLM answer (:mod:`crossspec_tools.train.job_generate`).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from crossspec_tools.records.sharded import Shard, Work, run_missing
from crossspec_tools.train.data import IM_END, Row, chat_prompt, read_rows
from crossspec_tools.train.dflash import target_layer_ids
from crossspec_tools.train.generations import claim
from crossspec_tools.train.recipes import DFlashConfig, GenerateConfig
from crossspec_tools.train.states import target_settings
from vllm_crossspec.cli.options import name_list
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.kinds.identity import identify

GENERATE = Work("train generate", "crossspec_tools.train.job_generate", "tokens")
STATES_BYTES = 1 << 30
"""Most that a shard's states may take: a shard has fewer prompts then."""


def generate(data: Path, target: Path, out: Path, config: GenerateConfig, engines: int = 1, **engine: Any) -> int:
    """Answer the prompts of ``data`` with ``target``; write ``train-*.jsonl.gz`` and ``dev-*.jsonl.gz`` to ``out``.

    ``engine``: further arguments of vLLM's LLM; None for its own defaults.
    Returns how many response tokens were written now. Raises ValueError as :func:`plan`, or the engine refuses the
    target, or several engines are to store states. Raises EngineError: an engine's process died.
    """
    if config.states and engines > 1:
        raise ValueError(f"--states is for one engine, not --engines {engines}; give --tensor-parallel-size instead")
    job, shards = plan(data, target, out, config)
    job["engine"] = {
        "model": str(target),
        "dtype": config.dtype,
        "seed": config.seed,
        "max_num_seqs": config.rows_per_batch,
        "max_model_len": config.max_prompt_tokens + config.max_new_tokens,
        **engine,
    }
    return run_missing(GENERATE, job, shards, config.max_new_tokens, engines)


def plan(data: Path, target: Path, out: Path, config: GenerateConfig) -> tuple[dict[str, Any], list[Shard]]:
    """What an engine is asked to generate: a job without its engine and shards, and all shards; ``out`` is claimed.

    Raises ValueError: no rows, no target, a target whose positions do not reach so far, ``--state-layers`` that it does
    not have, or ``out`` holds shards of other settings.
    """
    splits = {"train": read_rows(data)}
    if list(data.glob("dev-*.jsonl*")):
        splits["dev"] = read_rows(data, "dev-*.jsonl*")
    length = config.max_prompt_tokens + config.max_new_tokens
    model = target_settings(target).get_text_config()
    most = model.max_position_embeddings
    if length > most:
        raise ValueError(
            f"--max-prompt-tokens and --max-new-tokens are {length} together, {target} has {most} positions"
        )
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    end_id = tokenizer.get_vocab().get(IM_END)
    if end_id is None:
        raise ValueError(f"--target {target}: its tokenizer has no {IM_END}; give a ChatML target")
    settings = asdict(config)
    asked, states = settings.pop("state_layers"), None
    if settings.pop("states"):
        layers = state_layers(asked, model.num_hidden_layers)
        states = {"layers": layers, "target": identify(str(target.resolve()), "--target")}
        settings["state_layers"] = layers
        row_bytes = length * (len(layers) + 1) * model.hidden_size * 2
        config = replace(config, shard_rows=max(1, min(config.shard_rows, STATES_BYTES // row_bytes)))
    elif asked:
        raise ValueError(f"--state-layers {asked} needs --states, which stores them")
    shards = [
        shard for split, rows in sorted(splits.items()) for shard in _shards(tokenizer, split, rows, data, config)
    ]
    claim(out, "generate.json", settings | {"target": str(target.resolve())})
    job = {"out": str(out), "end_id": end_id, "max_new_tokens": config.max_new_tokens, "states": states}
    return job, [{"number": number, **shard} for number, shard in enumerate(shards)]


def state_layers(asked: str, depth: int) -> list[int]:
    """The layers ``--state-layers`` names, rising; none: those that drafters of a target so deep read by default.

    Raises ValueError: they are no numbers, or the target has no such layer.
    """
    if not asked:
        count = min(DFlashConfig().num_target_layers, depth - 3)
        dflash = [i + 1 for i in target_layer_ids(depth, count)] if count > 0 else []
        return sorted({*default_target_layers(depth), *dflash})
    try:
        layers = sorted({int(name) for name in name_list(asked)})
    except ValueError:
        raise ValueError(f"--state-layers {asked}: give numbers of layers, as in 2,9,27") from None
    if layers[0] < 0 or layers[-1] >= depth:
        raise ValueError(f"--state-layers {asked} must lie within 0..{depth - 1} of this target")
    return layers


def _shards(tokenizer: Any, split: str, rows: Sequence[Row], data: Path, config: GenerateConfig) -> Iterator[Shard]:
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
    encoded = tokenizer([_asked(tokenizer, row.prompt) for row in rows], add_special_tokens=False)["input_ids"]
    prompts = [
        {"ids": ids, "category": row.category, "temperature": config.temperature * (rng.random() < sampled_share)}
        for ids, row in zip(encoded, rows, strict=True)
        if len(ids) <= config.max_prompt_tokens
    ]
    rng.shuffle(prompts)
    # Each draws by a seed of its own, whatever shard and batch it is in.
    return [{**prompt, "seed": config.seed * 1_000_003 + number} for number, prompt in enumerate(prompts)]


def _asked(tokenizer: Any, prompt: str) -> str:
    """A prompt as a server renders it: by the target's own chat template, or plain ChatML where it has none."""
    if not tokenizer.chat_template:
        return chat_prompt(prompt)
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
