"""Runs jobs under a progress bar, a few side by side if asked to, and shows and writes their rows."""

import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_crossspec.cli import meta, runner
from vllm_crossspec.cli.options import check_file, write_json
from vllm_crossspec.cli.processes import BOUND_CORES, end_all, is_cpu_lane
from vllm_crossspec.cli.rows import ALL, PLAIN, Row, Run
from vllm_crossspec.cli.rows import rows as rows_of
from vllm_crossspec.cli.runner import Job
from vllm_crossspec.cli.stages import bars

MINIMUM_WIDTH = 160
"""Columns that the table takes where the output is no terminal and rich would assume 80."""

SAMPLED = "not identical: sampled texts follow plain's distribution, and other draws of it are as good"
INTERPRETED = "seconds: not meaningful, kernels are interpreted on this machine (counts and texts are real)"
COMPILED = "seconds: of generating, with kernels compiled for this CPU ({cpu}); they say nothing of a GPU"


def check_all(jobs: Sequence[Job]) -> None:
    """Find out what is wrong with any of the jobs before the first of them has run for an hour."""
    with Console(stderr=True).status(f"checking {len(jobs)} configurations"):
        runner.check(jobs)


def compare(
    jobs: Sequence[Job], settings: dict[str, Any], json_file: Path | None, side_by_side: int = 1
) -> tuple[list[Row], list[Run]]:
    """Run all jobs, print the table, write the document; the rows and what each engine did.

    If one fails or the user ends it, the table and the document are of those that are done; the document's ``meta``
    then names the ``unfinished``.

    Args:
        jobs: `plain` among them where texts are to be compared.
        settings: for the document.
        json_file: where it goes, if anywhere.
        side_by_side: engines that run at a time, each on cores of its own; on a CPU only.
    """
    check_file("--json", json_file)
    board = _Board(jobs)
    try:
        _run_all(jobs, board, side_by_side)
    except BaseException:
        if board.runs:
            _show(board.runs, settings | {"unfinished": board.unfinished}, json_file)
        raise
    return _show(board.runs, settings, json_file), board.runs


def run_all(jobs: Sequence[Job], side_by_side: int = 1) -> list[Run]:
    """Run all jobs, with a line for each that is done; as :func:`compare`, but for the table and the document."""
    board = _Board(jobs)
    _run_all(jobs, board, side_by_side)
    return board.runs


def _show(runs: Sequence[Run], settings: dict[str, Any], json_file: Path | None) -> list[Row]:
    """Print the table and write the document."""
    console, rows = wide_console(), rows_of(runs)
    about = meta.describe(runs, settings)
    console.print(table(rows, about))
    if settings["sampling"]["temperature"] > 0 and any(row.identical_to_plain is False for row in rows):
        console.print(SAMPLED)
    write_json(json_file, {"rows": [asdict(row) for row in rows], "meta": about})
    return rows


def wide_console() -> Console:
    """Where tables go: as wide as the terminal, and wide enough for them where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, MINIMUM_WIDTH))


def _run_all(jobs: Sequence[Job], board: "_Board", side_by_side: int) -> None:
    """Run every job, a few at a time; what each did is the board's when it is done."""
    shares = cores_of(side_by_side)
    with bars() as progress, ThreadPoolExecutor(len(shares)) as pool:
        free: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for share in shares:
            free.put(share)

        def work(job: Job) -> None:
            cores = free.get()
            try:
                board.follow(job, progress, cores)
            finally:
                free.put(cores)

        futures = [pool.submit(work, job) for job in jobs]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            while wait(futures, timeout=0.1).not_done:  # one may have been about to start an engine
                end_all()
            raise


def cores_of(side_by_side: int) -> list[list[int]]:
    """Which cores each of the engines that run at a time keeps to: none for a single one, or where the user chose."""
    if side_by_side <= 1 or not is_cpu_lane() or not hasattr(os, "sched_getaffinity") or BOUND_CORES in os.environ:
        return [[]]
    cores = sorted(os.sched_getaffinity(0))
    count = min(side_by_side, len(cores))
    return [cores[i::count] for i in range(count)] if count > 1 else [[]]


class _Board:
    """What all jobs did so far: their progress, and a line about each as soon as it and plain are done."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._order = [job.method for job in jobs]
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._told: set[str] = set()

    @property
    def runs(self) -> list[Run]:
        """Those that are done, in the order of the jobs."""
        with self._lock:
            return [self._runs[method] for method in self._order if method in self._runs]

    @property
    def unfinished(self) -> list[str]:
        """The others."""
        with self._lock:
            return [method for method in self._order if method not in self._runs]

    def follow(self, job: Job, progress: Progress, cores: Sequence[int]) -> None:
        """Run the job under a bar of its own."""
        most = sum(len(p.turns) for p in job.prompts) * job.sampling["max_tokens"]
        task = progress.add_task(f"{job.method}: starting the engine", total=most)

        def listen(event: dict[str, Any]) -> None:
            if event["event"] == "ready":
                progress.update(task, description=f"{job.method}: generating tokens")
            elif event["event"] == "progress":
                progress.advance(task, event["num_tokens"])

        run = runner.run(job, listen, cores)
        progress.remove_task(task)
        with self._lock:
            self._runs[job.method] = run
            for line in self._new_lines():
                progress.console.print(line, highlight=False, soft_wrap=True)

    def _new_lines(self) -> list[str]:
        plain = self._runs.get(PLAIN)
        if plain is None and PLAIN in self._order:
            return []
        lines = []
        for method in [method for method in self._runs if method not in self._told]:
            self._told.add(method)
            row = next(row for row in rows_of([self._runs[method]], plain) if row.category == ALL)
            lines.append(_line(row, f"{len(self._told)} of {len(self._order)}"))
        return lines


def _line(row: Row, number: str) -> str:
    same = {None: "", True: ", every text plain's", False: ", [red]NOT plain's texts[/red]"}[row.identical_to_plain]
    return (
        f"{row.method}: {row.num_tokens} tokens in {row.num_target_calls} target calls, {row.acceptance_length:.2f} "
        f"a round, {row.seconds:.1f} s{same if row.method != PLAIN else ''} ({number})"
    )


def seconds_note(about: dict[str, Any]) -> str | None:
    """Of what the seconds are, by the document's `meta`; None on a GPU."""
    hardware = about["hardware"]
    if about["kernels_interpreted"]:
        return INTERPRETED
    return COMPILED.format(**hardware) if hardware["device"] == "cpu" else None


def table(rows: Sequence[Row], about: dict[str, Any]) -> Table:
    """The rows as a table.

    Args:
        rows: of all runs.
        about: the document's `meta`, which says of what the seconds are.
    """
    interpreted = about["kernels_interpreted"]
    grid = Table(caption=seconds_note(about), caption_justify="left")
    grid.add_column("method", min_width=max((len(row.method) for row in rows), default=0))
    grid.add_column("category")
    for name in ("prompts", "tokens", "target\ncalls", "verified\ntokens", "acceptance\nlength"):
        grid.add_column(name, justify="right")
    grid.add_column("accepted per position\n(% of rounds)", no_wrap=True)
    grid.add_column("identical\nto plain", justify="center")
    grid.add_column("seconds\n(not meaningful)" if interpreted else "seconds", justify="right")
    for row in rows:
        histogram = row.accepted_per_position if row.num_rounds else []
        identical = {None: "-", True: "yes", False: "[red]no[/red]"}[row.identical_to_plain]
        verified = "-" if row.num_verified_tokens is None else row.num_verified_tokens
        grid.add_row(
            row.method,
            row.category,
            *map(str, (row.num_prompts, row.num_tokens, row.num_target_calls, verified)),
            f"{row.acceptance_length:.2f}",
            " ".join(f"{100 * count / row.num_rounds:2.0f}" for count in histogram),
            identical,
            f"{row.seconds:.2f}",
            style="bold" if row.category == ALL else None,
            end_section=row.category == ALL,
        )
    return grid
