"""Chains: a drafter's first choices as a tree of one path, and the best path of a tree."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.types import TokenTree


@triton.jit
def _chain_kernel(
    drafted_ptr,  # int64 [R, K]
    drafted_stride,
    drafted_log_probs_ptr,  # float [R, K] or None
    drafted_log_probs_stride,
    tree,  # TreeArguments of [R, width] nodes
    num_drafted,
    width,
    HAS_LOG_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    is_node = i < num_drafted
    inside = i < width
    token = tl.load(drafted_ptr + row * drafted_stride + i, mask=is_node, other=0)
    tl.store(tree.tokens + row * tree.tokens_stride + i, token, mask=inside)
    tl.store(tree.parents + row * tree.parents_stride + i, tl.where(is_node, i, 0), mask=inside)
    log_prob = tl.zeros([BLOCK], tl.float32)
    if HAS_LOG_PROBS:
        own = tl.load(drafted_log_probs_ptr + row * drafted_log_probs_stride + i, mask=is_node, other=0.0)
        log_prob = tl.cumsum(tl.minimum(own.to(tl.float32), 0.0), axis=0)
    log_prob = tl.where(is_node, log_prob, float("-inf"))
    tl.store(tree.log_probs + row * tree.log_probs_stride + i, log_prob, mask=inside)
    tl.store(tree.sizes + row, num_drafted)


def chain(*, tokens: torch.Tensor, log_probs: torch.Tensor | None = None, out: TokenTree) -> None:
    """Write a drafter's first choices as trees; one launch.

    Args:
        tokens: int64 [R, K] drafted ids in the target's vocabulary.
        log_probs: float [R, K] the log-probability of each, given those before it; None: every node is certain (0).
        out: its first R rows are written over their whole width W >= K; dead nodes get token 0, parent 0, -inf.
    """
    num_reqs, num_drafted = tokens.shape
    width = out.tokens.shape[1]
    assert num_drafted <= width and tokens.stride(1) == 1
    given = tokens if log_probs is None else log_probs
    _chain_kernel[(num_reqs,)](
        tokens,
        tokens.stride(0),
        given,
        given.stride(0),
        out.arguments,
        num_drafted,
        width,
        HAS_LOG_PROBS=log_probs is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )


@triton.jit
def _to_chain_kernel(
    tree,  # TreeArguments of [R, N] nodes, in place
    chain_only_ptr,  # bool [R], or [S] with idx_mapping
    idx_mapping_ptr,  # int [R]
    num_nodes,
    max_depth,
    BY_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = row
    if BY_SLOT:
        slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    if slot < 0:
        return
    if tl.load(chain_only_ptr + slot) == 0:
        return
    tokens_ptr = tree.tokens + row * tree.tokens_stride
    parents_ptr = tree.parents + row * tree.parents_stride
    log_probs_ptr = tree.log_probs + row * tree.log_probs_stride
    size = tl.minimum(tl.load(tree.sizes + row), num_nodes)
    i = tl.arange(0, BLOCK)
    is_node = i < size

    # Expected accepted length of the path to each node, and its depth; all nodes walk up together. Row 0 is the root.
    expected = tl.zeros([BLOCK], tl.float32)
    depth = tl.zeros([BLOCK], tl.int32)
    cur = tl.where(is_node, i + 1, 0)
    for _ in range(max_depth):
        log_prob = tl.load(log_probs_ptr + cur - 1, mask=cur > 0, other=float("-inf"))
        expected += tl.exp(log_prob)
        depth += (cur > 0).to(tl.int32)
        cur = tl.load(parents_ptr + cur - 1, mask=cur > 0, other=0)
    best = tl.argmax(tl.where(is_node, expected, -1.0), axis=0)
    length = tl.sum(tl.where(i == best, depth, 0), axis=0)

    # source[k]: row of the path's node at depth k + 1.
    source = tl.zeros([BLOCK], tl.int32)
    at = tl.where(size > 0, best + 1, 0)
    for k in range(length):
        source = tl.where(i == length - 1 - k, at, source)
        at = tl.load(parents_ptr + at - 1, mask=at > 0, other=0)
    on_path = i < length
    token = tl.load(tokens_ptr + source - 1, mask=on_path, other=0)
    log_prob = tl.load(log_probs_ptr + source - 1, mask=on_path, other=float("-inf"))
    # All threads must have read before any overwrites.
    tl.debug_barrier()
    inside = i < num_nodes
    tl.store(tokens_ptr + i, token, mask=inside)
    tl.store(parents_ptr + i, tl.where(on_path, i, 0), mask=inside)
    tl.store(log_probs_ptr + i, log_prob, mask=inside)
    tl.store(tree.sizes + row, length)


def to_chain(
    trees: TokenTree, chain_only: torch.Tensor, max_depth: int, idx_mapping: torch.Tensor | None = None
) -> None:
    """Replace the trees of flagged requests, in place, by their best path; one launch.

    Grammars, bad words and thinking budgets need chains. The path leads to the node with the largest expected accepted
    length: the sum of exp(log_prob) over its ancestors and itself. The first node wins ties. The path is renumbered as
    a chain; the other nodes are dead (token 0, parent 0, -inf).

    Args:
        trees: of the batch.
        chain_only: bool [R] flags of the rows; [S] flags of the slots if ``idx_mapping`` is given.
        max_depth: no tree is deeper.
        idx_mapping: int [R] slot of each row; negative rows are padding and stay as they are.
    """
    num_reqs, num_nodes = trees.tokens.shape
    _to_chain_kernel[(num_reqs if idx_mapping is None else len(idx_mapping),)](
        trees.arguments,
        chain_only,
        chain_only if idx_mapping is None else idx_mapping,
        num_nodes,
        max_depth,
        BY_SLOT=idx_mapping is not None,
        BLOCK=triton.next_power_of_2(num_nodes),
        num_warps=1,
    )
