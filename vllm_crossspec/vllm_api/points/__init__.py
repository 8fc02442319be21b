"""What this project relies on of vLLM, a list for each minor version that it runs with."""

from vllm_crossspec.vllm_api.points.base import Inventory, TouchPoint
from vllm_crossspec.vllm_api.points.generated import POINTS, RELEASES
from vllm_crossspec.vllm_api.points.ours import OURS, STAND_INS


def written(release: str) -> dict[tuple[str, str], str | None]:
    """By module and name: what :data:`POINTS` says of a release."""
    found = ((m, name, known) for m, names in POINTS.items() for name, known in names.items())
    split = ((m, name, known if isinstance(known, dict) else {release: known}) for m, name, known in found)
    return {(m, name): by_release[release] for m, name, by_release in split if release in by_release}


def _inventory(release: str) -> Inventory:
    points = []
    for (module, name), known in written(release).items():
        parameters, _, classes = (known or "").partition("; ")
        used = f"overridden by {classes}" if classes else "read or set" if known is None else "called"
        reason = OURS.get((module, name), used)
        points.append(TouchPoint(module, name, None if known is None else parameters, reason))
    return Inventory(release, tuple(points), STAND_INS)


def _minor(version: str) -> tuple[int, int]:
    major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    return major, minor


INVENTORIES: dict[tuple[int, int], Inventory] = {_minor(release): _inventory(release) for release in RELEASES}
"""By minor version, rising."""

_FIRST, _LAST = min(INVENTORIES), max(INVENTORIES)
RANGE = f">={_FIRST[0]}.{_FIRST[1]},<{_LAST[0]}.{_LAST[1] + 1}"
"""The supported versions, as pip writes them."""


def inventory_of(version: str) -> Inventory | None:
    """The list for a release of vLLM; None if that release has no list."""
    try:
        return INVENTORIES.get(_minor(version))
    except ValueError:
        return None
