"""The bounds check follows every pointer whose tensor is known, however its offset, mask or type came to be."""

import importlib
import sys

import pytest
import torch
import triton
import triton.language as tl
from compiled import line_of

pytestmark = pytest.mark.usefixtures("checked")


@pytest.fixture
def checked(monkeypatch):
    """One C compiler is enough: which pointers are followed is decided before it."""
    monkeypatch.setenv("TRITON_CPU_CHECK", "1")


@triton.jit
def indirect_kernel(x, at, out, N: tl.constexpr):
    i = tl.arange(0, N)
    where = tl.load(at + i)
    tl.store(out + i, tl.load(x + where, mask=where >= 0, other=0))


@triton.jit
def scatter_kernel(x, at, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + tl.load(at + i), tl.load(x + i))


@triton.jit
def counter_kernel(x, at, out, N: tl.constexpr):
    slot = tl.atomic_add(at, 1)
    tl.store(out + slot, tl.load(x))


@triton.jit
def bool_load_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    flags = tl.load(x + i)
    tl.store(out + i, flags.to(tl.int32), mask=i < 4)


@triton.jit
def bool_store_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i, mask=i < 4, other=0) > 0)


@triton.jit
def cast_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    halves = x.to(tl.pointer_type(tl.int16), bitcast=True)
    tl.store(out + i, tl.load(halves + i), mask=i < 4)


@triton.jit
def select_kernel(x, at, out, N: tl.constexpr):
    i = tl.arange(0, N)
    chosen = tl.where(tl.load(at + i) > 0, x + i, out + i)
    tl.store(chosen, 1)


@triton.jit
def branch_kernel(x, at, out, N: tl.constexpr):
    p = x
    if tl.load(at) > 0:
        p = out
    for _ in range(tl.load(at + 1)):
        p += 1
    tl.store(p, 1)


@triton.jit
def chase_kernel(x, at, out, N: tl.constexpr):
    p = x
    while tl.load(p) > 0:
        p += tl.load(at)
    tl.store(out, tl.load(p))


@triton.jit
def siblings_kernel(x, at, out, N: tl.constexpr):
    """Both branches number their values alike: what is loaded in one is a pointer in the other."""
    if tl.load(at) > 0:
        tl.store(out, tl.load(x + tl.load(at)))
    else:
        tl.store(out, tl.load(at + 1))
    if tl.load(at) > 1:
        tl.store(x, tl.load(at + 1))
    else:
        tl.store(out + tl.load(at), 1)


INTS = [3, 2, 1, 0]
PLANTED = [
    # kernel, x, at, line of the access, what is said
    (indirect_kernel, INTS, [0, -1, 4, 1], 4, "the load is out of bounds, at element 4 of x, which has 4"),
    (scatter_kernel, INTS, [0, -1, 2, 1], 3, "the store is out of bounds, at element -1 of out, which has 4"),
    (counter_kernel, INTS, [7], 3, "the store is out of bounds, at element 7 of out, which has 4"),
    (bool_load_kernel, [True] * 4, None, 3, "the load is out of bounds, at element 4 of x, which has 4"),
    (bool_store_kernel, INTS, None, 3, "the store is out of bounds, at element 4 of out, which has 4"),
    (cast_kernel, INTS, None, 4, "the load is out of bounds, at element 8 of x, which has 8"),
    (select_kernel, INTS[:2], [0, 0, 1, 0], 4, "the store is out of bounds, at element 2 of x, which has 2"),
    (chase_kernel, INTS, [-1], 3, "the load is out of bounds, at element -1 of x, which has 4"),
    (siblings_kernel, INTS, [-1, 4], 10, "the store is out of bounds, at element -1 of out, which has 4"),
    (siblings_kernel, INTS, [4, 4], 4, "the load is out of bounds, at element 4 of x, which has 4"),
    (branch_kernel, INTS, [1, 6], 7, "the store is out of bounds, at element 6 of out, which has 4"),
]


@pytest.mark.parametrize("kernel, x, at, line, said", PLANTED, ids=[p[0].__name__ for p in PLANTED])
def test_planted(kernel, x, at, line, said):
    # Far apart in one buffer, so that it is known which of two tensors is the nearer.
    buffer = torch.zeros(4096, dtype=torch.int32)
    near, far = buffer[: len(x)], buffer[2048:2052]
    near.copy_(torch.tensor(x))
    near = near.to(torch.bool) if x[0] is True else near
    far = torch.zeros(4, dtype=torch.bool) if kernel is bool_store_kernel else far
    n = 16 if at is None else len(at)
    given = () if at is None else (torch.tensor(at, dtype=torch.int32),)
    with pytest.raises(IndexError) as e:
        kernel[(1,)](near, *given, far, N=n)
    assert f"({__file__}:{line_of(kernel, line)}): {said} elements" in str(e.value)


@triton.jit
def chosen_kernel(a, b, c, which, at):
    p = a
    if which == 1:
        p = b
    elif which == 2:
        p = c
    tl.store(p + at, 1)


def test_the_nearest_of_several_tensors_is_named():
    buffer = torch.zeros(3000, dtype=torch.int32)
    tensors = buffer[:10], buffer[1000:1010], buffer[2000:2010]
    for which, at, said in ((0, 12, "12 of a"), (1, 12, "12 of b"), (2, 12, "12 of c"), (2, -3, "-3 of c")):
        with pytest.raises(IndexError, match=f"at element {said}, which has 10"):
            chosen_kernel[(1,)](*tensors, which, at)


@triton.jit
def everything_kernel(x, at, flags, out, N: tl.constexpr):
    i = tl.arange(0, N)
    seen = tl.load(flags + i)
    tl.store(out + tl.load(at + i), tl.load(x + tl.load(at + i)), mask=seen)
    tl.store(flags + i, ~seen)


def test_what_lies_within_is_let_through():
    x, at, out = torch.arange(4), torch.tensor([2, 0, 3, 1]), torch.zeros(4, dtype=torch.int64)
    flags = torch.tensor([True, True, False, True])
    everything_kernel[(1,)](x, at, flags, out, N=4)
    assert out.tolist() == [0, 1, 2, 0]
    assert flags.tolist() == [False, False, True, False]


HELPERS = """
import triton
import triton.language as tl

@triton.jit(noinline=True)
def fetch(x):
    return tl.load(x)
"""
KERNELS = """
import triton
import triton.language as tl
from copied.inner.helpers import fetch

@triton.jit
def near_kernel(x, out):
    tl.store(out, tl.load(x + 4))

@triton.jit
def far_kernel(x, out):
    tl.store(out, fetch(x + 4))
"""


def test_a_copy_of_the_source_is_told_of_its_own_files(tmp_path, monkeypatch):
    # Both copies find one entry in the cache: two clones of a project, or an environment that was made anew.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for place in ("first", "second/deeper"):
        folder = tmp_path / place / "copied"
        (folder / "inner").mkdir(parents=True)
        (folder / "kernels.py").write_text(KERNELS)
        (folder / "inner" / "helpers.py").write_text(HELPERS)
        with monkeypatch.context() as m:
            m.syspath_prepend(str(folder.parent))
            kernels = importlib.import_module("copied.kernels")
            x, out = torch.zeros(4), torch.zeros(1)
            for kernel, where in ((kernels.near_kernel, "kernels.py:8"), (kernels.far_kernel, "inner/helpers.py:7")):
                with pytest.raises(IndexError) as e:
                    kernel[(1,)](x, out)
                assert f"{kernel.__name__} ({folder / where}): the load" in str(e.value)
            for name in [n for n in sys.modules if n.split(".")[0] == "copied"]:
                del sys.modules[name]
    assert len(list((tmp_path / "cache").glob("*/*.so"))) == 2
