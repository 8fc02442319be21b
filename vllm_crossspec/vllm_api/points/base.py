"""What a list of touch points is made of."""

import inspect
import re
from typing import NamedTuple

from vllm_crossspec.vllm_api.points.ours import StandIn


class TouchPoint(NamedTuple):
    """One thing of vLLM's that this project replaces, overrides, calls, reads or sets.

    Attributes:
        name: attribute path inside the module.
        parameters: their names, in order, as this project relies on them; None for what is not called.
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


class Inventory(NamedTuple):
    """All that this project relies on of one minor version of vLLM, and the release that it was written for."""

    release: str
    touch_points: tuple[TouchPoint, ...]
    stand_ins: tuple[StandIn, ...]


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
