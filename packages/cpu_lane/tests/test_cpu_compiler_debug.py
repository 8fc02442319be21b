"""Kernels that the CPU's compiler refuses, that fail, that print, and that reach beyond their tensors."""

import math
import struct

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compiled import INF, NAN, bounds_check, c_compiler, line_of, same  # noqa: F401
from crossspec_cpu_lane import compiler, toolchain
from crossspec_cpu_lane.translate import translate
from crossspec_cpu_lane.ttir import UnsupportedError
from triton.tools.tensor_descriptor import TensorDescriptor

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
WIDE = """%wide = arith.extsi %i : tensor<4xi32> to tensor<4xi128> loc("/kernels/wide.py":7:3)
    tt.return"""
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


def test_a_constant_that_is_too_short():
    text = DENSE.format(elem="i1", text='"0x01"').replace("4x", "64x").replace("end = 4", "end = 64")
    with pytest.raises(UnsupportedError, match="cannot compile dense .*: a constant of 64 bits is written in 1 bytes"):
        translate(text)


@triton.jit
def assembly_kernel(out):
    tl.store(out, tl.inline_asm_elementwise("mov $0, $1;", "=r,r", [tl.program_id(0)], tl.int32, True, 1))


def test_what_is_not_covered_is_one_sentence(monkeypatch):
    monkeypatch.setattr(toolchain, "compile_c", lambda code, name: pytest.fail("the C compiler was called"))
    with pytest.raises(UnsupportedError) as e:
        assembly_kernel[(1,)](torch.zeros(1, dtype=torch.int32))
    line = assembly_kernel.fn.__code__.co_firstlineno + 2
    message = str(e.value.args[0])
    assert message.startswith(f"the CPU lane cannot compile assembly_kernel ({__file__}:{line}): ")
    assert "tt.elementwise_inline_asm" in message and "\n" not in message


def test_a_type_that_is_not_covered():
    text = DENSE.format(elem="i32", text="1").replace("tt.return", WIDE)
    with pytest.raises(UnsupportedError) as e:
        translate(text)
    said = "the CPU lane cannot compile dense (/kernels/wide.py:7): it has no translation of the type i128"
    assert e.value.args[0] == said


@triton.jit
def described_kernel(source, out):
    tl.store(out, tl.sum(source.load([0, 0])))


@triton.jit
def eighth_kernel(x: tl.float8e5, out):
    tl.store(out, x.to(tl.float32))


def test_arguments_that_cannot_be_passed_are_refused_before_the_c_compiler(monkeypatch):
    monkeypatch.setattr(toolchain, "compile_c", lambda code, name: pytest.fail("the C compiler was called"))
    descriptor = TensorDescriptor.from_tensor(torch.ones(16, 16), [8, 16])
    for kernel, given, kind, name in (
        (described_kernel, descriptor, "!tt.tensordesc<8x16xf32>", "source"),
        (eighth_kernel, 1.5, "f8E5M2", "x"),
    ):
        with pytest.raises(UnsupportedError) as e:
            kernel[(1,)](given, torch.zeros(1))
        assert str(e.value) == f"the CPU lane passes no argument of type {kind}: {name} of {kernel.__name__}"


@triton.jit
def narrow_kernel(small: tl.int8, half: tl.float16, brain: tl.bfloat16, out):
    tl.store(out, small.to(tl.float32))
    tl.store(out + 1, half.to(tl.float32))
    tl.store(out + 2, brain.to(tl.float32))


def test_narrow_numbers_as_arguments():
    out = torch.zeros(3)
    for brain in (1.2345, 1 + 2**-8, 1 + 3 * 2**-8, -3e38, 1e39, INF, NAN):
        narrow_kernel[(1,)](-7, 0.1, brain, out)
        expected = [-7.0, torch.tensor(0.1).half().item(), torch.tensor(brain).bfloat16().item()]
        assert same(out, torch.tensor(expected))
    for given, name, value in (((300, 0.1), "small", "300"), ((3, 1e6), "half", "1000000.0")):
        with pytest.raises(ValueError) as e:
            narrow_kernel[(1,)](*given, 1.0, out)
        said = f"the argument {name} of narrow_kernel cannot be passed as {value}: "
        assert str(e.value).startswith(said) and "\n" not in str(e.value)


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
def foreign_kernel(a):
    tl.device_print('100 % of "it" \\ ?3', tl.load(a))
    tl.device_assert(tl.load(a) < 5, "zu groß: ≥ 5 \\o/")


def test_text_is_as_it_was_written(capfd):
    with pytest.raises(AssertionError, match=r"zu groß: ≥ 5 \\o/ \(program"):
        foreign_kernel[(1,)](torch.tensor([7]), debug=True)
    assert capfd.readouterr().out == 'pid (0, 0, 0) 100 % of "it" \\ ?3: 7\n'


@triton.jit
def copy_kernel(source, target, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(source + i, mask=i < n)
    tl.store(target + i, x, mask=i < n)


@pytest.mark.usefixtures("bounds_check")
def test_a_load_out_of_bounds():
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


@pytest.mark.usefixtures("bounds_check")
def test_a_store_out_of_bounds():
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


@pytest.mark.usefixtures("bounds_check")
def test_pointers_are_followed_through_loops_and_branches():
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


@pytest.mark.usefixtures("bounds_check")
def test_pointers_read_from_memory_are_not_checked():
    a, out = torch.tensor([3.0, 4.0]), torch.zeros(1)
    indirect_kernel[(1,)](torch.tensor([a.data_ptr()]), out)
    assert out.item() == 4


@pytest.mark.usefixtures("bounds_check")
def test_strided_views_reach_to_their_last_element():
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
