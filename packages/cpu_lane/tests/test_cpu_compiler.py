"""Arithmetic, conversions and memory in small kernels compiled for the CPU, against values made without Triton."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compiled import FLOAT8, INF, NAN, N, c_compiler, randn, same  # noqa: F401

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


def test_floats_that_no_unsigned_integer_holds():
    """As x86-64 converts one number; numpy's answer depends on which of its loops runs."""
    a = torch.tensor([NAN, INF, -INF, 2.0**64, 1e30, 2.0**63, -1.0, 3e9])
    out = torch.zeros(8, dtype=torch.uint64)
    convert_kernel[(1,)](a, out, N=8)
    assert out.tolist() == [2**63, 0, 2**63, 0, 0, 2**63, 2**64 - 1, 3 * 10**9]


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
def swap_kernel(values, expected, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(expected + i, tl.atomic_cas(values + i, tl.load(expected + i), i.to(values.dtype.element_ty)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compare_and_swap_compares_bits(dtype):
    """A NaN is itself, and the zeros are two."""
    values = torch.tensor([NAN, 0.0, -0.0, -0.0], dtype=dtype)
    expected = torch.tensor([NAN, -0.0, 0.0, -0.0], dtype=dtype)
    before = values.clone()
    swap_kernel[(1,)](values, expected, N=4)
    assert same(values, torch.tensor([0.0, 0.0, -0.0, 3.0], dtype=dtype))
    assert same(expected, before)


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
