"""Runs engines, each in a process of its own.

The commands `demo` and `bench` share it. Nothing here imports vLLM: the process that does is
:mod:`vllm_crossspec.engine.jobs.offline`, and the two talk through a job file and a pipe of JSON lines.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vllm_crossspec.cli.processes import EngineError, engine_events
from vllm_crossspec.cli.rows import Run

DEFAULT_BATCH = 256
"""Most requests at a time of an engine that was not told."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt file: one turn, or several that are asked one after the other."""

    category: str
    turns: tuple[str, ...]
    where: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """One engine's work.

    Attributes:
        method: name of the row group in the table.
        engine: keyword arguments of vLLM's LLM; None means vLLM's default.
        sampling: keyword arguments of vLLM's SamplingParams.
        prompts: in the order of the table's categories.
        chat: whether to wrap prompts in the model's chat template; None where it has one.
        waves: at most so many times the batch size are answered of a category's prompts; None for all of them.
    """

    method: str
    engine: Mapping[str, Any]
    sampling: Mapping[str, Any]
    prompts: Sequence[Prompt]
    chat: bool | None = None
    waves: int | None = None

    def at(self, batch_size: int) -> list[Prompt]:
        """The prompts that are answered at a batch size."""
        most = None if self.waves is None else self.waves * batch_size
        return [prompt for group in by_category(self.prompts).values() for prompt in group[:most]]

    def as_message(self) -> dict[str, Any]:
        """What the engine process reads: prompts grouped by category, each group one batch."""
        groups = [
            {"category": category, "prompts": [{"where": p.where, "turns": p.turns} for p in prompts]}
            for category, prompts in by_category(self.prompts).items()
        ]
        return {"engine": dict(self.engine), "sampling": dict(self.sampling), "groups": groups, "chat": self.chat}


Listener = Callable[[dict[str, Any]], None]


def by_category(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts grouped by category, in the order in which the categories first appear."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return groups


def check(jobs: Sequence[Job]) -> None:
    """Have every job's engine configured, and none started, in one new process.

    Raises:
        ValueError: an engine's arguments are refused; the message names the job and says why.
        EngineError: the process died.
    """
    checks = [{"method": job.method, "engine": dict(job.engine)} for job in jobs]
    for _ in engine_events(jobs[0].method, {"checks": checks}):
        pass


def run(job: Job, listener: Listener, cores: Sequence[int] = ()) -> Run:
    """Have all prompts answered once in a new process.

    Args:
        job: what to run.
        listener: called with every event of the engine process, for a progress bar.
        cores: that the process keeps to; none for all.

    Raises:
        ValueError: the engine refused the job; the message is its sentence.
        EngineError: the process died; the message ends with the last lines of its log.
    """
    environment: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    batch_size = job.engine.get("max_num_seqs") or DEFAULT_BATCH
    message = {**job.as_message(), "orders": [{"batch_size": batch_size}]}
    for event in engine_events(job.method, message, cores=cores):
        listener(event)
        fields = {name: value for name, value in event.items() if name != "event"}
        if event["event"] == "ready":
            environment = fields
        elif event["event"] == "group":
            groups[fields.pop("category")] = fields
    _require_all(job, groups, by_category(job.prompts))
    return Run(method=job.method, environment=environment, groups=groups, batch_size=batch_size)


class Engine:
    """An engine that stays up and answers a job's prompts as often as it is asked to; made by :func:`started`.

    Attributes:
        environment: what runs, and the ``seconds`` that its start took.
    """

    def __init__(self, job: Job, orders: IO[str], events: Iterator[dict[str, Any]], listener: Listener):
        self._job, self._orders, self._events, self._listener = job, orders, events, listener
        self.environment = next((fields for kind, fields in self._until("ready") if kind == "ready"), {})

    def run(self, batch_size: int, repeat: int, category: str | None = None) -> Run:
        """Answer the prompts, or those of one category, at most so many at a time.

        A warm-up that does not count comes before, where they are asked from the first on.

        Raises:
            EngineError: the process ended before it was through.
        """
        every = list(by_category(self._job.prompts))
        categories = every if category is None else [category]
        begins = categories[0] == every[0]
        order = {"batch_size": batch_size, "warm_up": begins, "waves": self._job.waves, "categories": categories}
        groups = {fields.pop("category"): fields for kind, fields in self._order(order) if kind == "group"}
        _require_all(self._job, groups, categories)
        return Run(
            method=self._job.method,
            environment=self.environment,
            groups=groups,
            batch_size=batch_size,
            repeat=repeat,
        )

    def shares(self, batch_size: int) -> dict[str, float] | None:
        """Whose a round is (``Row.round_shares``), while as many prompts are answered as are one batch."""
        heard = self._order({"batch_size": batch_size, "shares": True})
        return next((fields["shares"] for kind, fields in heard if kind == "shares"), None)

    def _order(self, order: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        self._orders.write(json.dumps(order) + "\n")
        self._orders.flush()
        return list(self._until("done"))

    def _until(self, last: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for event in self._events:
            self._listener(event)
            yield event["event"], {name: value for name, value in event.items() if name != "event"}
            if event["event"] == last:
                return
        raise EngineError(f"{self._job.method}: the engine's process ended before it was through")


@contextmanager
def started(job: Job, listener: Listener) -> Iterator[Engine]:
    """An engine in a process of its own, up until the end of the block.

    Raises:
        ValueError: the engine refused the job; the message is its sentence.
        EngineError: the process died; the message ends with the last lines of its log.
    """
    with tempfile.TemporaryDirectory(prefix="crossspec-") as folder:
        pipe = Path(folder, "orders")
        os.mkfifo(pipe)
        # Open at both ends, or it would wait here for the engine to open the other.
        with open(os.open(pipe, os.O_RDWR), "w") as orders:
            events = engine_events(job.method, {**job.as_message(), "orders_file": str(pipe)})
            try:
                yield Engine(job, orders, events, listener)
                orders.close()  # it ends by itself, with all that it started
                for _ in events:
                    pass
            finally:
                events.close()


def _require_all(job: Job, groups: Mapping[str, Any], categories: Iterable[str]) -> None:
    missing = [category for category in categories if category not in groups]
    if missing:
        raise EngineError(f"{job.method}: the engine's process ended without results for {missing[0]}")
