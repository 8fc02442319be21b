"""Control flow and functions in small kernels compiled for the CPU, against values made without Triton."""

import pytest
import torch
import triton
import triton.language as tl
from compiled import INF, NAN, N, c_compiler, randn, same  # noqa: F401
from triton.language.extra import libdevice

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
def while_kernel(a, numbers, out, floats, N: tl.constexpr):
    c = 0
    while c < 5:
        c += 2
    tl.store(out, c)
    x = tl.load(a + tl.arange(0, N))
    while tl.sum(x) < 100:
        x = x * 2
    tl.store(floats + tl.arange(0, N), x)
    p = numbers
    while tl.load(p) != 0:
        p += 1
    tl.store(out + 1, tl.load(p + 1))
    while tl.load(numbers) > 1:
        tl.store(numbers, tl.load(numbers) - 1)
    n, y = 0, 1.5
    while n < 3:
        n, y = n + 1, y * y
    tl.store(floats + N, y)


def test_a_while_carries_a_number_a_tensor_a_pointer_nothing_and_several():
    a, floats = torch.tensor([1.0, 2, 3, 4]), torch.zeros(5)
    numbers, out = torch.tensor([9, 4, 0, 7], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    while_kernel[(1,)](a, numbers, out, floats, N=4)
    assert out.tolist() == [6, 7]
    assert floats.tolist() == [16, 32, 48, 64, 1.5**8]
    assert numbers.tolist() == [1, 4, 0, 7]


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
def turns_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    tl.store(out + i, libdevice.sinpi(x))
    tl.store(out + N + i, libdevice.cospi(x))
    tl.store(out + 2 * N + i, libdevice.erfcx(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_turns_and_scaled_error_functions(dtype):
    """Turns far from 0 are as exact as near it, and `erfcx` neither overflows nor vanishes."""
    far = 2.0**21 if dtype == torch.float32 else 2.0**50
    turns = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, -0.25, -0.5, -1, far + 0.25, far + 1.5, -far - 1]
    others = [-30, -5, 4, 9.5, 11.9, 12.1, 26, 60, 1e4, 1e18]
    a = torch.tensor([*turns, *others, NAN, INF, *[0] * 6], dtype=dtype)
    out = torch.zeros(3, 32, dtype=dtype)
    turns_kernel[(1,)](a, out, N=32)
    half = 0.5**0.5
    sines = [0, half, 1, half, 0, -half, -1, -half, -half, -1, 0, half, -1, 0]
    cosines = [1, half, 0, -half, -1, -half, 0, half, half, 0, -1, half, 0, -1]
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 0.0}
    for found, expected in zip(out.double(), (sines, cosines), strict=False):
        assert torch.allclose(found[:14], torch.tensor(expected, dtype=torch.float64), **tolerance)
        assert found[24:26].isnan().all()
    expected = torch.special.erfcx(a.double())
    within = a < far
    assert torch.allclose(out[2].double()[within], expected.to(dtype).double()[within], **tolerance)


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
    # PyTorch may round a square root of float32 the other way; one of float64 rounds once.
    expected = [a.abs().double().sqrt().float(), a.floor() + 16 * a.ceil(), a.round(), a.trunc(), a.fmod(1.5)]
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
