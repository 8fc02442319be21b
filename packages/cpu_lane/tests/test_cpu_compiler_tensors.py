"""Shapes, reductions and products in small kernels compiled for the CPU, against numpy and PyTorch."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compiled import FLOAT8, NAN, N, c_compiler, randn, same  # noqa: F401

# ---- shapes ----


@triton.jit
def shapes_kernel(a, out, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(a + i * N + j)
    place = tl.arange(0, M * N)
    tl.store(out + place, tl.reshape(tl.trans(x), [M * N]))
    low, high = tl.split(tl.reshape(x, [M, N // 2, 2]))
    tl.store(out + M * N + place, tl.reshape(tl.join(high, low), [M * N]))
    tl.store(out + 2 * M * N + place, tl.reshape(tl.permute(tl.reshape(x, [M, 2, N // 2]), (1, 2, 0)), [M * N]))
    tl.store(out + 3 * M * N + place, tl.reshape(tl.flip(x, 1), [M * N]))
    tl.store(out + 4 * M * N + tl.arange(0, 2 * M), tl.cat(tl.sum(x, 1), tl.max(x, 1)))


def test_shapes():
    m, n = 8, 16
    a, out = randn(m, n), torch.zeros(5 * m * n)
    shapes_kernel[(1,)](a, out, M=m, N=n)
    parts = out.view(5, -1)
    assert same(parts[0], a.T.flatten())
    assert same(parts[1], a.view(m, n // 2, 2).flip(2).flatten())
    assert same(parts[2], a.view(m, 2, n // 2).permute(1, 2, 0).flatten())
    assert same(parts[3], a.flip(1).flatten())
    assert same(parts[4][:m], torch.from_numpy(a.numpy().sum(1)))
    assert same(parts[4][m : 2 * m], a.max(1).values)


@triton.jit
def gather_kernel(a, index, out, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.gather(tl.load(a + at), tl.load(index + at), AXIS))


@pytest.mark.parametrize("axis", [0, 1])
def test_gather(axis):
    a = randn(8, 16)
    index = torch.randint(0, a.shape[axis], (8, 16), generator=torch.Generator().manual_seed(1))
    out = torch.zeros(8, 16)
    gather_kernel[(1,)](a, index, out, M=8, N=16, AXIS=axis)
    assert same(out, a.gather(axis, index))


@triton.jit
def descriptor_kernel(a, out, m, n, M: tl.constexpr, N: tl.constexpr):
    source = tl.make_tensor_descriptor(a, [m, n], [n, 1], [M, N])
    target = tl.make_tensor_descriptor(out, [m, n], [n, 1], [M, N])
    row = tl.program_id(0) * M
    target.store([row, 4], source.load([row, 4]) * 2)


def test_descriptors_made_in_a_kernel():
    a, out = randn(6, 16), torch.zeros(6, 16)
    descriptor_kernel[(2,)](a, out, 6, 16, M=4, N=16)
    expected = a * 2
    expected[:, :4] = 0
    assert same(out, expected)


@triton.jit
def sort_kernel(a, out, top, N: tl.constexpr, K: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    tl.store(out + i, tl.sort(x))
    tl.store(top + tl.arange(0, K), tl.topk(x, K))


@pytest.mark.parametrize("n", [16, 256])
def test_sort(n):
    a = randn(n)
    out, top = torch.zeros(n), torch.zeros(8)
    sort_kernel[(1,)](a, out, top, N=n, K=8)
    assert same(out, a.sort().values)
    assert same(top, a.topk(8).values)


# ---- reductions ----


@triton.jit
def sums_kernel(a, out, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, LEFT: tl.constexpr):
    x = tl.load(a + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out + tl.arange(0, LEFT), tl.sum(x, AXIS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize(("m", "n"), [(4, 4), (8, 128), (16, 1024), (1024, 8), (256, 1), (1, 256)])
def test_sums_add_in_the_order_of_numpy(dtype, m, n):
    a = (randn(m, n, seed=m) * 100).to(dtype)
    for axis, left in ((0, n), (1, m)):
        out = torch.zeros(left, dtype=dtype)
        sums_kernel[(1,)](a, out, M=m, N=n, AXIS=axis, LEFT=left)
        assert same(out, torch.from_numpy(a.numpy().sum(axis, dtype=a.numpy().dtype))), axis


@triton.jit
def transposed_sums_kernel(a, b, out, N: tl.constexpr, AXIS: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i[:, None] * N + i[None, :])
    y = tl.trans(x)
    tl.store(out + i, tl.sum(y, AXIS))
    tl.store(out + N + i, tl.sum(y * 2 + 1, AXIS))
    tl.store(out + 2 * N + i, tl.sum(y + tl.load(b + i[:, None] * N + i[None, :]), AXIS))
    tl.store(out + 3 * N + i, tl.sum(tl.where(y > 0, y, i[:, None].to(tl.float32)), AXIS))


@pytest.mark.parametrize("axis", [0, 1])
def test_sums_follow_the_layout_that_numpy_would_choose(axis):
    a, b, out = randn(N, N, seed=1), randn(N, N, seed=2), torch.zeros(4, N)
    transposed_sums_kernel[(1,)](a, b, out, N=N, AXIS=axis)
    y, column = a.numpy().T, np.broadcast_to(np.arange(N, dtype=np.float32)[:, None], (N, N))
    zeros, ones = np.zeros((N, N), np.float32), np.ones((N, N), np.float32)  # as `splat` makes them
    arrays = [y, y * (ones + ones) + ones, y + b.numpy(), np.where(y > zeros, y, column)]
    assert same(out, torch.from_numpy(np.stack([x.sum(axis) for x in arrays])))


@triton.jit
def add_pairs(a, x, b, y):
    return a + b, x * y


@triton.jit
def left_or_larger(a, b):
    if a > b:
        return a
    return b * 2


@triton.jit
def reductions_kernel(a, out, ints, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)
    x = tl.load(a + i[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out + i, tl.max(x, 1))
    tl.store(ints + i, tl.argmin(x, 1))
    value, index = tl.max(x, 1, return_indices=True)
    tl.store(out + M + i, value)
    tl.store(ints + M + i, index)
    y, z = tl.reduce((x, x), 1, add_pairs)
    tl.store(out + 2 * M + i, y)
    tl.store(out + 3 * M + i, z)
    tl.store(out + 4 * M + i, tl.reduce(x, 1, left_or_larger))
    tl.store(ints + 2 * M + i, tl.xor_sum((x * 1000).to(tl.int32), 1))


def test_reductions_with_any_combiner():
    m, n = 4, 32
    a = randn(m, n)
    out, ints = torch.zeros(5 * m), torch.zeros(3 * m, dtype=torch.int32)
    reductions_kernel[(1,)](a, out, ints, M=m, N=n)
    sums, products, folded = a[:, 0].clone(), a[:, 0].clone(), a[:, 0].clone()
    for k in range(1, n):
        sums, products = sums + a[:, k], products * a[:, k]
        folded = torch.where(folded > a[:, k], folded, a[:, k] * 2)
    assert same(out, torch.cat([a.max(1).values, a.max(1).values, sums, products, folded]))
    bits = np.bitwise_xor.reduce((a * 1000).to(torch.int32).numpy(), 1)
    assert ints.tolist() == [*a.argmin(1).tolist(), *a.argmax(1).tolist(), *bits.tolist()]


@triton.jit
def nan_kernel(a, out, N: tl.constexpr):
    x = tl.load(a + tl.arange(0, N))
    tl.store(out, tl.max(x, 0))
    tl.store(out + 1, tl.min(x, 0))


def test_extremes_pass_over_nan():
    a = randn(N)
    a[5] = NAN
    out = torch.zeros(2)
    nan_kernel[(1,)](a, out, N=N)
    kept = a[~a.isnan()]
    assert out.tolist() == [kept.max(), kept.min()]


@triton.jit
def scans_kernel(a, out, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(a + at)
    tl.store(out + at, tl.cumsum(x, AXIS))
    tl.store(out + M * N + at, tl.cumsum(x, AXIS, reverse=True))
    y, z = tl.associative_scan((x, x), AXIS, add_pairs, reverse=True)
    tl.store(out + 2 * M * N + at, y)
    tl.store(out + 3 * M * N + at, z)


@pytest.mark.parametrize("axis", [0, 1])
def test_scans(axis):
    a = randn(8, 32)
    out = torch.zeros(4, 8, 32)
    scans_kernel[(1,)](a, out, M=8, N=32, AXIS=axis)
    back = a.flip(axis).numpy()
    assert same(out[0], torch.from_numpy(a.numpy().cumsum(axis)))
    assert same(out[1], torch.from_numpy(back.cumsum(axis)).flip(axis))
    assert same(out[2], torch.from_numpy(back.cumsum(axis)).flip(axis))
    assert same(out[3], torch.from_numpy(back.cumprod(axis)).flip(axis))


@triton.jit
def histogram_kernel(a, out, n, N: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + tl.arange(0, BINS), tl.histogram(tl.load(a + i), BINS, mask=i < n))


def test_histogram():
    a = torch.randint(0, 20, (N,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    out = torch.zeros(16, dtype=torch.int32)
    histogram_kernel[(1,)](a, out, 50, N=N, BINS=16)
    assert out.tolist() == torch.bincount(a[:50], minlength=20)[:16].tolist()


# ---- products ----


@triton.jit
def dot_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + i[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + j[None, :])
    tl.store(c + i[:, None] * N + j[None, :], tl.dot(x, y, out_dtype=OUT))


PRODUCTS = [(torch.int8, torch.int32, tl.int32), (torch.float64, torch.float64, tl.float64)]
PRODUCTS += [(d, torch.float32, tl.float32) for d in (torch.float16, torch.bfloat16, torch.float32, *FLOAT8[:2])]
PRODUCTS += [(torch.float16, torch.float16, tl.float16)]


@pytest.mark.parametrize(("operand", "result", "out"), PRODUCTS)
def test_products(operand, result, out):
    """Of small whole numbers, whose sums are exact in any order."""
    g = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-8, 8, s, generator=g).to(operand) for s in ((16, 32), (32, 64)))
    c = torch.zeros(16, 64, dtype=result)
    dot_kernel[(1,)](a, b, c, M=16, N=64, K=32, OUT=out)
    assert torch.equal(c.double(), a.double() @ b.double())


@triton.jit
def batched_kernel(a, b, c, B: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, B)[:, None, None] * N * N + tl.arange(0, N)[None, :, None] * N + tl.arange(0, N)[None, None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), tl.load(c + at)))


def test_batched_products():
    a, b, c = ((randn(2, 16, 16, seed=s) * 8).round() for s in (1, 2, 3))
    expected = a @ b + c
    batched_kernel[(1,)](a, b, c, B=2, N=16)
    assert torch.equal(c, expected)
