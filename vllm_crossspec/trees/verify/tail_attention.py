"""Attention among draft rows: continues the online softmax of a dense prefix pass over the tail.

A fast backend attends to each request's prefix without a mask and returns its output and log-sum-exp. The tail after it
is short, and every query row sees its own subset of it. The tail's keys come from the paged KV cache (a target verifies
a tree) or from a dense scratch (an autoregressive drafter grows one).

Supported features of layers:

- Sliding window: a row sees the last ``window`` tokens of its own path, itself included. Its prefix pass is here too.
- Soft cap of the logits.
- Sinks: a logit per head without a value, which takes a share of every softmax. They join here.
- A float8 cache, and float8 queries: numbers are multiplied by the layer's scales once per tile.
- Soft prompts: learned keys and values before everything else, in no cache (Qin et al. 2026, section 3.1).

A tile holds the query rows times the query heads that share a KV head. So each key is read once for all of them, and a
few rows fill the tensor cores. Tile row m is query row m // GROUP and head m % GROUP.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # the hardware computes powers of two


class RowArguments(NamedTuple):
    """Query rows as kernel arguments, without their log-sum-exp."""

    query: torch.Tensor  # [rows, Hq, D]
    query_row_stride: int
    query_head_stride: int
    out: torch.Tensor  # [rows, Hq, D]
    out_row_stride: int
    out_head_stride: int
    starts: torch.Tensor  # int32 [R + 1]
    mask: torch.Tensor  # int32 [rows, W + ceil(s / 32)]
    mask_stride: int


class QueryRows(NamedTuple):
    """The query rows of a launch."""

    query: torch.Tensor  # [rows, Hq, head_size], head_size contiguous; of the output's type, or float8
    out: torch.Tensor  # [rows, Hq, head_size], head_size contiguous
    lse: torch.Tensor  # float32 [Hq, at least rows] natural log-sum-exp of the prefix pass
    query_start_loc: torch.Tensor  # int32 [at least num_reqs + 1] first query row of each request
    # int32 [at least rows, W], for tails of at most 32 * W rows: bit j % 32 of word j // 32: the row sees tail row j.
    # With s soft prompts ceil(s / 32) more words follow, one bit per prompt
    row_mask: torch.Tensor
    num_reqs: int  # requests to look at
    max_query_len: int  # most query rows of a request

    @property
    def arguments(self) -> tuple[RowArguments, torch.Tensor, int, int]:
        """Kernel arguments: the rows, the log-sum-exp, and its two strides."""
        query, out, lse, starts, mask = self[:5]
        assert query.stride(2) == out.stride(2) == mask.stride(1) == 1
        strided = (query, *query.stride()[:2], out, *out.stride()[:2], starts, mask, mask.stride(0))
        return (RowArguments._make(strided), lse, lse.stride(0), lse.stride(1))

    def tiles(self, kv_heads: int, num_keys: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """Grid and tile constants of a launch that reads ``num_keys`` keys per request."""
        group, head_size = self.query.shape[1] // kv_heads, self.query.shape[2]
        # float32 has no tensor cores at full precision, and needs more registers.
        is_exact = self.out.dtype == torch.float32
        tile_rows = self.max_query_len * group
        block_m = min(16 if is_exact else 64, max(16, triton.next_power_of_2(tile_rows)))
        constants = {
            "GROUP": group,
            "HEAD": head_size,
            "HEAD_P2": max(16, triton.next_power_of_2(head_size)),
            "BLOCK_M": block_m,
            "BLOCK_N": 32 if is_exact or num_keys <= 32 else 64,
            "num_warps": 4,
            "num_stages": 2,
        }
        return (self.num_reqs, kv_heads, triton.cdiv(tile_rows, block_m)), constants


class Pages(NamedTuple):
    """Kernel arguments of a :class:`PagedTail`, or of a :class:`DenseTail` with one block per request."""

    cache: torch.Tensor  # paged: [blocks, kv_heads, block_size, 2 * D]; dense: [R, rows, 2, kv_heads, D]
    block_stride: int  # dense: of a request
    head_stride: int
    token_stride: int
    num_blocks: int  # dense: rows of the scratch
    table: torch.Tensor | None  # int32 [R, max_blocks]; None if dense
    table_stride: int
    max_blocks: int
    start: torch.Tensor | None  # int32 [R] prefix lengths; None if dense
    end: torch.Tensor  # int32 [R] sequence lengths; dense: int32 [1]


class PagedTail(NamedTuple):
    """A tail in the paged KV cache, after the prefix of each of R requests."""

    # [blocks, kv_heads, block_size, 2 * head_size], K then V, with any strides; float8 if quantised
    cache: torch.Tensor
    block_table: torch.Tensor  # int32 [at least R, max_blocks]
    prefix_len: torch.Tensor  # int32 [at least R] tokens before the tail
    # int32 [at least R] tokens including the tail, which is at most as long as the request's query rows
    seq_lens: torch.Tensor

    @property
    def pages(self) -> Pages:
        """The tail as kernel arguments."""
        cache, table, start, end = self
        of_blocks, of_heads, of_tokens, of_columns = cache.stride()
        assert of_columns == 1
        strides = (of_blocks, of_heads, of_tokens)
        return Pages(cache, *strides, len(cache), table, table.stride(0), table.shape[1], start, end)


class DenseTail(NamedTuple):
    """A tail in a dense scratch."""

    keys_values: torch.Tensor  # [at least R, rows, 2, kv_heads, head_size]
    length: torch.Tensor  # int32 [1] on the device, used rows of the scratch, the same for all requests

    @property
    def pages(self) -> Pages:
        """The tail as kernel arguments."""
        scratch = self.keys_values
        of_requests, of_rows, _, of_heads, of_columns = scratch.stride()
        assert of_columns == 1
        return Pages(scratch, of_requests, of_heads, of_rows, scratch.shape[1], None, 0, 0, None, self.length)


class Scales(NamedTuple):
    """Scales of a layer's quantised numbers: float32 on the device, one per layer or per KV head."""

    query: torch.Tensor | None = None  # of the queries; None if they are not quantised
    key: torch.Tensor | None = None  # of the paged cache's keys; None if they are not quantised
    value: torch.Tensor | None = None  # of its values; likewise

    def strided(self, kv_heads: int) -> Any:
        """Kernel arguments: each scale and its stride."""
        return Scales._make((x, 0 if x is None else x.expand(kv_heads).stride(0)) for x in self)


class Softmax(NamedTuple):
    """Parameters of a layer's softmax."""

    scale: float  # factor of the scores
    window: int = 0  # how many tokens a row sees, itself included; 0: all
    soft_cap: float = 0.0  # c of c tanh(score / c), which replaces the score; 0: none
    sinks: torch.Tensor | None = None  # [Hq] a logit of each head without a value, or None
    scales: Scales = Scales()  # of a layer with a float8 paged cache
    # [2, kv_heads, s, head_size] keys (0, after rotation) and values (1) of soft prompts, contiguous, or None. Windows
    # do not apply to them
    soft: torch.Tensor | None = None


@triton.jit
def _seen_bits(
    mask_row,  # pointers [BLOCK_M] to int32 words
    present,
    key,
    key_start,
    num_words,
    BLOCK_N: tl.constexpr,
):
    """Whether each row sees each key of a block, int [BLOCK_M, BLOCK_N]: the bits ``key`` of the rows' words."""
    word = key_start // 32
    bits = tl.load(mask_row + word, mask=present, other=0)[:, None]
    if BLOCK_N == 64:
        upper = tl.load(mask_row + tl.minimum(word + 1, num_words - 1), mask=present, other=0)
        bits = tl.where((key < key_start + 32)[None, :], bits, upper[:, None])
    return (bits >> (key % 32)[None, :]) & 1


@triton.jit
def query_tile(rows, first, num_rows, kv_head, tile, GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_P2: tl.constexpr):
    """The query rows and heads of a tile, whose places [BLOCK_M] count those of the request and KV head.

    Returns:
        Queries [BLOCK_M, HEAD_P2] in the output's type, pointers to their output, and which elements exist; each
        place's token row (int64), head, and whether it exists; the columns.
    """
    present = tile < num_rows * GROUP
    row = (first + tile // GROUP).to(tl.int64)
    head = kv_head * GROUP + tile % GROUP
    column = tl.arange(0, HEAD_P2)
    element = present[:, None] & (column < HEAD)[None, :]
    source = rows.query + (row * rows.query_row_stride + head * rows.query_head_stride)[:, None] + column[None, :]
    query = tl.load(source, mask=element, other=0.0).to(rows.out.dtype.element_ty)
    target = rows.out + (row * rows.out_row_stride + head * rows.out_head_stride)[:, None] + column[None, :]
    return query, target, element, row, head, present, column


@triton.jit
def scaled(factor, scale, kv_head):
    """A factor times a KV head's scale (a pointer to float32 [kv_heads] and its stride; None: 1)."""
    if scale[0] is not None:
        factor = factor * tl.load(scale[0] + kv_head * scale[1])
    return factor


@triton.jit
def paged_offset(pages, request, position, wanted, BLOCK_SIZE: tl.constexpr):
    """int64 offsets of a request's tokens in the cache; stale block tables stay within it."""
    entry = tl.minimum(position // BLOCK_SIZE, pages.max_blocks - 1)
    block = tl.load(pages.table + request.to(tl.int64) * pages.table_stride + entry, mask=wanted, other=0)
    block = tl.minimum(tl.maximum(block, 0), pages.num_blocks - 1).to(tl.int64)
    return block * pages.block_stride + (position % BLOCK_SIZE).to(tl.int64) * pages.token_stride


@triton.jit
def count_seen(
    mask_row,  # pointers [BLOCK_M] to int32 words
    present,
    num_words,
):
    """How many rows of the tail each row sees, int32 [BLOCK_M]: its depth + 1."""
    count = present.to(tl.int32) * 0
    for word in tl.range(0, num_words):
        bits = tl.load(mask_row + word, mask=present, other=0)
        # Population count: sums of two, four and eight bits, then of the four bytes; signs are masked away.
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
):
    """Add one block of keys; returns the running maximum, sum of weights, and weighted values.

    A non-finite value makes only the rows that see it NaN, although 0 times NaN is NaN.
    """
    v = v.to(query.dtype)
    nothing = v * 0.0
    v = tl.where(nothing == 0.0, v, 0.0)
    scores = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee") * scale_log2
    if SOFT_CAP > 0:
        # tanh(x) by e^(-2 |x|), which cannot overflow; scores and cap are in powers of two.
        cap: tl.constexpr = SOFT_CAP * LOG2_E
        small = tl.exp2(tl.abs(scores) * (-2.0 / SOFT_CAP))
        capped = cap * (1.0 - small) / (1.0 + small)
        scores = tl.where(scores < 0, -capped, capped)
    # The product has no NaN now; rows that see such a value get NaN scores.
    scores = tl.where(seen, scores + tl.sum(nothing.to(tl.float32), axis=1)[None, :], float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    # A row that has seen nothing keeps -inf, and -inf - -inf is NaN.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(maximum - shift)
    total = total * decay + tl.sum(weights, axis=1)
    accumulator = accumulator * decay[:, None]
    accumulator += tl.dot(weights.to(query.dtype), v, input_precision="ieee")
    return new_maximum, total, accumulator


# The log-sum-exp is as wide as the batch: specialising on its stride would compile variants during serving.
@triton.jit(do_not_specialize=["lse_head_stride"])
def _tail_attention_kernel(
    rows,  # RowArguments
    lse_ptr,  # float32 [Hq, rows], natural log
    lse_head_stride,
    lse_row_stride,
    num_words,  # W
    pages,  # Pages
    value_offset,  # from a key to its value
    soft_ptr,  # [2, kv_heads, SOFT, D], contiguous; None if SOFT is 0
    sinks_ptr,  # [Hq]; None if not HAS_SINKS
    scales,  # Scales, each with its stride
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
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(rows.starts + request)
    num_rows = tl.load(rows.starts + request + 1) - first
    tile = tl.program_id(2) * BLOCK_M
    # Dummy replays of a captured graph have stale lengths, so all lengths are clamped before they become addresses.
    if PAGED:
        start = tl.maximum(tl.load(pages.start + request), 0)
        length = tl.minimum(tl.minimum(tl.load(pages.end + request) - start, num_rows), 32 * num_words)
        # A row sees no later row: keys past the tile's last row need not be read.
        keys = tl.minimum(length, (tile + BLOCK_M - 1) // GROUP + 1)
        base = pages.cache + kv_head.to(tl.int64) * pages.head_stride
    else:
        start = 0
        length = tl.minimum(tl.minimum(tl.load(pages.end), pages.num_blocks), 32 * num_words)
        keys = length
        base = pages.cache + request.to(tl.int64) * pages.block_stride + kv_head.to(tl.int64) * pages.head_stride
    # A request without a tail needs only the sinks.
    if (HAS_SINKS or length > 0) & (tile < num_rows * GROUP):
        places = tile + tl.arange(0, BLOCK_M)
        query, target, element, row, head, present, column = query_tile(
            rows, first, num_rows, kv_head, places, GROUP, HEAD, HEAD_P2
        )
        scale_log2 = scaled(scale_log2, scales.query, kv_head)
        tail_scale_log2 = scaled(scale_log2, scales.key, kv_head)
        lse = tl.load(lse_ptr + head * lse_head_stride + row * lse_row_stride, mask=present, other=float("-inf"))
        # Backends use either sign for an empty prefix's infinity.
        maximum = tl.where(lse == float("inf"), float("-inf"), lse) * LOG2_E
        has_prefix = maximum != float("-inf")  # true for NaN, which must propagate
        total = tl.where(has_prefix, 1.0, 0.0)
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
        value_scale = scaled(1.0, scales.value, kv_head)
        if scales.value[0] is not None:
            accumulator = accumulator / value_scale  # in units of the quantised values
        mask_row = rows.mask + row * rows.mask_stride
        if WINDOW > 0:
            ahead = count_seen(mask_row, present, num_words)

        for key_start in tl.range(0, keys, BLOCK_N):
            key = key_start + tl.arange(0, BLOCK_N)
            in_tail = key < length
            if PAGED:
                offset = paged_offset(pages, request, start + key, in_tail, BLOCK_SIZE)
            else:
                offset = key.to(tl.int64) * pages.token_stride
            wanted = in_tail[:, None] & (column < HEAD)[None, :]
            address = base + offset[:, None] + column[None, :]
            k = tl.load(address, mask=wanted, other=0.0)
            v = tl.load(address + value_offset, mask=wanted, other=0.0)

            seen = _seen_bits(mask_row, present, key, key_start, num_words, BLOCK_N)
            if WINDOW > 0:
                # A row sees a path from the root: a key's distance is the number of set bits after its own.
                distance = ahead[:, None] - tl.cumsum(seen, axis=1)
                ahead -= tl.sum(seen, axis=1)
                seen = tl.where(distance < WINDOW, seen, 0)
            seen = (seen != 0) & in_tail[None, :]
            maximum, total, accumulator = continue_softmax(
                query, k, v, seen, tail_scale_log2, maximum, total, accumulator, SOFT_CAP
            )

        if scales.value[0] is not None:
            accumulator = accumulator * value_scale
        if SOFT > 0:
            for soft_start in tl.range(0, SOFT, SOFT_N):
                prompt = soft_start + tl.arange(0, SOFT_N)
                wanted = (prompt < SOFT)[:, None] & (column < HEAD)[None, :]
                address = soft_ptr + (kv_head.to(tl.int64) * SOFT + prompt)[:, None] * HEAD + column[None, :]
                k = tl.load(address, mask=wanted, other=0.0)
                # The values follow the keys of all heads.
                v = tl.load(address + tl.num_programs(1).to(tl.int64) * SOFT * HEAD, mask=wanted, other=0.0)
                seen = _seen_bits(mask_row + num_words, present, prompt, soft_start, tl.cdiv(SOFT, 32), SOFT_N)
                seen = (seen != 0) & (prompt < SOFT)[None, :]
                maximum, total, accumulator = continue_softmax(
                    query, k, v, seen, scale_log2, maximum, total, accumulator, SOFT_CAP
                )

        total = tl.where(total > 0, total, 1.0)
        merged = accumulator / total[:, None]
        tl.store(target, merged.to(query.dtype), mask=element)


def tail_attention(rows: QueryRows, tail: PagedTail | DenseTail, softmax: Softmax) -> None:
    """Merge masked attention over each request's tail into the prefix pass's output, in place; one launch.

    Requests with an empty tail only get the sinks. A CUDA graph can hold the launch. Stale lengths and block tables of
    dummy replays read nothing out of bounds.

    Args:
        rows: with the prefix pass's results; an empty prefix may have any output, and either infinity as log-sum-exp.
        tail: its keys and values. The rows of a :class:`PagedTail` are the request's query rows; none sees a later one.
        softmax: of the layer; the prefix pass used all of it except the sinks. Soft prompts need a paged tail that is
            not empty.
    """
    soft = softmax.soft
    num_soft = 0 if soft is None else soft.shape[2]
    num_words = rows.row_mask.shape[1] - soft_words(num_soft)
    scales, head_size = softmax.scales, rows.query.shape[2]
    if isinstance(tail, PagedTail):
        _, kv_heads, block_size, _ = tail.cache.shape
        tail_rows, value_offset = min(rows.max_query_len, 32 * num_words), head_size
        assert soft is None or (soft.is_contiguous() and soft.shape == (2, kv_heads, num_soft, head_size))
    else:
        _, tail_rows, _, kv_heads, _ = tail.keys_values.shape
        block_size, value_offset, scales = 1, tail.keys_values.stride(2), Scales(scales.query)
        assert soft is None
    assert num_words > 0
    assert softmax.sinks is None or softmax.sinks.is_contiguous()
    grid, constants = rows.tiles(kv_heads, tail_rows)
    _tail_attention_kernel[grid](
        *rows.arguments,
        num_words,
        tail.pages,
        value_offset,
        soft,
        softmax.sinks,
        scales.strided(kv_heads),
        softmax.scale * LOG2_E.value,
        PAGED=isinstance(tail, PagedTail),
        BLOCK_SIZE=block_size,
        SOFT=num_soft,
        SOFT_N=min(constants["BLOCK_N"], max(16, triton.next_power_of_2(num_soft))),
        # A path is at most as long as the tail: a window of that size hides nothing.
        WINDOW=softmax.window if softmax.window < tail_rows else 0,
        SOFT_CAP=softmax.soft_cap,
        HAS_SINKS=softmax.sinks is not None,
        **constants,
    )


@triton.jit(do_not_specialize=["lse_head_stride"])
def _window_attention_kernel(
    rows,  # RowArguments
    lse_ptr,  # float32 [Hq, rows], natural log
    lse_head_stride,
    lse_row_stride,
    num_words,  # W
    pages,  # Pages; the ends are not read if not TAILS_IN_CACHE
    scales,  # Scales, each with its stride
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
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(rows.starts + request)
    num_rows = tl.load(rows.starts + request + 1) - first
    tile = tl.program_id(2) * BLOCK_M
    if tile < num_rows * GROUP:
        places = tile + tl.arange(0, BLOCK_M)
        query, target, element, row, head, present, column = query_tile(
            rows, first, num_rows, kv_head, places, GROUP, HEAD, HEAD_P2
        )
        scale_log2 = scaled(scale_log2, scales.query, kv_head)
        scale_log2 = scaled(scale_log2, scales.key, kv_head)
        # Dummy replays of a captured graph have stale lengths, so they are clamped before they become addresses.
        length = tl.maximum(tl.load(pages.start + request), 0)
        depth = count_seen(rows.mask + row * rows.mask_stride, present, num_words)
        nearest = 1
        if TAILS_IN_CACHE:
            # A request without drafts has one row, whose key is the prefix's last; its mask is not written.
            nearest = (tl.load(pages.end + request) > length).to(tl.int32)
            depth = tl.where(nearest > 0, depth, 0)
        begin = length + depth - WINDOW
        maximum = tl.where(present, float("-inf"), float("-inf"))
        total = tl.where(present, 0.0, 0.0)
        accumulator = tl.where(element, 0.0, 0.0)
        base = pages.cache + kv_head.to(tl.int64) * pages.head_stride

        # Start at the first key that the root sees: blocks before it may belong to another request.
        for key_start in tl.range(tl.maximum(length + nearest - WINDOW, 0), length, BLOCK_N):
            key = key_start + tl.arange(0, BLOCK_N)
            in_prefix = key < length
            offset = paged_offset(pages, request, key, in_prefix, BLOCK_SIZE)
            wanted = in_prefix[:, None] & (column < HEAD)[None, :]
            address = base + offset[:, None] + column[None, :]
            k = tl.load(address, mask=wanted, other=0.0)
            v = tl.load(address + HEAD, mask=wanted, other=0.0)
            seen = in_prefix[None, :] & (key[None, :] >= begin[:, None])
            maximum, total, accumulator = continue_softmax(
                query, k, v, seen, scale_log2, maximum, total, accumulator, SOFT_CAP
            )

        sees = total != 0  # true for NaN, which must propagate
        total = tl.where(sees, total, 1.0)
        lse = tl.where(sees, (maximum + tl.log2(total)) / LOG2_E, float("-inf"))
        tl.store(lse_ptr + head * lse_head_stride + row * lse_row_stride, lse, mask=present)
        accumulator = scaled(accumulator, scales.value, kv_head)
        tl.store(target, (accumulator / total[:, None]).to(query.dtype), mask=element)


def window_attention(rows: QueryRows, prefix: PagedTail, softmax: Softmax, tails_in_cache: bool = True) -> None:
    """The prefix pass of layers with a sliding window; one launch, which a CUDA graph can hold.

    A row at depth d of a tree whose root is at position P sees the keys from P + d - window + 1 on. FlashAttention's
    windows follow a row's place in the batch, which for tree rows is not their depth. This kernel reads the root's
    window once for all rows of a request. It masks the keys that are too far for a row's depth. Its work is bounded by
    the window.

    Args:
        rows: output (0 if a row sees nothing of the prefix) and log-sum-exp (then -inf) are written. The masks give
            each row's depth: the number of tail rows that it sees.
        prefix: the paged cache and the end of each request's prefix; a tail in a scratch begins there too.
        softmax: of the layer, whose window is not 0; its sinks are left to the tail.
        tails_in_cache: whether tails are in the paged cache. Then a request whose ``seq_lens`` end with its prefix has
            no tail, and one row whose key is the prefix's last. Otherwise every request has a tail, and ``seq_lens``
            are not read.
    """
    _, kv_heads, block_size, _ = prefix.cache.shape
    assert softmax.window > 0
    grid, constants = rows.tiles(kv_heads, softmax.window)
    _window_attention_kernel[grid](
        *rows.arguments,
        rows.row_mask.shape[1],
        prefix.pages,
        softmax.scales.strided(kv_heads),
        softmax.scale * LOG2_E.value,
        TAILS_IN_CACHE=tails_in_cache,
        BLOCK_SIZE=block_size,
        WINDOW=softmax.window,
        SOFT_CAP=softmax.soft_cap,
        **constants,
    )


def soft_words(num_soft: int) -> int:
    """Number of words at the end of a row's mask for ``num_soft`` soft prompts."""
    return -(-num_soft // 32)
