"""`crossspec collect`: the records that routers are trained on, calibrated with and compared by."""

import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TaskProgressColumn
from typer import Option

from vllm_crossspec.cli import options, processes
from vllm_crossspec.cli.bench import read_configs
from vllm_crossspec.cli.demo import POCKET, WHIFLASH_DRAFTERS, located
from vllm_crossspec.cli.learned import learned_prompts
from vllm_crossspec.cli.processes import EngineError
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.runner import Prompt, by_category
from vllm_crossspec.cli.stages import bars
from vllm_crossspec.files import replacing
from vllm_crossspec.shards import shard_path

COLLECT_MODULE = "vllm_crossspec.engine.jobs.collect"
TENSORS = "content"
"""Key of a shard's bytes in the events of an engine on another machine."""

Event = dict[str, Any]


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
    engines: Annotated[int, Option(min=1, help="Engines side by side; more than one run on Ray.")] = 1,
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
    if costs is not None:
        from vllm_crossspec.router.costs import read_costs

        read_costs(costs, tuple(speculative["drafters"]), "--costs")
    is_known = learned_prompts(learned_from, answers.model or str(POCKET / "target")) if learned_from else None
    chosen = interleaved(answers.prompts, answers.limit, is_known)
    sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": answers.max_tokens}
    if temperature > 0:
        sampling |= {"top_p": top_p, "top_k": top_k, "seed": answers.seed}
    job = make_job(out, answers.model, {**speculative, "router": {"policy": "record"}}, engine, batch_size)
    job |= {"sampling": sampling, "max_prompt_tokens": answers.max_prompt_tokens}
    from vllm_crossspec.training import records

    facts = {"speculative_config": {key: value for key, value in speculative.items() if key != "router"}}
    categories = [p.category for p in chosen for _ in p.turns]
    records.claim(out, {**describe(job, chosen, answers.shard_prompts), **facts, "categories": categories})
    if not learned_from:
        typer.echo(
            "collect: whether the drafters learned from these prompts is not checked; see --learned-from", err=True
        )
    num_shards = run_missing(job, make_shards(chosen, answers.shard_prompts), engines)
    from vllm_crossspec.cli.router import show_oracles

    show_oracles(out, costs)
    typer.echo(f"{num_shards} shards of records in {out}")


def drafters_of(spec: Path | None) -> dict[str, Any]:
    """The config whose drafters are looked at. Raises ValueError where it has none to choose between."""
    if spec is None:
        return {"method": "whiflash", "drafters": located(WHIFLASH_DRAFTERS, POCKET)}
    config = read_configs([spec])[spec.stem]
    assert config is not None
    drafters = config.get("drafters")
    if config.get("method") != "whiflash" or not isinstance(drafters, Mapping) or len(drafters) < 2:
        raise ValueError(f'--spec {spec} must have "method": "whiflash" and at least two drafters')
    return config


def make_job(
    out: Path, model: str | None, speculative: dict[str, Any], engine: options.EngineOptions, batch_size: int
) -> dict[str, Any]:
    """A job as ``engine.jobs.collect`` takes it, but for its shards and how they are answered.

    Args:
        out: folder of the shards.
        model: the target; None is the pocket target, in float32 if no type is asked for.
        speculative: the speculative config.
        engine: how it is to run.
        batch_size: most requests at a time.
    """
    if model is None and engine.dtype == "auto":
        engine = engine._replace(dtype="float32")
    arguments = engine.arguments(model or str(POCKET / "target"), batch_size)
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

    Args:
        files: of prompts; None: the demo's.
        limit: of each category; None: all.
        is_known: prompts that are left out, with a line that says how many.

    Raises:
        ValueError: a file that cannot be used, or none is left.
    """
    prompts = [prompt for file in files or [POCKET / "prompts.jsonl"] for prompt in read_prompts(file)]
    if is_known is not None:
        fresh = [prompt for prompt in prompts if not is_known(prompt)]
        typer.echo(f"{len(prompts) - len(fresh)} of {len(prompts)} prompts left out: drafters learned from them")
        if not fresh:
            raise ValueError("--learned-from: drafters learned from every one of these prompts; give others")
        prompts = fresh
    groups = by_category(prompts)
    turns = zip_longest(*(group[:limit] for group in groups.values()))
    return [prompt for row in turns for prompt in row if prompt is not None]


def make_shards(prompts: Sequence[Prompt], size: int) -> list[dict[str, Any]]:
    """The prompts in groups, each with the number of its first text: a prompt of several turns makes several texts."""
    described, number = [], 0
    for prompt in prompts:
        described.append(
            {"text": number, "category": prompt.category, "turns": list(prompt.turns), "where": prompt.where}
        )
        number += len(prompt.turns)
    starts = range(0, len(described), size)
    return [{"number": i, "prompts": described[start : start + size]} for i, start in enumerate(starts)]


def run_missing(job: dict[str, Any], shards: list[dict[str, Any]], engines: int) -> int:
    """Have the engines write the shards that are not there yet; the number of all."""
    missing = [shard for shard in shards if not shard_path(Path(job["out"]), shard["number"]).is_file()]
    if missing:
        run_shards(job, missing, engines, len(shards))
    return len(shards)


def run_shards(job: dict[str, Any], shards: list[dict[str, Any]], engines: int, num_shards: int) -> None:
    """Let the engines answer the missing shards, under one progress bar.

    Args:
        job: as ``engine.jobs.collect`` takes it, without its shards; ``module`` is another one that takes such jobs.
        shards: that are missing, as :func:`make_shards` describes them.
        engines: side by side; more than one run on Ray.
        num_shards: all of them.
    """
    most = job["sampling"]["max_tokens"]
    sizes = {shard["number"]: most * sum(len(p["turns"]) for p in shard["prompts"]) for shard in shards}
    done = num_shards - len(shards)
    with bars(TaskProgressColumn()) as progress:
        task = progress.add_task("collect: starting the engine", total=sum(sizes.values()))
        lock, finished, records = threading.Lock(), 0, 0

        def listen(event: Event) -> None:
            nonlocal done, finished, records
            with lock:
                if event["event"] == "progress":
                    progress.advance(task, event["num_tokens"])
                elif event["event"] == "shard":
                    done, records = done + 1, records + event["num_records"]
                    # Texts end before the limit where the model says so.
                    finished += sizes[event["number"]]
                    if engines == 1:
                        progress.update(task, completed=finished)
                if event["event"] in ("ready", "shard"):
                    text = f"collect: shard {done} of {num_shards} done, {records} new records"
                    progress.update(task, description=text)

        if engines == 1:
            for event in engine_events({**job, "shards": shards}):
                listen(event)
        else:
            run_on_ray(job, shards, engines, listen)


def engine_events(job: dict[str, Any]) -> Iterator[Event]:
    """Run a job in a process of its own; its events.

    Raises:
        ValueError, EngineError: as :func:`processes.engine_events` does.
    """
    missing = {shard["number"] for shard in job["shards"]}
    for event in processes.engine_events("collect", job, job.get("module", COLLECT_MODULE)):
        if event["event"] == "shard":
            missing.discard(event["number"])
        yield event
    if missing:
        raise EngineError(f"collect: the engine's process ended without shard {min(missing)}")


def run_on_ray(
    job: dict[str, Any], shards: list[dict[str, Any]], engines: int, listen: Callable[[Event], None]
) -> None:
    """Share the shards among engines on the machines of a Ray cluster; shards come back and are written here.

    Models must be found under the same names on all machines.

    Raises:
        ValueError: Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("--engines above 1 needs Ray: run `pip install ray`, or leave it out") from None

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    num_gpus = (job["engine"]["tensor_parallel_size"] or 1) if ray.cluster_resources().get("GPU") else 0
    remote = ray.remote(num_cpus=1, num_gpus=num_gpus, max_retries=0)(_remote_events)
    parts = [part for i in range(engines) if (part := shards[i::engines])]

    def follow(part: list[dict[str, Any]]) -> None:
        for reference in remote.options(num_returns="streaming").remote({**job, "shards": part}):
            event = ray.get(reference)
            content = event.pop(TENSORS, None)
            if content is not None:
                path = shard_path(Path(job["out"]), event["number"])
                with replacing(path) as partial:
                    partial.write_bytes(content)
            listen(event)

    try:
        with ThreadPoolExecutor(len(parts)) as pool:
            for finished in [pool.submit(follow, part) for part in parts]:
                finished.result()
    except ray.exceptions.RayTaskError as problem:
        if isinstance(problem.cause, ValueError | EngineError):
            raise problem.cause from None
        raise


def _remote_events(job: dict[str, Any]) -> Iterator[Event]:
    """On a machine of the cluster: as :func:`engine_events`, with the bytes of every finished shard."""

    with tempfile.TemporaryDirectory(prefix="crossspec-shards-") as folder:
        for event in engine_events({**job, "out": folder}):
            if event["event"] == "shard":
                path = shard_path(Path(folder), event["number"])
                event[TENSORS] = path.read_bytes()
                path.unlink()
            yield event
