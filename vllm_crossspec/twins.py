"""Which of two twins runs: a Triton kernel, or the same as PyTorch operations.

A room's ``kernels`` have two twins. ``naive`` is the truth: loops over requests and rows that are easy to believe, for
tests. ``torch_ops`` are operations over the whole batch, for machines on which kernels are interpreted: there the
number of programs is what costs, not their size.
"""

import torch
import triton


def runs_kernels() -> bool:
    """Whether kernels run as machine code: on a GPU, or compiled for the processor."""
    return not triton.knobs.runtime.interpret


def kernels_multiply(device: torch.device) -> bool:
    """Whether kernels that are mostly matrix products run there: on a GPU. A processor's own library is faster."""
    return runs_kernels() and device.type == "cuda"
