"""Work of engines that is kept in shards: one file each, written whole, so that a stopped command can resume.

One engine does it in a process of its own. Several, on a Ray cluster, do an equal part of the missing shards each. A
job is a dictionary that the engine's module reads. It has ``engine`` (arguments of vLLM's LLM), ``out`` (folder of the
shards) and ``shards``, each with ``number``, ``file`` (its name in the folder) and ``num_texts``, and more of its own.
An order has the place of a ``shard`` in the job's list.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import TaskProgressColumn

from vllm_crossspec.cli.cluster import ray_connected
from vllm_crossspec.cli.processes import BOUND_CORES, EngineError, Event, started
from vllm_crossspec.cli.stages import bars
from vllm_crossspec.files import replacing

RETRIES = 2
"""How often an engine on Ray that died begins its part anew."""

Shard = dict[str, Any]


class Work(NamedTuple):
    """What a command's engines do."""

    name: str  # of the command, for messages
    # that an engine's process runs; beside the events of all (`vllm_crossspec.jobs.offline`) it has `shard` with
    # `number` and `num_made`
    module: str
    made: str  # what a shard is full of, in the plural


def run_missing(work: Work, job: dict[str, Any], shards: Sequence[Shard], max_tokens: int, engines: int) -> int:
    """Have the engines write the shards that are missing, under one progress bar; how many records were made.

    Raises ValueError: an engine refuses its arguments, or several are asked for without Ray. Raises EngineError: an
    engine died, or on Ray died again each time that it was started anew.

    Args:
        job: without its shards.
        shards: all of them.
        max_tokens: of a text, at most; the bar is of these tokens.
        engines: side by side; more than one run on Ray.
    """
    missing = [shard for shard in shards if not Path(job["out"], shard["file"]).is_file()]
    if not missing:
        return 0
    sizes = {shard["number"]: max_tokens * shard["num_texts"] for shard in missing}
    events = _on_ray(work, job, missing, engines) if engines > 1 else _events(work, {**job, "shards": missing})
    made = finished = 0
    with bars(TaskProgressColumn()) as progress:
        task = progress.add_task(f"{work.name}: starting the engine", total=sum(sizes.values()))
        for event in events:
            if event["event"] == "progress":
                progress.advance(task, event["num_tokens"])
                continue
            if event["event"] == "shard":
                made += event["num_made"]
                finished += sizes.pop(event["number"])  # texts end before the limit where the model says so
            done = f"shard {len(shards) - len(sizes)} of {len(shards)} done, {made} new {work.made}"
            progress.update(task, completed=finished, description=f"{work.name}: {done}")
    return made


def _events(work: Work, job: dict[str, Any]) -> Iterator[Event]:
    """Run a job in a process of its own; what is told of it."""
    with started(work.name, job, work.module) as engine:
        yield engine.about
        for place in range(len(job["shards"])):
            yield from (event for event in engine.follow(shard=place) if event["event"] != "done")


def _on_ray(work: Work, job: dict[str, Any], missing: Sequence[Shard], engines: int) -> Iterator[Event]:
    """Deal the shards out to engines on a Ray cluster, and write them here; an event of each that is done.

    Models must be found under the same names on all machines.
    """
    if find_spec("ray") is None:
        problem = f'{work.name}: several engines need Ray: run `pip install "vllm-crossspec[ray]"`, or ask for one'
        raise ValueError(problem)
    with ray_connected() as ray:
        task = ray.remote(
            num_cpus=1,
            num_gpus=(job["engine"].get("tensor_parallel_size") or 1) if ray.cluster_resources().get("GPU") else 0,
            num_returns="streaming",
            max_retries=RETRIES,
            retry_exceptions=[EngineError],
            scheduling_strategy="SPREAD",
        )(_with_contents)
        files = {shard["number"]: Path(job["out"], shard["file"]) for shard in missing}
        parts = [missing[i::engines] for i in range(min(engines, len(missing)))]
        running = [task.remote(work, {**job, "shards": part}, os.getcwd()) for part in parts]
        while running:
            (first, *_), _ = ray.wait(running)
            try:
                event, content = ray.get(next(first))
            except StopIteration:
                running.remove(first)
                continue
            except ray.exceptions.RayError as problem:
                cause = getattr(problem, "cause", None)
                if isinstance(cause, ValueError | EngineError):
                    raise cause from None
                raise EngineError(f"{work.name}: {str(problem).strip().partition(chr(10))[0]}") from None
            with replacing(files[event["number"]]) as partial:
                partial.write_bytes(content)
            yield event


def _with_contents(work: Work, job: dict[str, Any], cwd: str) -> Iterator[tuple[Event, bytes]]:
    """On a machine of the cluster: an event of each shard that is done, and the bytes of its file."""
    with suppress(FileNotFoundError):  # a machine that does not have it has no relative names, either
        os.chdir(cwd)
    # vLLM would have all engines of a machine keep to the same cores of a CPU.
    os.environ.setdefault(BOUND_CORES, "nobind")
    files = {shard["number"]: shard["file"] for shard in job["shards"]}
    with tempfile.TemporaryDirectory(prefix="crossspec-shards-") as folder:
        for event in _events(work, {**job, "out": folder}):
            if event["event"] == "shard":
                file = Path(folder, files[event["number"]])
                yield event, file.read_bytes()
                file.unlink()
