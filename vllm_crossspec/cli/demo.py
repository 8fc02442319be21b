"""`crossspec demo`: every method beside plain generation, with the pocket models."""

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from vllm_crossspec.cli.compare import compare
from vllm_crossspec.cli.options import AnswerTokens, TableFile
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.rows import PLAIN, Row
from vllm_crossspec.cli.runner import Job, Prompt, by_category
from vllm_crossspec.pocket_models import find_pocket

CHAIN = {"num_speculative_tokens": 7, "tree": {"type": "chain"}}
TREE = {"tree": {"type": "dynamic", "depth": 8, "top_k": 10, "num_nodes": 60}}
EAGLE3 = {"method": "eagle3", "model": "{pocket}/eagle3"}
EAGLE3_LONGER = {"method": "eagle3", "model": "{pocket}/eagle3-longer"}
DFLASH = {"method": "dflash", "model": "{pocket}/dflash", "num_speculative_tokens": 7}
DFLASH_LONGER = {"method": "dflash", "model": "{pocket}/dflash-longer", "num_speculative_tokens": 15}
DART = {"method": "dart", "model": "{pocket}/dart"}
CONFU = {"method": "confu", "model": "{pocket}/confu"}
DRAFT_MODEL = "{pocket}/draft-model"
NGRAM = {"ngram": "{pocket}/ngram/store.safetensors"}

# Trees of which neither is always the better: the first two rows of whiflash keep to one drafter, for comparison.
WHIFLASH_DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"model": "{pocket}/eagle3", "tree": {"type": "dynamic", "depth": 3, "top_k": 10, "num_nodes": 30}},
    "dflash": {
        "model": "{pocket}/dflash",
        "num_speculative_tokens": 7,
        "tree": {"type": "best_first", "num_nodes": 15},
    },
}

# What a router by goodput chooses from: forms of two drafters, a lookup, and nothing.
ARMS: dict[str, dict[str, Any]] = {
    "tree": {"type": "eagle3", "model": "{pocket}/eagle3", **TREE},
    "chain": {"of": "tree", "num_speculative_tokens": 4},
    "dflash": {
        "model": "{pocket}/dflash",
        "num_speculative_tokens": 7,
        "tree": {"type": "best_first", "num_nodes": 15},
    },
    "suffix": {"tree": {"num_nodes": 15}},
    "plain": {"type": "nothing"},
}

METHODS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    # `tree` is one of our keys: with it the drafter is our proposer, without it vLLM's own.
    "eagle3": {**EAGLE3, **CHAIN},
    "dflash": {**DFLASH, **CHAIN},
    "eagle3-tree": {**EAGLE3, **TREE},
    "dflash-tree": {**DFLASH, "tree": {"type": "best_first", "num_nodes": 60}},
    # The paper's tree, `continuity`, pruned by n-grams; the same without them; and under another parallel drafter.
    "dart": {**DART, **NGRAM},
    "dart-nongram": DART,
    "dflash-continuity": {**DFLASH, "tree": {"type": "continuity"}, **NGRAM},
    # Three layers, blocks of 16, more training.
    "dflash-longer-tree": {**DFLASH_LONGER, "tree": {"type": "best_first", "num_nodes": 60}},
    "dflash-longer-continuity": {**DFLASH_LONGER, "tree": {"type": "continuity"}, **NGRAM},
    # A small language model of its own, with its whole output layer and with clusters of it; and those for EAGLE-3.
    "draft-model": {"method": "draft_model", "model": DRAFT_MODEL, **CHAIN},
    "draft-model-tree": {"method": "draft_model", "model": DRAFT_MODEL, **TREE},
    "flashhead": {
        "method": "flashhead",
        "model": DRAFT_MODEL,
        "num_speculative_tokens": 7,
        "head": "{pocket}/flashhead-draft-model",
    },
    "eagle3-flashhead": {**EAGLE3, "num_speculative_tokens": 7, "head": "{pocket}/flashhead-eagle3"},
    # The tree of eagle3-tree, deeper and of fewer nodes where the drafter is sure of itself.
    "eagle3-heterospec": {**EAGLE3, **TREE, "adaptive": "{pocket}/heterospec/calibration.json"},
    # EAGLE-3 with a target that contemplates the future, and an EAGLE-3 that only trained as much longer.
    "confu": {**CONFU, "num_speculative_tokens": 7},
    "eagle3-longer": {**EAGLE3_LONGER, **CHAIN},
    "confu-tree": {**CONFU, **TREE},
    "eagle3-longer-tree": {**EAGLE3_LONGER, **TREE},
    # Without weights: what followed the last tokens where they stood before.
    "ngram": {"method": "ngram", **CHAIN},
    "suffix": {"method": "suffix", "tree": {"num_nodes": 60}},
    **{
        f"arm-{name}": {"method": "whiflash", "drafters": ARMS, "router": {"policy": "fixed", "drafter": name}}
        for name in ARMS
        if name != "plain"
    },
    "whiflash-goodput": {"method": "whiflash", "drafters": ARMS, "router": {"policy": "goodput"}},
    **{
        f"whiflash-{name}": {"method": "whiflash", "drafters": WHIFLASH_DRAFTERS, "router": router}
        for name, router in {
            "eagle3": {"policy": "fixed", "drafter": "eagle3"},
            "dflash": {"policy": "fixed", "drafter": "dflash"},
            "entropy": {"policy": "entropy", "threshold": "auto", "model": "{pocket}/router"},
            "neural": {"policy": "neural", "model": "{pocket}/router"},
        }.items()
    },
}
"""Every method of the demo and its --speculative-config; `{pocket}` is the folder of the pocket models."""

HEADLINE = (
    PLAIN,
    "eagle3-tree",
    "eagle3",
    "dflash-tree",
    "dart",
    "confu",
    "eagle3-heterospec",
    "flashhead",
    "whiflash-neural",
)
"""What `crossspec demo` shows unless it is asked for others."""

ALL_METHODS = "all"
HEADLINE_PROMPTS = 2
"""Prompts of each category that the headline is shown on."""

PROOF = (
    "Every method drafts tokens that the target then verifies in one pass: the fewer target calls for the same tokens, "
    'the better the drafts.\n"Identical to plain" compares every text token for token with what the target writes '
    "alone: speculation changes how soon a text is there, not a token of it."
)

POCKET_FILES = ("config.json", "router.json", "store.safetensors", "calibration.json")
"""Of which each pocket folder has one."""

TEMPERATURE, TOP_P = 0.8, 0.95
SIDE_BY_SIDE = 4
"""Engines that run at a time where there are cores for them; each takes 1.5 GiB."""


def demo(
    json_file: TableFile = None,
    methods: Annotated[
        str | None,
        Option(
            help=f"Comma-separated, of: {', '.join(METHODS)}; or `{ALL_METHODS}`. "
            f"Default: {', '.join(HEADLINE)}, on {HEADLINE_PROMPTS} prompts of each category."
        ),
    ] = None,
    limit: Annotated[
        int | None, Option(min=1, help="Use this many prompts of each category. With --methods, all by default.")
    ] = None,
    max_tokens: AnswerTokens = 64,
    prompts: Annotated[
        Path | None, Option(help="Other prompts: JSON lines with `prompt` or `turns`, and `category`.")
    ] = None,
    sampled: Annotated[
        bool, Option("--sampled", help=f"Sample at temperature {TEMPERATURE}, seeded, instead of greedily.")
    ] = False,
    seed: Annotated[int, Option(help="Seed of --sampled; each prompt adds its number.")] = 0,
    pocket: Annotated[
        Path | None, Option(help="Other models: a folder with target/ and one folder per method.")
    ] = None,
    texts: Annotated[bool, Option("--texts", help="Print the first text of each category, too.")] = False,
) -> None:
    """Generate with the pocket target, plainly and with each method, and compare.

    Real prompts in four categories (chat, math, code, agentic), all of a category as one batch, in float32,
    each method in an engine of its own; on a CPU an engine takes one core, and as many run at a time as there
    are cores. The table's columns:

    tokens: generated, without the prompts.

    target calls: the target model's passes that gave a request tokens, one for its prompt and one a round,
    summed over requests. Counted as they happen.

    acceptance length: tokens a round, the target's own included: 1 + accepted / rounds, vLLM's count. 1.00 for
    plain.

    verified tokens: rows that the target computed for them, draft tokens and the token before them.

    accepted per position: in how many rounds the first, second, ... draft token was accepted; percent here,
    counts in the JSON document.

    Trees stay whole at every load here, so that what is counted is the same on every machine; `crossspec bench`
    and servers fit them to it.

    identical to plain: whether every prompt's tokens are plain's. Exit code 1 where a greedy text is not.
    Sampled texts have plain's distribution, not its tokens, and do not count.
    """
    os.environ.setdefault("CROSSSPEC_FIXED_WIDTHS", "1")  # what is counted is the same on every machine
    if limit is None and methods is None and prompts is None:
        limit = HEADLINE_PROMPTS
    folder = pocket or find_pocket()
    chosen = first_of_each(read_prompts(prompts or demo_prompts()), limit)
    sampling = {"temperature": TEMPERATURE, "top_p": TOP_P, "seed": seed} if sampled else {"temperature": 0.0}
    sampling["max_tokens"] = max_tokens
    jobs = [make_job(name, folder, chosen, sampling) for name in choose(methods)]
    about = {"model": "pocket", "dtype": "float32", "sampling": sampling}
    rows, runs = compare(jobs, about, json_file, side_by_side=SIDE_BY_SIDE)
    typer.echo(PROOF)
    if texts:
        show_texts(chosen, runs[0].groups)
    if not sampled:
        require_identical(rows)


def choose(methods: str | None) -> list[str]:
    """The methods to run, `plain` first: all are compared with it. Raises ValueError on an unknown name."""
    if methods is None:
        return list(HEADLINE)
    if methods.strip() == ALL_METHODS:
        return list(METHODS)
    asked = [name.strip() for name in methods.split(",") if name.strip()]
    unknown = [name for name in asked if name not in METHODS]
    if unknown or not asked:
        raise ValueError(f"--methods {methods}: choose from {', '.join(METHODS)}, or say `{ALL_METHODS}`")
    return [PLAIN, *(name for name in METHODS if name in asked and name != PLAIN)]


def make_job(name: str, folder: Path, prompts: list[Prompt], sampling: dict[str, Any]) -> Job:
    """What one method's engine is to do. Raises ValueError where a pocket model is missing."""
    return job_of(name, METHODS[name], folder, prompts, sampling)


def job_of(
    name: str, config: dict[str, Any] | None, folder: Path, prompts: list[Prompt], sampling: dict[str, Any]
) -> Job:
    """The same for a method of one's own."""
    engine: dict[str, Any] = {"model": str(folder / "target"), "dtype": "float32", "max_num_seqs": 16}
    if config is not None:
        engine["speculative_config"] = located(config, folder)
    for model in pocket_folders(config):
        if not any((folder / model / file).is_file() for file in POCKET_FILES):
            raise ValueError(
                f"{folder / model} holds no model: check out the repository whole, or train one (`crossspec train`)"
            )
    return Job(method=name, engine=engine, sampling=sampling, prompts=prompts)


def demo_prompts() -> Path:
    """The file of the demo's prompts. Raises ValueError where the pocket models are not installed."""
    return find_pocket() / "prompts.jsonl"


def first_of_each(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """The first prompts of each category, or all of them."""
    return [prompt for group in by_category(prompts).values() for prompt in group[:limit]]


def pocket_folders(config: Any) -> list[str]:
    """The folders of pocket models that a method needs, the target's first."""
    return ["target", *sorted(set(re.findall(r"{pocket}/([\w.-]+)", json.dumps(config))))]


def located(value: Any, folder: Path) -> Any:
    """The same with `{pocket}` filled in."""
    if isinstance(value, dict):
        return {key: located(inner, folder) for key, inner in value.items()}
    return value.replace("{pocket}", str(folder)) if isinstance(value, str) else value


def show_texts(prompts: list[Prompt], groups: dict[str, dict[str, Any]]) -> None:
    """Print plain's first text of each category."""
    for category, group in groups.items():
        first = next(prompt for prompt in prompts if prompt.category == category)
        typer.secho(f"\n{category}: {first.turns[0]}", bold=True)
        typer.echo(group["generations"][0]["text"])


def require_identical(rows: list[Row]) -> None:
    """Exit with 1 where a row's tokens are not plain's."""
    if any(row.identical_to_plain is False for row in rows):
        raise typer.Exit(1)
