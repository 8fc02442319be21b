"""What random programs found in the CPU lane's compiler, in a few lines each."""

import pytest
import torch
import triton
import triton.language as tl
from compiled import c_compiler  # noqa: F401


@triton.jit
def there_and_back_kernel(
    x_ptr,  # [N]
    y_ptr,  # [N]
    N: tl.constexpr,
):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x.to(tl.int32).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_integer_has_no_negative_zero(dtype):
    """Program 1740: the way to an integer and back is no truncation, which would keep the sign."""
    x = torch.tensor([-0.0, 0.0, -0.25, 0.25, -1.5, 1.5, -3.0, 3.0], dtype=dtype)
    y = torch.empty_like(x)
    there_and_back_kernel[(1,)](x, y, N=8)
    assert torch.equal(y.view(torch.int8), x.to(torch.int32).to(dtype).view(torch.int8))
