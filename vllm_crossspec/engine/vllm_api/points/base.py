"""What a list of touch points is made of."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_ROW = re.compile(r"(?P<name>[\w.]+)(\((?P<parameters>[\w ]*)\)|\{(?P<attributes>[\w ]+)\})? - (?P<reason>.+)")


class TouchPoint(NamedTuple):
    """One thing of vLLM's that this project replaces, overrides, calls, reads or sets.

    Attributes:
        module: of vLLM.
        name: attribute path inside it.
        parameters: names of its parameters, in order, as this project relies on them; None for what is not called.
        reason: what we do with it.
    """

    module: str
    name: str
    parameters: str | None
    reason: str

    @property
    def is_ours(self) -> bool:
        """Whether vLLM calls a function of ours in its place, with whatever parameters its own has."""
        return self.reason.startswith(("overridden", "replaced", "stood in for"))


class StandIn(NamedTuple):
    """One object of ours of which vLLM's code reads attributes as of one of its own.

    Attributes:
        ours: our class, by its dotted name.
        name: under which vLLM's code has the object.
        readers: modules of vLLM that read attributes of it.
        attributes: all that they read.
        others: read under circumstances that are never ours; the class need not have them.
    """

    ours: str
    name: str
    readers: str
    attributes: str
    others: str = ""


def parse(table: str) -> tuple[TouchPoint, ...]:
    """The touch points of a table: a line for each module, and below it, indented by two, a row for each point.

    A row is ``name(parameters) - reason`` of what is called, ``Class.{attributes} - reason`` of what is read or set,
    and ``name - reason`` of anything else; where it goes on in another line, that is indented further.
    """
    rows: list[tuple[str, str]] = []
    module = ""
    for line in table.strip("\n").splitlines():
        if not line.startswith(" "):
            module = line
        elif line.startswith("   "):
            rows[-1] = module, f"{rows[-1][1]} {line.strip()}"
        else:
            rows.append((module, line.strip()))
    return tuple(point for module, row in rows for point in _points(module, row))


def _points(module: str, row: str) -> Iterator[TouchPoint]:
    found = _ROW.fullmatch(row)
    if found is None:
        raise ValueError(f"no row of touch points: {row}")
    name, reason = found["name"], found["reason"]
    if found["attributes"] is None:
        yield TouchPoint(module, name, found["parameters"], reason)
    else:
        yield from (TouchPoint(module, name + attribute, None, reason) for attribute in found["attributes"].split())
