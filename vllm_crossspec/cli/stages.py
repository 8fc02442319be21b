"""How commands show what they do: progress bars, one a stage if they work in stages, and tables of facts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table


def bars(done: ProgressColumn | None = None) -> Progress:
    """Progress on stderr.

    Args:
        done: how a bar says how far it is; None says it in numbers.
    """
    text, count = TextColumn("{task.description}"), done or MofNCompleteColumn()
    return Progress(SpinnerColumn(), text, BarColumn(), count, TimeElapsedColumn(), console=Console(stderr=True))


@contextmanager
def stage_bars() -> Iterator[Callable[[str, int, int], None]]:
    """One bar a stage; yields what is to be told (stage, done, total)."""
    with bars() as progress:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield report


def facts_table(title: object, facts: Mapping[str, str]) -> Table:
    """What a file or folder holds, a fact a row."""
    table = Table(title=str(title), show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    return table
