"""Runs jobs one after the other under a progress bar, and shows and writes their rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from vllm_crossspec.cli import meta, runner
from vllm_crossspec.cli.runner import ALL, Job, Row, Run

MINIMUM_WIDTH = 140
"""Columns that the table takes where the output is no terminal and rich would assume 80."""

SAMPLED = "not identical: sampled texts follow plain's distribution, and other draws of it are as good"
INTERPRETED = "seconds: not meaningful, kernels are interpreted on this machine (counts and texts are real)"


def check_all(jobs: Sequence[Job], json_file: Path | None) -> None:
    """Find out what is wrong with any of the jobs before the first of them has run for an hour."""
    if json_file is not None:
        check_writable(json_file)
    with Console(stderr=True).status(f"checking {len(jobs)} configurations"):
        runner.check(jobs)


def compare(jobs: Sequence[Job], settings: dict[str, Any], json_file: Path | None) -> tuple[list[Row], list[Run]]:
    """Run all jobs, print the table, write the document; the rows and what each engine did.

    If one fails or the user ends it, the table and the document are of those that are done.
    """
    if json_file is not None:
        check_writable(json_file)
    runs: list[Run] = []
    try:
        _run_all(jobs, Console(stderr=True), runs)
    except BaseException:
        if runs:
            _show(runs, settings, json_file)
        raise
    return _show(runs, settings, json_file), runs


def _show(runs: Sequence[Run], settings: dict[str, Any], json_file: Path | None) -> list[Row]:
    """Print the table and write the document."""
    console, rows = wide_console(), runner.rows(runs)
    about = meta.describe(runs, settings)
    console.print(table(rows, interpreted=about["kernels_interpreted"]))
    if settings["sampling"]["temperature"] > 0 and any(row.identical_to_plain is False for row in rows):
        console.print(SAMPLED)
    if json_file is not None:
        document = {"rows": [row.as_dict() for row in rows], "meta": about}
        json_file.write_text(json.dumps(document, indent=2) + "\n")
    return rows


def check_writable(json_file: Path) -> None:
    """Find out before the run, not after it. Raises ValueError."""
    if json_file.is_dir() or not json_file.resolve().parent.is_dir():
        raise ValueError(f"--json {json_file}: name a file in a folder that exists")


def wide_console() -> Console:
    """Where tables go: as wide as the terminal, and wide enough for them where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, MINIMUM_WIDTH))


def _run_all(jobs: Sequence[Job], console: Console, runs: list[Run]) -> None:
    """Run every job, and add what it did to ``runs`` when it is done."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for job in jobs:
            most = sum(len(p.turns) for p in job.prompts) * job.sampling["max_tokens"]
            task = progress.add_task(f"{job.method}: starting the engine", total=most)

            def listen(event: dict[str, Any], method: str = job.method, task: Any = task) -> None:
                if event["event"] == "ready":
                    progress.update(task, description=f"{method}: generating tokens")
                elif event["event"] == "progress":
                    progress.advance(task, event["num_tokens"])

            runs.append(runner.run(job, listen))
            # Texts end before the limit where the model says so: then this is all there was.
            done = next(t.completed for t in progress.tasks if t.id == task)
            progress.update(task, description=f"{job.method}: done", total=done)
            if not console.is_terminal:  # bars are only drawn when all is over
                console.print(f"{job.method}: done ({len(runs)} of {len(jobs)})", highlight=False)


def table(rows: Sequence[Row], *, interpreted: bool) -> Table:
    """The rows as a table.

    Args:
        interpreted: whether Triton's kernels were interpreted, so that seconds say nothing about speed.
    """
    grid = Table(caption=INTERPRETED if interpreted else None, caption_justify="left")
    grid.add_column("method", min_width=max((len(row.method) for row in rows), default=0))
    grid.add_column("category")
    for name in ("prompts", "tokens", "target\ncalls", "verified\ntokens", "acceptance\nlength"):
        grid.add_column(name, justify="right")
    grid.add_column("accepted per position\n(% of rounds)", no_wrap=True)
    grid.add_column("identical\nto plain", justify="center")
    grid.add_column("seconds\n(not meaningful)" if interpreted else "seconds", justify="right")
    for row in rows:
        grid.add_row(*_cells(row), style="bold" if row.category == ALL else None, end_section=row.category == ALL)
    return grid


def _cells(row: Row) -> list[str]:
    shares = " ".join(f"{100 * count / row.num_rounds:2.0f}" for count in row.accepted_per_position if row.num_rounds)
    identical = {None: "-", True: "yes", False: "[red]no[/red]"}[row.identical_to_plain]
    verified = "-" if row.num_verified_tokens is None else row.num_verified_tokens
    counts = (row.num_prompts, row.num_tokens, row.num_target_calls, verified)
    return [
        row.method,
        row.category,
        *map(str, counts),
        f"{row.acceptance_length:.2f}",
        shares,
        identical,
        f"{row.seconds:.2f}",
    ]
