"""Attention of draft rows among themselves: the online softmax of a dense prefix pass, carried on over the tail.

A fast backend attends to each request's prefix without a mask and leaves its output and log-sum-exp. What follows
the prefix is short, and every query row sees its own subset of it. Keys of the tail come from the paged KV cache (a
target that verifies a tree) or from a dense scratch (an autoregressive drafter that grows one).

A layer may have a sliding window: a row sees the last ``window`` tokens of its own line, itself included, its ancestors
being the nearest. It may have sinks, a logit a head that takes its share of every softmax and has no value: they join
here, once, whatever the prefix was attended by. And it may cap its logits.

A quantised cache is read as it is: what a row sees of the tail are the numbers that plain decoding will read back, and
they are multiplied with the layer's scales here, once a tile. Queries may be quantised, too.

Some rows may see learned keys and values in front of everything else, which lie in no cache: ConFu's soft prompts (Qin
et al. 2026, section 3.1). The softmax goes on over them as it does over the tail.

The query heads that share a KV head are laid beside the query rows in one tile, so that each key is read once for all
of them and even a few rows fill the tensor cores: tile row m is query row m // GROUP and head m % GROUP of the group.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.twins import operand_type

LOG2_E = tl.constexpr(1.4426950408889634)  # powers of two are what the hardware computes


class PagedTail(NamedTuple):
    """A tail in the paged KV cache: what follows the prefix of each request. Shapes: R requests.

    Attributes:
        cache: [blocks, kv_heads, block_size, 2 * head_size], K beside V, with any strides; float8 if quantised.
        block_table: int32 [at least R, max_blocks].
        prefix_len: int32 [at least R] tokens before the tail.
        seq_lens: int32 [at least R] tokens with the tail; the tail is never longer than the request's query rows.
    """

    cache: torch.Tensor
    block_table: torch.Tensor
    prefix_len: torch.Tensor
    seq_lens: torch.Tensor


class Softmax(NamedTuple):
    """How a layer's scores become the weights of its values.

    Attributes:
        scale: factor of the scores.
        window: how many tokens a row sees, itself included; 0: all.
        soft_cap: c of c tanh(score / c), which takes the score's place; 0: none.
        sinks: [Hq] a logit of each head that has no value; None: there are none.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None


class Scales(NamedTuple):
    """What quantised numbers of a layer are multiplied with: float32 on the device, one or one a KV head.

    Attributes:
        query: of the queries; None where those are not quantised.
        key: of the paged cache's keys; None where nothing is quantised. Soft prompts and a scratch never are.
        value: of its values; likewise.
    """

    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None


UNSCALED = Scales()


class DenseTail(NamedTuple):
    """A tail in a scratch of its own.

    Attributes:
        keys_values: [at least R, rows, 2, kv_heads, head_size].
        length: int32 [1] on the device, rows of the scratch that count, the same for all requests.
    """

    keys_values: torch.Tensor
    length: torch.Tensor


@triton.jit
def _seen_bits(
    mask_row,  # pointers [BLOCK_M] to int32 words
    present,
    key,
    key_start,
    num_words,
    BLOCK_N: tl.constexpr,
):
    """Whether each row sees each key of a block, int [BLOCK_M, BLOCK_N]: bits ``key`` of the rows' words."""
    word = key_start // 32
    bits = tl.load(mask_row + word, mask=present, other=0)[:, None]
    if BLOCK_N == 64:
        upper = tl.load(mask_row + tl.minimum(word + 1, num_words - 1), mask=present, other=0)
        bits = tl.where((key < key_start + 32)[None, :], bits, upper[:, None])
    return (bits >> (key % 32)[None, :]) & 1


@triton.jit
def scaled(
    factor,
    scale_ptr,  # float32 [kv_heads], of any stride; None: there is nothing to multiply with
    stride,
    kv_head,
):
    """A factor times the scale of a KV head."""
    if scale_ptr is not None:
        factor = factor * tl.load(scale_ptr + kv_head * stride)
    return factor


@triton.jit
def count_seen(
    mask_row,  # pointers [BLOCK_M] to int32 words
    present,
    num_words,
):
    """How many rows of the tail each row sees, int32 [BLOCK_M]: its depth and one more."""
    count = present.to(tl.int32) * 0
    for word in tl.range(0, num_words):
        bits = tl.load(mask_row + word, mask=present, other=0)
        # The bits of every two, four and eight places are added up, then the four bytes; signs are masked away.
        bits = bits - ((bits >> 1) & 0x55555555)
        bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
        bits = (bits + (bits >> 4)) & 0x0F0F0F0F
        bits += bits >> 8
        count += (bits + (bits >> 16)) & 0x3F
    return count


@triton.jit
def continue_softmax(
    query,  # [BLOCK_M, HEAD_P2]
    k,  # [BLOCK_N, HEAD_P2]
    v,  # [BLOCK_N, HEAD_P2]
    seen,  # bool [BLOCK_M, BLOCK_N]
    scale_log2,
    maximum,  # float32 [BLOCK_M]
    total,  # float32 [BLOCK_M]
    accumulator,  # float32 [BLOCK_M, HEAD_P2]
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """One block of keys more: the running maximum, the sum of the weights and the weighted values after it."""
    scores = tl.dot(query.to(OPERAND), tl.trans(k.to(query.dtype).to(OPERAND)), input_precision=PRECISION)
    scores *= scale_log2
    if SOFT_CAP > 0:
        # tanh(x) by e^(-2 |x|), which cannot overflow; scores are in powers of two, and so is the cap.
        cap: tl.constexpr = SOFT_CAP * LOG2_E
        small = tl.exp2(tl.abs(scores) * (-2.0 / SOFT_CAP))
        capped = cap * (1.0 - small) / (1.0 + small)
        scores = tl.where(scores < 0, -capped, capped)
    scores = tl.where(seen, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    # A row that has seen nothing yet keeps -inf, and -inf - -inf is no number.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(maximum - shift)
    total = total * decay + tl.sum(weights, axis=1)
    accumulator = accumulator * decay[:, None]
    weights = weights.to(query.dtype).to(OPERAND)
    accumulator += tl.dot(weights, v.to(query.dtype).to(OPERAND), input_precision=PRECISION)
    return new_maximum, total, accumulator


# The log-sum-exp is as wide as the batch: a variant for each divisibility would be compiled in the middle of serving.
@triton.jit(do_not_specialize=["lse_head_stride"])
def _tail_attention_kernel(
    query_ptr,  # [rows, Hq, D]
    query_row_stride,
    query_head_stride,
    out_ptr,  # [rows, Hq, D], holds the prefix pass's output
    out_row_stride,
    out_head_stride,
    lse_ptr,  # float32 [Hq, rows], natural log
    lse_head_stride,
    lse_row_stride,
    query_start_loc_ptr,  # int32 [R + 1]
    row_mask_ptr,  # int32 [rows, W + ceil(SOFT / 32)]
    row_mask_stride,
    num_words,  # W
    cache_ptr,  # paged: [blocks, kv_heads, block_size, 2 * D]; dense: [R, rows, 2, kv_heads, D]
    cache_block_stride,  # dense: of a request
    cache_head_stride,
    cache_token_stride,
    cache_value_offset,  # from a key to its value
    num_blocks,  # dense: rows of the scratch
    block_table_ptr,  # int32 [R, max_blocks]; unused if dense
    block_table_stride,
    max_blocks,
    start_ptr,  # int32 [R] prefix lengths; unused if dense
    end_ptr,  # int32 [R] sequence lengths; dense: int32 [1]
    soft_ptr,  # [2, kv_heads, SOFT, D], contiguous; None if SOFT is 0
    sinks_ptr,  # [Hq]; None if not HAS_SINKS
    query_scale_ptr,  # float32 [kv_heads]; None where nothing is quantised, or queries are not
    query_scale_stride,
    key_scale_ptr,  # float32 [kv_heads]; None if the cache is not quantised
    key_scale_stride,
    value_scale_ptr,  # likewise
    value_scale_stride,
    scale_log2,
    PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_P2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT: tl.constexpr,
    SOFT_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(query_start_loc_ptr + request)
    num_rows = tl.load(query_start_loc_ptr + request + 1) - first
    tile = tl.program_id(2) * BLOCK_M
    # Replays of a captured graph see stale lengths, so that none of them is trusted with an address.
    if PAGED:
        start = tl.maximum(tl.load(start_ptr + request), 0)
        length = tl.minimum(tl.minimum(tl.load(end_ptr + request) - start, num_rows), 32 * num_words)
        # A row sees none after itself: keys past the tile's last row need not be read.
        keys = tl.minimum(length, (tile + BLOCK_M - 1) // GROUP + 1)
        base = cache_ptr + kv_head.to(tl.int64) * cache_head_stride
    else:
        start = 0
        length = tl.minimum(tl.minimum(tl.load(end_ptr), num_blocks), 32 * num_words)
        keys = length
        base = cache_ptr + request.to(tl.int64) * cache_block_stride + kv_head.to(tl.int64) * cache_head_stride
    # A request without a tail has had its softmax, but for the sinks.
    if (HAS_SINKS or length > 0) & (tile < num_rows * GROUP):
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
        tail_scale_log2 = scaled(scale_log2, key_scale_ptr, key_scale_stride, kv_head)
        lse = tl.load(lse_ptr + head * lse_head_stride + row * lse_row_stride, mask=present, other=float("-inf"))
        # Backends disagree on the sign of an empty prefix's infinity.
        maximum = tl.where(lse == float("inf"), float("-inf"), lse) * LOG2_E
        has_prefix = maximum > float("-inf")
        total = tl.where(has_prefix, 1.0, 0.0)
        target = out_ptr + (row * out_row_stride + head * out_head_stride)[:, None] + column[None, :]
        # An empty prefix's output may be anything, NaN included.
        accumulator = tl.load(target, mask=element, other=0.0).to(tl.float32)
        accumulator = tl.where(has_prefix[:, None], accumulator, 0.0)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=present, other=0.0).to(tl.float32) * LOG2_E
            with_sink = tl.maximum(maximum, sink)
            decay = tl.exp2(maximum - with_sink)
            total = total * decay + tl.exp2(sink - with_sink)
            accumulator = accumulator * decay[:, None]
            maximum = with_sink
        if value_scale_ptr is not None:
            # In units of the quantised values.
            value_scale = tl.load(value_scale_ptr + kv_head * value_scale_stride)
            accumulator = accumulator / value_scale
        mask_row = row_mask_ptr + row * row_mask_stride
        if WINDOW > 0:
            ahead = count_seen(mask_row, present, num_words)

        for key_start in tl.range(0, keys, BLOCK_N):
            key = key_start + tl.arange(0, BLOCK_N)
            in_tail = key < length
            if PAGED:
                position = start + key
                entry = tl.minimum(position // BLOCK_SIZE, max_blocks - 1)
                block = tl.load(
                    block_table_ptr + request.to(tl.int64) * block_table_stride + entry, mask=in_tail, other=0
                )
                block = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
                offset = block * cache_block_stride + (position % BLOCK_SIZE).to(tl.int64) * cache_token_stride
            else:
                offset = key.to(tl.int64) * cache_token_stride
            wanted = in_tail[:, None] & (column < HEAD)[None, :]
            address = base + offset[:, None] + column[None, :]
            k = tl.load(address, mask=wanted, other=0.0)
            v = tl.load(address + cache_value_offset, mask=wanted, other=0.0)

            seen = _seen_bits(mask_row, present, key, key_start, num_words, BLOCK_N)
            if WINDOW > 0:
                # What a row sees is a line, from the root on: a key is as far away as there are bits behind its own.
                distance = ahead[:, None] - tl.cumsum(seen, axis=1)
                ahead -= tl.sum(seen, axis=1)
                seen = tl.where(distance < WINDOW, seen, 0)
            maximum, total, accumulator = continue_softmax(
                query,
                k,
                v,
                (seen != 0) & in_tail[None, :],
                tail_scale_log2,
                maximum,
                total,
                accumulator,
                SOFT_CAP,
                PRECISION,
                OPERAND,
            )

        if value_scale_ptr is not None:
            accumulator = accumulator * value_scale
        if SOFT > 0:
            for soft_start in tl.range(0, SOFT, SOFT_N):
                prompt = soft_start + tl.arange(0, SOFT_N)
                wanted = (prompt < SOFT)[:, None] & (column < HEAD)[None, :]
                address = soft_ptr + (kv_head.to(tl.int64) * SOFT + prompt)[:, None] * HEAD + column[None, :]
                k = tl.load(address, mask=wanted, other=0.0)
                # The values lie behind the keys of all heads.
                v = tl.load(address + tl.num_programs(1).to(tl.int64) * SOFT * HEAD, mask=wanted, other=0.0)
                seen = _seen_bits(mask_row + num_words, present, prompt, soft_start, tl.cdiv(SOFT, 32), SOFT_N)
                maximum, total, accumulator = continue_softmax(
                    query,
                    k,
                    v,
                    (seen != 0) & (prompt < SOFT)[None, :],
                    scale_log2,
                    maximum,
                    total,
                    accumulator,
                    SOFT_CAP,
                    PRECISION,
                    OPERAND,
                )

        total = tl.where(total > 0, total, 1.0)
        merged = accumulator / total[:, None]
        tl.store(target, merged.to(out_ptr.dtype.element_ty), mask=element)


def tail_attention(
    *,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tail: PagedTail | DenseTail,
    query_start_loc: torch.Tensor,
    row_mask: torch.Tensor,
    softmax: Softmax,
    num_reqs: int,
    max_query_len: int,
    soft: torch.Tensor | None = None,
    scales: Scales = UNSCALED,
) -> None:
    """Merge masked attention over each request's tail into the prefix pass's output, in place; one launch.

    Requests whose tail is empty are left untouched, but for the sinks. Nothing is allocated and the lengths stay on the
    device, so that a CUDA graph can hold the launch; stale lengths and block tables of its dummy replays read nothing
    out of bounds.

    Args:
        query: [rows, Hq, head_size], head_size contiguous; of the output's type, or float8.
        out: [rows, Hq, head_size] output of the prefix pass, merged in place; anything where the prefix is empty.
        lse: float32 [Hq, at least rows] natural log-sum-exp of the prefix pass; either infinity for an empty prefix.
        tail: where the tail's keys and values are. In a :class:`PagedTail` the tail's rows are the request's query
            rows, none of which sees a later one.
        query_start_loc: int32 [at least num_reqs + 1] first query row of each request.
        row_mask: int32 [at least rows, W], for tails of at most 32 * W rows: bit j % 32 of word j // 32 says that the
            query row sees row j of the tail. With ``soft`` it has ceil(s / 32) words more at its end, whose bits say
            which soft prompts the row sees.
        softmax: of the layer; the prefix pass was its, too, but for the sinks. Soft prompts stand in no window.
        num_reqs: requests to look at.
        max_query_len: most query rows of a request.
        soft: [2, kv_heads, s, head_size] keys (0, as after rotation) and values (1) of soft prompts, contiguous; for a
            paged tail only. Requests whose tail is empty do not see them.
        scales: of a quantised layer, whose paged cache is float8.
    """
    paged = isinstance(tail, PagedTail)
    num_soft = 0 if soft is None else soft.shape[2]
    num_words = row_mask.shape[1] - soft_words(num_soft)
    if isinstance(tail, PagedTail):
        cache, block_table, start, end = tail
        num_blocks, kv_heads, block_size, _ = cache.shape
        strides = (cache.stride(0), cache.stride(1), cache.stride(2), query.shape[2])
        tail_rows = min(max_query_len, 32 * num_words)
    else:
        cache, end = tail
        block_table, start, block_size = query_start_loc, query_start_loc, 1
        num_blocks, kv_heads = cache.shape[1], cache.shape[3]
        strides = (cache.stride(0), cache.stride(3), cache.stride(1), cache.stride(2))
        tail_rows = num_blocks
    head_size, group = query.shape[2], query.shape[1] // kv_heads
    assert query.stride(2) == out.stride(2) == cache.stride(-1) == 1
    assert row_mask.stride(1) == 1 and num_words > 0
    assert soft is None or (paged and soft.is_contiguous() and soft.shape == (2, kv_heads, num_soft, head_size))
    assert softmax.sinks is None or softmax.sinks.is_contiguous()
    tile_rows = max_query_len * group
    block_m, block_n = tile_sizes(out.dtype, tile_rows, tail_rows)
    _tail_attention_kernel[(num_reqs, kv_heads, triton.cdiv(tile_rows, block_m))](
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
        num_words,
        cache,
        *strides,
        num_blocks,
        block_table,
        block_table.stride(0),
        block_table.shape[-1],
        start,
        end,
        soft,
        softmax.sinks,
        *scale_arguments(scales if paged else Scales(scales.query), kv_heads),
        softmax.scale * LOG2_E.value,
        PAGED=paged,
        BLOCK_SIZE=block_size,
        GROUP=group,
        HEAD=head_size,
        HEAD_P2=max(16, triton.next_power_of_2(head_size)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SOFT=num_soft,
        SOFT_N=min(block_n, max(16, triton.next_power_of_2(num_soft))),
        # No line is longer than the tail has rows: a window of so many hides none of them.
        WINDOW=softmax.window if softmax.window < tail_rows else 0,
        SOFT_CAP=softmax.soft_cap,
        HAS_SINKS=softmax.sinks is not None,
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        OPERAND=operand_type(out.dtype),
        num_warps=4,
        num_stages=2,
    )


def scale_arguments(scales: Scales, kv_heads: int) -> list[torch.Tensor | int | None]:
    """Pointers and strides of the queries', keys' and values' scales, for a kernel."""
    arguments: list[torch.Tensor | int | None] = []
    for scale in scales:
        arguments += [None, 0] if scale is None else [scale, scale.expand(kv_heads).stride(0)]
    return arguments


def tile_sizes(dtype: torch.dtype, num_rows: int, num_keys: int) -> tuple[int, int]:
    """Rows and keys of a program's tile; float32 has no tensor cores at full precision, and needs more registers."""
    exact = dtype == torch.float32
    rows = min(16 if exact else 64, max(16, triton.next_power_of_2(num_rows)))
    return rows, 32 if exact or num_keys <= 32 else 64


def soft_words(num_soft: int) -> int:
    """Words of a row's mask that say which of ``num_soft`` soft prompts it sees; its last ones."""
    return -(-num_soft // 32)
