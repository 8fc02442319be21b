"""The interpreter beside compiled kernels: its mends against torch, and that the comparison sees what is wrong."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compared import UnequalError, compare, difference_by_largest, launch_both, ulps
from interpreted import interpret
from triton.language.extra import libdevice
from triton.runtime.jit import JITFunction

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU"),
]


@triton.jit
def _bfloat16_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x * y)
    tl.store(out_ptr + 2 * N + i, -x)
    tl.store(out_ptr + 3 * N + i, tl.where(x < y, x, y))
    tl.store(out_ptr + 4 * N + i, (x.to(tl.float32) * 1.001).to(tl.bfloat16))
    tl.store(out_ptr + 5 * N + i, tl.zeros([N], tl.bfloat16) + tl.argmax(x, axis=0).to(tl.bfloat16))


@triton.jit
def _doubled(x):
    return x + x


@triton.jit
def _simple_kernel(x_ptr, count_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = _doubled(tl.load(x_ptr + i))
    tl.store(out_ptr + i, x + x.sum(axis=0))
    tl.atomic_add(count_ptr, 1)


@triton.jit
def _log1p_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, libdevice.log1p(tl.load(x_ptr + i)))


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + i, tl.dot(tl.load(a_ptr + i), tl.trans(tl.load(b_ptr + i)), input_precision="ieee"))


def case():
    x = torch.randn(16, generator=torch.Generator().manual_seed(3))
    return x, torch.zeros(1, dtype=torch.int32), torch.zeros(16)


def test_bfloat16_is_torchs():
    """In the interpreter as it is, the bits are added."""
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(64, generator=generator).mul(100).bfloat16() for _ in range(2))
    expected = [x + y, x * y, -x, torch.where(x < y, x, y), (x.float() * 1.001).bfloat16(), x.argmax().expand(64)]
    out = torch.zeros(6 * 64, dtype=torch.bfloat16)
    interpret(_bfloat16_kernel, (1,), x, y, out, N=64)
    assert torch.equal(out.view(6, 64), torch.stack([e.bfloat16() for e in expected]))
    compare(_bfloat16_kernel, (1,), x, y, out, N=64)


def test_products_and_library_functions_are_torchs():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-9, 9, (16, 16), generator=generator).float() for _ in range(2))
    out = torch.zeros(16, 16)
    interpret(_product_kernel, (1,), a, b, out, N=16)
    assert torch.equal(out, a @ b.T)
    x, out = torch.rand(64, generator=generator), torch.zeros(64)
    interpret(_log1p_kernel, (1,), x, out, N=64)
    torch.testing.assert_close(out, x.log1p(), rtol=1e-6, atol=0)


def test_what_is_compiled_afterwards_is_as_before():
    """Triton's language is patched only while a kernel is interpreted, also where that fails."""
    before = {name: value for name, value in vars(tl).items() if callable(value)}
    call = JITFunction.__call__
    with pytest.raises(TypeError):
        interpret(_simple_kernel, (1,), *case())  # without N
    with pytest.raises(Exception, match="arange"):
        interpret(_simple_kernel, (1,), *case(), N=3)
    interpret(_simple_kernel, (1,), *case(), N=16)
    assert {name: value for name, value in vars(tl).items() if callable(value)} == before
    assert JITFunction.__call__ is call
    x, count, out = case()
    _simple_kernel[(2,)](x, count, out, N=8)
    assert torch.equal(out[:8], 2 * x[:8] + (2 * x[:8]).sum())
    assert int(count) == 2


def test_a_launch_is_made_once():
    """Both ways from the same memory: what is counted is counted once."""
    x, count, out = case()
    outcome = launch_both(JITFunction.run, _simple_kernel, (3,), (x, count, out), {"N": 16})
    assert (int(count), outcome.elements, outcome.wrong, outcome.library) == (3, 17, "", False)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda x, count, out: out.view(torch.int32)[3].add_(1), "1 of 16 elements of fp32 differ, by 1 ulp"),
        (lambda x, count, out: out[3].fill_(float("nan")), "by inf ulp: nan compiled"),
        (lambda x, count, out: count.add_(1), "1 of 1 elements of int32 differ"),
        (lambda x, count, out: x[5].add_(1), "bytes written that the interpreter does not write"),
    ],
    ids=["a bit", "a NaN", "an integer", "elsewhere"],
)
def test_a_wrong_kernel_is_found_out(spoil, says):
    def run(kernel, *args, warmup, **options):
        JITFunction.run(kernel, *args, warmup=warmup, **options)
        if not warmup:
            spoil(*args)

    outcome = launch_both(run, _simple_kernel, (1,), case(), {"N": 16})
    assert says in outcome.wrong


def test_comparing_raises(monkeypatch):
    run = JITFunction.run

    def wrong(kernel, *args, **options):
        run(kernel, *args, **options)
        args[2][0] += 1

    monkeypatch.setattr(JITFunction, "run", wrong)
    with pytest.raises(UnequalError, match="_simple_kernel: 1 of 16 elements of fp32 differ"):
        compare(_simple_kernel, (1,), *case(), N=16)


def test_distances_in_ulp_of_the_largest_by_hand():
    def far(a, b):
        a, b = (np.array(x, dtype=np.float32) for x in (a, b))
        return difference_by_largest([(tl.float32, None, a)], [(tl.float32, None, b)])

    step = 2.0**-23
    assert far([4, 1e-6], [4, 2e-6]) == pytest.approx(1e-6 / (4 * step), rel=1e-3)  # a million of its own
    assert far([4 + 8 * step, 0], [4, 0]) == pytest.approx(2)
    assert far([np.nan, np.inf, 1], [np.nan, np.inf, 1]) == far([0, 0], [0, -0.0]) == 0
    for wrong in (np.nan, -np.inf, 1):
        assert far([wrong, 1], [np.inf, 1]) == far([np.inf, 1], [wrong, 1]) == np.inf


def test_ulps_by_hand():
    one = np.float32(1)
    a = np.array([1, 1, 0, -0.0, np.nan, np.nan, -1e-45], dtype=np.float32)
    b = np.array([1, np.nextafter(one, 2 * one), -0.0, 1e-45, np.nan, 1, 1e-45], dtype=np.float32)
    assert ulps(a, b, tl.float32).tolist() == [0, 1, 0, 1, 0, np.inf, 2]
