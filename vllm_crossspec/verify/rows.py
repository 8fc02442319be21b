"""Rows of a verification step: how deep each one sits and which others it sees.

Row 0 of a request is its last sampled token, row i its draft node i - 1; parents are rows, smaller than the node's
own. A row takes the position of its depth and keeps the KV slot of its number.
"""

import torch
import triton
import triton.language as tl

ROWS_PER_PROGRAM = 32


@triton.jit
def _prepare_rows_kernel(
    idx_mapping_ptr,  # int [R]
    query_start_loc_ptr,  # int32 [R + 1]
    cu_num_logits_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    prefill_len_ptr,  # int32 [S]
    parents_ptr,  # int32 [S, N]
    parents_stride,
    sizes_ptr,  # int32 [S]
    positions_ptr,  # int64 [T]
    row_mask_ptr,  # int32 [T, W]
    row_mask_stride,
    prefix_len_ptr,  # int32 [R]
    num_live_ptr,  # int32 [R]
    max_depth,
    num_words,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    request = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    known = slot >= 0
    slot = tl.maximum(slot, 0)
    seq_len = tl.load(seq_lens_ptr + request)
    num_logits = tl.load(cu_num_logits_ptr + request + 1) - tl.load(cu_num_logits_ptr + request)
    drafted = known & (num_logits > 1)
    root = seq_len - num_logits  # KV index of row 0, which is its position
    # Drafts of a step that begins inside the prompt are the scheduler's padding: nobody proposed them.
    proposed = drafted & (root >= tl.load(prefill_len_ptr + slot))
    live = tl.where(proposed, tl.minimum(num_logits - 1, tl.load(sizes_ptr + slot)), 0)
    if block == 0:
        tl.store(num_live_ptr + request, live)
        tl.store(prefix_len_ptr + request, tl.where(drafted, root, seq_len))
    if drafted & (block * ROWS < num_logits):
        first = (tl.load(query_start_loc_ptr + request + 1) - num_logits).to(tl.int64)
        row = block * ROWS + tl.arange(0, ROWS)
        word = tl.arange(0, WORDS)
        current = tl.where(row <= live, row, 0)
        depth = tl.zeros((ROWS,), tl.int32)
        seen = _bit_of(current, word) | _bit_of(row, word)
        for _ in range(tl.minimum(max_depth, live)):
            inner = current > 0
            parent = tl.load(parents_ptr + slot * parents_stride + current - 1, mask=inner, other=0)
            depth += inner.to(tl.int32)
            current = parent
            seen = seen | _bit_of(current, word)
        depth = tl.where(row > live, 1, depth)
        depth = tl.where(proposed, depth, row)
        seen = tl.where(proposed, seen, _bits_up_to(row, word))
        present = row < num_logits
        tl.store(positions_ptr + first + row, (root + depth).to(tl.int64), mask=present)
        target = row_mask_ptr + (first + row)[:, None] * row_mask_stride + word[None, :]
        tl.store(target, seen, mask=present[:, None] & (word < num_words)[None, :])


@triton.jit
def _bit_of(
    row,  # int32 [ROWS]
    word,  # int32 [WORDS]
):
    """Mask words [ROWS, WORDS] in which one bit is set: that of ``row``."""
    one = tl.full((1, 1), 1, tl.int32)
    return tl.where((row >> 5)[:, None] == word[None, :], one << (row & 31)[:, None], 0)


@triton.jit
def _bits_up_to(
    row,  # int32 [ROWS]
    word,  # int32 [WORDS]
):
    """Mask words [ROWS, WORDS] of a causal chain: bits 0 to ``row``."""
    count = row[:, None] + 1 - 32 * word[None, :]
    # A shift by 32 is undefined, so full words are made by hand.
    one = tl.full((1, 1), 1, tl.int32)
    partial = (one << tl.minimum(tl.maximum(count, 0), 31)) - 1
    return tl.where(count >= 32, -1, partial)


def prepare_rows(
    *,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    parents: torch.Tensor,
    sizes: torch.Tensor,
    positions: torch.Tensor,
    row_mask: torch.Tensor,
    prefix_len: torch.Tensor,
    num_live: torch.Tensor,
    max_depth: int,
) -> None:
    """Give every row of the step's trees its position and its mask; one launch, no sync.

    Runs after the KV slots were made from linear positions. A node that the scheduler cut off, or past the size of
    its tree, is dead: it sits at depth 1 and sees the prefix, the root and itself. Drafts of a step that begins
    inside the prompt are placeholders: a causal chain at linear positions, none of them live.

    Args:
        idx_mapping: int [R] slot of each request; negative entries are padding and get no live nodes and no tail.
        query_start_loc: int32 [R + 1] first token row of each request.
        cu_num_logits: int32 [R + 1]; a request's logits rows are its last ones, one more than its drafts.
        seq_lens: int32 [R] tokens of each request, all rows of this step included.
        prefill_len: int32 [S] tokens of the prompt (and what a preempted request had generated).
        parents: int32 [S, N] row of each node's parent, smaller than the node's own row.
        sizes: int32 [S] nodes of each slot's tree.
        positions: int64 [T], linear; rewritten in place for the rows of requests with drafts.
        row_mask: int32 [T, W], written for the same rows: bit j % 32 of word j // 32 says that row j is seen.
        prefix_len: int32 [at least R], written: tokens before row 0, or all tokens where nothing was drafted.
        num_live: int32 [at least R], written: nodes that may be accepted.
        max_depth: depth of the deepest possible node.
    """
    num_reqs, num_words = idx_mapping.shape[0], row_mask.shape[1]
    blocks = triton.cdiv(parents.shape[1] + 1, ROWS_PER_PROGRAM)
    _prepare_rows_kernel[(num_reqs, blocks)](
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        seq_lens,
        prefill_len,
        parents,
        parents.stride(0),
        sizes,
        positions,
        row_mask,
        row_mask.stride(0),
        prefix_len,
        num_live,
        max_depth,
        num_words,
        ROWS=ROWS_PER_PROGRAM,
        WORDS=triton.next_power_of_2(num_words),
        num_warps=1,
    )
