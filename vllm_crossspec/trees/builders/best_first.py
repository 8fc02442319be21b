"""The likeliest prefixes under a product of marginals, as one launch.

A parallel drafter gives one distribution per position. A tree node is a prefix of candidate ranks (r_1, ..., r_d); its
log-probability is the sum of log p_i[r_i]. Candidates of a position are in falling order. So the best remaining prefix
is always the first child or the next sibling of a taken one. A frontier of these finds the N best in order.

Shape legend: R requests, K positions, M candidates of a position, N draft nodes.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from vllm_crossspec.trees.builders.dynamic import MAX_NODES, as_log_prob
from vllm_crossspec.types import TokenTree

_ROWS = tl.constexpr(256)


@triton.jit
def _best_first_kernel(
    log_probs_ptr,  # float [R, K, M]
    log_probs_stride_r,
    log_probs_stride_k,
    candidates_ptr,  # int64 [R, K, M]
    candidates_stride_r,
    candidates_stride_k,
    tree,  # TreeArguments of [R, width] nodes
    num_positions,
    num_candidates,
    num_nodes,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    log_probs_ptr += row * log_probs_stride_r
    candidates_ptr += row * candidates_stride_r
    slot = tl.arange(0, BLOCK)

    # The frontier, one entry per slot. One reduction fetches key = (position * M + rank) * 256 + parent's row.
    first = as_log_prob(tl.load(log_probs_ptr))
    score = tl.where(slot == 0, first, float("-inf"))
    key = tl.zeros([BLOCK], tl.int32)
    parent_score = tl.zeros([BLOCK], tl.float32)
    node_key = tl.zeros([BLOCK], tl.int32)
    node_score = tl.full([BLOCK], float("-inf"), tl.float32)

    for n in range(num_nodes):
        top, best = tl.max(score, axis=0, return_indices=True)
        taken = slot == best
        entry = tl.sum(tl.where(taken, key, 0), axis=0)
        above = tl.sum(tl.where(taken, parent_score, 0.0), axis=0)
        node_key = tl.where(slot == n, entry, node_key)
        node_score = tl.where(slot == n, top, node_score)

        # Keys past the last candidate are in the frontier too, at -inf; they are reached when all others are taken.
        position = (entry // _ROWS) // num_candidates
        rank = (entry // _ROWS) % num_candidates
        here = log_probs_ptr + position.to(tl.int64) * log_probs_stride_k
        has_sibling = (rank + 1 < num_candidates) & (position < num_positions)
        sibling = as_log_prob(tl.load(here + rank + 1, mask=has_sibling, other=float("-inf")))
        child = as_log_prob(tl.load(here + log_probs_stride_k, mask=position + 1 < num_positions, other=float("-inf")))

        # The sibling takes the place of the entry that left, the child a new one.
        score = tl.where(taken, tl.where(top > float("-inf"), above + sibling, float("-inf")), score)
        key = tl.where(taken, entry + _ROWS, key)
        score = tl.where(slot == n + 1, top + child, score)
        key = tl.where(slot == n + 1, (position + 1) * num_candidates * _ROWS + n + 1, key)
        parent_score = tl.where(slot == n + 1, top, parent_score)

    is_node = node_score > float("-inf")
    position = (node_key // _ROWS) // num_candidates
    rank = (node_key // _ROWS) % num_candidates
    source = candidates_ptr + position.to(tl.int64) * candidates_stride_k + rank
    token = tl.load(source, mask=is_node, other=0)
    inside = slot < width
    tl.store(tree.tokens + row * tree.tokens_stride + slot, token, mask=inside)
    tl.store(tree.parents + row * tree.parents_stride + slot, tl.where(is_node, node_key % _ROWS, 0), mask=inside)
    tl.store(tree.log_probs + row * tree.log_probs_stride + slot, node_score, mask=inside)
    tl.store(tree.sizes + row, tl.sum(is_node.to(tl.int32), axis=0))


def best_first(*, log_probs: torch.Tensor, tokens: torch.Tensor, num_nodes: int, out: TokenTree) -> None:
    """The ``num_nodes`` likeliest prefixes of every request, in falling order; one launch, one program per request.

    At exact ties the older frontier entry wins; a next sibling inherits its sibling's age.

    Args:
        log_probs: float [R, K, M] log-probabilities of each position's candidates, falling along M. -inf (and NaN)
            marks a candidate that must not be drafted; values above 0 count as 0.
        tokens: int64 [R, K, M] their ids in the target's vocabulary.
        num_nodes: most nodes of a tree, at most 255.
        out: its first R rows are written over their whole width W >= num_nodes. Dead nodes get token 0, parent 0 and
            log-probability -inf; ``sizes`` is below ``num_nodes`` if candidates run out.
    """
    num_reqs, num_positions, num_candidates = log_probs.shape
    width = out.tokens.shape[1]
    assert tokens.shape == log_probs.shape and tokens.stride(2) == log_probs.stride(2) == 1
    assert 1 <= num_nodes <= width <= MAX_NODES and num_positions * num_candidates < 2**22
    _best_first_kernel[(num_reqs,)](
        log_probs,
        *log_probs.stride()[:2],
        tokens,
        *tokens.stride()[:2],
        out.arguments,
        num_positions,
        num_candidates,
        num_nodes,
        width,
        BLOCK=triton.next_power_of_2(width),
        # One warp: the loop is a chain of reductions, and these then need no shared memory.
        num_warps=1,
    )
