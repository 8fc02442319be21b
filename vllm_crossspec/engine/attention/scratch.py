"""Writing one level of a draft tree's keys and values into the scratch of its layer."""

import torch
import triton
import triton.language as tl


@triton.jit
def _write_level_kernel(
    key_ptr,  # [R * queries_per_req, Hkv, Dh]
    key_row_stride,
    key_head_stride,
    value_ptr,  # [R * queries_per_req, Hkv, Dh]
    value_row_stride,
    value_head_stride,
    scratch_ptr,  # [R, rows, 2, Hkv, Dh]
    request_stride,
    row_stride,
    value_offset,
    head_stride,
    length_ptr,  # int32 [1]
    capacity,
    queries_per_req,
    head_size,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    place = query % queries_per_req
    row = tl.load(length_ptr) - queries_per_req + place
    if HAS_SHARED:
        row = tl.where(place == queries_per_req - 1, 0, row + 1)
    # A replay of a CUDA graph for no one may find any length there.
    if (row >= 0) & (row < capacity):
        column = tl.arange(0, BLOCK)
        mask = column < head_size
        target = scratch_ptr + (query // queries_per_req) * request_stride + row * row_stride + head * head_stride
        key = tl.load(key_ptr + query * key_row_stride + head * key_head_stride + column, mask=mask)
        tl.store(target + column, key.to(scratch_ptr.dtype.element_ty), mask=mask)
        value = tl.load(value_ptr + query * value_row_stride + head * value_head_stride + column, mask=mask)
        tl.store(target + value_offset + column, value.to(scratch_ptr.dtype.element_ty), mask=mask)


def write_level(
    *,
    key: torch.Tensor,
    value: torch.Tensor,
    scratch: torch.Tensor,
    length: torch.Tensor,
    queries_per_req: int,
    has_shared: bool = False,
) -> None:
    """Write the level's keys and values as the last ``queries_per_req`` rows of every request's tail; one launch.

    Args:
        key: [R * queries_per_req, Hkv, Dh], the requests' rows one after another; the last dimension contiguous.
        value: of the same shape.
        scratch: [at least R, rows, 2, Hkv, Dh], written; the last dimension contiguous.
        length: int32 [1] on the device, rows of the tail with this level. Rows outside the scratch are not written.
        queries_per_req: rows of a request.
        has_shared: the last of them is written to row 0 of the scratch, and only the others are the tail's last rows.
    """
    num_queries, num_heads, head_size = key.shape
    assert key.stride(2) == value.stride(2) == scratch.stride(4) == 1
    if num_queries == 0:
        return
    _write_level_kernel[(num_queries, num_heads)](
        key,
        key.stride(0),
        key.stride(1),
        value,
        value.stride(0),
        value.stride(1),
        scratch,
        scratch.stride(0),
        scratch.stride(1),
        scratch.stride(2),
        scratch.stride(3),
        length,
        scratch.shape[1],
        queries_per_req,
        head_size,
        HAS_SHARED=has_shared,
        BLOCK=triton.next_power_of_2(head_size),
        num_warps=1,
    )


def write_level_naive(
    *,
    key: torch.Tensor,
    value: torch.Tensor,
    scratch: torch.Tensor,
    length: torch.Tensor,
    queries_per_req: int,
    has_shared: bool = False,
) -> None:
    """:func:`write_level` in plain PyTorch: its truth, and what a CPU runs where kernels are interpreted."""
    rows = int(length) - queries_per_req + torch.arange(queries_per_req)
    if has_shared:
        rows = torch.cat([rows[1:], rows.new_zeros(1)])
    inside = (rows >= 0) & (rows < scratch.shape[1])
    level = torch.stack([key, value], dim=1).unflatten(0, (-1, queries_per_req))
    scratch[: level.shape[0], rows[inside]] = level[:, inside].to(scratch.dtype)
