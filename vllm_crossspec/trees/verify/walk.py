"""The walk: the path in each request's tree that its samples follow."""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Walk(NamedTuple):
    """Inputs and outputs of a step's walk. R requests, S slots, L rows with logits, N nodes of a tree."""

    idx_mapping: torch.Tensor  # int [R] slot of each request; negative entries are padding: length 0
    cu_num_logits: torch.Tensor  # int32 [R + 1] first logits row of each request
    num_live: torch.Tensor  # int32 [at least R] nodes that may be accepted
    parents: torch.Tensor  # int32 [S, N] row of each node's parent
    sampled: torch.Tensor  # int64 [L] token that the target sampled at each logits row
    node_tokens: torch.Tensor  # int [L] token of each logits row; a negative one matches nothing
    out_tokens: torch.Tensor  # int64 [R, at least max_depth + 1], written: the sampled tokens, then zeros
    path: torch.Tensor  # int32 [at least R, at least max_depth + 1], written: the rows walked, then zeros
    num_sampled: torch.Tensor  # int32 [R], written: length of both; 0 inside a prompt, where no sample counts
    num_rejected: torch.Tensor  # int32 [R], written: verification rows not on the path; 0 inside a prompt
    cu_rows: torch.Tensor  # int32 [R + 1] as ``cu_num_logits``, of all rows that the scheduler planned for verification
    seq_lens: torch.Tensor  # int32 [at least R] tokens of each request, including all rows of this step
    prefill_len: torch.Tensor  # int32 [S] tokens of the prompt (and of a preempted request's output)
    max_depth: int  # depth of the deepest possible node


@triton.jit
def _walk_tree_kernel(
    walk,  # Walk
    parents_stride,
    out_tokens_stride,
    path_stride,
    out_tokens_width,
    path_width,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(walk.idx_mapping + request).to(tl.int64)
    first = tl.load(walk.cu_num_logits + request).to(tl.int64)
    num_logits = tl.load(walk.cu_num_logits + request + 1) - first.to(tl.int32)
    known = (slot >= 0) & (num_logits > 0)
    live = tl.where(known, tl.minimum(tl.load(walk.num_live + request), num_logits - 1), 0)

    row = tl.arange(0, NODES)
    # Rows that are not live nodes get a parent that does not exist.
    is_node = (row > 0) & (row <= live)
    parent = tl.load(walk.parents + tl.maximum(slot, 0) * parents_stride + row - 1, mask=is_node, other=-2)
    token = tl.load(walk.node_tokens + first + row, mask=is_node, other=-1).to(tl.int64)
    parent = tl.where(token < 0, -2, parent)

    step = tl.arange(0, STEPS)
    path = tl.zeros((STEPS,), tl.int32)
    out = tl.zeros((STEPS,), tl.int64)
    current = tl.where(known, 0, -1)
    length = tl.full((), 0, tl.int32)
    while (current >= 0) & (length <= walk.max_depth):
        sampled = tl.load(walk.sampled + first + current).to(tl.int64)
        path = tl.where(step == length, current, path)
        out = tl.where(step == length, sampled, out)
        length += 1
        child = tl.min(tl.where((parent == current) & (token == sampled), row, NODES), axis=0)
        current = tl.where(child < NODES, child, -1)

    tl.store(walk.path + request.to(tl.int64) * path_stride + step, path, mask=step < path_width)
    tl.store(walk.out_tokens + request.to(tl.int64) * out_tokens_stride + step, out, mask=step < out_tokens_width)
    # Samples inside a prompt do not count.
    known = known & (tl.load(walk.seq_lens + request) >= tl.load(walk.prefill_len + tl.maximum(slot, 0)))
    num_rows = tl.load(walk.cu_rows + request + 1) - tl.load(walk.cu_rows + request)
    tl.store(walk.num_sampled + request, tl.where(known, length, 0))
    tl.store(walk.num_rejected + request, tl.where(known, num_rows - length, 0))


def walk_tree(walk: Walk) -> None:
    """Follow each request's samples from the root through its tree; one launch.

    The walk outputs the token sampled at a row. If a live child of the row has that token, the walk continues at the
    first such child, else it ends. So the last token is not a draft.
    """
    parents, out_tokens, path = walk.parents, walk.out_tokens, walk.path
    _walk_tree_kernel[(walk.idx_mapping.shape[0],)](
        walk,
        *(tensor.stride(0) for tensor in (parents, out_tokens, path)),
        out_tokens.shape[1],
        path.shape[1],
        NODES=triton.next_power_of_2(parents.shape[1] + 1),
        STEPS=triton.next_power_of_2(max(out_tokens.shape[1], path.shape[1])),
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
    """Write the logits row at which each request's walk ended (int64 [at least R] ``rows``); one launch.

    The other arguments are those of :class:`Walk`. Requests that sampled nothing get the root's row.
    """
    _last_rows_kernel[(cu_num_logits.shape[0] - 1,)](cu_num_logits, num_sampled, path, path.stride(0), rows)
