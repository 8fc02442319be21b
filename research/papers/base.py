"""What a paper's table is: its options, and how it is made and printed."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Figures(NamedTuple):
    """A table that was made.

    Attributes:
        title: what its numbers are, with their unit.
        header: of the columns.
        rows: cells as they are printed.
        values: the same numbers, for the document: one dictionary a row.
        note: what to know of it: texts, what chose what, what the paper has.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    values: Sequence[dict[str, Any]]
    note: str = ""

    def markdown(self) -> str:
        """To paste into a page."""
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, ["---"] * len(self.header), *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines, *(["", self.note] if self.note else [])])


class PaperTable(NamedTuple):
    """One table or figure of a paper that can be made here.

    Attributes:
        about: a line: what it has in the paper, and what is made of it here.
        add_options: to its command.
        make: from the parsed options. A ValueError is a sentence for the user, raised before anything heavy starts.
    """

    about: str
    add_options: Callable[[ArgumentParser], None]
    make: Callable[[Namespace], Sequence[Figures]]


def numbers(option: str, given: str, kind: Callable[[str], Any], what: str = "numbers") -> list[Any]:
    """Of an option. Raises ValueError."""
    try:
        return [kind(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(f"{option} {given}: give {what} with commas between them") from None


def say(words: str) -> None:
    """Progress."""
    print(words, file=sys.stderr, flush=True)


def read_recipe(folder: Path, command: str, has: str, beside: str = "") -> dict[str, Any]:
    """The recipe of a finished training by a `crossspec train` command, or by one ``beside`` it.

    Raises ValueError where it is not finished, or ``has`` not what a recipe of this drafter has.
    """
    if not ((folder / "recipe.json").is_file() and (folder / "model" / "config.json").is_file()):
        raise ValueError(f"--runs {folder} is no finished --out of `crossspec train {command}`: recipe.json and model/")
    recipe: dict[str, Any] = json.loads((folder / "recipe.json").read_text())
    if has not in recipe:
        commands = f"`crossspec train {command}`" + (f" or `{beside}`" if beside else "")
        raise ValueError(f"--runs {folder} is of another drafter; give an --out of {commands}")
    return recipe
