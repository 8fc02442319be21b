"""`crossspec demo`: every method beside plain generation, with the pocket models. `crossspec pocket`: their configs."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from vllm_crossspec.cli import report
from vllm_crossspec.cli.options import AnswerTokens, TableFile, name_list
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.rows import ALL, PLAIN, Row
from vllm_crossspec.cli.runner import Job, Measurement, Pass, Prompt, first_of_each
from vllm_crossspec.names import counted, look_up
from vllm_crossspec.pocket_models import find_pocket

_TABLE = json.loads(Path(__file__).with_name("methods.json").read_text())
METHODS: dict[str, dict[str, Any] | None] = _TABLE["methods"]
"""Every method of the demo and its --speculative-config; `{pocket}` is the folder of the pocket models.

`tree` is one of our keys: with it the drafter is our proposer, without it vLLM's own.
"""
for _config in METHODS.values():
    if _config is not None and "drafters" in _config:
        _config["drafters"] = _TABLE["drafters"][_config["drafters"]]
PAIR: dict[str, dict[str, Any]] = _TABLE["drafters"]["pair"]
"""Two drafters; which is better depends on the text."""

HEADLINE: list[str] = _TABLE["headline"]
"""What `crossspec demo` shows unless it is asked for others."""

HEADLINE_PROMPTS = 2
"""Prompts of each category that the headline is shown on."""

PROOF = (
    "Every method drafts tokens that the target then verifies in one pass: the fewer target calls for the same tokens, "
    'the better the drafts.\n"Identical to plain" compares every text token for token with what the target writes '
    "alone: speculation changes how soon a text is there, not a token of it."
)

POCKET_FILES = ("config.json", "router.json", "store.safetensors", "calibration.json")
"""Each pocket folder has one of them."""

TEMPERATURE, TOP_P = 0.8, 0.95
BATCH_SIZE = 16
SIDE_BY_SIDE = 4
"""Engines that run at a time where there are cores for them; each takes 1.5 GiB."""


def demo(
    json_file: TableFile = None,
    methods: Annotated[
        str | None,
        Option(
            help=f"Comma-separated, of: {', '.join(METHODS)}; or `{ALL}`. "
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

    The prompts are real, in four categories (chat, math, code, agentic), each one batch, in float32. Each method has an
    engine of its own; on a CPU each engine takes a core, and as many run at a time as there are. The table's columns:

    tokens: generated, without the prompts.

    target calls: the target model's passes that gave a request tokens, one for its prompt and one a round,
    summed over requests. Counted as they happen.

    acceptance length: tokens a round, the target's own included: 1 + accepted / rounds. 1.00 for plain.

    rounds with drafts: rounds in which draft tokens were verified.

    verified tokens: rows that the target computed in all rounds, draft tokens and the token before them.

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
    jobs = [job_of(name, METHODS[name], folder, chosen, sampling) for name in choose(methods)]
    measurement = measurement_of(jobs)
    about = {"model": "pocket", "dtype": "float32", "sampling": sampling}
    files = report.Files(json_file)
    files.check()
    rows = report.measure(measurement, about, files, side_by_side=SIDE_BY_SIDE, has_speeds=False)
    typer.echo(PROOF)
    for category, group in measurement.runs[0].groups.items() if texts else ():  # plain's
        first = next(prompt for prompt in chosen if prompt.category == category)
        typer.secho(f"\n{category}: {first.turns[0]}", bold=True)
        typer.echo(group["generations"][0]["text"])
    if not sampled:
        require_identical(rows)


def print_pocket(
    method: Annotated[
        str | None, Argument(help="One of the demo's: print its --speculative-config.", show_default=False)
    ] = None,
) -> None:
    """Print the folder of the pocket models, or what `vllm serve` takes as one method's --speculative-config.

    Example: vllm serve "$(crossspec pocket)/target" --speculative-config "$(crossspec pocket eagle3-tree)"
    """
    if method is None:
        typer.echo(find_pocket())
        return
    drafting = {name: config for name, config in METHODS.items() if config is not None}
    typer.echo(json.dumps(located(look_up(method, drafting, "METHOD", "method"), find_pocket())))


def measurement_of(jobs: Sequence[Job]) -> Measurement:
    """All jobs once, and a line about each as soon as it and plain are done."""

    def outcome(row: Row, number: int) -> str:
        same = {None: "", True: ", every text plain's", False: ", [red]NOT plain's texts[/red]"}[row.identical_to_plain]
        return (
            f"{counted(row.num_tokens, 'token')} in {counted(row.num_target_calls, 'target call')}, "
            f"{row.acceptance_length:.2f} a round, {row.seconds:.1f} s{same if row.method != PLAIN else ''} "
            f"({number} of {len(jobs)})"
        )

    plan = [Pass(job.method, BATCH_SIZE, 0) for job in jobs]
    return Measurement(jobs, plan, lambda one: one.method, outcome)


def choose(methods: str | None) -> list[str]:
    """The methods to run, `plain` first: all are compared with it. Raises ValueError on an unknown name."""
    if methods is None:
        return HEADLINE
    if methods.strip() == ALL:
        return list(METHODS)
    asked = [name for name in name_list(methods) if name]
    unknown = [name for name in asked if name not in METHODS]
    if unknown or not asked:
        raise ValueError(f"--methods {methods}: choose from {', '.join(METHODS)}, or say `{ALL}`")
    return [PLAIN, *(name for name in METHODS if name in asked and name != PLAIN)]


def job_of(
    name: str, config: dict[str, Any] | None, folder: Path, prompts: list[Prompt], sampling: dict[str, Any]
) -> Job:
    """What one method's engine is to do. Raises ValueError where a pocket model is missing."""
    engine: dict[str, Any] = {"model": str(folder / "target"), "dtype": "float32", "max_num_seqs": BATCH_SIZE}
    if config is not None:
        engine["speculative_config"] = located(config, folder)
    for model in pocket_folders(config):
        if not any((folder / model / file).is_file() for file in POCKET_FILES):
            raise ValueError(
                f"{folder / model} holds no model: check out the repository whole, or train one (`crossspec train`)"
            )
    return Job(method=name, engine=engine, sampling=sampling, prompts=prompts, warm_up=False)


def demo_prompts() -> Path:
    """The file of the demo's prompts. Raises ValueError where the pocket models are not installed."""
    return find_pocket() / "prompts.jsonl"


def pocket_folders(config: Any) -> list[str]:
    """The folders of pocket models that a method needs, the target's first."""
    return ["target", *sorted(set(re.findall(r"{pocket}/([\w.-]+)", json.dumps(config))))]


def located(value: Any, folder: Path) -> Any:
    """The same with `{pocket}` filled in."""
    if isinstance(value, dict):
        return {key: located(inner, folder) for key, inner in value.items()}
    return value.replace("{pocket}", str(folder)) if isinstance(value, str) else value


def require_identical(rows: list[Row]) -> None:
    """Exit with 1 where a row's tokens are not plain's."""
    if any(row.identical_to_plain is False for row in rows):
        raise typer.Exit(1)
