"""Which of two twins runs: a Triton kernel, or the same as PyTorch operations.

A room's ``kernels`` have two twins. ``naive`` is the truth: loops over requests and rows that are easy to believe, for
tests. ``torch_ops`` are operations over the whole batch, for machines on which kernels are interpreted: there the
number of programs is what costs, not their size.
"""

import functools

import torch
import triton
import triton.language as tl

# Triton's own takes as long as an operation on a small tensor.
next_power_of_2 = functools.cache(triton.next_power_of_2)


def runs_kernels() -> bool:
    """Whether kernels run as machine code: on a GPU, or compiled for the processor."""
    return not triton.knobs.runtime.interpret


def kernels_multiply(device: torch.device) -> bool:
    """Whether kernels that are mostly matrix products run there: on a GPU. A processor's own library is faster."""
    return runs_kernels() and device.type == "cuda"


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """What the tensor cores multiply: the inputs' own type. The interpreter would multiply bfloat16's bits."""
    if not runs_kernels():
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
