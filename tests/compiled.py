"""What the tests of the CPU lane's compiler share: each of their kernels is compiled by every C compiler there is."""

import shlex
import shutil

import pytest
import torch

pytest.importorskip("crossspec_cpu_lane.translate")
import triton

if torch.cuda.is_available():
    pytest.skip("tests of the compiler for the CPU: with a GPU it stays away", allow_module_level=True)

from crossspec_cpu_lane import compiler, toolchain

N = 64
INF, NAN = float("inf"), float("nan")
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)] or [shlex.join(toolchain.find())]


def forget_compiled_kernels(module):
    for value in vars(module).values():
        if isinstance(value, triton.runtime.JITFunction):
            value.device_caches.clear()
            value.__dict__.pop("_cpu_lane_launch", None)


def forget_compiler():
    for remembered in (toolchain.compiler, toolchain.fingerprint, compiler._identity):
        remembered.cache_clear()


@pytest.fixture(autouse=True, params=COMPILERS)
def c_compiler(request, monkeypatch):
    """Kernels are compiled again for each C compiler."""
    monkeypatch.setenv("CC", request.param)
    forget_compiler()
    forget_compiled_kernels(request.module)
    yield request.param
    forget_compiler()
    forget_compiled_kernels(request.module)


@pytest.fixture
def bounds_check(monkeypatch):
    monkeypatch.setenv("TRITON_CPU_CHECK", "1")


def line_of(kernel, offset):
    return kernel.fn.__code__.co_firstlineno + offset


def same(a, b):
    """Bit for bit, but for the bits of a NaN."""
    if a.is_floating_point():
        views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        nan = a.to(torch.float32).isnan() & b.to(torch.float32).isnan()
        return bool((nan | (a.view(views[a.itemsize]) == b.view(views[b.itemsize]))).all())
    return torch.equal(a, b)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
