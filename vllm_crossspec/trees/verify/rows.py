"""Rows of a verification step: their depths and the rows that each sees.

Row 0 of a request is its last sampled token, row i its draft node i - 1. A parent is a row before the node's own. A
row's position follows from its depth, its KV slot from its number.

With contemplate tokens (Qin et al. 2026, section 3.1 and figure 3) a request has twice as many rows. After its n nodes
comes a contemplate row for each of the rows 0 to n. It sees what that row sees, itself, and the soft prompts. Other
rows do not see it.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.step.request_rows import request_rows
from vllm_crossspec.trees.verify.tail_attention import soft_words

ROWS_PER_PROGRAM = 32


class StepRows(NamedTuple):
    """The verification rows of a step. R requests, S slots, T token rows, N nodes of a tree, W mask words of a row."""

    # int [R] slot of each request; negative entries are padding and get no live nodes and no tail
    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor  # int32 [R + 1] first token row of each request
    cu_rows: torch.Tensor  # int32 [R + 1]; a request's verification rows are its last ones, one more than its drafts
    seq_lens: torch.Tensor  # int32 [R] tokens of each request, including all rows of this step
    prefill_len: torch.Tensor  # int32 [S] tokens of the prompt (and of a preempted request's output)
    parents: torch.Tensor  # int32 [S, N] row of each node's parent, smaller than the node's own row
    sizes: torch.Tensor  # int32 [S] nodes of each slot's tree
    positions: torch.Tensor  # int64 [T], linear; rewritten in place for the rows of requests with drafts
    # int32 [T, W + ceil(num_soft / 32)], written for the same rows: bit j % 32 of word j // 32: row j is seen. The last
    # words are about soft prompts; contemplate rows see all of them.
    row_mask: torch.Tensor
    prefix_len: torch.Tensor  # int32 [at least R], written: tokens before row 0, or all tokens without drafts
    num_live: torch.Tensor  # int32 [at least R], written: nodes that may be accepted
    max_depth: int  # depth of the deepest possible node
    contemplates: bool = False  # whether draft tokens include contemplate rows
    num_soft: int = 0  # soft prompts of the target's layers


@triton.jit
def _prepare_rows_kernel(
    step,  # StepRows
    parents_stride,
    row_mask_stride,
    num_words,  # W
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    SOFT_WORDS: tl.constexpr,
    CONTEMPLATES: tl.constexpr,
):
    request = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(step.idx_mapping + request).to(tl.int64)
    known = slot >= 0
    slot = tl.maximum(slot, 0)
    seq_len = tl.load(step.seq_lens + request)
    first, num_rows, nodes = request_rows(step.query_start_loc, step.cu_rows, request)
    drafted = known & (num_rows > 1)
    root = seq_len - num_rows  # KV index of row 0, which is its position
    # Drafts of a step that begins inside the prompt are the scheduler's padding.
    proposed = drafted & (root >= tl.load(step.prefill_len + slot))
    if not CONTEMPLATES:
        nodes = num_rows - 1
    live = tl.where(proposed, tl.minimum(nodes, tl.load(step.sizes + slot)), 0)
    if block == 0:
        tl.store(step.num_live + request, live)
        tl.store(step.prefix_len + request, tl.where(drafted, root, seq_len))
    if drafted & (block * ROWS < num_rows):
        row = block * ROWS + tl.arange(0, ROWS)
        word = tl.arange(0, WORDS)
        node = row
        if CONTEMPLATES:
            node = tl.where(row > nodes, row - nodes - 1, row)
        current = tl.where(node <= live, node, 0)
        depth = tl.zeros((ROWS,), tl.int32)
        seen = _bit_of(current, word) | _bit_of(row, word)
        for _ in range(tl.minimum(step.max_depth, live)):
            inner = current > 0
            parent = tl.load(step.parents + slot * parents_stride + current - 1, mask=inner, other=0)
            depth += inner.to(tl.int32)
            current = parent
            seen = seen | _bit_of(current, word)
        depth = tl.where(node > live, 1, depth)
        causal = tl.where(proposed, 0, (node <= nodes).to(tl.int32)) != 0
        depth = tl.where(causal, node, depth)
        seen = tl.where(causal[:, None], _bits_up_to(node, word) | _bit_of(row, word), seen)
        if CONTEMPLATES:
            depth += ((row > nodes) & ((node <= live) | causal)).to(tl.int32)
        present = row < num_rows
        tl.store(step.positions + first + row, (root + depth).to(tl.int64), mask=present)
        target = step.row_mask + (first + row)[:, None] * row_mask_stride + word[None, :]
        tl.store(target, seen, mask=present[:, None] & (word < num_words)[None, :])
        if SOFT_WORDS > 0:
            prompt_word = tl.arange(0, SOFT_WORDS)
            prompts = _bits_up_to(tl.zeros((ROWS,), tl.int32) + step.num_soft - 1, prompt_word)
            prompts = tl.where((row > nodes)[:, None], prompts, 0)
            target = step.row_mask + (first + row)[:, None] * row_mask_stride + num_words + prompt_word[None, :]
            tl.store(target, prompts, mask=present[:, None] & (prompt_word * 32 < step.num_soft)[None, :])


@triton.jit
def _bit_of(
    row,  # int32 [ROWS]
    word,  # int32 [WORDS]
):
    """Mask words [ROWS, WORDS] with the bit of ``row`` set."""
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


def prepare_rows(step: StepRows) -> None:
    """Write the position and mask of every row of the step's trees; one launch, no sync.

    Call it after the KV slots were computed from linear positions. A node that the scheduler cut off, or past its
    tree's size, is dead. It is at depth 1 and sees the prefix, the root and itself. Drafts of a step that begins inside
    the prompt are placeholders: a causal chain at linear positions, none of them live.

    If the step contemplates, a request of D + 1 rows has n = (D - 1) // 2 nodes. Row n + 1 + a is the contemplate row
    of row a, one position after it, and dead if a is. If D is even, the remaining row is dead too.
    """
    parents, row_mask, num_soft = step.parents, step.row_mask, step.num_soft
    num_words = row_mask.shape[1] - soft_words(num_soft)
    max_rows = (2 if step.contemplates else 1) * (parents.shape[1] + 1)
    _prepare_rows_kernel[(step.idx_mapping.shape[0], triton.cdiv(max_rows, ROWS_PER_PROGRAM))](
        step,
        parents.stride(0),
        row_mask.stride(0),
        num_words,
        ROWS=ROWS_PER_PROGRAM,
        WORDS=triton.next_power_of_2(num_words),
        SOFT_WORDS=triton.next_power_of_2(soft_words(num_soft)) if num_soft else 0,
        CONTEMPLATES=step.contemplates,
        num_warps=1,
    )


# One variant for every number of rows, so that no request waits for a compilation.
@triton.jit(do_not_specialize=["rows_ptr", "num_rows"])
def _gather_rows_kernel(
    rows_ptr,  # int64 [L]
    input_ids_ptr,  # int32 [T]
    positions_ptr,  # int64 [T]
    token_ids_ptr,  # int32 [L], written
    row_positions_ptr,  # int64 [L], written
    num_rows,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_rows
    row = tl.load(rows_ptr + i, mask=inside, other=0)
    tl.store(token_ids_ptr + i, tl.load(input_ids_ptr + row, mask=inside), mask=inside)
    tl.store(row_positions_ptr + i, tl.load(positions_ptr + row, mask=inside), mask=inside)


def gather_rows(
    rows: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token (int32 [L]) and position (int64 [L]) of the token rows that get logits (int64 [L]); one launch."""
    num_rows, block = rows.shape[0], 1024
    token_ids = torch.empty(num_rows, dtype=input_ids.dtype, device=rows.device)
    row_positions = torch.empty(num_rows, dtype=positions.dtype, device=rows.device)
    _gather_rows_kernel[(triton.cdiv(num_rows, block),)](
        rows, input_ids, positions, token_ids, row_positions, num_rows, BLOCK=block
    )
    return token_ids, row_positions
