"""The walk: which path of its tree each request's own samples follow."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl


@triton.jit
def _walk_tree_kernel(
    idx_mapping_ptr,  # int [R]
    cu_num_logits_ptr,  # int32 [R + 1]
    num_live_ptr,  # int32 [R]
    parents_ptr,  # int32 [S, N]
    parents_stride,
    sampled_ptr,  # int64 [L]
    node_tokens_ptr,  # int [L]
    out_tokens_ptr,  # int64 [R, width]
    out_tokens_stride,
    out_tokens_width,
    path_ptr,  # int32 [R, width]
    path_stride,
    path_width,
    num_sampled_ptr,  # int32 [R]
    num_rejected_ptr,  # int32 [R]
    cu_rows_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    prefill_len_ptr,  # int32 [S]
    max_depth,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    first = tl.load(cu_num_logits_ptr + request).to(tl.int64)
    num_logits = tl.load(cu_num_logits_ptr + request + 1) - first.to(tl.int32)
    known = (slot >= 0) & (num_logits > 0)
    live = tl.where(known, tl.minimum(tl.load(num_live_ptr + request), num_logits - 1), 0)

    row = tl.arange(0, NODES)
    # Rows that are no live node get a parent that no row has.
    is_node = (row > 0) & (row <= live)
    parent = tl.load(parents_ptr + tl.maximum(slot, 0) * parents_stride + row - 1, mask=is_node, other=-2)
    token = tl.load(node_tokens_ptr + first + row, mask=is_node, other=-1).to(tl.int64)
    parent = tl.where(token < 0, -2, parent)

    step = tl.arange(0, STEPS)
    path = tl.zeros((STEPS,), tl.int32)
    out = tl.zeros((STEPS,), tl.int64)
    current = tl.where(known, 0, -1)
    length = tl.full((), 0, tl.int32)
    while (current >= 0) & (length <= max_depth):
        sampled = tl.load(sampled_ptr + first + current).to(tl.int64)
        path = tl.where(step == length, current, path)
        out = tl.where(step == length, sampled, out)
        length += 1
        child = tl.min(tl.where((parent == current) & (token == sampled), row, NODES), axis=0)
        current = tl.where(child < NODES, child, -1)

    tl.store(path_ptr + request.to(tl.int64) * path_stride + step, path, mask=step < path_width)
    tl.store(out_tokens_ptr + request.to(tl.int64) * out_tokens_stride + step, out, mask=step < out_tokens_width)
    # What a step samples inside a prompt is dropped.
    known = known & (tl.load(seq_lens_ptr + request) >= tl.load(prefill_len_ptr + tl.maximum(slot, 0)))
    num_rows = tl.load(cu_rows_ptr + request + 1) - tl.load(cu_rows_ptr + request)
    tl.store(num_sampled_ptr + request, tl.where(known, length, 0))
    tl.store(num_rejected_ptr + request, tl.where(known, num_rows - length, 0))


def walk_tree(
    *,
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_live: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    node_tokens: torch.Tensor,
    out_tokens: torch.Tensor,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    cu_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    max_depth: int,
) -> None:
    """Follow each request's samples through its tree from the root for as long as they are drafted; one launch.

    The token sampled at a row goes out; if a live child of the row holds that token the walk goes on there (at the
    smallest such row), else it ends. So the last token is the one that no draft foresaw.

    Args:
        idx_mapping: int [R] slot of each request; negative entries are padding: length 0.
        cu_num_logits: int32 [R + 1] first logits row of each request.
        num_live: int32 [at least R] nodes that may be accepted.
        parents: int32 [S, N] row of each node's parent.
        sampled: int64 [L] token that the target sampled at each logits row.
        node_tokens: int [L] token of each logits row; a negative one matches nothing.
        out_tokens: int64 [R, at least max_depth + 1], written: the sampled tokens, then zeros.
        path: int32 [at least R, at least max_depth + 1], written: the rows walked, then zeros.
        num_sampled: int32 [R], written: length of both; 0 inside a prompt, where no sample counts.
        num_rejected: int32 [R], written: the other rows of the step's last ones; 0 inside a prompt.
        cu_rows: int32 [R + 1] as ``cu_num_logits``, of all rows that the scheduler planned for verification.
        seq_lens: int32 [at least R] tokens of each request, all rows of this step included.
        prefill_len: int32 [S] tokens of the prompt (and what a preempted request had generated).
        max_depth: depth of the deepest possible node.
    """
    width = max(out_tokens.shape[1], path.shape[1])
    _walk_tree_kernel[(idx_mapping.shape[0],)](
        idx_mapping,
        cu_num_logits,
        num_live,
        parents,
        parents.stride(0),
        sampled,
        node_tokens,
        out_tokens,
        out_tokens.stride(0),
        out_tokens.shape[1],
        path,
        path.stride(0),
        path.shape[1],
        num_sampled,
        num_rejected,
        cu_rows,
        seq_lens,
        prefill_len,
        max_depth,
        NODES=triton.next_power_of_2(parents.shape[1] + 1),
        STEPS=triton.next_power_of_2(width),
        num_warps=1,
    )


@triton.jit
def _last_rows_kernel(
    cu_num_logits_ptr,  # int32 [R + 1]
    num_sampled_ptr,  # int32 [R]
    path_ptr,  # int32 [R, width]
    path_stride,
    rows_ptr,  # int64 [R] out
):
    request = tl.program_id(0).to(tl.int64)
    step = tl.maximum(tl.load(num_sampled_ptr + request) - 1, 0)
    row = tl.load(cu_num_logits_ptr + request) + tl.load(path_ptr + request * path_stride + step)
    tl.store(rows_ptr + request, row.to(tl.int64))


def last_rows(
    *, cu_num_logits: torch.Tensor, num_sampled: torch.Tensor, path: torch.Tensor, rows: torch.Tensor
) -> None:
    """The logits row at which each request's walk ended; one launch.

    Args:
        cu_num_logits: int32 [R + 1] first logits row of each request.
        num_sampled: int32 [at least R] and path: int32 [at least R, width], as :func:`walk_tree` wrote them.
        rows: int64 [at least R], written; the root's row for requests that sampled nothing.
    """
    _last_rows_kernel[(cu_num_logits.shape[0] - 1,)](cu_num_logits, num_sampled, path, path.stride(0), rows)
