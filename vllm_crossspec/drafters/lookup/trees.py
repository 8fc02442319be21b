"""The best prefixes of matches' continuations as a draft tree; one launch, one program per request.

Continuations with a common beginning share nodes, as in a suffix tree. A node's probability is the share of matches'
weight that passes through it, which extends the estimate of SuffixDecoding (Oliaro et al. 2024, section 3.2) to matches
of several lengths. A match weighs its number of equal tokens. After m equal tokens the next one is equal with odds of m
to 1. A weight of 1 stands for everything unseen. So one match of m tokens is right for d more with probability
m / (m + d). Nodes are in falling order, so any number of first nodes is a tree.

Shape legend: R requests, M matches of a request, D tokens of a continuation, N draft nodes.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

from vllm_crossspec.drafters.lookup.kernels import Matches
from vllm_crossspec.types import TokenTree

MAX_CANDIDATES = 512
"""Most tokens of all continuations of a request, which one program holds."""

BEYOND = 3
"""A match as long as the longest comparison counts as this many times as long."""

_BEYOND = tl.constexpr(BEYOND)


@triton.jit
def _match_tree_kernel(
    continuations_ptr,  # int32 [R, M, D]
    lengths_ptr,  # int32 [R, M]
    counts_ptr,  # float32 [R, M]
    num_matches,
    depth,
    max_match,
    tokens_ptr,  # int64 [R, width]
    tokens_stride,
    parents_ptr,  # int32 [R, width]
    parents_stride,
    log_probs_ptr,  # float32 [R, width]
    log_probs_stride,
    sizes_ptr,  # int32 [R]
    num_nodes,
    width,
    MATCHES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    match = tl.arange(0, MATCHES)
    is_match = match < num_matches
    length = tl.load(lengths_ptr + request * num_matches + match, mask=is_match, other=0)
    count = tl.load(counts_ptr + request * num_matches + match, mask=is_match, other=0.0)
    agreed = tl.where(length >= max_match, _BEYOND * max_match, length).to(tl.float32)
    weight = tl.where(length > 0, agreed * count, 0.0)
    total = 1.0 + tl.sum(weight, axis=0)

    # For each level: the first match with the same beginning, and the weight of all such matches. A node is at
    # [level, that match]; levels come first, so of equal nodes the parent wins.
    level_of = tl.arange(0, DEPTH)
    place = level_of[:, None] * MATCHES + match[None, :]
    score = tl.full([DEPTH, MATCHES], 0.0, tl.float32)
    token_of = tl.zeros([DEPTH, MATCHES], tl.int32)
    above = tl.zeros([DEPTH, MATCHES], tl.int32)
    same = tl.zeros([MATCHES], tl.int32)
    for level in range(depth):
        token = tl.load(
            continuations_ptr + (request * num_matches + match) * depth + level,
            mask=is_match & (length > 0) & (same >= 0),
            other=-1,
        )
        alike = (token[:, None] == token[None, :]) & (same[:, None] == same[None, :]) & (token[:, None] >= 0)
        first = tl.min(tl.where(alike, match[None, :], MATCHES), axis=1)
        lasting = weight * (agreed + 1.0) / (agreed + 1.0 + level)
        mass = tl.sum(tl.where(alike, lasting[None, :], 0.0), axis=1)
        is_node = (first == match) & (token >= 0)
        here = level_of[:, None] == level
        score = tl.where(here & is_node[None, :], mass[None, :], score)
        token_of = tl.where(here, token[None, :], token_of)
        above = tl.where(here, same[None, :], above)
        same = tl.where(token >= 0, first, -1)

    row_of = tl.zeros([DEPTH, MATCHES], tl.int32)
    size = 0
    for node in range(num_nodes):
        best = tl.max(tl.max(score, axis=1), axis=0)
        at = tl.min(tl.min(tl.where(score == best, place, DEPTH * MATCHES), axis=1), axis=0)
        is_node = best > 0.0
        chosen = place == at
        token = tl.sum(tl.sum(tl.where(chosen, token_of, 0), axis=1), axis=0)
        parent_at = at - at % MATCHES - MATCHES + tl.sum(tl.sum(tl.where(chosen, above, 0), axis=1), axis=0)
        parent = tl.sum(tl.sum(tl.where(place == parent_at, row_of, 0), axis=1), axis=0)  # 0, the root's, in level 0
        row_of = tl.where(chosen, node + 1, row_of)
        score = tl.where(chosen, 0.0, score)
        tl.store(tokens_ptr + request * tokens_stride + node, tl.where(is_node, token, 0).to(tl.int64))
        tl.store(parents_ptr + request * parents_stride + node, tl.where(is_node, parent, 0))
        log_prob = tl.where(is_node, tl.log(tl.maximum(best, 1e-30) / total), float("-inf"))
        tl.store(log_probs_ptr + request * log_probs_stride + node, log_prob)
        size += is_node.to(tl.int32)
    tl.store(sizes_ptr + request, size)

    rest = tl.arange(0, 256)
    is_rest = (rest >= num_nodes) & (rest < width)
    tl.store(tokens_ptr + request * tokens_stride + rest, tl.zeros([256], tl.int64), mask=is_rest)
    tl.store(parents_ptr + request * parents_stride + rest, tl.zeros([256], tl.int32), mask=is_rest)
    tl.store(log_probs_ptr + request * log_probs_stride + rest, tl.full([256], float("-inf"), tl.float32), mask=is_rest)


def match_tree(matches: Matches, *, max_match: int, num_nodes: int, out: TokenTree) -> None:
    """The ``num_nodes`` likeliest prefixes of every request's continuations, in falling order.

    Args:
        matches: of R requests; at most :data:`MAX_CANDIDATES` tokens of a request, M and D taken as powers of 2.
        max_match: most tokens that were compared.
        num_nodes: most nodes of a tree, at most 255.
        out: its first R rows are written over their whole width. Dead nodes have log-probability -inf.
    """
    num_reqs, num_matches, depth = matches.continuations.shape
    sizes = {"MATCHES": triton.next_power_of_2(num_matches), "DEPTH": triton.next_power_of_2(depth)}
    assert sizes["MATCHES"] * sizes["DEPTH"] <= MAX_CANDIDATES and 1 <= num_nodes <= out.tokens.shape[1] <= 255
    _match_tree_kernel[(num_reqs,)](
        *matches, num_matches, depth, max_match, *out.arguments, num_nodes, out.tokens.shape[1], **sizes, num_warps=1
    )
