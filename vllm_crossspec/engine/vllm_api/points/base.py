"""What a list of touch points is made of."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
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

    def takes(self, found: list[inspect.Parameter]) -> bool:
        """Whether what has these parameters can be used as this point says."""
        names = (self.parameters or "").split()
        return fits(found, names) and not (self.is_ours and len(found) > len(names))


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


class Inventory(NamedTuple):
    """All that this project relies on of one minor version of vLLM.

    Attributes:
        release: that it was written for.
        touch_points: what is replaced, overridden, called, read or set.
        stand_ins: what takes the place of vLLM's own objects.
    """

    release: str
    touch_points: tuple[TouchPoint, ...]
    stand_ins: tuple[StandIn, ...]

    def changed(
        self, release: str, table: str, gone: Iterable[str] = (), stand_ins: Mapping[str, str] | None = None
    ) -> "Inventory":
        """The inventory of a later version, from what is not as in this one.

        Args:
            release: the later one.
            table: see :func:`parse`; its points take the place of those of the same name, or are new.
            gone: dotted names of points that the later version does not have.
            stand_ins: attributes that it reads beyond this version's, by the name under which it has the object.
        """
        new = {(point.module, point.name): point for point in parse(table)}
        dropped, more = set(gone), stand_ins or {}
        kept = [new.pop((p.module, p.name), p) for p in self.touch_points if f"{p.module}.{p.name}" not in dropped]
        known = {f"{p.module}.{p.name}" for p in self.touch_points}
        assert dropped <= known and more.keys() <= {s.name for s in self.stand_ins}, "nothing of that name to change"
        read = (s._replace(attributes=f"{s.attributes} {more.get(s.name, '')}".strip()) for s in self.stand_ins)
        return Inventory(release, (*kept, *new.values()), tuple(read))


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


def fits(found: list[inspect.Parameter], names: list[str]) -> bool:
    """Whether a function with these parameters can be used as one with ``names``: what is new has a default, and last.

    Or it is by keyword alone, wherever it stands.
    """
    known = [p for p in found if p.name in names or p.kind != p.KEYWORD_ONLY or p.default is p.empty]
    new = known[len(names) :]
    return [p.name for p in known[: len(names)]] == names and all(p.default is not p.empty for p in new)


def reads(source: str, name: str) -> set[str]:
    """Attributes that source text reads or sets of objects under a name."""
    found = re.findall(rf"\b{name}\.(\w+)|getattr\(\s*[\w.]*\b{name},\s*\"(\w+)\"", source)
    return {one or other for one, other in found}
