"""Small kernels, compiled for the CPU by every C compiler that is installed, against values made without Triton."""

import math
import os
import shutil
import struct

import numpy as np
import pytest
import torch

pytest.importorskip("crossspec_cpu_lane.translate")
if os.environ.get("TRITON_INTERPRET", "0") == "1" or torch.cuda.is_available():
    pytest.skip("these kernels are to be compiled for the CPU", allow_module_level=True)

import triton
import triton.language as tl
from crossspec_cpu_lane import compiler
from crossspec_cpu_lane.translate import translate
from crossspec_cpu_lane.ttir import UnsupportedError
from triton.language.extra import libdevice

N = 64
INF, NAN = float("inf"), float("nan")
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]


def forget_compiled_kernels():
    for value in globals().values():
        if isinstance(value, triton.runtime.JITFunction):
            value.device_caches.clear()


@pytest.fixture(autouse=True, params=COMPILERS)
def c_compiler(request, monkeypatch):
    """Kernels are compiled again for each C compiler."""
    monkeypatch.setenv("CC", request.param)
    compiler._identity.cache_clear()
    forget_compiled_kernels()
    yield request.param
    compiler._identity.cache_clear()
    forget_compiled_kernels()


@pytest.fixture
def bounds_check(monkeypatch):
    monkeypatch.setenv("TRITON_CPU_CHECK", "1")


def same(a, b):
    """Bit for bit, but for the bits of a NaN."""
    if a.is_floating_point():
        views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        nan = a.to(torch.float32).isnan() & b.to(torch.float32).isnan()
        return bool((nan | (a.view(views[a.itemsize]) == b.view(views[b.itemsize]))).all())
    return torch.equal(a, b)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- arithmetic ----


@triton.jit
def integer_kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x // y)
    tl.store(out + N + i, x % y)
    tl.store(out + 2 * N + i, x * y + x - y)
    tl.store(out + 3 * N + i, x << (y & 7))
    tl.store(out + 4 * N + i, x >> (y & 7))
    tl.store(out + 5 * N + i, (x < y).to(x.dtype) + 2 * (x >= y))
    tl.store(out + 6 * N + i, tl.minimum(x, y) ^ tl.maximum(x, y))
    tl.store(out + 7 * N + i, ~x | (y & 3))


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    dtype = np.dtype(name)
    info = np.iinfo(dtype)
    g = np.random.default_rng(3)
    a = g.integers(info.min, info.max, N, dtype=dtype, endpoint=True)
    b = g.integers(info.min, info.max, N, dtype=dtype, endpoint=True)
    a[:4], b[:4] = [info.max, info.min, 7, info.min], [1, 3, 0, info.max]
    if info.min < 0:
        a[4:8], b[4:8] = [info.min, -7, 7, -7], [-1, 2, -2, -2]
    out = torch.zeros(8 * N, dtype=getattr(torch, name))
    integer_kernel[(1,)](torch.from_numpy(a), torch.from_numpy(b), out, N=N)
    found = out.numpy().reshape(8, N)

    def wrapped(values):
        size = 1 << info.bits
        return np.array([(v - info.min) % size + info.min for v in values], dtype=dtype)

    x, y = [int(v) for v in a], [int(v) for v in b]
    trunc = [0 if q == 0 else abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1) for p, q in zip(x, y, strict=True)]
    nonzero = b != 0
    assert np.array_equal(found[0], wrapped(trunc))
    rest = wrapped([p - q * t for p, q, t in zip(x, y, trunc, strict=True)])
    assert np.array_equal(found[1][nonzero], rest[nonzero])
    pairs = list(zip(x, y, strict=True))
    assert np.array_equal(found[2], wrapped([p * q + p - q for p, q in pairs]))
    assert np.array_equal(found[3], wrapped([p << (q & 7) for p, q in pairs]))
    assert np.array_equal(found[4], wrapped([p >> (q & 7) for p, q in pairs]))
    assert np.array_equal(found[5], wrapped([(p < q) + 2 * (p >= q) for p, q in pairs]))
    assert np.array_equal(found[6], wrapped([min(p, q) ^ max(p, q) for p, q in pairs]))
    assert np.array_equal(found[7], wrapped([~p | (q & 3) for p, q in pairs]))


@triton.jit
def shift_kernel(a, out, s, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    tl.store(out + i, x << s)
    tl.store(out + N + i, x >> s)
    tl.store(out + 2 * N + i, (x.to(tl.uint32, bitcast=True) >> s).to(tl.int32, bitcast=True))
    tl.store(out + 3 * N + i, tl.umulhi(x, x))


def test_shifts_by_the_width_and_more():
    a = torch.tensor([5, -5, 2**31 - 1, -(2**31)], dtype=torch.int32)
    out = torch.zeros(16, dtype=torch.int32)
    shift_kernel[(1,)](a, out, 40, N=4)
    high = [((v & 0xFFFFFFFF) ** 2 >> 32) for v in a.tolist()]
    assert out.tolist()[:12] == [0] * 4 + [0, -1, 0, -1] + [0] * 4
    assert [v & 0xFFFFFFFF for v in out.tolist()[12:]] == high


@triton.jit
def float_kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x + y)
    tl.store(out + N + i, x * y - x)
    tl.store(out + 2 * N + i, x / y)
    tl.store(out + 3 * N + i, tl.maximum(x, y))
    tl.store(out + 4 * N + i, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 5 * N + i, -x)
    tl.store(out + 6 * N + i, tl.abs(x))
    tl.store(out + 7 * N + i, tl.clamp(x, -1.0, 1.0))
    tl.store(out + 8 * N + i, tl.where((x < y) | (x != x), x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats(dtype):
    special = torch.tensor([NAN, 1, INF, -INF, 0.0, -0.0, 1e-41, 3.0])
    a, b = (randn(N, seed=s) * 9 for s in (1, 2))
    a[:8], b[:8] = special, special.flip(0)
    a, b = a.to(dtype), b.to(dtype)
    out = torch.zeros(9 * N, dtype=dtype)
    float_kernel[(1,)](a, b, out, N=N)
    found = out.view(9, N)
    assert same(found[0], a + b)
    assert same(found[1], (a * b) - a)
    assert same(found[2], (a.float() / b.float()).to(dtype) if dtype != torch.float64 else a / b)
    zeros = (a == 0) & (b == 0)
    assert same(found[3][~zeros], torch.fmax(a, b)[~zeros])
    assert same(found[4][~zeros], torch.minimum(a, b)[~zeros])
    assert same(found[5], -a)
    assert same(found[6], a.abs())
    assert same(found[7][1:], a.clamp(-1, 1)[1:])
    assert same(found[8], torch.where((a < b) | a.isnan(), a, b))


@triton.jit
def compare_kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    bits = (x < y).to(tl.int32) + 2 * (x <= y) + 4 * (x > y) + 8 * (x >= y) + 16 * (x == y) + 32 * (x != y)
    tl.store(out + i, bits + 64 * (not (x < y)))


def test_nan_in_comparisons():
    a = torch.tensor([NAN, 1, NAN, 1, 2, 1, INF, 0.0])
    b = torch.tensor([1, NAN, NAN, 2, 1, 1, INF, -0.0])
    out = torch.zeros(8, dtype=torch.int32)
    compare_kernel[(1,)](a, b, out, N=8)
    expected = (a < b) + 2 * (a <= b) + 4 * (a > b) + 8 * (a >= b) + 16 * (a == b) + 32 * (a != b) + 64 * ~(a < b)
    assert out.tolist() == expected.tolist()


@triton.jit
def contraction_kernel(a, b, c, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y, z = tl.load(a + i), tl.load(b + i), tl.load(c + i)
    tl.store(out + i, x * y + z)
    tl.store(out + N + i, tl.fma(x, y, z))


def test_a_product_and_a_sum_are_not_contracted():
    a, b, c = (randn(4096, seed=s) for s in (1, 2, 3))
    out = torch.zeros(8192)
    contraction_kernel[(1,)](a, b, c, out, N=4096)
    fused = (a.double() * b.double() + c.double()).float()
    assert same(out[:4096], a * b + c)
    assert not same(out[4096:], a * b + c)
    assert (out[4096:] != fused).sum() <= 2  # the f64 sum is rounded, too


# ---- conversions ----


@triton.jit
def convert_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i).to(out.dtype.element_ty))


def hard_numbers():
    """Every bfloat16 and its neighbourhood: between two narrow numbers, on ties, at both ends of each type's range."""
    bits = torch.arange(0, 1 << 16, dtype=torch.int32) << 16
    offsets = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF], dtype=torch.int32)
    return (bits[:, None] + offsets).flatten().view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOAT8])
def test_narrow_floats_round_as_torch_does(dtype):
    a = hard_numbers()
    out = torch.zeros(a.numel(), dtype=dtype)
    convert_kernel[(1,)](a, out, N=a.numel())
    assert same(out, a.to(dtype))
    back = torch.zeros(a.numel())
    convert_kernel[(1,)](out, back, N=a.numel())
    assert same(back, out.to(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_f64_is_rounded_once(dtype):
    """A number just off a tie: rounding to f32 first would put it on the tie."""
    ties = {torch.float16: 1 + 2**-11, torch.bfloat16: 1 + 2**-8, torch.float8_e4m3fn: 1 + 2**-4}
    tie = ties.get(dtype, 1 + 2**-3)
    a = torch.tensor([tie + 2**-40, tie, tie - 2**-40, -tie - 2**-40], dtype=torch.float64)
    out = torch.zeros(4, dtype=dtype)
    convert_kernel[(1,)](a, out, N=4)
    up = 1 + 2 * (tie - 1)
    assert out.double().tolist() == [up, 1, 1, -up]


def test_integers_to_narrow_floats_round_once():
    a = torch.tensor([2**24 + 2**16 + 1, 2**62 + 2**54 + 1, -(2**62) - 2**54 - 1, 2**62 + 2**54])
    out = torch.zeros(4, dtype=torch.bfloat16)
    convert_kernel[(1,)](a, out, N=4)
    assert out.double().tolist() == [2**24 + 2**17, 2**62 + 2**55, -(2**62) - 2**55, 2**62]


@triton.jit
def toward_zero_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i).to(out.dtype.element_ty, fp_downcast_rounding="rtz"))


def test_rounding_toward_zero():
    a = torch.tensor([1 + 2**-8 + 2**-9, -1 - 2**-8 - 2**-9, 3e38, 1e-45, INF])
    out = torch.zeros(5, dtype=torch.bfloat16)
    toward_zero_kernel[(1,)](a[[0, 1, 2, 3, 4, 4, 4, 4]].contiguous(), out.new_zeros(8), N=8)
    out = out.new_zeros(8)
    toward_zero_kernel[(1,)](a[[0, 1, 2, 3, 4, 4, 4, 4]].contiguous(), out, N=8)
    bits = (a.view(torch.int32) >> 16 << 16).view(torch.float32)
    assert out[:5].float().tolist() == bits.tolist()


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8", "uint32"])
def test_floats_to_integers(source, name):
    a = torch.tensor([0.9, -0.9, 126.5, -3.7, 100.0, 65.0, 0.0, -0.0], dtype=source)
    if name.startswith("u"):
        a = a.abs()
    out = torch.zeros(8, dtype=getattr(torch, name))
    convert_kernel[(1,)](a, out, N=8)
    assert out.tolist() == [int(v) for v in a.tolist()]


def test_floats_that_no_integer_holds():
    a = torch.tensor([NAN, INF, -INF, 3e9, -3e9, 2.0**63, -(2.0**63), 1e30])
    out = torch.zeros(8, dtype=torch.int32)
    convert_kernel[(1,)](a, out, N=8)
    assert out.tolist() == [-(2**31)] * 8
    long = torch.zeros(8, dtype=torch.int64)
    convert_kernel[(1,)](a, long, N=8)
    low = -(2**63)
    assert long.tolist() == [low, low, low, 3 * 10**9, -3 * 10**9, low, low, low]


@triton.jit
def e4b15_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i).to(tl.float8e4b15).to(tl.float32))


def test_float8_e4b15():
    values = [(8 + m) * 2.0 ** (e - 18) if e else m * 2.0**-17 for e in range(16) for m in range(8)]
    a = torch.tensor(values + [-v for v in values])
    out = torch.zeros(256)
    e4b15_kernel[(1,)](a, out, N=256)
    assert out.tolist() == a.tolist()


@triton.jit
def bitcast_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i).to(tl.int32, bitcast=True))


def test_bitcast():
    a = randn(N)
    out = torch.zeros(N, dtype=torch.int32)
    bitcast_kernel[(1,)](a, out, N=N)
    assert torch.equal(out, a.view(torch.int32))


# ---- memory ----


@triton.jit
def masked_kernel(a, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i, mask=i < n, other=-2.5), mask=i < n + 1)


def test_masked_off_elements_touch_no_memory():
    a, out = torch.ones(3), torch.zeros(8)
    masked_kernel[(1,)](a, out, 3, N=8)
    assert out.tolist() == [1, 1, 1, -2.5, 0, 0, 0, 0]
    # A mask that is false everywhere: not even a pointer to nowhere is followed.
    nowhere = torch.empty(0)
    masked_kernel[(1,)](nowhere, nowhere, -1, N=1024)


@triton.jit
def bool_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    tl.store(out + i, x ^ (i % 2 == 0))


def test_bools():
    a = torch.arange(16) % 3 == 0
    out = torch.zeros(16, dtype=torch.bool)
    bool_kernel[(1,)](a, out, N=16)
    assert out.tolist() == [(i % 3 == 0) != (i % 2 == 0) for i in range(16)]


@triton.jit
def rotate_kernel(a, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(a + (i + 1) % N, tl.load(a + i))


def test_loads_are_complete_before_stores():
    a = randn(N)
    expected = a.roll(1)
    rotate_kernel[(1,)](a, N=N)
    assert same(a, expected)


@triton.jit
def atomic_kernel(counts, out, N: tl.constexpr):
    i = tl.arange(0, N)
    old = tl.atomic_add(counts + i % 4, (i + 1).to(counts.dtype.element_ty), mask=i % 2 == 0)
    tl.store(out + i, old.to(tl.float32))
    tl.store(out + N, tl.atomic_cas(counts + 5, tl.load(counts + 5), tl.load(counts + 4)).to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32])
def test_atomics(dtype):
    if dtype in (torch.float16, torch.bfloat16):
        counts, out = torch.tensor([1, 1, 1, 1, 7, 9], dtype=dtype), torch.zeros(17)
        half_atomic_kernel[(1,)](counts, N=16)
        assert counts.tolist() == [1 + sum(range(1, 17, 4)), 1, 1 + sum(range(3, 17, 4)), 1, 7, 9]
        return
    counts, out = torch.tensor([1, 1, 1, 1, 7, 9], dtype=dtype), torch.zeros(17)
    atomic_kernel[(1,)](counts, out, N=16)
    assert counts.tolist() == [1 + sum(range(1, 17, 4)), 1, 1 + sum(range(3, 17, 4)), 1, 7, 7]
    assert out[:8].tolist() == [1, 0, 1, 0, 2, 0, 4, 0]
    assert out[16] == 9


@triton.jit
def half_atomic_kernel(counts, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(counts + i % 4, (i + 1).to(counts.dtype.element_ty), mask=i % 2 == 0)


@triton.jit
def extremes_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    tl.atomic_max(out + i * 0, x)
    tl.atomic_min(out + 1 + i * 0, x)
    tl.atomic_xchg(out + 2 + i * 0, x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_atomic_extremes(dtype):
    a = (randn(N) * 100).to(dtype)
    out = torch.zeros(3, dtype=dtype)
    extremes_kernel[(1,)](a, out, N=N)
    assert out.tolist() == [a.max(), a.min(), a[-1]]


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


# ---- control flow ----


@triton.jit(noinline=True)
def scaled(x, y):
    if x > 3:
        return x * y
    return x - y


@triton.jit
def flow_kernel(a, out, n, low, high):
    pid = tl.program_id(0)
    if pid == 2:
        return
    total = 0
    for i in range(low, high, 2):
        if i % 3 == 0:
            for j in range(i):
                total += j
        else:
            total -= 1
    c = 0
    while c < n and tl.load(a + c) < 10:
        total += c * tl.load(a + c)
        c += 1
    tl.store(out + pid, scaled(total, pid) if total > 0 else scaled(2, pid))
    tl.store(out + 8, tl.num_programs(0))


def test_control_flow():
    a = torch.tensor([1, 5, 3, 12, 4], dtype=torch.int32)
    out = torch.full((9,), -1, dtype=torch.int32)
    flow_kernel[(5,)](a, out, 5, 1, 14)
    total = sum(sum(range(i)) if i % 3 == 0 else -1 for i in range(1, 14, 2)) + 1 * 5 + 2 * 3
    assert out.tolist() == [total * p if p != 2 else -1 for p in range(5)] + [-1, -1, -1, 5]


@triton.jit
def carried_kernel(a, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(a + N + i)
    for _ in range(n):
        x, y = y, x + y
    tl.store(out + i, x)
    tl.store(out + N + i, y)


def test_loops_exchange_tensors():
    a, out = randn(2 * N), torch.zeros(2 * N)
    carried_kernel[(1,)](a, out, 5, N=N)
    x, y = a[:N], a[N:]
    for _ in range(5):
        x, y = y, x + y
    assert same(out, torch.cat([x, y]))


COUNTED = """
module {{
  tt.func public @counted(%p: !tt.ptr<i32>, %low: i32, %high: i32, %step: i32) {{
    %zero = arith.constant 0 : i32
    %one = arith.constant 1 : i32
    %n = scf.for {sign}%i = %low to %high step %step iter_args(%k = %zero) -> (i32)  : i32 {{
      %m = arith.addi %k, %one : i32
      scf.yield %m : i32
    }}
    tt.store %p, %n : !tt.ptr<i32>
    tt.return
  }}
}}
"""
BIG = 2**31 - 1
COUNTS = [("unsigned ", 5, -1, 1 << 30, 4), ("", 5, -1, 1 << 30, 0), ("", 0, BIG, 1 << 30, 2), ("", -3, 4, 2, 4)]


@pytest.mark.parametrize(("sign", "low", "high", "step", "count"), COUNTS)
def test_loops_that_count_unsigned_or_to_the_end_of_their_type(tmp_path, sign, low, high, step, count):
    path = tmp_path / "counted.ttir"
    path.write_text(COUNTED.format(sign=sign))
    kernel = triton.compile(str(path), target=triton.runtime.driver.active.get_current_target())
    out = torch.zeros(1, dtype=torch.int32)
    kernel[(1, 1, 1)](out, low, high, step)
    assert out.item() == count


@triton.jit
def mapped(x, y):
    if x > y:
        return x, y
    return y + 1, x


@triton.jit
def map_kernel(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.map_elementwise(mapped, tl.load(a + i), tl.load(b + i))
    tl.store(out + i, x)
    tl.store(out + N + i, y)
    z, _ = tl.map_elementwise(mapped, x, y)
    tl.store(out + 2 * N + i, z)


def test_map_elementwise():
    a, b, out = randn(N, seed=1), randn(N, seed=2), torch.zeros(3 * N)
    map_kernel[(1,)](a, b, out, N=N)
    x, y = torch.where(a > b, a, b + 1), torch.where(a > b, b, a)
    assert same(out, torch.cat([x, y, torch.where(x > y, x, y + 1)]))


# ---- functions ----


@triton.jit
def math_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    tl.store(out + i, tl.exp(x))
    tl.store(out + N + i, tl.log(tl.abs(x)))
    tl.store(out + 2 * N + i, tl.sin(x) + tl.cos(x))
    tl.store(out + 3 * N + i, tl.exp2(x) + tl.log2(tl.abs(x)))
    tl.store(out + 4 * N + i, tl.erf(x))
    tl.store(out + 5 * N + i, libdevice.log1p(tl.abs(x)))
    tl.store(out + 6 * N + i, libdevice.tanh(x))
    tl.store(out + 7 * N + i, libdevice.pow(tl.abs(x), x))
    tl.store(out + 8 * N + i, tl.sigmoid(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transcendental_functions(dtype):
    a = (randn(N) * 3).to(dtype)
    out = torch.zeros(9, N, dtype=dtype)
    math_kernel[(1,)](a, out, N=N)
    x = a.double()
    expected = [x.exp(), x.abs().log(), x.sin() + x.cos(), x.exp2() + x.abs().log2(), x.erf(), x.abs().log1p()]
    expected = torch.stack([*expected, x.tanh(), x.abs() ** x, x.sigmoid()])
    # A few units in the last place: C's functions, and the sums of two of them.
    assert torch.allclose(out.double(), expected, rtol=16 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@triton.jit
def exact_kernel(a, out, ints, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    tl.store(out + i, tl.sqrt_rn(tl.abs(x)))
    tl.store(out + N + i, tl.floor(x) + 16 * tl.ceil(x))
    tl.store(out + 2 * N + i, libdevice.rint(x))
    tl.store(out + 3 * N + i, libdevice.trunc(x))
    tl.store(out + 4 * N + i, x % 1.5)
    n = tl.load(ints + i)
    tl.store(ints + N + i, libdevice.popc(n))
    tl.store(ints + 2 * N + i, libdevice.clz(n))
    tl.store(ints + 3 * N + i, libdevice.isnan(x).to(tl.int32) + 2 * libdevice.isinf(x).to(tl.int32))
    tl.store(ints + 4 * N + i, libdevice.brev(n))


def test_exact_functions():
    a = randn(N) * 5
    a[:6] = torch.tensor([0.5, 1.5, 2.5, -0.5, NAN, INF])
    ints = torch.zeros(5 * N, dtype=torch.int32)
    ints[:N] = torch.randint(-(2**31), 2**31 - 1, (N,), generator=torch.Generator().manual_seed(1))
    ints[0] = 0
    out = torch.zeros(5, N)
    exact_kernel[(1,)](a, out, ints, N=N)
    expected = [a.abs().sqrt(), a.floor() + 16 * a.ceil(), a.round(), a.trunc(), a.fmod(1.5)]
    assert same(out, torch.stack(expected))
    bits = [f"{v & 0xFFFFFFFF:032b}" for v in ints[:N].tolist()]
    rows = ints.view(5, N)
    assert rows[1].tolist() == [b.count("1") for b in bits]
    assert rows[2].tolist() == [len(b) - len(b.lstrip("0")) for b in bits]
    assert rows[3].tolist() == (a.isnan() + 2 * a.isinf()).tolist()
    assert [v & 0xFFFFFFFF for v in rows[4].tolist()] == [int(b[::-1], 2) for b in bits]


@triton.jit
def random_kernel(out, ints, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.rand(seed, i))
    tl.store(out + N + i, tl.randn(seed, i))
    tl.store(ints + i, tl.randint(seed, i))


def philox(seed, counter):
    key, c, mask = [seed & 0xFFFFFFFF, seed >> 32], [counter, 0, 0, 0], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c[0]


def test_philox():
    out, ints = torch.zeros(2 * N), torch.zeros(N, dtype=torch.int32)
    seed = 0x1234567890ABCDEF
    random_kernel[(1,)](out, ints, seed, N=N)
    assert [v & 0xFFFFFFFF for v in ints.tolist()] == [philox(seed, i) for i in range(N)]
    assert out[:N].min() >= 0 and out[:N].max() < 1 and 0.3 < out[:N].mean() < 0.7
    assert abs(out[N:].mean()) < 0.5 and 0.6 < out[N:].std() < 1.4


# ---- text of Triton's IR ----

DENSE = """
module {{
  tt.func public @dense(%p: !tt.ptr<{elem}>) {{
    %c = arith.constant dense<{text}> : tensor<4x{elem}>
    %i = tt.make_range {{end = 4 : i32, start = 0 : i32}} : tensor<4xi32>
    %q = tt.splat %p : !tt.ptr<{elem}> -> tensor<4x!tt.ptr<{elem}>>
    %r = tt.addptr %q, %i : tensor<4x!tt.ptr<{elem}>>, tensor<4xi32>
    tt.store %r, %c : tensor<4x!tt.ptr<{elem}>>
    tt.return
  }}
}}
"""
HALVES = struct.pack("<4e", 1.0, -2.0, 0.5, INF).hex().upper()
DENSES = [
    ("i32", "[1, -2, 3, 4]", torch.int32, [1, -2, 3, 4]),
    ("f32", "[1.0, -2.5, 0x7F800000, 0.0]", torch.float32, [1, -2.5, INF, 0]),
    ("i64", f'"0x{struct.pack("<4q", 5, -6, 2**40, -(2**63)).hex()}"', torch.int64, [5, -6, 2**40, -(2**63)]),
    ("f16", f'"0x{HALVES}"', torch.float16, [1, -2, 0.5, INF]),
    ("f8E4M3FN", "[1.0, -0.5, 448.0, 0x7F]", torch.float8_e4m3fn, [1, -0.5, 448, NAN]),
    ("f32", "-1.5", torch.float32, [-1.5] * 4),
]


@pytest.mark.parametrize(("elem", "text", "dtype", "values"), DENSES)
def test_constant_tensors(tmp_path, elem, text, dtype, values):
    path = tmp_path / "dense.ttir"
    path.write_text(DENSE.format(elem=elem, text=text))
    kernel = triton.compile(str(path), target=triton.runtime.driver.active.get_current_target())
    out = torch.zeros(4, dtype=dtype)
    kernel[(1, 1, 1)](out)
    assert np.array_equal(out.double().numpy(), np.array(values, dtype=np.float64), equal_nan=True)


@triton.jit
def assembly_kernel(out):
    tl.store(out, tl.inline_asm_elementwise("mov $0, $1;", "=r,r", [tl.program_id(0)], tl.int32, True, 1))


def test_what_is_not_covered_is_one_sentence(monkeypatch):
    monkeypatch.setattr(compiler, "_compile", lambda code: pytest.fail("the C compiler was called"))
    with pytest.raises(UnsupportedError) as e:
        assembly_kernel[(1,)](torch.zeros(1, dtype=torch.int32))
    line = assembly_kernel.fn.__code__.co_firstlineno + 2
    message = str(e.value.args[0])
    assert message.startswith(f"the CPU lane cannot compile assembly_kernel ({__file__}:{line}): ")
    assert "tt.elementwise_inline_asm" in message and "\n" not in message


def test_a_type_that_is_not_covered():
    text = DENSE.format(elem="i128", text="1")
    with pytest.raises(UnsupportedError, match="i128"):
        translate(text)


# ---- debugging ----


@triton.jit
def assert_kernel(a, n, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i, mask=i < n, other=0)
    tl.device_assert(x < 5, "too large")
    tl.store(a + i, x + 1)


def test_device_assert():
    a = torch.tensor([1, 2, 9, 3], dtype=torch.int32)
    assert_kernel[(1,)](a, 4, N=4)  # without debug it is not there
    assert a.tolist() == [2, 3, 10, 4]
    line = assert_kernel.fn.__code__.co_firstlineno + 4
    with pytest.raises(AssertionError) as e:
        assert_kernel[(1,)](a, 4, N=4, debug=True)
    assert str(e.value) == f"assert_kernel ({__file__}:{line}): too large (program (0, 0, 0))"
    assert a.tolist() == [2, 3, 10, 4]
    assert_kernel[(1,)](a, 2, N=4, debug=True)
    assert a.tolist() == [3, 4, 1, 1]


@triton.jit
def print_kernel(a, N: tl.constexpr):
    tl.device_print("value", tl.load(a + tl.arange(0, N)))
    tl.device_print("program", tl.program_id(0), hex=True)


def test_device_print(capfd):
    print_kernel[(2,)](torch.tensor([1.5, -2.0]), N=2)
    lines = capfd.readouterr().out.splitlines()
    assert lines == [
        line
        for p in range(2)
        for line in (
            f"pid ({p}, 0, 0) idx (0) value: 1.500000",
            f"pid ({p}, 0, 0) idx (1) value: -2.000000",
            f"pid ({p}, 0, 0) program: 0x0000000{p}",
        )
    ]


@triton.jit
def copy_kernel(source, target, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(source + i, mask=i < n)
    tl.store(target + i, x, mask=i < n)


def line_of(kernel, offset):
    return kernel.fn.__code__.co_firstlineno + offset


def test_a_load_out_of_bounds(bounds_check):
    storage = torch.arange(64, dtype=torch.float32)
    source, target = storage[:20], torch.zeros(64)
    copy_kernel[(2,)](source, target, 20, N=16)
    assert target[:20].tolist() == source.tolist()
    with pytest.raises(IndexError) as e:
        copy_kernel[(2,)](source, target, 24, N=16)
    assert str(e.value) == (
        f"copy_kernel ({__file__}:{line_of(copy_kernel, 3)}): the load is out of bounds, at element 20 of source,"
        " which has 20 elements (program (1, 0, 0))"
    )


def test_a_store_out_of_bounds(bounds_check):
    storage = torch.zeros(64)
    source, target = torch.ones(64), storage[:20]
    with pytest.raises(IndexError) as e:
        copy_kernel[(2,)](source, target, 24, N=16)
    assert str(e.value) == (
        f"copy_kernel ({__file__}:{line_of(copy_kernel, 4)}): the store is out of bounds, at element 20 of target,"
        " which has 20 elements (program (1, 0, 0))"
    )
    assert storage.tolist() == [1] * 20 + [0] * 44  # what lies behind was not touched


@triton.jit
def walk_kernel(a, b, out, n, which):
    p = a + 0
    if which:
        p = b + 0
    total = 0.0
    for _ in range(n):
        total += tl.load(p)
        p += 1
    tl.atomic_add(out + n, total)


def test_pointers_are_followed_through_loops_and_branches(bounds_check):
    a, b, out = torch.ones(8), torch.ones(4), torch.zeros(9)
    walk_kernel[(1,)](a, b, out, 8, 0)
    assert out[8] == 8
    with pytest.raises(IndexError, match="the load is out of bounds"):
        walk_kernel[(1,)](a, b, torch.zeros(10), 9, 0)
    with pytest.raises(IndexError, match="the atomic operation is out of bounds, at element 4 of out, which has 4"):
        walk_kernel[(1,)](a, b, torch.zeros(4), 4, 1)
    with pytest.raises(IndexError, match="at element -1 of source"):
        before_kernel[(1,)](a[1:], out)


@triton.jit
def before_kernel(source, target):
    tl.store(target, tl.load(source - 1))


@triton.jit
def indirect_kernel(pointers, out):
    p = tl.load(pointers).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(p + 1))


def test_pointers_read_from_memory_are_not_checked(bounds_check):
    a, out = torch.tensor([3.0, 4.0]), torch.zeros(1)
    indirect_kernel[(1,)](torch.tensor([a.data_ptr()]), out)
    assert out.item() == 4


def test_strided_views_reach_to_their_last_element(bounds_check):
    a = torch.arange(32, dtype=torch.float32).view(4, 8)[:, 3]
    out = torch.zeros(25)
    copy_kernel[(1,)](a, out, 25, N=32)
    assert out.tolist() == list(range(3, 28))
    with pytest.raises(IndexError, match="at element 25 of source, which has 25 elements"):
        copy_kernel[(1,)](a, torch.zeros(26), 26, N=32)


def test_checked_kernels_have_a_cache_entry_of_their_own(monkeypatch):
    plain = compiler.CBackend(triton.runtime.driver.active.get_current_target()).parse_options({})
    monkeypatch.setenv("TRITON_CPU_CHECK", "1")
    checked = compiler.CBackend(triton.runtime.driver.active.get_current_target()).parse_options({})
    assert plain.hash() != checked.hash() and checked.check


@triton.jit
def large_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.cumsum(tl.load(a + i), 0))


def test_large_tensors_are_not_on_the_stack():
    """A thread's stack holds 8 MiB."""
    n = 1 << 20
    a, out = torch.ones(n), torch.zeros(n)
    large_kernel[(1,)](a, out, N=n)
    assert out[-1] == n and math.isclose(out[n // 2].item(), n // 2 + 1)
