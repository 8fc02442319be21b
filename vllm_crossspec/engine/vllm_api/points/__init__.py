"""What this project relies on of vLLM, a list for each minor version that it runs with."""

from vllm_crossspec.engine.vllm_api.points import v0_32, v0_33
from vllm_crossspec.engine.vllm_api.points.base import Inventory

INVENTORIES: dict[tuple[int, int], Inventory] = {(0, 32): v0_32.INVENTORY, (0, 33): v0_33.INVENTORY}
"""By minor version, rising."""

_FIRST, _LAST = min(INVENTORIES), max(INVENTORIES)
RANGE = f">={_FIRST[0]}.{_FIRST[1]},<{_LAST[0]}.{_LAST[1] + 1}"
"""The supported versions, as pip writes them."""


def inventory_of(version: str) -> Inventory | None:
    """The list for a release of vLLM; None for one that nobody has looked at."""
    try:
        major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        return None
    return INVENTORIES.get((major, minor))
