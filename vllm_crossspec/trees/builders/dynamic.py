"""The dynamic tree of EAGLE-2 and EAGLE-3: expand the likeliest nodes of every level, then keep the best of all.

Shape legend: R requests, S most requests, D levels, k top_k (beam width, and candidates of every beam node),
C candidates in all: k of level 1 and k * k of every further level, N draft nodes, W mask words = ceil(D * k / 32).

Launches: 1 for the first level, 1 for every further one, 2 to finish.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.kernel_args import next_power_of_2
from vllm_crossspec.types import TokenTree

MAX_NODES = 255
ONE_WARP = 256
"""Most candidates of a level for which one warp chooses the beam: eight per thread."""


class Beam(NamedTuple):
    """The nodes of a level whose children the drafter gives next; views of persistent buffers.

    Beam node j of level d (from 1) belongs in row (d - 1) * k + j of the drafter's scratch, after rows that all nodes
    see. ``masks`` then says which of the rows before it are its ancestors.
    """

    tokens: torch.Tensor  # int64 [R, k] ids in the target's vocabulary, by falling log-probability; 0 for a dead node
    parents: torch.Tensor  # int32 [R, k] each node's parent as an index into the beam before (0 at level 1)
    log_probs: torch.Tensor  # float32 [R, k] of the path from the root; -inf for a dead node
    # int32 [R, k, W], bit (i % 32) of word i // 32 set where scratch row i is the node or an ancestor of it
    masks: torch.Tensor


@triton.jit
def as_log_prob(x):
    # A NaN compares false and so counts as impossible. A value above 0 is not a log-probability: such a child would
    # beat its parent.
    x = x.to(tl.float32)
    return tl.where(x > float("-inf"), tl.minimum(x, 0.0), float("-inf"))


@triton.jit(do_not_specialize=["level"])
def _expand_kernel(
    log_probs_ptr,  # float [R, k, k], of each beam node's children; [R, 1, k] at level 1
    log_probs_stride_r,
    log_probs_stride_b,
    tokens_ptr,  # int64, shaped as log_probs
    tokens_stride_r,
    tokens_stride_b,
    pool,  # Pool
    pool_stride,  # C
    beams,  # Beam of [D, S, k]
    beam_candidates_ptr,  # int32 [D, S, k], each beam node's own candidate index
    beam_stride,  # S * k
    limits_ptr,  # int32 [S], deepest level of each request
    level,  # from 0
    num_words,
    first_row,
    IS_FIRST: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * TOP_K
    before = (level - 1).to(tl.int64) * beam_stride + first
    now = level.to(tl.int64) * beam_stride + first

    # Level 1 has k candidates, all others k * k.
    c = tl.arange(0, BLOCK_C)
    start = level * 0
    num_children = TOP_K
    if not IS_FIRST:
        start = TOP_K + (level - 1) * TOP_K * TOP_K
        num_children = TOP_K * TOP_K
    is_candidate = c < num_children
    beam = c // TOP_K
    source = row * log_probs_stride_r + beam * log_probs_stride_b + c % TOP_K
    score = as_log_prob(tl.load(log_probs_ptr + source, mask=is_candidate, other=float("-inf")))
    if not IS_FIRST:
        score += tl.load(beams.log_probs + before + beam, mask=is_candidate, other=0.0)
        # A request has no candidates below its own limit, even if others in the batch still grow.
        score = tl.where(level < tl.load(limits_ptr + row), score, float("-inf"))
    source = row * tokens_stride_r + beam * tokens_stride_b + c % TOP_K
    token = tl.load(tokens_ptr + source, mask=is_candidate, other=0)
    above = tl.full([BLOCK_C], -1, tl.int32)
    if not IS_FIRST:
        above = tl.load(beam_candidates_ptr + before + beam, mask=is_candidate, other=0)

    target = row * pool_stride + start + c
    tl.store(pool.log_probs + target, score, mask=is_candidate)
    tl.store(pool.tokens + target, token, mask=is_candidate)
    tl.store(pool.parents + target, above, mask=is_candidate)

    j = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    beam_score = tl.full([BLOCK_K], float("-inf"), tl.float32)
    left = score
    for n in range(TOP_K):
        top, best = tl.max(left, axis=0, return_indices=True)
        chosen = tl.where(j == n, best, chosen)
        beam_score = tl.where(j == n, top, beam_score)
        left = tl.where(c == best, float("-inf"), left)
    inside = j < TOP_K
    is_live = inside & (beam_score > float("-inf"))
    parent = chosen // TOP_K
    source = row * tokens_stride_r + parent * tokens_stride_b + chosen % TOP_K
    tl.store(beams.tokens + now + j, tl.load(tokens_ptr + source, mask=is_live, other=0), mask=inside)
    tl.store(beams.parents + now + j, parent, mask=inside)
    tl.store(beams.log_probs + now + j, beam_score, mask=inside)
    tl.store(beam_candidates_ptr + now + j, start + chosen, mask=inside)

    word = tl.arange(0, BLOCK_W)[None, :]
    in_mask = inside[:, None] & (word < num_words)
    own_row = (first_row + level * TOP_K + j)[:, None]
    mask = tl.where(word == own_row // 32, tl.full([1, 1], 1, tl.int32) << (own_row % 32), 0)
    if IS_FIRST:  # rows that all nodes see; later levels inherit them
        mask = mask | tl.where(word == 0, (tl.full([1, 1], 1, tl.int32) << first_row) - 1, 0)
    if not IS_FIRST:
        inherited = (before + parent)[:, None] * num_words + word
        mask = mask | tl.load(beams.masks + inherited, mask=in_mask, other=0)
    tl.store(beams.masks + (now + j)[:, None] * num_words + word, mask, mask=in_mask)


@triton.jit
def _rank_kernel(
    pool,  # Pool
    pool_stride,  # C
    order_stride,
    sizes_ptr,  # int32 [R]
    num_candidates,
    num_nodes,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    scores = pool.log_probs + row * pool_stride
    mine = tl.load(scores + i, mask=i < num_candidates, other=float("-inf"))
    rank = tl.zeros([BLOCK_I], tl.int32)
    num_live = tl.zeros([BLOCK_J], tl.int32)
    for start in range(0, num_candidates, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        other = tl.load(scores + j, mask=j < num_candidates, other=float("-inf"))
        is_tie = (other[None, :] == mine[:, None]) & (j[None, :] < i[:, None])
        is_ahead = (other[None, :] > mine[:, None]) | is_tie
        rank += tl.sum(is_ahead.to(tl.int32), axis=1)
        num_live += (other > float("-inf")).to(tl.int32)
    is_live = mine > float("-inf")
    tl.store(pool.ranks + row * pool_stride + i, rank, mask=is_live)
    tl.store(pool.order + row * order_stride + rank, i, mask=is_live & (rank < num_nodes))
    if tl.program_id(1) == 0:
        size = tl.minimum(tl.sum(num_live, axis=0), num_nodes)
        if pool.caps is not None:
            size = tl.minimum(size, tl.load(pool.caps + row))
        tl.store(sizes_ptr + row, size)


@triton.jit
def _gather_kernel(
    pool,  # Pool
    pool_stride,  # C
    order_stride,
    tree,  # TreeArguments of [R, width] nodes
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    candidates = row * pool_stride
    n = tl.arange(0, BLOCK)
    is_node = n < tl.load(tree.sizes + row)
    c = tl.load(pool.order + row * order_stride + n, mask=is_node, other=0)
    token = tl.load(pool.tokens + candidates + c, mask=is_node, other=0)
    log_prob = tl.load(pool.log_probs + candidates + c, mask=is_node, other=float("-inf"))

    parent = tl.load(pool.parents + candidates + c, mask=is_node, other=-1)
    parent_row = tl.load(pool.ranks + candidates + parent, mask=parent >= 0, other=-1) + 1

    inside = n < width
    tl.store(tree.tokens + row * tree.tokens_stride + n, token, mask=inside)
    tl.store(tree.parents + row * tree.parents_stride + n, parent_row, mask=inside)
    tl.store(tree.log_probs + row * tree.log_probs_stride + n, log_prob, mask=inside)


def ranking_blocks(count: int, device: torch.device) -> tuple[int, int]:
    """How many of ``count`` candidates a program ranks, and with how many it compares them at once."""
    return (64, 16) if device.type == "cpu" else (32, 128)


class Pool(NamedTuple):
    """The candidates of a batch, and buffers to order them; all persistent."""

    log_probs: torch.Tensor  # float32 [S, C] of the path from the root; -inf for a dead candidate
    tokens: torch.Tensor  # int64 [S, C]
    # int32 [S, C], each candidate's parent, which is earlier and no worse; -1 for the root's children
    parents: torch.Tensor
    ranks: torch.Tensor  # int32 [S, C]
    order: torch.Tensor  # int32 [S, N]
    caps: torch.Tensor | None = None  # int32 [S] most nodes of each request's tree; None where all may have N


def make_pool(
    max_num_reqs: int, num_candidates: int, num_nodes: int, device: torch.device, caps: torch.Tensor | None = None
) -> Pool:
    """An empty pool for S, C and N."""

    def zeros(width: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(max_num_reqs, width, dtype=dtype, device=device)

    c = num_candidates
    return Pool(zeros(c, torch.float32), zeros(c, torch.int64), zeros(c), zeros(c), zeros(num_nodes), caps)


def keep_best(pool: Pool, num_reqs: int, num_candidates: int, out: TokenTree) -> None:
    """The best N of all candidates as trees, in falling order, earlier ones first at ties; two launches.

    Args:
        pool: a candidate with N others before it may lack its parent.
        num_reqs: R, first rows of ``pool`` to use.
        num_candidates: first candidates of each row to use. Time grows with their square.
        out: its first R rows are written over their whole width >= N; dead nodes get token 0, parent 0, -inf.
    """
    num_nodes, width = pool.order.shape[1], out.tokens.shape[1]
    block, others = ranking_blocks(num_candidates, pool.log_probs.device)
    assert num_nodes <= width
    _rank_kernel[(num_reqs, -(-num_candidates // block))](
        pool,
        pool.log_probs.stride(0),
        pool.order.stride(0),
        out.sizes,
        num_candidates,
        num_nodes,
        BLOCK_I=block,
        BLOCK_J=others,
    )
    _gather_kernel[(num_reqs,)](
        pool,
        pool.log_probs.stride(0),
        pool.order.stride(0),
        out.arguments,
        width,
        BLOCK=next_power_of_2(width),
        num_warps=1,
    )


class Grown(NamedTuple):
    """The candidates and beams of a tree so far, as views of persistent buffers; L levels."""

    # float32 [R, C] of every candidate's path: k of level 1, then k * k per level, child i of beam node b at b * k + i
    log_probs: torch.Tensor
    beam_parents: torch.Tensor  # int32 [L, R, k] each beam node's parent as an index into the beam before
    beam_log_probs: torch.Tensor  # float32 [L, R, k] of each beam node's path; -inf for a dead node


class DynamicTree:
    """Expand and rerank for a batch; all buffers are made here, so a CUDA graph can hold all calls.

    Call :meth:`start`, then :meth:`expand` for levels 2 to at most ``depth``, then :meth:`finish`. At exact ties the
    earlier candidate wins: the shallower one, then the one whose parent is earlier in the beam. So a parent always
    comes before its children. 256 requests need 4.4 MB with the defaults.

    Args:
        num_nodes: N, most nodes of a tree, at most 255.
        depth: D, levels of the tree. SafeAILab's EAGLE counts one less: the drafter's passes after the first.
        top_k: children of a node, and nodes of a level that get children.
        max_num_reqs: S.
        first_row: first scratch row of the first beam, at most 31; all nodes see the rows before it.

    Attributes:
        limits: int32 [S] deepest level of each request of the batch; ``depth`` by default.
        caps: int32 [S] most nodes of each request's tree; ``num_nodes`` by default.
    """

    def __init__(
        self, *, num_nodes: int, depth: int, top_k: int, max_num_reqs: int, device: torch.device, first_row: int = 0
    ):
        assert 1 <= num_nodes <= MAX_NODES and depth >= 1 and top_k >= 1 and 0 <= first_row < 32
        self.first_row = first_row
        self.num_nodes, self.depth, self.top_k, self.max_num_reqs = num_nodes, depth, top_k, max_num_reqs
        self.mask_words = -(-(first_row + depth * top_k) // 32)

        def zeros(*last: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(depth, max_num_reqs, top_k, *last, dtype=dtype, device=device)

        self._beams = Beam(zeros(dtype=torch.int64), zeros(), zeros(dtype=torch.float32), zeros(self.mask_words))
        self._beam_candidates = zeros()
        self.limits = torch.full((max_num_reqs,), depth, dtype=torch.int32, device=device)
        self.caps = torch.full((max_num_reqs,), num_nodes, dtype=torch.int32, device=device)
        self._pool = make_pool(max_num_reqs, self._num_candidates(depth), num_nodes, device, self.caps)
        self._num_reqs, self._levels = 0, 0
        self._block_c = [next_power_of_2(top_k), next_power_of_2(top_k * top_k)]
        self._block_k, self._block_w = self._block_c[0], next_power_of_2(self.mask_words)

    def _num_candidates(self, levels: int) -> int:
        return self.top_k + (levels - 1) * self.top_k**2

    def start(self, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        """Take the root's children, which are level 1 and the first beam.

        Args:
            log_probs: float [R, k]; -inf (and NaN) marks a child that must not be drafted; values above 0 count as 0.
            tokens: int64 [R, k] their ids in the target's vocabulary.
        """
        self._num_reqs = log_probs.shape[0]
        return self._take(1, log_probs[:, None], tokens[:, None])

    def expand(self, level: int, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        """Take the children of the last beam, at ``level`` (2 to ``depth``); the best ``top_k`` are the next beam.

        ``log_probs`` are float [R, k, k] of each beam node's children, given the node; ``tokens`` int64 [R, k, k].
        """
        assert level == self._levels + 1 <= self.depth and log_probs.shape[0] == self._num_reqs
        return self._take(level, log_probs, tokens)

    def grown(self) -> Grown:
        at = (slice(self._levels), slice(self._num_reqs))
        return Grown(self._pool.log_probs[: self._num_reqs], self._beams.parents[at], self._beams.log_probs[at])

    def resume(self, num_reqs: int, levels: int) -> Beam:
        """Resume after a captured graph has grown ``levels`` levels; returns the last beam, without a launch."""
        self._num_reqs, self._levels = num_reqs, levels
        return self._beam(levels)

    def _beam(self, level: int) -> Beam:
        return Beam(*(of_all[level - 1, : self._num_reqs] for of_all in self._beams))

    def finish(self, out: TokenTree) -> None:
        """Keep the best ``num_nodes`` candidates, or each request's cap (:func:`keep_best`)."""
        assert self._levels
        keep_best(self._pool, self._num_reqs, self._num_candidates(self._levels), out)
        self._levels = 0

    def _take(self, level: int, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        num_beams = 1 if level == 1 else self.top_k
        assert log_probs.shape == tokens.shape == (self._num_reqs, num_beams, self.top_k)
        assert log_probs.stride(2) == tokens.stride(2) == 1
        _expand_kernel[(self._num_reqs,)](
            log_probs,
            *log_probs.stride()[:2],
            tokens,
            *tokens.stride()[:2],
            self._pool,
            self._pool.log_probs.stride(0),
            self._beams,
            self._beam_candidates,
            self._beam_candidates.stride(0),
            self.limits,
            level - 1,
            self.mask_words,
            self.first_row,
            IS_FIRST=level == 1,
            TOP_K=self.top_k,
            BLOCK_C=self._block_c[level > 1],
            BLOCK_K=self._block_k,
            BLOCK_W=self._block_w,
            # One warp for the usual 16 or 128: the beam is a chain of reductions, which then need no shared memory.
            num_warps=1 if self._block_c[level > 1] <= ONE_WARP else 4,
        )
        self._levels = level
        return self._beam(level)
