"""How commands show what they do: progress bars, one a stage if they work in stages, and tables of facts."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import progress as rich
from rich.console import Console
from rich.table import Table

MINIMUM_WIDTH = 160
"""Columns that a table takes where the output is no terminal and rich would assume 80."""


def bars(done: rich.ProgressColumn | None = None) -> rich.Progress:
    """Progress on stderr; ``done``: how a bar says how far it is; None says it in numbers."""
    text, count = rich.TextColumn("{task.description}"), done or rich.MofNCompleteColumn()
    parts = (rich.SpinnerColumn(), text, rich.BarColumn(), count, rich.TimeElapsedColumn())
    return rich.Progress(*parts, console=Console(stderr=True))


def wide_console() -> Console:
    """The console for tables: as wide as the terminal, or wide enough for them."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, MINIMUM_WIDTH))


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


def grid(title: str, columns: Iterable[str], left: Collection[str] = (), **looks: Any) -> Table:
    """A table without rows; its columns are aligned on the right, except for those in ``left``."""
    table = Table(title=title, **looks)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def facts_table(title: object, facts: Mapping[str, str]) -> Table:
    """What a file or folder holds, a fact a row."""
    table = Table(title=str(title), show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    return table
