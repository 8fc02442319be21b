"""Kernels compiled for sm_90 on a machine without a GPU, by Triton's own compiler and assembler; nothing is launched.

The interpreter runs what the compiler refuses (types that change in a loop, names that live in one branch only), so
that a kernel which passes its tests there is not yet one that a GPU takes.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit


class CompileOnlyDriver:
    """Stands in for the CUDA driver of an H100: it answers questions and drops launches."""

    def __init__(self):
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (1, 1, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        )

    def launcher_cls(self, source, metadata):
        return lambda *arguments, **options: None

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only():
    """From now on a launch compiles its kernel and stops there. For a process that interprets none.

    Returns:
        The kernels compiled so far, by name: the code of every variant ("ptx", "cubin").
    """
    driver.set_active(CompileOnlyDriver())
    compiled = {}
    run = jit.JITFunction.run

    def run_and_note(self, *arguments, **options):
        kernel = run(self, *arguments, **options)
        compiled.setdefault(kernel.name, {})[kernel.hash] = kernel.asm
        return kernel

    jit.JITFunction.run = run_and_note
    return compiled


def compile_in_subprocess(code, cache):
    """Run ``code``, which begins with :func:`compile_only`, in a process of its own, beside the tests."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, check=True, timeout=600)
