"""Kernels that the tests of launches launch."""

import triton
import triton.language as tl

OFFSET = tl.constexpr(3)


@triton.jit
def scale_kernel(
    x_ptr,  # [n]
    y_ptr,  # [n]
    n,
    factor=2,
    BLOCK: tl.constexpr = 4,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def offset_kernel(
    x_ptr,  # [BLOCK]
    y_ptr,  # [BLOCK]
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i) + OFFSET)


@triton.jit
def named_kernel(key, grid, name, compiled, kernel, launch, len, type, int, warmup, *, hooks):
    tl.store(key, grid + name + compiled + kernel + launch + len + type + int + warmup + hooks)


@triton.jit
def varying_kernel(out, *numbers):
    total = 0
    for k in tl.static_range(len(numbers)):
        total = total * 10 + tl.load(numbers[k])
    tl.store(out, total)
