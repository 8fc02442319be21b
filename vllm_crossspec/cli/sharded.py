"""Work of engines that is kept in shards: one file each, written whole, so that a stopped command goes on.

One engine does it in a process of its own, several share the missing shards on a Ray cluster (``replicas``). A job is a
dictionary that the engine's module reads: its ``engine`` (arguments of vLLM's LLM), ``out`` (folder of the shards) and
``shards``, each with ``number``, ``file`` (its name in the folder) and ``num_texts``, and what the module wants beside.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress, TaskProgressColumn

from vllm_crossspec.cli import processes, replicas
from vllm_crossspec.cli.processes import EngineError
from vllm_crossspec.cli.replicas import Event, Shard
from vllm_crossspec.cli.stages import bars
from vllm_crossspec.files import replacing


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


def run_missing(
    work: Work,
    job: dict[str, Any],
    shards: Sequence[Shard],
    max_tokens: int,
    engines: int,
    listen: Callable[[Event], None] = lambda event: None,
) -> int:
    """Have the engines write the shards that are not there yet, under one progress bar.

    Args:
        job: without its shards.
        shards: all of them.
        max_tokens: of a text, at most.
        engines: side by side; more than one run on Ray.
        listen: called with every event; ``died`` is an engine's whose shard another one begins anew.

    Returns:
        What was made now: records, or whatever shards are full of.

    Raises:
        ValueError, EngineError: as :func:`processes.engine_events` and :func:`replicas.run` do.
    """
    missing = [shard for shard in shards if not Path(job["out"], shard["file"]).is_file()]
    if not missing:
        return 0
    with bars(TaskProgressColumn()) as progress:
        shown = _Shown(work, progress, shards, missing, max_tokens)
        lock = threading.Lock()

        def follow(shard: Shard | None, event: Event) -> None:
            with lock:
                shown.update(shard, event)
                listen(event)

        if engines == 1:
            running = iter(missing)
            current = next(running)
            for event in _engine_events(work, {**job, "shards": missing}):
                follow(current, event)
                if event["event"] == "shard":
                    current = next(running, current)
            return shown.made

        def deliver(shard: Shard, event: Event) -> None:
            content = event.pop(replicas.CONTENT)
            with replacing(Path(job["out"], shard["file"])) as partial:
                partial.write_bytes(content)
            follow(shard, event)

        replicas.run(work.name, work.module, job, missing, engines, deliver, follow)
        return shown.made


class _Shown:
    """The progress bar: tokens, of those that texts may have at most.

    Args:
        shards: all of them.
        missing: those that are to be done now.
        max_tokens: of a text, at most.

    Attributes:
        made: what shards were full of so far.
    """

    def __init__(
        self, work: Work, progress: Progress, shards: Sequence[Shard], missing: Sequence[Shard], max_tokens: int
    ) -> None:
        self.made = 0
        self._work, self._progress, self._num_shards = work, progress, len(shards)
        self._done, self._finished, self._running = len(shards) - len(missing), 0, Counter[int]()
        self._sizes = {shard["number"]: max_tokens * shard["num_texts"] for shard in missing}
        self._task = progress.add_task(f"{work.name}: starting the engine", total=sum(self._sizes.values()))

    def update(self, shard: Shard | None, event: Event) -> None:
        """Show what an event of a shard (None: of none) says."""
        number = None if shard is None else shard["number"]
        if event["event"] == "progress" and number is not None:
            self._running[number] += event["num_tokens"]
        elif event["event"] == "died":
            lost = "" if number is None else f"; another begins shard {number + 1} of {self._num_shards} anew"
            self._progress.console.print(
                f"{self._work.name}: an engine died ({event['reason']}){lost}", highlight=False, soft_wrap=True
            )
            self._running.pop(-1 if number is None else number, None)
        elif event["event"] == "shard":
            self._done, self.made = self._done + 1, self.made + event["num_made"]
            # Texts end before the limit where the model says so.
            self._running.pop(event["number"], None)
            self._finished += self._sizes[event["number"]]
        if event["event"] in ("ready", "shard"):
            done = f"shard {self._done} of {self._num_shards} done, {self.made} new {self._work.made}"
            self._progress.update(self._task, description=f"{self._work.name}: {done}")
        self._progress.update(self._task, completed=self._finished + self._running.total())


def _engine_events(work: Work, job: dict[str, Any]) -> Iterator[Event]:
    """Run a job in a process of its own; its events. Raises EngineError where a shard is missing at the end."""
    missing = {shard["number"] for shard in job["shards"]}
    for event in processes.engine_events(work.name, job, work.module):
        if event["event"] == "shard":
            missing.discard(event["number"])
        yield event
    if missing:
        raise EngineError(f"{work.name}: the engine's process ended without shard {min(missing)}")
