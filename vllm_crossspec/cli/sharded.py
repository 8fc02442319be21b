"""Work of engines that is kept in shards: one file each, written whole, so that a stopped command goes on.

One engine does it in a process of its own, several share the missing shards on a Ray cluster. A job is a dictionary
that the engine's module reads: its ``engine`` (arguments of vLLM's LLM), ``out`` (folder of the shards) and ``shards``,
each with ``number``, ``file`` (its name in the folder) and ``num_texts``, and what the module wants besides.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import TaskProgressColumn

from vllm_crossspec.cli import processes
from vllm_crossspec.cli.processes import EngineError
from vllm_crossspec.cli.stages import bars
from vllm_crossspec.files import replacing

TENSORS = "content"
"""Key of a shard's bytes in the events of an engine on another machine."""

Event = dict[str, Any]
Shard = dict[str, Any]


class Work(NamedTuple):
    """What a command's engines do.

    Attributes:
        name: of the command, for messages.
        module: that an engine's process runs; takes jobs, emits ``ready``, ``progress`` with ``num_tokens``, and
            ``shard`` with ``number`` and ``num_made``.
        made: what a shard is full of, in the plural.
    """

    name: str
    module: str
    made: str


def run_missing(work: Work, job: dict[str, Any], shards: Sequence[Shard], max_tokens: int, engines: int) -> int:
    """Have the engines write the shards that are not there yet, under one progress bar.

    Args:
        job: without its shards.
        shards: all of them.
        max_tokens: of a text, at most.
        engines: side by side; more than one run on Ray.

    Returns:
        What was made now: records, or whatever shards are full of.

    Raises:
        ValueError, EngineError: as :func:`processes.engine_events` does.
    """
    missing = [shard for shard in shards if not Path(job["out"], shard["file"]).is_file()]
    if not missing:
        return 0
    sizes = {shard["number"]: max_tokens * shard["num_texts"] for shard in missing}
    done, made, finished = len(shards) - len(missing), 0, 0
    with bars(TaskProgressColumn()) as progress:
        task = progress.add_task(f"{work.name}: starting the engine", total=sum(sizes.values()))
        lock = threading.Lock()

        def listen(event: Event) -> None:
            nonlocal done, made, finished
            with lock:
                if event["event"] == "progress":
                    progress.advance(task, event["num_tokens"])
                elif event["event"] == "shard":
                    done, made = done + 1, made + event["num_made"]
                    # Texts end before the limit where the model says so.
                    finished += sizes[event["number"]]
                    if engines == 1:
                        progress.update(task, completed=finished)
                if event["event"] in ("ready", "shard"):
                    text = f"{work.name}: shard {done} of {len(shards)} done, {made} new {work.made}"
                    progress.update(task, description=text)

        if engines == 1:
            for event in _engine_events(work, {**job, "shards": missing}):
                listen(event)
        else:
            _run_on_ray(work, job, missing, engines, listen)
    return made


def _engine_events(work: Work, job: dict[str, Any]) -> Iterator[Event]:
    """Run a job in a process of its own; its events. Raises EngineError where a shard is missing at the end."""
    missing = {shard["number"] for shard in job["shards"]}
    for event in processes.engine_events(work.name, job, work.module):
        if event["event"] == "shard":
            missing.discard(event["number"])
        yield event
    if missing:
        raise EngineError(f"{work.name}: the engine's process ended without shard {min(missing)}")


def _run_on_ray(
    work: Work, job: dict[str, Any], shards: Sequence[Shard], engines: int, listen: Callable[[Event], None]
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

    def follow(part: Sequence[Shard]) -> None:
        files = {shard["number"]: Path(job["out"], shard["file"]) for shard in part}
        for reference in remote.options(num_returns="streaming").remote(work, {**job, "shards": part}):
            event = ray.get(reference)
            content = event.pop(TENSORS, None)
            if content is not None:
                with replacing(files[event["number"]]) as partial:
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


def _remote_events(work: Work, job: dict[str, Any]) -> Iterator[Event]:
    """On a machine of the cluster: as :func:`_engine_events`, with the bytes of every finished shard."""
    with tempfile.TemporaryDirectory(prefix="crossspec-shards-") as folder:
        files = {shard["number"]: Path(folder, shard["file"]) for shard in job["shards"]}
        for event in _engine_events(work, {**job, "out": folder}):
            if event["event"] == "shard":
                path = files[event["number"]]
                event[TENSORS] = path.read_bytes()
                path.unlink()
            yield event
