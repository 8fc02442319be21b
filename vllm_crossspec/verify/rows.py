"""Rows of a verification step: how deep each one sits and which others it sees.

Row 0 of a request is its last sampled token, row i its draft node i - 1; parents are rows, smaller than the node's
own. A row takes the position of its depth and keeps the KV slot of its number.

With contemplate tokens (ConFu: Qin et al. 2026, section 3.1 and figure 3) a request brings twice as many rows: behind
its n nodes a contemplate row for each of the rows 0 to n, which sees what that row sees, itself and the soft prompts.
No row sees a contemplate row but itself.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.contemplate.kernels import request_rows
from vllm_crossspec.verify.tail_attention import soft_words

ROWS_PER_PROGRAM = 32


@triton.jit
def _prepare_rows_kernel(
    idx_mapping_ptr,  # int [R]
    query_start_loc_ptr,  # int32 [R + 1]
    cu_rows_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    prefill_len_ptr,  # int32 [S]
    parents_ptr,  # int32 [S, N]
    parents_stride,
    sizes_ptr,  # int32 [S]
    positions_ptr,  # int64 [T]
    row_mask_ptr,  # int32 [T, W + ceil(num_soft / 32)]
    row_mask_stride,
    prefix_len_ptr,  # int32 [R]
    num_live_ptr,  # int32 [R]
    max_depth,
    num_words,  # W
    num_soft,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    SOFT_WORDS: tl.constexpr,
    CONTEMPLATES: tl.constexpr,
):
    request = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    known = slot >= 0
    slot = tl.maximum(slot, 0)
    seq_len = tl.load(seq_lens_ptr + request)
    first, num_rows, nodes = request_rows(query_start_loc_ptr, cu_rows_ptr, request)
    drafted = known & (num_rows > 1)
    root = seq_len - num_rows  # KV index of row 0, which is its position
    # Drafts of a step that begins inside the prompt are the scheduler's padding: nobody proposed them.
    proposed = drafted & (root >= tl.load(prefill_len_ptr + slot))
    if not CONTEMPLATES:
        nodes = num_rows - 1
    live = tl.where(proposed, tl.minimum(nodes, tl.load(sizes_ptr + slot)), 0)
    if block == 0:
        tl.store(num_live_ptr + request, live)
        tl.store(prefix_len_ptr + request, tl.where(drafted, root, seq_len))
    if drafted & (block * ROWS < num_rows):
        row = block * ROWS + tl.arange(0, ROWS)
        word = tl.arange(0, WORDS)
        node = row
        if CONTEMPLATES:
            node = tl.where(row > nodes, row - nodes - 1, row)
        current = tl.where(node <= live, node, 0)
        depth = tl.zeros((ROWS,), tl.int32)
        seen = _bit_of(current, word) | _bit_of(row, word)
        for _ in range(tl.minimum(max_depth, live)):
            inner = current > 0
            parent = tl.load(parents_ptr + slot * parents_stride + current - 1, mask=inner, other=0)
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
        tl.store(positions_ptr + first + row, (root + depth).to(tl.int64), mask=present)
        target = row_mask_ptr + (first + row)[:, None] * row_mask_stride + word[None, :]
        tl.store(target, seen, mask=present[:, None] & (word < num_words)[None, :])
        if SOFT_WORDS > 0:
            prompt_word = tl.arange(0, SOFT_WORDS)
            # Bits up to a number in every row alike.
            prompts = _bits_up_to(tl.zeros((ROWS,), tl.int32) + num_soft - 1, prompt_word)
            prompts = tl.where((row > nodes)[:, None], prompts, 0)
            target = row_mask_ptr + (first + row)[:, None] * row_mask_stride + num_words + prompt_word[None, :]
            tl.store(target, prompts, mask=present[:, None] & (prompt_word * 32 < num_soft)[None, :])


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
    cu_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    parents: torch.Tensor,
    sizes: torch.Tensor,
    positions: torch.Tensor,
    row_mask: torch.Tensor,
    prefix_len: torch.Tensor,
    num_live: torch.Tensor,
    max_depth: int,
    contemplates: bool = False,
    num_soft: int = 0,
) -> None:
    """Give every row of the step's trees its position and its mask; one launch, no sync.

    Runs after the KV slots were made from linear positions. A node that the scheduler cut off, or past the size of
    its tree, is dead: it sits at depth 1 and sees the prefix, the root and itself. Drafts of a step that begins
    inside the prompt are placeholders: a causal chain at linear positions, none of them live.

    With ``contemplates``, a request of D + 1 rows has n = (D - 1) // 2 nodes. Row n + 1 + a belongs to row a: it stands
    one position after it, and sees what it sees, itself and the soft prompts. It is dead where a is; so is the one row
    that is left where D is even.

    Args:
        idx_mapping: int [R] slot of each request; negative entries are padding and get no live nodes and no tail.
        query_start_loc: int32 [R + 1] first token row of each request.
        cu_rows: int32 [R + 1]; a request's verification rows are its last ones, one more than its drafts.
        seq_lens: int32 [R] tokens of each request, all rows of this step included.
        prefill_len: int32 [S] tokens of the prompt (and what a preempted request had generated).
        parents: int32 [S, N] row of each node's parent, smaller than the node's own row.
        sizes: int32 [S] nodes of each slot's tree.
        positions: int64 [T], linear; rewritten in place for the rows of requests with drafts.
        row_mask: int32 [T, W + ceil(num_soft / 32)], written for the same rows: bit j % 32 of word j // 32 says that
            row j is seen; the last words say the same of the soft prompts: all of them by contemplate rows.
        prefix_len: int32 [at least R], written: tokens before row 0, or all tokens where nothing was drafted.
        num_live: int32 [at least R], written: nodes that may be accepted.
        max_depth: depth of the deepest possible node.
        contemplates: whether draft tokens are nodes and contemplate rows.
        num_soft: s, soft prompts of the target's layers.
    """
    num_reqs, num_words = idx_mapping.shape[0], row_mask.shape[1] - soft_words(num_soft)
    max_rows = (2 if contemplates else 1) * (parents.shape[1] + 1)
    blocks = triton.cdiv(max_rows, ROWS_PER_PROGRAM)
    _prepare_rows_kernel[(num_reqs, blocks)](
        idx_mapping,
        query_start_loc,
        cu_rows,
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
        num_soft,
        ROWS=ROWS_PER_PROGRAM,
        WORDS=triton.next_power_of_2(num_words),
        SOFT_WORDS=triton.next_power_of_2(soft_words(num_soft)) if num_soft else 0,
        CONTEMPLATES=contemplates,
        num_warps=1,
    )


# One variant for every number of rows: none may have to be compiled while requests wait.
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
    """Token and position of the rows that get logits; one launch.

    Args:
        rows: int64 [L].
        input_ids: int32 [T].
        positions: int64 [T].

    Returns:
        int32 [L] and int64 [L].
    """
    num_rows, block = rows.shape[0], 1024
    token_ids = torch.empty(num_rows, dtype=input_ids.dtype, device=rows.device)
    row_positions = torch.empty(num_rows, dtype=positions.dtype, device=rows.device)
    _gather_rows_kernel[(triton.cdiv(num_rows, block),)](
        rows, input_ids, positions, token_ids, row_positions, num_rows, BLOCK=block
    )
    return token_ids, row_positions
