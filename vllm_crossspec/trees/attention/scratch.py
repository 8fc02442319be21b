"""Writing a tree level's keys and values into the scratch of its layer."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.trees.attention.base import DraftTail


@triton.jit
def row_of_query(query, queries_per_req, length, HAS_SHARED: tl.constexpr):
    """The scratch row of its request to which a level's query is written."""
    place = query % queries_per_req
    row = length - queries_per_req + place
    if HAS_SHARED:
        row = tl.where(place == queries_per_req - 1, 0, row + 1)
    return row


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
    row = row_of_query(query, queries_per_req, tl.load(length_ptr), HAS_SHARED)
    # A dummy replay of a CUDA graph may find any length there.
    if (row >= 0) & (row < capacity):
        column = tl.arange(0, BLOCK)
        mask = column < head_size
        target = scratch_ptr + (query // queries_per_req) * request_stride + row * row_stride + head * head_stride
        key = tl.load(key_ptr + query * key_row_stride + head * key_head_stride + column, mask=mask)
        tl.store(target + column, key.to(scratch_ptr.dtype.element_ty), mask=mask)
        value = tl.load(value_ptr + query * value_row_stride + head * value_head_stride + column, mask=mask)
        tl.store(target + value_offset + column, value.to(scratch_ptr.dtype.element_ty), mask=mask)


def write_level(key: torch.Tensor, value: torch.Tensor, tail: DraftTail) -> None:
    """Write the level's keys and values as the last ``queries_per_req`` rows of every request's tail; one launch.

    Args:
        key, value: [R * queries_per_req, Hkv, Dh], request by request; the last dimension is contiguous.
        tail: of the level; its scratch is written, except rows outside of it.
    """
    scratch = tail.scratch
    num_queries, num_heads, head_size = key.shape
    assert key.stride(2) == value.stride(2) == scratch.stride(4) == 1
    if num_queries == 0:
        return
    _write_level_kernel[(num_queries, num_heads)](
        key,
        *key.stride()[:2],
        value,
        *value.stride()[:2],
        scratch,
        *scratch.stride()[:4],
        tail.length,
        scratch.shape[1],
        tail.queries_per_req,
        head_size,
        HAS_SHARED=tail.has_shared,
        BLOCK=triton.next_power_of_2(head_size),
        num_warps=1,
    )


def write_level_naive(key: torch.Tensor, value: torch.Tensor, tail: DraftTail) -> None:
    """As :func:`write_level`; also used on CPUs in half precision."""
    rows = int(tail.length) - tail.queries_per_req + torch.arange(tail.queries_per_req)
    if tail.has_shared:
        rows = torch.cat([rows[1:], rows.new_zeros(1)])
    inside = (rows >= 0) & (rows < tail.scratch.shape[1])
    level = torch.stack([key, value], dim=1).unflatten(0, (-1, tail.queries_per_req))
    tail.scratch[: level.shape[0], rows[inside]] = level[:, inside].to(tail.scratch.dtype)
