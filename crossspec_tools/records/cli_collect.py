"""`crossspec collect`: the records that routers are trained on, calibrated with and compared by."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from crossspec_tools.records.learned import learned_prompts
from crossspec_tools.records.sharded import Work, run_missing
from vllm_crossspec.cli import options
from vllm_crossspec.cli.bench import read_configs
from vllm_crossspec.cli.check import checked_first
from vllm_crossspec.cli.demo import PAIR, demo_prompts
from vllm_crossspec.cli.models import located
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.runner import Prompt, by_category
from vllm_crossspec.names import counted
from vllm_crossspec.pocket_models import find_pocket

COLLECT = Work("collect", "crossspec_tools.records.job_collect", "records")


@options.grouped
def collect(
    *,
    out: Annotated[Path, Option(help="Folder of the records; a stopped collection goes on there.")],
    answers: options.Answers,
    spec: options.DraftersFile = None,
    learned_from: Annotated[
        list[Path] | None,
        Option(
            help="What the drafters learned from: a folder that `crossspec train generate` wrote, or a prompt file. "
            "May be repeated. Its prompts are left out: there drafters are better than a router will meet them."
        ),
    ] = None,
    temperature: options.Greedy = 0.0,
    top_p: Annotated[float, Option(min=0.0, max=1.0, help="Of sampled answers.")] = 1.0,
    top_k: Annotated[int, Option(help="Of sampled answers; 0 is all tokens.")] = 0,
    batch_size: options.EngineBatch = 32,
    engines: options.Engines = 1,
    costs: Annotated[
        Path | None,
        Option(help="What `crossspec costs` measured: the table at the end then tells tokens a second, too."),
    ] = None,
    engine: options.EngineOptions,
) -> None:
    """Record, at every token of the target's answers, what a round with each drafter would have yielded.

    The target decodes plainly while every drafter drafts at every token. What is kept of a token: the target's final
    hidden state and the entropy of its next-token distribution, and each drafter's acceptance length there. A table at
    the end says what each drafter brings alone, and the best of them in every category, text and round.

    Then: `crossspec train router`, `crossspec calibrate`, `crossspec oracle`, `crossspec trace`, all without an engine.

    Example: crossspec collect --prompts train.jsonl --learned-from work/responses --out work/records
    """
    speculative = drafters_of(spec)
    recording = {**speculative, "router": {"policy": "record"}}
    check_job(answers.model, spec, recording)
    if costs is not None:
        from vllm_crossspec.load.costs import read_costs

        read_costs(costs, tuple(speculative["drafters"]), "--costs")
    is_known = learned_prompts(learned_from, answers.model or str(find_pocket() / "target")) if learned_from else None
    chosen = interleaved(answers.prompts, answers.limit, is_known)
    sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": answers.max_tokens}
    if temperature > 0:
        sampling |= {"top_p": top_p, "top_k": top_k, "seed": answers.seed}
    job = make_job(out, answers.model, recording, engine, batch_size)
    job |= {"sampling": sampling, "max_prompt_tokens": answers.max_prompt_tokens}
    from crossspec_tools.train import records

    facts = {"speculative_config": {key: value for key, value in speculative.items() if key != "router"}}
    categories = [p.category for p in chosen for _ in p.turns]
    records.claim(out, {**describe(job, chosen, answers.shard_prompts), **facts, "categories": categories})
    if not learned_from:
        typer.echo(
            "collect: whether the drafters learned from these prompts is not checked; see --learned-from", err=True
        )
    shards = make_shards(chosen, answers.shard_prompts)
    run_missing(COLLECT, job, shards, answers.max_tokens, engines)
    from crossspec_tools.records.cli_router import show_oracles

    show_oracles(out, costs)
    typer.echo(f"{counted(len(shards), 'shard')} of records in {out}")


def drafters_of(spec: Path | None) -> dict[str, Any]:
    """The config whose drafters are looked at. Raises ValueError where it has none to choose between."""
    if spec is None:
        return {"method": "whiflash", "drafters": located(PAIR, find_pocket())}
    config = read_configs([spec])[spec.stem]
    assert config is not None
    drafters = config.get("drafters")
    if config.get("method") != "whiflash" or not isinstance(drafters, Mapping) or len(drafters) < 2:
        raise ValueError(f'--spec {spec} must have "method": "whiflash" and at least two drafters')
    return config


def check_job(model: str | None, spec: Path | str | None, speculative: dict[str, Any]) -> None:
    """See that target and config can be meant; None is the pocket target. Raises ValueError."""
    name = "--spec" if spec is None or str(spec).lstrip().startswith("{") else Path(spec).stem
    checked_first({"model": model or str(find_pocket() / "target")}, {name: speculative})


def make_job(
    out: Path, model: str | None, speculative: dict[str, Any], engine: options.EngineOptions, batch_size: int
) -> dict[str, Any]:
    """A job as ``crossspec_tools.records.job_collect`` takes it, without its shards and how they are answered."""
    if model is None and engine.dtype == "auto":  # of the pocket target
        engine = engine._replace(dtype="float32")
    arguments = engine.arguments(model or str(find_pocket() / "target"), batch_size)
    return {
        "engine": {**arguments, "speculative_config": speculative},
        "chat": engine.chat,
        "out": str(out),
        "model": model or "the pocket target",
    }


def describe(job: dict[str, Any], prompts: Sequence[Prompt], shard_prompts: int) -> dict[str, Any]:
    """What decides the shards of any such job, for the folder's index."""
    canonical = json.dumps([[p.category, *p.turns] for p in prompts])
    return {
        **{name: job["engine"][name] for name in ("model", "dtype", "max_model_len")},
        **{name: job[name] for name in ("sampling", "chat", "max_prompt_tokens")},
        "shard_prompts": shard_prompts,
        "prompts": hashlib.sha256(canonical.encode()).hexdigest(),
    }


def interleaved(
    files: Sequence[Path] | None, limit: int | None, is_known: Callable[[Prompt], bool] | None = None
) -> list[Prompt]:
    """The prompts of all files, the categories taking turns, so that a collection stopped early has some of each.

    Raises ValueError: a file that cannot be used, or none is left.

    Args:
        files: of prompts; None: the demo's.
        limit: of each category; None: all.
        is_known: prompts that are left out, with a line that says how many.
    """
    prompts = [prompt for file in files or [demo_prompts()] for prompt in read_prompts(file)]
    if is_known is not None:
        fresh = [prompt for prompt in prompts if not is_known(prompt)]
        typer.echo(
            f"{len(prompts) - len(fresh)} of {counted(len(prompts), 'prompt')} left out: drafters learned from these"
        )
        if not fresh:
            raise ValueError("--learned-from: drafters learned from every one of these prompts; give others")
        prompts = fresh
    groups = by_category(prompts)
    turns = zip_longest(*(group[:limit] for group in groups.values()))
    return [prompt for row in turns for prompt in row if prompt is not None]


def make_shards(prompts: Sequence[Prompt], size: int) -> list[dict[str, Any]]:
    """The prompts in groups, each with the number of its first text: a prompt of several turns makes several texts."""
    from crossspec_tools.records.shards import shard_path

    shards, number = [], 0
    for i, start in enumerate(range(0, len(prompts), size)):
        part, first = [], number
        for prompt in prompts[start : start + size]:
            part.append({"text": number, "category": prompt.category, "turns": prompt.turns, "where": prompt.where})
            number += len(prompt.turns)
        file = shard_path(Path(), i).name
        shards.append({"number": i, "file": file, "num_texts": number - first, "prompts": part})
    return shards
