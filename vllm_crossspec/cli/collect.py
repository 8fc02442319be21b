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
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from vllm_crossspec.cli.bench import read_configs
from vllm_crossspec.cli.demo import POCKET, WHIFLASH_DRAFTERS
from vllm_crossspec.cli.processes import EngineError, engine_process, post_mortem
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.runner import Prompt, by_category

COLLECT_MODULE = "vllm_crossspec.engine.jobs.collect"
TENSORS = "content"
"""Key of a shard's bytes in the events of an engine on another machine."""

Event = dict[str, Any]


def collect(
    out: Annotated[Path, typer.Option(help="Folder of the records; a stopped collection goes on there.")],
    model: Annotated[
        str | None, typer.Option(help="The target: a local folder or a hub id. Default: the pocket target, in float32.")
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            help="A file with the JSON of --speculative-config, method whiflash; its router is not looked at. Default: "
            "the demo's pair."
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines (or .jsonl.gz) with `prompt` or `turns`, and `category`; repeatable. Default: the demo's."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use this many prompts of each category.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 256,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 2048,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of sampled answers.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of sampled answers; 0 is all tokens.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of sampled answers; each text adds its number.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Most requests at a time, of each engine.")] = 32,
    shard_prompts: Annotated[int, typer.Option(min=1, help="Prompts of a shard: what a stop can lose.")] = 64,
    engines: Annotated[int, typer.Option(min=1, help="Engines side by side; more than one run on Ray.")] = 1,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Wrap prompts in the chat template. Default: if there is one."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Weights' type.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest prompt and answer, in tokens.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(min=0.05, max=1.0, help="vLLM's own.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="vLLM's own.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="vLLM's own.")] = False,
) -> None:
    """Record, at every token of the target's answers, what a round with each drafter would have yielded.

    The target decodes plainly while every drafter drafts at every token. What is kept of a token: the target's final
    hidden state and the entropy of its next-token distribution, and each drafter's acceptance length there.

    Then: `crossspec train router`, `crossspec calibrate`, `crossspec oracle`, `crossspec trace`, all without an engine.

    Example: crossspec collect --prompts train.jsonl --out work/records
    """
    dtype = "float32" if model is None and dtype == "auto" else dtype
    speculative = _speculative(spec)
    chosen = interleaved(prompts or [POCKET / "prompts.jsonl"], limit)
    sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    if temperature > 0:
        sampling |= {"top_p": top_p, "top_k": top_k, "seed": seed}
    target = model or str(POCKET / "target")
    job = {
        "engine": {
            "model": target,
            "dtype": dtype,
            "max_num_seqs": batch_size,
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
            "tensor_parallel_size": tensor_parallel_size,
            "trust_remote_code": trust_remote_code or None,
            "speculative_config": {**speculative, "router": {"policy": "record"}},
        },
        "sampling": sampling,
        "chat": chat,
        "out": str(out),
        "model": target if model else "the pocket target",
        "max_prompt_tokens": max_prompt_tokens,
    }
    shards = make_shards(chosen, shard_prompts)
    _claim(out, job, chosen, shard_prompts)
    missing = [shard for shard in shards if not _is_done(out, shard["number"])]
    if missing:
        run_shards(job, missing, engines, len(shards))
    typer.echo(f"{len(shards)} shards of records in {out}")


def _speculative(spec: Path | None) -> dict[str, Any]:
    """The config whose drafters are recorded. Raises ValueError where it has none to choose between."""
    if spec is None:
        pocket = {
            name: {**settings, "model": settings["model"].format(pocket=POCKET)}
            for name, settings in WHIFLASH_DRAFTERS.items()
        }
        return {"method": "whiflash", "drafters": pocket}
    config = read_configs([spec])[spec.stem]
    assert config is not None
    drafters = config.get("drafters")
    if config.get("method") != "whiflash" or not isinstance(drafters, Mapping) or len(drafters) < 2:
        raise ValueError(f'--spec {spec} must have "method": "whiflash" and at least two drafters to record')
    return config


def interleaved(files: Sequence[Path], limit: int | None) -> list[Prompt]:
    """The prompts of all files, the categories taking turns, so that a collection stopped early has some of each."""
    groups = by_category([prompt for file in files for prompt in read_prompts(file)])
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


def _claim(out: Path, job: dict[str, Any], prompts: Sequence[Prompt], shard_prompts: int) -> None:
    from vllm_crossspec.training import records

    engine = job["engine"]
    canonical = json.dumps([[p.category, *p.turns] for p in prompts])
    speculative = {key: value for key, value in engine["speculative_config"].items() if key != "router"}
    records.claim(
        out,
        {
            "model": engine["model"],
            "dtype": engine["dtype"],
            "speculative_config": speculative,
            "sampling": job["sampling"],
            "chat": job["chat"],
            "max_model_len": engine["max_model_len"],
            "max_prompt_tokens": job["max_prompt_tokens"],
            "shard_prompts": shard_prompts,
            "prompts": hashlib.sha256(canonical.encode()).hexdigest(),
            "categories": [p.category for p in prompts for _ in p.turns],
        },
    )


def _is_done(out: Path, number: int) -> bool:
    from vllm_crossspec.training import records

    return records.shard_path(out, number).is_file()


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
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
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
        ValueError: the engine refused the job; the message is its sentence.
        EngineError: the process died; the message ends with the last lines of its log.
    """
    with tempfile.TemporaryDirectory(prefix="crossspec-") as folder:
        job_file, log_file = Path(folder, "job.json"), Path(folder, "log.txt")
        job_file.write_text(json.dumps(job))
        missing = {shard["number"] for shard in job["shards"]}
        with engine_process(job_file, log_file, job.get("module", COLLECT_MODULE)) as (process, events):
            for event in events:
                if event["event"] == "error":
                    raise ValueError(f"collect: {event['message']}")
                if event["event"] == "shard":
                    missing.discard(event["number"])
                yield event
            status = process.wait()
        if status != 0 or missing:
            raise EngineError(post_mortem("collect", status or 0, log_file.read_text(errors="replace")))


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
    from vllm_crossspec.training import records

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
                path = records.shard_path(Path(job["out"]), event["number"])
                path.with_suffix(".new").write_bytes(content)
                path.with_suffix(".new").replace(path)
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
    from vllm_crossspec.training import records

    with tempfile.TemporaryDirectory(prefix="crossspec-shards-") as folder:
        for event in engine_events({**job, "out": folder}):
            if event["event"] == "shard":
                path = records.shard_path(Path(folder), event["number"])
                event[TENSORS] = path.read_bytes()
                path.unlink()
            yield event
