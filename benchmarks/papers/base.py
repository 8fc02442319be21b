"""What a paper's table is: its options, and how it is made and printed."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
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
