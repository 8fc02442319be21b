"""What the CPU's attention copies: a level of a draft tree behind its prefix.

Copies and conversions only, in one launch, for around attention this small a dozen operations of PyTorch cost more than
its products do. Legend as in ``base``.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.engine.attention.base import DraftTail
from vllm_crossspec.engine.attention.scratch import row_of_query, write_level_naive
from vllm_crossspec.verify.naive import unpack_bits


def _part_of(head_size: int) -> int:
    """The largest power of two that divides it."""
    return head_size & -head_size


@triton.jit(do_not_specialize=["num_heads", "capacity", "length", "num_words", "queries_per_req", "head_size"])
def _append_level_kernel(
    key_ptr,  # [R * queries_per_req, Hkv, Dh]
    key_row_stride,
    key_head_stride,
    value_ptr,  # [R * queries_per_req, Hkv, Dh]
    value_row_stride,
    value_head_stride,
    scratch_ptr,  # [R, capacity, 2, Hkv, Dh]
    scratch_request_stride,
    dense_ptr,  # float32 [R, Hkv, tokens, 2 * Dh]
    dense_request_stride,
    dense_head_stride,
    prefix_lens_ptr,  # int32 [R]
    masks_ptr,  # int32 [R * queries_per_req, W]
    hidden_ptr,  # float32 [R * queries_per_req, length]
    num_heads,
    capacity,
    length,
    num_words,
    queries_per_req,
    head_size,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    request = query // queries_per_req
    row = row_of_query(query, queries_per_req, length, HAS_SHARED)
    if (row >= 0) & (row < capacity):
        width = num_heads * head_size
        token = tl.load(prefix_lens_ptr + request) + row
        for head in range(num_heads):
            kept = scratch_ptr + request * scratch_request_stride + row * 2 * width + head * head_size
            read = dense_ptr + request * dense_request_stride + head * dense_head_stride + token * 2 * head_size
            for start in range(0, head_size, BLOCK):  # a part of the head, so that nothing is masked
                column = start + tl.arange(0, BLOCK)
                key = tl.load(key_ptr + query * key_row_stride + head * key_head_stride + column)
                key = key.to(scratch_ptr.dtype.element_ty)
                tl.store(kept + column, key)
                tl.store(read + column, key.to(tl.float32))
                value = tl.load(value_ptr + query * value_row_stride + head * value_head_stride + column)
                value = value.to(scratch_ptr.dtype.element_ty)
                tl.store(kept + width + column, value)
                tl.store(read + head_size + column, value.to(tl.float32))
    bit = tl.arange(0, 32)
    for start in range(0, length, 32):
        word = tl.load(masks_ptr + query * num_words + start // 32)
        hidden = tl.where(((word >> bit) & 1) != 0, 0.0, float("-inf"))
        tl.store(hidden_ptr + query * length + start + bit, hidden, mask=start + bit < length)


def append_level(
    key: torch.Tensor,
    value: torch.Tensor,
    tail: DraftTail,
    length: int,
    dense: torch.Tensor,
    prefix_lens: torch.Tensor,
) -> torch.Tensor:
    """Write a level's keys and values into its layer's scratch and behind each request's prefix; one launch.

    Args:
        key: [R * queries_per_req, Hkv, Dh]; the last dimension contiguous.
        value: of the same shape.
        tail: of the level; its scratch, contiguous but for requests left out, is written as ``scratch.write_level``
            does.
        length: the tail's, on the host; ``tail.length`` is not read.
        dense: float32 [R, Hkv, tokens, 2 * Dh], contiguous: row r of a request's scratch is token ``prefix_lens + r``.
            Only the rows that are written to the scratch are written here.
        prefix_lens: int32 [at least R].

    Returns:
        float32 [R * queries_per_req, length], 0 where a row sees a row of the tail and -inf where it does not.
    """
    num_queries, num_heads, head_size = key.shape
    scratch, masks = tail.scratch, tail.row_mask
    assert key.stride(2) == value.stride(2) == prefix_lens.stride(0) == 1
    assert scratch[0].is_contiguous() and masks.is_contiguous() and dense.is_contiguous()
    assert length <= min(scratch.shape[1], 32 * masks.shape[1])
    hidden = torch.empty(num_queries, length)
    _append_level_kernel[(num_queries,)](
        key,
        key.stride(0),
        key.stride(1),
        value,
        value.stride(0),
        value.stride(1),
        scratch,
        scratch.stride(0),
        dense,
        dense.stride(0),
        dense.stride(1),
        prefix_lens,
        masks,
        hidden,
        num_heads,
        scratch.shape[1],
        length,
        masks.shape[1],
        tail.queries_per_req,
        head_size,
        HAS_SHARED=tail.has_shared,
        BLOCK=_part_of(head_size),
    )
    return hidden


def append_level_naive(
    key: torch.Tensor,
    value: torch.Tensor,
    tail: DraftTail,
    length: int,
    dense: torch.Tensor,
    prefix_lens: torch.Tensor,
) -> torch.Tensor:
    """:func:`append_level` in plain PyTorch: the truth for its test, and what runs where kernels are interpreted.

    It copies all rows of the tail, of which those above the level are there already.
    """
    write_level_naive(key, value, tail)
    copy_tail(tail.scratch, length, dense, prefix_lens.tolist())
    return hide(unpack_bits(tail.row_mask[: key.shape[0]])[:, :length])


def copy_tail(scratch: torch.Tensor, length: int, dense: torch.Tensor, prefix_lens: list[int]) -> None:
    """Copy the first rows of each request's scratch behind its prefix; shapes as in :func:`append_level`."""
    for into, rows, start in zip(dense, scratch[:, :length], prefix_lens, strict=False):
        into[:, start : start + length].unflatten(-1, (2, -1)).copy_(rows.permute(2, 0, 1, 3))


def hide(visible: torch.Tensor) -> torch.Tensor:
    """What is added to logits, float32, of bools: 0 where a key is seen and -inf where it is not."""
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
