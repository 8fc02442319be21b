"""Which function translates which operation."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from crossspec_cpu_lane.translate.values import Value
from crossspec_cpu_lane.ttir import Op

if TYPE_CHECKING:
    from crossspec_cpu_lane.translate.writer import Writer

Handler = Callable[["Writer", Op, list[Value]], Value | list[Value] | None]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


@handles("ttg.barrier", "gpu.barrier", "tt.debug_barrier", "llvm.intr.assume")
def nothing(w: "Writer", op: Op, operands: list[Value]) -> None:
    """One thread computes a program, so there is nobody to wait for."""
