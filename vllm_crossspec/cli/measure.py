"""Measures methods beside each other: who answers all prompts when, in engines that stay up where they can."""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from rich.progress import Progress

from vllm_crossspec.cli import runner
from vllm_crossspec.cli.processes import CHILD_DEFAULTS, is_cpu_lane
from vllm_crossspec.cli.rows import ALL, PLAIN, Row, Run, rows
from vllm_crossspec.cli.runner import Engine, Job, by_category
from vllm_crossspec.cli.stages import bars

GIB = 1 << 30
ENGINE_GIB = 0.75
"""Of memory that an engine on a CPU takes beside its weights and its KV cache."""

GPU_SHARE, DEFAULT_GPU_SHARE = 0.95, 0.92
"""Of a GPU's memory: what engines may take together, and what one takes that was told nothing (vLLM's own)."""


class Pass(NamedTuple):
    """One time that a method answers prompts; with a ``repeat`` of None what of its rounds is whose is measured.

    Attributes:
        category: of the prompts; None: all of them.
    """

    method: str
    batch_size: int
    repeat: int | None
    category: str | None = None

    @property
    def is_timed(self) -> bool:
        """Whether it counts."""
        return self.repeat is not None


def schedule(
    methods: Sequence[str], batch_sizes: Sequence[int], repeats: int, stay_up: bool, categories: Sequence[str]
) -> list[Pass]:
    """All passes in their order: methods take turns, so that what slows the machine down for a while hits all alike.

    Engines that stay up take turns at every category of prompts; others are visited once a repeat, and run all sizes.
    """
    if stay_up:
        turns = [(size, repeat, one) for repeat in range(repeats) for size in batch_sizes for one in categories]
        timed = [Pass(m, *turn) for turn in turns for m in methods]
        return timed + [Pass(m, size, None) for m in methods for size in batch_sizes]
    found = []
    for repeat in range(repeats):
        last = [None] if repeat == repeats - 1 else []
        found += [Pass(m, size, number) for m in methods for number in [repeat, *last] for size in batch_sizes]
    return found


@dataclass
class Measurement:
    """What was measured so far.

    Attributes:
        runs: in the order of their end.
        parts: what is there of those that have not ended: their groups, by method, batch size and repeat.
        shares: whose a round is, by method and batch size.
        seconds: of every pass that is done, its warm-up included.
        starts: seconds that engines took to start.
    """

    runs: list[Run] = field(default_factory=list)
    parts: dict[tuple[str, int, int], dict[str, Any]] = field(default_factory=dict)
    shares: dict[tuple[str, int], dict[str, float] | None] = field(default_factory=dict)
    seconds: dict[Pass, float] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)

    def sorted_runs(self, methods: Sequence[str]) -> list[Run]:
        """By batch size, then in the methods' order, then by repeat."""
        return sorted(self.runs, key=lambda run: (run.batch_size, methods.index(run.method), run.repeat))

    def unfinished(self, plan: Sequence[Pass]) -> list[str]:
        """Methods of which a pass is missing."""
        return list(dict.fromkeys(one.method for one in plan if one not in self.seconds))


def measure(jobs: Sequence[Job], plan: Sequence[Pass], stay_up: bool, found: Measurement) -> None:
    """Carry out the plan; what is done is in ``found`` whatever comes after.

    Raises:
        ValueError: an engine refused its job.
        EngineError: an engine's process died.
    """
    by_method = {job.method: job for job in jobs}
    with bars() as progress, ExitStack() as blocks:
        engines: dict[str, tuple[Engine, ExitStack]] = {}
        board = _Board(progress, plan, found)
        for number, one in enumerate(plan):
            job, later = by_method[one.method], [other.method for other in plan[number + 1 :]]
            changes = [a for a, b in pairwise([one.method, *later]) if a != b]
            board.begin(number, job, len({*later} - {one.method, *engines} if stay_up else changes))
            if one.method not in engines:
                block = blocks.enter_context(ExitStack())
                engines[one.method] = block.enter_context(runner.started(job, board.listen)), block
                found.starts.append(engines[one.method][0].environment["seconds"])
            begun = perf_counter()
            _carry_out(one, job, engines[one.method][0], found)
            found.seconds[one] = perf_counter() - begun
            board.tell(one)
            if one.method not in later or (not stay_up and later[0] != one.method):
                engines.pop(one.method)[1].close()
        board.end()


def _carry_out(one: Pass, job: Job, engine: Engine, found: Measurement) -> None:
    if one.repeat is None:
        found.shares[one.method, one.batch_size] = engine.shares(one.batch_size)
        return
    run = engine.run(one.batch_size, one.repeat, one.category)
    key = (one.method, one.batch_size, one.repeat)
    groups = {**found.parts.pop(key, {}), **run.groups}
    if len(groups) < len(by_category(job.prompts)):
        found.parts[key] = groups
    else:
        found.runs.append(replace(run, groups=groups))


class _Board:
    """A bar for the pass under way with an estimate of what is left, and a line for every one that is done."""

    def __init__(self, progress: Progress, plan: Sequence[Pass], found: Measurement):
        self._progress, self._plan, self._found = progress, plan, found
        self._task, self._label = progress.add_task(""), ""

    def begin(self, number: int, job: Job, num_starts: int) -> None:
        """The pass is next, and so many engines will have to be started after its own."""
        one = self._plan[number]
        asked = [p for p in job.at(one.batch_size) if one.category in (None, p.category)]
        most = sum(len(prompt.turns) for prompt in asked) * job.sampling["max_tokens"]
        left = remaining(self._plan[number:], self._found, num_starts)
        about = "" if left is None else f", about {clock(left)} left"
        self._label = f"{describe(one)} ({number + 1} of {len(self._plan)}{about})"
        self._progress.reset(self._task, total=most, description=self._label)

    def end(self) -> None:
        """Nothing is left."""
        self._progress.remove_task(self._task)

    def listen(self, event: dict[str, Any]) -> None:
        """Take an engine's event."""
        if event["event"] == "progress":
            self._progress.advance(self._task, event["num_tokens"])

    def tell(self, one: Pass) -> None:
        """Print what a repeat came to, beside plain's where that is done, once the last pass of it is done."""
        if one.repeat is not None and (one.method, one.batch_size, one.repeat) not in self._found.parts:
            same = [run for run in self._found.runs if (run.batch_size, run.repeat) == (one.batch_size, one.repeat)]
            row = next(row for row in rows(same) if (row.method, row.category) == (one.method, ALL))
            self._progress.console.print(f"{describe(one)}: {_outcome(row)}", highlight=False, soft_wrap=True)


def describe(one: Pass) -> str:
    """A pass in words."""
    turn = "parts of a round" if one.repeat is None else f"repeat {one.repeat + 1}"
    return f"{one.method}, batch size {one.batch_size}, {turn}"


def _outcome(row: Row) -> str:
    speed = "" if row.tokens_per_second is None else f", {row.tokens_per_second:.1f} a second"
    if row.method == PLAIN or row.speedup is None:
        return f"{row.num_tokens} tokens in {row.seconds:.1f} s{speed}"
    same = ", every text plain's" if row.identical_to_plain else ", [red]NOT plain's texts[/red]"
    return f"{row.num_tokens} tokens in {row.seconds:.1f} s{speed}, {row.speedup:.2f} times plain{same}"


def remaining(plan: Sequence[Pass], found: Measurement, num_starts: int) -> float | None:
    """About how many seconds these passes will take; None before anything is known.

    A pass takes what it took before; else what others of its batch size took; else what passes took.

    Args:
        plan: the passes to come.
        found: those that are done.
        num_starts: engines to start meanwhile.
    """
    if not found.seconds:
        return None

    def expected(one: Pass) -> float:
        known = found.seconds.items()
        of_its_size = [(other, seconds) for other, seconds in known if other.batch_size == one.batch_size]
        alike = [(o, s) for o, s in of_its_size if o.method == one.method and o.is_timed == one.is_timed]
        its_own = [s for o, s in alike if o.category == one.category] or [s for _, s in alike]
        return statistics.fmean(its_own or [s for _, s in of_its_size] or found.seconds.values())

    return sum(map(expected, plan)) + num_starts * statistics.fmean(found.starts)


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def fits(jobs: Sequence[Job]) -> tuple[bool, str]:
    """Whether the jobs' engines can be up at the same time, and in words how much they take of how much."""
    if is_cpu_lane():
        needed, free = sum(map(_gib_on_cpu, jobs)), _available_gib()
        return needed <= free, f"{len(jobs)} engines take about {needed:.1f} GiB and {free:.1f} are free"
    share = sum(job.engine.get("gpu_memory_utilization") or DEFAULT_GPU_SHARE for job in jobs)
    each = int(100 * GPU_SHARE / len(jobs)) / 100
    return (
        share <= GPU_SHARE,
        f"{len(jobs)} engines take {share:.2f} of a GPU's memory (--gpu-memory-utilization {each} lets all stay up)",
    )


def _gib_on_cpu(job: Job) -> float:
    """What an engine takes: what it computes with, its KV cache, and the weights that are in folders here."""
    variable = "VLLM_CPU_KVCACHE_SPACE"
    models = [job.engine["model"], *_models_in(job.engine.get("speculative_config"))]
    sizes = [f.stat().st_size for model in models for f in Path(model).glob("*.safetensors")]
    cache = job.engine.get("kv_cache_memory_bytes") or GIB * float(os.environ.get(variable) or CHILD_DEFAULTS[variable])
    return ENGINE_GIB + (cache + sum(sizes)) / GIB


def _models_in(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == "model" and isinstance(value, str):
                yield value
            yield from _models_in(value)


def _available_gib() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / (1 << 20) for line in lines if line.startswith("MemAvailable:")), 0.0)
