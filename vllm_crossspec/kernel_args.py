"""Arguments shared by several kernels' launches."""

import functools

import torch
import triton
import triton.language as tl

# Cached, because Triton's function takes as long as an operation on a small tensor.
next_power_of_2 = functools.cache(triton.next_power_of_2)


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """The type in which tensor cores multiply: the inputs' own."""
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
