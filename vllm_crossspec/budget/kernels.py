"""What each node of a draft tree is worth, and which nodes of a batch are worth most; all on the device.

A node is worth the chance that it is accepted: the product, along its path, of each node's chance once its parent was
accepted. The drafter's own probability says how likely that is; a logistic of each depth, learned from what was
accepted, corrects it. vLLM 0.33 estimates chains in the same way.

Shape legend: R requests, S slots, N draft nodes, D deepest level. Row i is node i - 1, row 0 the last token.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.kernel_args import next_power_of_2
from vllm_crossspec.types import TokenTree

MOST_LOGIT = 7.0
"""Log-odds of a node beyond this count as this: a drafter's chain has no probabilities, and its nodes this much."""
MEMORY = 0.99
"""What a round leaves of what the rounds before it have taught."""
PRIOR = 2.0
"""Curvature of the logistic that stands for the first guess: about eight nodes of even odds."""
UNIT = tl.constexpr(1 << 24)
SUMS = 5
"""Numbers of a depth: gradient by offset and slope, curvature by offset, both, and slope."""


class Estimates(NamedTuple):
    """What is known of the drafts of every slot; all persistent."""

    worth: torch.Tensor  # float32 [S, N] chance that a node is accepted; 0 for a dead one
    odds: torch.Tensor  # float32 [S, N] the drafter's log-odds of a node, given its parent
    logistics: torch.Tensor  # float32 [D, 2] offset and slope by which log-odds of a level are corrected
    # int64 [D, SUMS] of the step under way, in units of 1 / UNIT; zero between two steps. Integers, because the order
    # in which programs add must not matter: tensor-parallel ranks admit the same nodes.
    sums: torch.Tensor
    curvature: torch.Tensor  # float32 [D, 3] of all steps, which MEMORY forgets


def make_estimates(max_num_reqs: int, num_nodes: int, max_depth: int, device: torch.device) -> Estimates:
    """Of no drafts, and of drafters that are believed: offset 0, slope 1."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    logistics = torch.tensor([0.0, 1.0], device=device).repeat(max_depth, 1)
    shape = (max_num_reqs, num_nodes)
    sums = zeros(max_depth, SUMS, dtype=torch.int64)
    return Estimates(zeros(*shape), zeros(*shape), logistics, sums, zeros(max_depth, 3))


@triton.jit
def _estimate_kernel(
    tree,  # TreeArguments of [R, N] nodes
    idx_mapping_ptr,  # int [R] slot of each row; negative rows are padding
    estimates,  # Estimates
    stride,  # N of the estimates
    num_nodes,
    max_depth,
    MOST_LOGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    if slot >= 0:
        log_probs = tree.log_probs + row * tree.log_probs_stride
        parents = tree.parents + row * tree.parents_stride
        node = tl.arange(0, BLOCK)
        is_node = node < tl.minimum(tl.load(tree.sizes + row), num_nodes)

        depth = tl.zeros([BLOCK], tl.int32)
        current = tl.where(is_node, node + 1, 0)
        for _ in range(max_depth):
            depth += (current > 0).to(tl.int32)
            current = tl.load(parents + current - 1, mask=current > 0, other=0)

        worth = tl.where(is_node, 1.0, 0.0)
        own = tl.zeros([BLOCK], tl.float32)
        current = tl.where(is_node, node + 1, 0)
        for above in range(max_depth):
            inner = current > 0
            parent = tl.load(parents + current - 1, mask=inner, other=0)
            given = tl.load(log_probs + current - 1, mask=inner, other=0.0)
            given -= tl.load(log_probs + parent - 1, mask=parent > 0, other=0.0)
            # log(p / (1 - p)) of p = exp(given), which is at most 1.
            rest = 1.0 - tl.exp(tl.minimum(given, 0.0))
            odds = given - tl.log(tl.maximum(rest, 1e-6))
            odds = tl.minimum(tl.maximum(odds, -MOST_LOGIT), MOST_LOGIT)
            own = tl.where(node + 1 == current, odds, own)
            level = tl.maximum(depth - above, 1)
            offset = tl.load(estimates.logistics + 2 * (level - 1))
            slope = tl.load(estimates.logistics + 2 * (level - 1) + 1)
            chance = 1.0 / (1.0 + tl.exp(-(offset + slope * odds)))
            worth = tl.where(inner, worth * chance, worth)
            current = parent
        inside = node < stride
        tl.store(estimates.worth + slot * stride + node, worth, mask=inside)
        tl.store(estimates.odds + slot * stride + node, own, mask=inside)


def estimate(tree: TokenTree, idx_mapping: torch.Tensor, estimates: Estimates) -> None:
    """Write what the nodes of a batch's trees are worth, and the drafter's log-odds of each; one launch.

    Args:
        tree: [R, at most N] nodes; ``log_probs`` are the drafter's.
        idx_mapping: int [R] slot of each row; negative rows are padding.
        estimates: its rows of these slots are written.
    """
    stride = estimates.worth.shape[1]
    _estimate_kernel[(idx_mapping.shape[0],)](
        tree.arguments,
        idx_mapping,
        estimates,
        stride,
        min(tree.tokens.shape[1], stride),
        estimates.logistics.shape[0],
        MOST_LOGIT=MOST_LOGIT,
        BLOCK=next_power_of_2(stride),
        num_warps=1,
    )


@triton.jit
def _in_units(number):
    return (number * UNIT).to(tl.int64)


@triton.jit
def _observe_kernel(
    verified,  # Verified
    parents_stride,
    path_stride,
    estimates,  # Estimates
    stride,  # N of the estimates
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(verified.idx_mapping + row).to(tl.int64)
    live = tl.load(verified.num_live + row)
    if (slot >= 0) & (live > 0):
        node = tl.arange(0, BLOCK)
        is_node = node < live
        parent = tl.load(verified.parents + slot * parents_stride + node, mask=is_node, other=-1)
        odds = tl.load(estimates.odds + slot * stride + node, mask=is_node, other=0.0)
        length = tl.load(verified.num_sampled + row)
        for level in range(length):
            # The children of the level's accepted row: whether each is the next accepted one.
            here = tl.load(verified.path + row * path_stride + level)
            following = tl.load(verified.path + row * path_stride + level + 1, mask=level + 1 < length, other=0)
            is_child = is_node & (parent == here)
            offset = tl.load(estimates.logistics + 2 * level, mask=level < verified.max_depth, other=0.0)
            slope = tl.load(estimates.logistics + 2 * level + 1, mask=level < verified.max_depth, other=0.0)
            chance = 1.0 / (1.0 + tl.exp(-(offset + slope * odds)))
            wrong = tl.where(is_child, tl.where(node + 1 == following, 1.0, 0.0) - chance, 0.0)
            weight = tl.where(is_child, chance * (1.0 - chance), 0.0)
            sums = estimates.sums + level * SUMS
            inside = level < verified.max_depth  # the last accepted row has no children
            tl.atomic_add(sums, _in_units(tl.sum(wrong, axis=0)), mask=inside)
            tl.atomic_add(sums + 1, _in_units(tl.sum(wrong * odds, axis=0)), mask=inside)
            tl.atomic_add(sums + 2, _in_units(tl.sum(weight, axis=0)), mask=inside)
            tl.atomic_add(sums + 3, _in_units(tl.sum(weight * odds, axis=0)), mask=inside)
            tl.atomic_add(sums + 4, _in_units(tl.sum(weight * odds * odds, axis=0)), mask=inside)


@triton.jit
def _learn_kernel(
    estimates,  # Estimates
    max_depth,
    MEMORY: tl.constexpr,
    PRIOR: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    level = tl.arange(0, BLOCK)
    inside = level < max_depth
    sums = estimates.sums + level * SUMS
    curvature = estimates.curvature + 3 * level
    by_offset = tl.load(sums, mask=inside, other=0).to(tl.float32) / UNIT
    by_slope = tl.load(sums + 1, mask=inside, other=0).to(tl.float32) / UNIT
    first = tl.load(sums + 2, mask=inside, other=0).to(tl.float32) / UNIT
    first += MEMORY * tl.load(curvature, mask=inside, other=0.0)
    both = tl.load(sums + 3, mask=inside, other=0).to(tl.float32) / UNIT
    both += MEMORY * tl.load(curvature + 1, mask=inside, other=0.0)
    second = tl.load(sums + 4, mask=inside, other=0).to(tl.float32) / UNIT
    second += MEMORY * tl.load(curvature + 2, mask=inside, other=0.0)
    tl.store(curvature, first, mask=inside)
    tl.store(curvature + 1, both, mask=inside)
    tl.store(curvature + 2, second, mask=inside)
    zero = tl.zeros([BLOCK], tl.int64)
    for i in range(SUMS):
        tl.store(sums + i, zero, mask=inside)
    # A Newton step of the regularised logistic; the determinant is at least PRIOR squared.
    one, two = first + PRIOR, second + PRIOR
    scale = 1.0 / (one * two - both * both)
    offset = tl.load(estimates.logistics + 2 * level, mask=inside, other=0.0)
    slope = tl.load(estimates.logistics + 2 * level + 1, mask=inside, other=1.0)
    offset += scale * (two * by_offset - both * by_slope)
    slope += scale * (one * by_slope - both * by_offset)
    tl.store(estimates.logistics + 2 * level, tl.minimum(tl.maximum(offset, -7.0), 7.0), mask=inside)
    tl.store(estimates.logistics + 2 * level + 1, tl.minimum(tl.maximum(slope, 0.0), 3.0), mask=inside)


class Verified(NamedTuple):
    """What became of a step's drafts."""

    idx_mapping: torch.Tensor  # int [R] slot of each row; negative rows are padding
    parents: torch.Tensor  # int32 [S, N] row of each node's parent
    num_live: torch.Tensor  # int32 [at least R] nodes that were verified and could be accepted
    path: torch.Tensor  # int32 [at least R, at least max_depth + 1] accepted rows
    num_sampled: torch.Tensor  # int32 [R] length of each path
    max_depth: int


def learn(verified: Verified, estimates: Estimates) -> None:
    """Correct the logistics by a verified step; two launches. Only nodes whose parent was accepted say anything."""
    max_depth, stride = estimates.logistics.shape[0], estimates.worth.shape[1]
    _observe_kernel[(verified.idx_mapping.shape[0],)](
        verified,
        verified.parents.stride(0),
        verified.path.stride(0),
        estimates,
        stride,
        SUMS=SUMS,
        BLOCK=next_power_of_2(stride),
        num_warps=1,
    )
    _learn_kernel[(1,)](
        estimates, max_depth, MEMORY=MEMORY, PRIOR=PRIOR, SUMS=SUMS, BLOCK=next_power_of_2(max_depth), num_warps=1
    )


class Shares(NamedTuple):
    """The rows of a step, shared out among its requests. R requests."""

    idx_mapping: torch.Tensor  # int [R] slot of each request
    planned: torch.Tensor  # int32 [R] draft rows that the scheduler planned
    others: torch.Tensor  # int32 [R] other rows: the last token, or tokens of a prompt
    admitted: torch.Tensor  # int32 [R], written: draft rows
    cu_num_logits: torch.Tensor  # int32 [R + 1], written behind its first entry
    query_start_loc: torch.Tensor  # int32 [at least R + 1], likewise


@triton.jit
def _keys(shares, worth_ptr, stride, start, num_reqs, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Worth as rising integers [BLOCK_R, BLOCK_N], -1 where no row was planned, and the requests' planned rows."""
    request = start + tl.arange(0, BLOCK_R)
    is_request = request < num_reqs
    slot = tl.load(shares.idx_mapping + request, mask=is_request, other=0).to(tl.int64)
    planned = tl.load(shares.planned + request, mask=is_request, other=0)
    node = tl.arange(0, BLOCK_N)[None, :]
    is_planned = node < planned[:, None]
    worth = tl.load(worth_ptr + slot[:, None] * stride + node, mask=is_planned & (node < stride), other=0.0)
    return tl.where(is_planned, worth.to(tl.int32, bitcast=True), -1)


@triton.jit(do_not_specialize=["budget", "num_reqs"])
def _admit_kernel(
    shares,  # Shares
    worth_ptr,  # float32 [S, N], not negative
    stride,
    budget,
    num_reqs,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The largest key that at least `budget` planned rows reach; 1.0 is the largest worth.
    low = budget * 0
    high = budget * 0 + 0x3F800001
    while high - low > 1:
        middle = (low + high) // 2
        count = budget * 0
        for start in range(0, num_reqs, BLOCK_R):
            keys = _keys(shares, worth_ptr, stride, start, num_reqs, BLOCK_R, BLOCK_N)
            count += tl.sum(tl.sum((keys >= middle).to(tl.int32), axis=1), axis=0)
        low = tl.where(count >= budget, middle, low)
        high = tl.where(count >= budget, high, middle)
    free = budget
    for start in range(0, num_reqs, BLOCK_R):
        keys = _keys(shares, worth_ptr, stride, start, num_reqs, BLOCK_R, BLOCK_N)
        free -= tl.sum(tl.sum((keys > low).to(tl.int32), axis=1), axis=0)
    # Rows of the very key are given to the first requests.
    num_logits = budget * 0
    num_rows = budget * 0
    for start in range(0, num_reqs, BLOCK_R):
        keys = _keys(shares, worth_ptr, stride, start, num_reqs, BLOCK_R, BLOCK_N)
        request = start + tl.arange(0, BLOCK_R)
        inside = request < num_reqs
        tied = tl.sum((keys == low).to(tl.int32), axis=1)
        given = tl.minimum(tl.maximum(free - (tl.cumsum(tied, axis=0) - tied), 0), tied)
        admitted = tl.sum((keys > low).to(tl.int32), axis=1) + given
        free -= tl.sum(given, axis=0)
        others = tl.load(shares.others + request, mask=inside, other=0)
        logits = tl.where(inside, admitted + 1, 0)
        rows = tl.where(inside, admitted + others, 0)
        tl.store(shares.admitted + request, admitted, mask=inside)
        tl.store(shares.cu_num_logits + request + 1, num_logits + tl.cumsum(logits, axis=0), mask=inside)
        tl.store(shares.query_start_loc + request + 1, num_rows + tl.cumsum(rows, axis=0), mask=inside)
        num_logits += tl.sum(logits, axis=0)
        num_rows += tl.sum(rows, axis=0)


def admit(shares: Shares, worth: torch.Tensor, budget: int) -> None:
    """Give the ``budget`` planned draft rows that are worth most to their requests; one launch, no sync.

    A request gets as many of its first nodes as it has among them: every prefix of a tree is a tree. Where its nodes'
    worth does not fall, these need not be the very nodes.

    Args:
        shares: of the step; at least ``budget`` rows are planned.
        worth: float32 [S, N] of every slot's nodes.
        budget: draft rows of the step, at least 1.
    """
    num_reqs, stride = len(shares.planned), worth.shape[1]
    _admit_kernel[(1,)](
        shares,
        worth,
        worth.stride(0),
        budget,
        num_reqs,
        BLOCK_R=min(next_power_of_2(num_reqs), 32),
        BLOCK_N=next_power_of_2(stride),
    )
