"""The prefix pass of layers with a sliding window: every row's own piece of the prefix, and its log-sum-exp.

A row at depth d of a tree whose root is at position P sees the keys from P + d - window + 1 on. FlashAttention's
windows go by a row's place in the batch, and a tree's rows stand there by probability, not by depth; so it cannot be
told where the windows of a tree begin. A window is short, which is its point: this kernel walks over what the root
sees, for all rows of a request together, and hides from each row what is too far away for its depth. Its work is
bounded by the window, whatever the context.

Which depth a row has, its mask says: the root, its ancestors and itself are the rows that it sees. The tail itself is
left to ``tail_attention``.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.twins import operand_type
from vllm_crossspec.verify.tail_attention import (
    LOG2_E,
    UNSCALED,
    PagedTail,
    Scales,
    Softmax,
    continue_softmax,
    count_seen,
    scale_arguments,
    scaled,
    tile_sizes,
)


# The log-sum-exp is as wide as the batch: a variant for each divisibility would be compiled in the middle of serving.
@triton.jit(do_not_specialize=["lse_head_stride"])
def _window_attention_kernel(
    query_ptr,  # [rows, Hq, D]
    query_row_stride,
    query_head_stride,
    out_ptr,  # [rows, Hq, D]
    out_row_stride,
    out_head_stride,
    lse_ptr,  # float32 [Hq, rows], natural log
    lse_head_stride,
    lse_row_stride,
    query_start_loc_ptr,  # int32 [R + 1]
    row_mask_ptr,  # int32 [rows, W]
    row_mask_stride,
    num_words,  # W
    cache_ptr,  # [blocks, kv_heads, block_size, 2 * D]
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    num_blocks,
    block_table_ptr,  # int32 [R, max_blocks]
    block_table_stride,
    max_blocks,
    prefix_len_ptr,  # int32 [R]
    seq_lens_ptr,  # int32 [R]; unused if not TAILS_IN_CACHE
    query_scale_ptr,  # float32 [kv_heads]; None where nothing is quantised, or queries are not
    query_scale_stride,
    key_scale_ptr,  # float32 [kv_heads]; None if the cache is not quantised
    key_scale_stride,
    value_scale_ptr,  # likewise
    value_scale_stride,
    scale_log2,
    TAILS_IN_CACHE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_P2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(query_start_loc_ptr + request)
    num_rows = tl.load(query_start_loc_ptr + request + 1) - first
    tile = tl.program_id(2) * BLOCK_M
    if tile < num_rows * GROUP:
        m = tile + tl.arange(0, BLOCK_M)
        present = m < num_rows * GROUP
        row = (first + m // GROUP).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        column = tl.arange(0, HEAD_P2)
        element = present[:, None] & (column < HEAD)[None, :]
        query = tl.load(
            query_ptr + (row * query_row_stride + head * query_head_stride)[:, None] + column[None, :],
            mask=element,
            other=0.0,
        ).to(out_ptr.dtype.element_ty)
        scale_log2 = scaled(scale_log2, query_scale_ptr, query_scale_stride, kv_head)
        scale_log2 = scaled(scale_log2, key_scale_ptr, key_scale_stride, kv_head)
        # Replays of a captured graph see stale lengths, so that none of them is trusted with an address.
        length = tl.maximum(tl.load(prefix_len_ptr + request), 0)
        depth = count_seen(row_mask_ptr + row * row_mask_stride, present, num_words)
        nearest = 1
        if TAILS_IN_CACHE:
            # A request without drafts has one row, whose own key is the prefix's last; its mask is not written.
            nearest = (tl.load(seq_lens_ptr + request) > length).to(tl.int32)
            depth = tl.where(nearest > 0, depth, 0)
        begin = length + depth - WINDOW
        maximum = tl.where(present, float("-inf"), float("-inf"))
        total = tl.where(present, 0.0, 0.0)
        accumulator = tl.where(element, 0.0, 0.0)
        base = cache_ptr + kv_head.to(tl.int64) * cache_head_stride

        # From what the root sees on: blocks before it may be another request's by now.
        for key_start in tl.range(tl.maximum(length + nearest - WINDOW, 0), length, BLOCK_N):
            key = key_start + tl.arange(0, BLOCK_N)
            in_prefix = key < length
            entry = tl.minimum(key // BLOCK_SIZE, max_blocks - 1)
            place = block_table_ptr + request.to(tl.int64) * block_table_stride + entry
            block = tl.load(place, mask=in_prefix, other=0)
            block = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
            offset = block * cache_block_stride + (key % BLOCK_SIZE).to(tl.int64) * cache_token_stride
            wanted = in_prefix[:, None] & (column < HEAD)[None, :]
            address = base + offset[:, None] + column[None, :]
            k = tl.load(address, mask=wanted, other=0.0)
            v = tl.load(address + HEAD, mask=wanted, other=0.0)
            maximum, total, accumulator = continue_softmax(
                query,
                k,
                v,
                in_prefix[None, :] & (key[None, :] >= begin[:, None]),
                scale_log2,
                maximum,
                total,
                accumulator,
                SOFT_CAP,
                PRECISION,
                OPERAND,
            )

        sees = total > 0
        total = tl.where(sees, total, 1.0)
        lse = tl.where(sees, (maximum + tl.log2(total)) / LOG2_E, float("-inf"))
        tl.store(lse_ptr + head * lse_head_stride + row * lse_row_stride, lse, mask=present)
        if value_scale_ptr is not None:
            accumulator = accumulator * tl.load(value_scale_ptr + kv_head * value_scale_stride)
        target = out_ptr + (row * out_row_stride + head * out_head_stride)[:, None] + column[None, :]
        tl.store(target, (accumulator / total[:, None]).to(out_ptr.dtype.element_ty), mask=element)


def window_attention(
    *,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    prefix: PagedTail,
    query_start_loc: torch.Tensor,
    row_mask: torch.Tensor,
    softmax: Softmax,
    num_reqs: int,
    max_query_len: int,
    tails_in_cache: bool = True,
    scales: Scales = UNSCALED,
) -> None:
    """Attend to what each row's window leaves of its request's prefix; one launch, which a CUDA graph can hold.

    Args:
        query: [rows, Hq, head_size], head_size contiguous; of the output's type, or float8.
        out: [rows, Hq, head_size], written; 0 where a row sees nothing of the prefix.
        lse: float32 [Hq, at least rows], written: natural log-sum-exp, -inf where a row sees nothing.
        prefix: the paged cache and where each request's prefix ends; a tail in a scratch of its own begins there, too.
        query_start_loc: int32 [at least num_reqs + 1] first query row of each request.
        row_mask: int32 [at least rows, W] which rows of the tail each row sees: its ancestors and itself.
        softmax: of the layer, whose window is not 0; its sinks are left to the tail.
        num_reqs: requests to look at.
        max_query_len: most query rows of a request.
        tails_in_cache: the tail is the cache's, and a request whose ``seq_lens`` end with its prefix has none, but one
            row whose own key is the prefix's last. If not, every request has a tail, and ``seq_lens`` are not read.
        scales: of a quantised layer, whose cache is float8.
    """
    cache, block_table, prefix_len, seq_lens = prefix
    num_blocks, kv_heads, block_size, _ = cache.shape
    head_size, group = query.shape[2], query.shape[1] // kv_heads
    assert query.stride(2) == out.stride(2) == cache.stride(3) == row_mask.stride(1) == 1
    assert softmax.window > 0
    tile_rows = max_query_len * group
    block_m, block_n = tile_sizes(out.dtype, tile_rows, softmax.window)
    _window_attention_kernel[(num_reqs, kv_heads, triton.cdiv(tile_rows, block_m))](
        query,
        query.stride(0),
        query.stride(1),
        out,
        out.stride(0),
        out.stride(1),
        lse,
        lse.stride(0),
        lse.stride(1),
        query_start_loc,
        row_mask,
        row_mask.stride(0),
        row_mask.shape[1],
        cache,
        *cache.stride()[:3],
        num_blocks,
        block_table,
        block_table.stride(0),
        block_table.shape[1],
        prefix_len,
        seq_lens,
        *scale_arguments(scales, kv_heads),
        softmax.scale * LOG2_E.value,
        TAILS_IN_CACHE=tails_in_cache,
        BLOCK_SIZE=block_size,
        GROUP=group,
        HEAD=head_size,
        HEAD_P2=max(16, triton.next_power_of_2(head_size)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        WINDOW=softmax.window,
        SOFT_CAP=softmax.soft_cap,
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        OPERAND=operand_type(out.dtype),
        num_warps=4,
        num_stages=2,
    )
