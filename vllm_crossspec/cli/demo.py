"""`crossspec demo`: methods beside plain generation, with a set of models. `crossspec pocket`: the pocket's configs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from vllm_crossspec.cli import models as sets
from vllm_crossspec.cli import report
from vllm_crossspec.cli.models import POCKET, Config, ModelSet, absent_folders, folders_of, located
from vllm_crossspec.cli.options import AnswerTokens, TableFile, name_list
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.rows import ALL, PLAIN, Row
from vllm_crossspec.cli.runner import Job, Measurement, Pass, Prompt, first_of_each
from vllm_crossspec.cli.show import show
from vllm_crossspec.names import counted

METHODS: dict[str, Config] = POCKET.methods
"""Every method of the pocket's demo and its --speculative-config.

`tree` is one of our keys: with it the drafter is our proposer, without it vLLM's own.
"""
PAIR: dict[str, dict[str, Any]] = (METHODS["whiflash-neural"] or {})["drafters"]
"""Two drafters; which is better depends on the text."""

PROOF = (
    "Every method drafts tokens that the target then verifies in one pass: the fewer target calls for the same tokens, "
    'the better the drafts.\n"Identical to plain" compares every text token for token with what the target writes '
    "alone: speculation changes how soon a text is there, not a token of it."
)

TEMPERATURE, TOP_P = 0.8, 0.95
SIDE_BY_SIDE = 4
"""Engines that run at a time where there are cores for them; each takes 1.5 GiB."""


def demo(
    json_file: TableFile = None,
    models: Annotated[
        str | None, Option(envvar="CROSSSPEC_MODELS", help="`smollm2` or `pocket`. Default: smollm2, if installed.")
    ] = None,
    methods: Annotated[
        str | None,
        Option(
            help=f"Comma-separated, with the pocket models of: {', '.join(METHODS)}; or `{ALL}`. "
            f"Default: {', '.join(POCKET.headline)}, on {counted(POCKET.headline_prompts, 'prompt')} of each category."
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
    show_prompt: Annotated[
        int | None,
        Option("--show", min=0, help="Show this prompt's answer as it comes; 0 for none. Default: 1, on a terminal."),
    ] = None,
    texts: Annotated[bool, Option("--texts", help="Print the first text of each category, too.")] = False,
) -> None:
    """Generate plainly and with each method, and compare.

    First one answer appears as it is generated, plainly and with the first method; what the drafter guessed is green.
    The prompts are real, in four categories (chat, math, code, agentic), in float32. Each method has an engine of its
    own. Pocket engines take a core each on a CPU, and run side by side; those of SmolLM2 run one by one, and their
    times are compared. The table's columns:

    tokens: generated, without the prompts.

    target calls: the target model's passes that gave a request tokens, one for its prompt and one a round,
    summed over requests. Counted as they happen.

    acceptance length: tokens a round, the target's own included: 1 + accepted / rounds. 1.00 for plain.

    rounds with drafts: rounds in which draft tokens were verified.

    verified tokens: rows that the target computed in all rounds, draft tokens and the token before them.

    accepted per position: in how many rounds the first, second, ... draft token was accepted; percent here,
    counts in the JSON document.

    Trees of the pocket models stay whole at every load here, so that what is counted is the same on every machine;
    those of SmolLM2, `crossspec bench` and servers fit them to it.

    identical to plain: whether every prompt's tokens are plain's. Exit code 1 where a greedy text is not.
    Sampled texts have plain's distribution, not its tokens, and do not count.
    """
    chosen_set = POCKET if pocket else sets.choose_set(models)
    if not chosen_set.is_timed:
        os.environ.setdefault("CROSSSPEC_FIXED_WIDTHS", "1")
    if limit is None and methods is None and prompts is None:
        limit = chosen_set.headline_prompts
    folder = pocket or chosen_set.find()
    read = read_prompts(prompts or chosen_set.find() / "prompts.jsonl")
    chosen = first_of_each(read, limit)
    files = report.Files(json_file)
    files.check()
    names = choose(methods, chosen_set, folder)
    sampling = {"temperature": TEMPERATURE, "top_p": TOP_P, "seed": seed} if sampled else {"temperature": 0.0}
    sampling["max_tokens"] = max_tokens
    engine = {"model": str(pocket / "target" if pocket else chosen_set.target()), "max_num_seqs": chosen_set.batch_size}
    jobs = [job_of(name, chosen_set.methods[name], folder, chosen, sampling, **engine) for name in names]
    if show_prompt or (show_prompt is None and Console().is_terminal):
        show(jobs[:2], read, show_prompt or 1)
    measurement = measurement_of(jobs)
    about = {"model": chosen_set.name, "dtype": "float32", "sampling": sampling}
    plan = (1, "timed") if chosen_set.is_timed else (SIDE_BY_SIDE, "counts")
    rows = report.measure(measurement, about, files, *plan)
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
    typer.echo(POCKET.find() if method is None else sets.config_of(POCKET, method))


def measurement_of(jobs: Sequence[Job]) -> Measurement:
    """All jobs once, and a line about each as soon as it and plain are done."""

    def outcome(row: Row, number: int) -> str:
        same = {None: "", True: ", every text plain's", False: ", [red]NOT plain's texts[/red]"}[row.identical_to_plain]
        return (
            f"{counted(row.num_tokens, 'token')} in {counted(row.num_target_calls, 'target call')}, "
            f"{row.acceptance_length:.2f} a round, {row.seconds:.1f} s{same if row.method != PLAIN else ''} "
            f"({number} of {len(jobs)})"
        )

    plan = [Pass(job.method, job.engine.get("max_num_seqs", POCKET.batch_size), 0) for job in jobs]
    return Measurement(jobs, plan, lambda one: one.method, outcome)


def choose(methods: str | None, models: ModelSet = POCKET, folder: Path | None = None) -> list[str]:
    """The methods to run, `plain` first: all are compared with it. Raises ValueError on an unknown name.

    Of all, those whose models are not in the folder are left out, and named on stderr.
    """
    if methods is None:
        return models.headline
    if methods.strip() == ALL:
        absent = {name: absent_folders(config, folder or models.find()) for name, config in models.methods.items()}
        if left_out := [f"{name} ({', '.join(lacks)})" for name, lacks in absent.items() if lacks]:
            Console(stderr=True).print(f"note: left out, for want of models: {', '.join(left_out)}", soft_wrap=True)
        return [name for name, lacks in absent.items() if not lacks]
    asked = [name for name in name_list(methods) if name]
    unknown = [name for name in asked if name not in models.methods]
    if unknown or not asked:
        raise ValueError(f"--methods {methods}: choose from {', '.join(models.methods)}, or say `{ALL}`")
    return [PLAIN, *(name for name in models.methods if name in asked and name != PLAIN)]


def job_of(
    name: str, config: Config, folder: Path, prompts: list[Prompt], sampling: dict[str, Any], **more: Any
) -> Job:
    """What one method's engine is to do, with further arguments of it. Raises ValueError where a model is missing."""
    engine = {"model": str(folder / "target"), "dtype": "float32", "max_num_seqs": POCKET.batch_size, **more}
    if config is not None:
        engine["speculative_config"] = located(config, folder, lambda: Path(engine["model"]))
    for model in (Path(engine["model"]), *(folder / drafter for drafter in folders_of(config))):
        sets.require_model(model)
    return Job(method=name, engine=engine, sampling=sampling, prompts=prompts, warm_up=False)


def demo_prompts() -> Path:
    """The file of the pocket demo's prompts. Raises ValueError where the pocket models are not installed."""
    return POCKET.find() / "prompts.jsonl"


def require_identical(rows: list[Row]) -> None:
    """Exit with 1 where a row's tokens are not plain's."""
    if any(row.identical_to_plain is False for row in rows):
        raise typer.Exit(1)
