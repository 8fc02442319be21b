"""Measures methods beside each other: each has an engine of its own, and a plan says whose turn it is.

The commands `demo` and `bench` share it; :mod:`vllm_crossspec.cli.processes` has the engines.
"""

import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from vllm_crossspec.cli.processes import BOUND_CORES, Engine, end_all, started
from vllm_crossspec.cli.rows import PLAIN, Row, Run, rows
from vllm_crossspec.cli.stages import bars
from vllm_crossspec.names import counted
from vllm_crossspec.platform import platform


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
        engine, sampling: keyword arguments of vLLM's LLM, where None means vLLM's default, and of SamplingParams.
        chat: whether to wrap prompts in the model's chat template; None where it has one.
        waves: at most so many times the batch size are answered of a category's prompts; None for all of them.
        warm_up: whether some prompts are answered before those that count.
    """

    method: str
    engine: Mapping[str, Any]
    sampling: Mapping[str, Any]
    prompts: Sequence[Prompt]
    chat: bool | None = None
    waves: int | None = None
    warm_up: bool = True

    def at(self, batch_size: int) -> list[Prompt]:
        """The prompts that are answered at a batch size."""
        return first_of_each(self.prompts, None if self.waves is None else self.waves * batch_size)

    def as_message(self) -> dict[str, Any]:
        """What the engine process reads: prompts grouped by category."""
        groups = [
            {"category": category, "prompts": [{"where": p.where, "turns": p.turns} for p in prompts]}
            for category, prompts in by_category(self.prompts).items()
        ]
        return {"engine": dict(self.engine), "sampling": dict(self.sampling), "groups": groups, "chat": self.chat}


def by_category(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts grouped by category, in the order in which the categories first appear."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return groups


def first_of_each(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first prompts of each category, or all of them."""
    return [prompt for group in by_category(prompts).values() for prompt in group[:limit]]


def check(jobs: Sequence[Job]) -> None:
    """Have every job's engine configured, and none started, in one new process. Raises as :func:`started`."""
    checks = [{"method": job.method, "engine": dict(job.engine)} for job in jobs]
    with (
        Console(stderr=True).status(f"checking {counted(len(jobs), 'configuration')}"),
        started(jobs[0].method, {"checks": checks}),
    ):
        pass


class Pass(NamedTuple):
    """One time that a method answers prompts, of one category or (None) of all; a ``number`` is the only one of them.

    With a ``repeat`` of None what of its rounds is whose is measured.
    """

    method: str
    batch_size: int
    repeat: int | None
    category: str | None = None
    number: int | None = None

    @property
    def is_timed(self) -> bool:
        return self.repeat is not None

    @property
    def run(self) -> "Pass":
        """Of the whole repeat."""
        return Pass(self.method, self.batch_size, self.repeat)


def schedule(
    methods: Sequence[str],
    batch_sizes: Sequence[int],
    repeats: int,
    stay_up: bool,
    prompts: Callable[[int], list[Prompt]],
) -> list[Pass]:
    """All passes in their order: methods take turns, so that what slows the machine down for a while hits all alike.

    Engines that stay up take turns at every prompt if these come one at a time, else at every category; others are
    visited once a repeat, and run all sizes. ``prompts`` are those of a batch size.
    """
    if stay_up:
        turns = [
            (size, repeat, category, number)
            for repeat in range(repeats)
            for size in batch_sizes
            for category, group in by_category(prompts(size)).items()
            for number in (range(len(group)) if size == 1 else [None])
        ]
        timed = [Pass(m, *turn) for turn in turns for m in methods]
        return timed + [Pass(m, size, None) for m in methods for size in batch_sizes]
    found = []
    for repeat in range(repeats):
        last = [None] if repeat == repeats - 1 else []
        found += [Pass(m, size, number) for m in methods for number in [repeat, *last] for size in batch_sizes]
    return found


class Measurement:
    """A plan, and what was measured so far, whatever ends it.

    Args:
        jobs: in the order of the table.
        describe: a pass in words.
        outcome: what a run came to in words, by its row over all categories and how many runs were told with it.
        stay_up: whether engines are kept for passes to come.

    Attributes:
        shares: whose a round is, by method and batch size.
        seconds: of every pass that is done, its warm-up included.
        starts: seconds that engines took to start.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        plan: Sequence[Pass],
        describe: Callable[[Pass], str],
        outcome: Callable[[Row, int], str],
        stay_up: bool = False,
    ) -> None:
        self.jobs, self.plan, self._stay_up = {job.method: job for job in jobs}, plan, stay_up
        self._describe, self._outcome = describe, outcome
        self.shares: dict[tuple[str, int], dict[str, float] | None] = {}
        self.seconds: dict[Pass, float] = {}
        self.starts: list[float] = []
        self._environment: dict[str, Any] = {}
        self._groups: dict[Pass, dict[str, Any]] = {}
        self._told: set[Pass] = set()
        self._lock = threading.Lock()

    @property
    def runs(self) -> list[Run]:
        """Runs whose passes are all done: by batch size, then in the jobs' order, then by repeat."""
        methods, pending = list(self.jobs), {one.run for one in self.plan if one not in self.seconds}
        found = [
            Run(method=method, environment=self._environment, groups=groups, batch_size=batch_size, repeat=repeat or 0)
            for (method, batch_size, repeat, *_), groups in self._groups.items()
            if Pass(method, batch_size, repeat) not in pending
        ]
        return sorted(found, key=lambda run: (run.batch_size, methods.index(run.method), run.repeat))

    @property
    def unfinished(self) -> list[str]:
        """Methods with a missing pass."""
        return list(dict.fromkeys(one.method for one in self.plan if one not in self.seconds))

    def carry_out(self, side_by_side: int = 1) -> None:
        """Follow the plan, with a bar for every engine at work and a line for every run. Raises as :func:`started`.

        So many passes run ``side_by_side``, each with cores of its own, where engines compute on cores only.
        """
        shares = cores_of(side_by_side)
        with bars() as progress:
            if len(shares) == 1:
                self._follow(self.plan, progress)
                return
            local = threading.local()
            with ThreadPoolExecutor(len(shares), initializer=lambda: setattr(local, "cores", shares.pop())) as pool:
                futures = [pool.submit(lambda one: self._follow([one], progress, local.cores), p) for p in self.plan]
                try:
                    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                        future.result()
                except BaseException:
                    for future in futures:
                        future.cancel()
                    while wait(futures, timeout=0.1).not_done:  # one may have been about to start an engine
                        end_all()
                    raise

    def _follow(self, passes: Sequence[Pass], progress: Progress, cores: Sequence[int] = ()) -> None:
        """Carry out passes one after the other, in engines that keep to the cores (none for all)."""
        task = progress.add_task("")
        engines: dict[str, tuple[Engine, ExitStack]] = {}
        with ExitStack() as blocks:
            for number, one in enumerate(passes):
                job, later = self.jobs[one.method], [other.method for other in passes[number + 1 :]]
                starts = {*later} - {one.method, *engines}
                changes = [a for a, b in pairwise([one.method, *later]) if a != b]
                left = self.remaining(passes[number:], len(starts if self._stay_up else changes))
                about = "" if left is None else f", about {clock(left)} left"
                asked = [p for p in job.at(one.batch_size) if one.category in (None, p.category)]
                asked = asked if one.number is None else [asked[one.number]]
                progress.reset(
                    task,
                    total=sum(len(prompt.turns) for prompt in asked) * job.sampling["max_tokens"],
                    description=f"{self._describe(one)} ({self.plan.index(one) + 1} of {len(self.plan)}{about})",
                )
                if one.method not in engines:
                    block = blocks.enter_context(ExitStack())
                    engine = block.enter_context(started(one.method, job.as_message(), cores=cores))
                    engines[one.method] = engine, block
                    self.starts.append(engine.about["seconds"])
                begun = perf_counter()
                groups = self._carry_out(one, engines[one.method][0], lambda count: progress.advance(task, count))
                with self._lock:
                    self.seconds[one] = perf_counter() - begun
                    self._environment = engines[one.method][0].about
                    if one.is_timed:
                        _add(self._groups.setdefault(one.run, {}), groups)
                    for line in self._new_lines():
                        progress.console.print(line, highlight=False, soft_wrap=True)
                if one.method not in later or (not self._stay_up and later[0] != one.method):
                    engines.pop(one.method)[1].close()
        progress.remove_task(task)

    def _carry_out(self, one: Pass, engine: Engine, advance: Callable[[int], None]) -> dict[str, Any]:
        """What the engine says of each category of prompts."""
        groups: dict[str, Any] = {}
        job = self.jobs[one.method]
        every = list(by_category(job.prompts))
        categories = every if one.category is None else [one.category]
        # A warm-up comes before the first prompts.
        warm_up = job.warm_up and categories[0] == every[0] and not one.number
        timed = {"warm_up": warm_up, "waves": job.waves, "categories": categories, "number": one.number}
        for event in engine.follow(batch_size=one.batch_size, **(timed if one.is_timed else {"shares": True})):
            if event["event"] == "progress":
                advance(event["num_tokens"])
            elif event["event"] == "group":
                groups[event["category"]] = event
            elif event["event"] == "shares" and not one.is_timed:
                self.shares[one.method, one.batch_size] = event["shares"]
        return groups

    def _new_lines(self) -> Iterator[str]:
        """One about every run that is done and was not told, as soon as plain's is done, too."""
        runs = self.runs
        plains = {(run.batch_size, run.repeat): run for run in runs if run.method == PLAIN}
        for run in runs:
            one, plain = Pass(run.method, run.batch_size, run.repeat), plains.get((run.batch_size, run.repeat))
            if one not in self._told and (plain is not None or PLAIN not in self.jobs):
                self._told.add(one)
                yield f"{self._describe(one)}: {self._outcome(rows([run], plain)[-1], len(self._told))}"

    def remaining(self, passes: Sequence[Pass], num_starts: int) -> float | None:
        """About how many seconds these passes and so many starts will take; None before anything is known.

        A pass takes what it took before; else what others of its batch size took; else what passes took.
        """
        if not self.seconds:
            return None

        def expected(one: Pass) -> float:
            known = list(self.seconds.items())
            of_its_size = [(other, seconds) for other, seconds in known if other.batch_size == one.batch_size]
            alike = [(o, s) for o, s in of_its_size if o.method == one.method and o.is_timed == one.is_timed]
            its_own = [s for o, s in alike if o.category == one.category] or [s for _, s in alike]
            return statistics.fmean(its_own or [s for _, s in of_its_size or known])

        return sum(map(expected, passes)) + num_starts * statistics.fmean(self.starts)


def _add(groups: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add what a pass did; several passes of a category come in the order of its prompts."""
    for category, event in more.items():
        if (known := groups.setdefault(category, event)) is not event:
            for key in ("seconds", "num_verified_tokens", "generations"):
                known[key] += event[key]
            known["routes"] = {name: known["routes"].get(name, 0) + count for name, count in event["routes"].items()}


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def cores_of(side_by_side: int) -> list[list[int]]:
    """Which cores each of the engines that run at a time keeps to: none for a single one, or where the user chose."""
    cores: list[int] = []
    if platform().on_cores and hasattr(os, "sched_getaffinity") and BOUND_CORES not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
    count = min(side_by_side, len(cores))
    return [cores[i::count] for i in range(count)] if count > 1 else [[]]
