"""The CPU lane: what it sets, what it leaves alone, and that it keeps off machines with a GPU."""

import os
import subprocess
import sys
from importlib import metadata, util

import pytest

pytestmark = pytest.mark.skipif(
    util.find_spec("crossspec_cpu_lane") is None,
    reason="the CPU lane is installed on machines without a GPU and without triton-cpu only",
)

LANE_VARIABLES = ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_CPU_KVCACHE_SPACE")
SHOW = f"import os; print(*(os.environ.get(name) for name in {LANE_VARIABLES!r}))"


def python(code, **variables):
    """Run code in a fresh interpreter, without the lane's variables but for those given."""
    clean = {name: value for name, value in os.environ.items() if name not in LANE_VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | variables, capture_output=True, text=True, timeout=300
    )


def test_importing_triton_chooses_the_interpreter_the_v2_runner_and_a_small_cache():
    assert python(f"import triton; {SHOW}").stdout.split() == ["1", "1", "1"]


def test_kernels_that_triton_itself_defines_are_interpreted_too():
    code = "import triton.language as tl; print(type(tl.sum).__name__)"
    assert python(code).stdout.strip() == "InterpretedFunction"


def test_children_inherit_the_choice():
    code = f"import triton, subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}])"
    assert python(code).stdout.split() == ["1", "1", "1"]


def test_what_the_user_set_stands():
    assert python(f"import triton; {SHOW}", TRITON_INTERPRET="0").stdout.split() == ["0", "1", "1"]


def test_a_kernel_runs_on_the_cpu():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def _add_kernel(
        x_ptr,  # [n]
        y_ptr,  # [n]
        n,
        BLOCK: tl.constexpr,
    ):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)

    x = torch.arange(10, dtype=torch.float32)
    y = torch.full_like(x, float("nan"))
    _add_kernel[(3,)](x, y, 10, BLOCK=4)
    assert torch.equal(y, x + 1)


def test_it_is_the_active_driver_and_says_what_it_cannot_do():
    code = """
import torch, triton
from triton.runtime import driver
print(driver.active.get_current_target().backend, driver.active.get_active_torch_device())
from triton.backends import backends
try:
    backends['cpu'].compiler(driver.active.get_current_target()).parse_options({})
except RuntimeError as problem:
    print(problem)
"""
    assert python(code).stdout.splitlines() == [
        "cpu cpu",
        "the CPU lane interprets Triton kernels and compiles none: set TRITON_INTERPRET=1",
    ]


def test_it_stays_inactive_beside_a_gpu_and_says_so():
    code = f"""
import ctypes, types
def count(pointer):
    pointer._obj.value = 1
    return 0
real = ctypes.CDLL
nvml = types.SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetCount_v2=count, nvmlShutdown=lambda: 0)
ctypes.CDLL = lambda name, *rest: nvml if name == "libnvidia-ml.so.1" else real(name, *rest)
import crossspec_cpu_lane
ctypes.CDLL = real
from triton.backends import backends
print(backends["cpu"].driver.is_active())
{SHOW}
"""
    done = python(code)
    assert done.stdout.splitlines() == ["False", "None None None"]
    assert done.stderr.count("stays inactive") == 1 and "pip uninstall crossspec-cpu-lane" in done.stderr


def test_the_vllm_command_finds_its_version():
    assert metadata.version("vllm") == metadata.version("vllm-cpu") + "+cpu"
    assert not [file for file in metadata.files("vllm") if file.suffix == ".py"]
