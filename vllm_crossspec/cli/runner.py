"""Runs engines, each in a process of its own, and turns what they did into rows of one table.

The commands `demo` and `bench` share it. Nothing here imports vLLM: the process that does is
:mod:`vllm_crossspec.engine.jobs.offline`, and the two talk through a job file and a pipe of JSON lines.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_crossspec.cli.processes import EngineError, engine_events

ALL = "all"
PLAIN = "plain"


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
    """

    method: str
    engine: Mapping[str, Any]
    sampling: Mapping[str, Any]
    prompts: Sequence[Prompt]
    chat: bool | None = None

    def as_message(self) -> dict[str, Any]:
        """What the engine process reads: prompts grouped by category, each group one batch."""
        groups = [
            {"category": category, "prompts": [{"where": p.where, "turns": p.turns} for p in prompts]}
            for category, prompts in by_category(self.prompts).items()
        ]
        return {"engine": dict(self.engine), "sampling": dict(self.sampling), "groups": groups, "chat": self.chat}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one engine did: its description and, by category, seconds and one record per generation."""

    method: str
    environment: dict[str, Any]
    groups: dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table; the fields are those of the JSON document.

    Attributes:
        method: `plain` or a method's name.
        category: of the prompts, or `all`.
        num_prompts: prompts answered; a row with several turns counts each.
        num_tokens: generated, without the prompts.
        num_target_calls: sum over requests of the target's passes that gave the request tokens: one for its
            prompt and one a round. Counted as they happen, for `plain` as for the others.
        num_verified_tokens: rows that the target computed in these rounds: draft tokens, and the token before them;
            prompts are left out. None where the engine did not say.
        acceptance_length: tokens a round, the target's own included: 1 + accepted / rounds; 1.0 for `plain`.
        accepted_per_position: [K] number of rounds in which the first, second, ... draft token was accepted.
        identical_to_plain: whether every prompt's tokens equal plain's; None where plain was not run.
        seconds: wall-clock of the generation, without starting the engine.
    """

    method: str
    category: str
    num_prompts: int
    num_tokens: int
    num_target_calls: int
    num_verified_tokens: int | None = None
    acceptance_length: float
    accepted_per_position: list[int] = field(default_factory=list)
    identical_to_plain: bool | None
    seconds: float

    @property
    def num_rounds(self) -> int:
        """Target calls that verified a draft (or, for `plain`, decoded a token)."""
        return self.num_target_calls - self.num_prompts


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
    """Run a job in a new process.

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
    for event in engine_events(job.method, job.as_message(), cores=cores):
        listener(event)
        fields = {name: value for name, value in event.items() if name != "event"}
        if event["event"] == "ready":
            environment = fields
        elif event["event"] == "group":
            groups[fields.pop("category")] = fields
    missing = [category for category in by_category(job.prompts) if category not in groups]
    if missing:
        raise EngineError(f"{job.method}: the engine's process ended without results for {missing[0]}")
    return Run(method=job.method, environment=environment, groups=groups)


def rows(runs: Sequence[Run], plain: Run | None = None) -> list[Row]:
    """A row per method and category, and one over all of a method's categories.

    Args:
        runs: at least one.
        plain: what texts are compared with; None is the run of that name among them, if any.
    """
    plain = plain or next((run for run in runs if run.method == PLAIN), None)
    return [row for run in runs for row in _rows_of(run, plain)]


def _rows_of(run: Run, plain: Run | None) -> Iterator[Row]:
    categories = [*run.groups, ALL]
    for category in categories:
        names = list(run.groups) if category == ALL else [category]
        generations = [g for name in names for g in run.groups[name]["generations"]]
        counts = [run.groups[name].get("num_verified_tokens", -1) for name in names]
        accepted = accepted_per_position([g["accepted_histogram"] for g in generations])
        num_drafts = sum(sum(g["accepted_histogram"]) for g in generations)
        yield Row(
            method=run.method,
            category=category,
            num_prompts=len(generations),
            num_tokens=sum(len(g["token_ids"]) for g in generations),
            num_target_calls=sum(g["num_target_calls"] for g in generations),
            num_verified_tokens=None if -1 in counts else sum(counts),
            acceptance_length=1.0 + sum(accepted) / num_drafts if num_drafts else 1.0,
            accepted_per_position=accepted,
            identical_to_plain=None if plain is None else all(_identical(run, plain, name) for name in names),
            seconds=sum(run.groups[name]["seconds"] for name in names),
        )


def accepted_per_position(histograms: Sequence[Sequence[int]]) -> list[int]:
    """From "how many rounds accepted j tokens" to "how many rounds accepted the i-th token".

    Args:
        histograms: one per generation, each [K + 1] or empty.

    Returns:
        [K] counts, up to the last position that was ever accepted (a tree of many nodes is not as deep); the first is
        never smaller than the second.
    """
    total = [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]
    counts = [sum(total[i:]) for i in range(1, len(total))]
    return counts[: next((i for i in range(len(counts), 0, -1) if counts[i - 1]), 0)]


def _identical(run: Run, plain: Run, category: str) -> bool:
    mine, theirs = run.groups[category]["generations"], plain.groups[category]["generations"]
    return [g["token_ids"] for g in mine] == [g["token_ids"] for g in theirs]
