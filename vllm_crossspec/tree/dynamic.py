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

from vllm_crossspec.twins import next_power_of_2, runs_kernels
from vllm_crossspec.types import TokenTree

MAX_NODES = 255


class Beam(NamedTuple):
    """The nodes of a level whose children the drafter is asked for next; views of persistent buffers.

    A drafter that gives beam node j of level d (from 1) the row (d - 1) * k + j of its scratch, behind rows that all
    nodes see, has all ancestors of a node in rows below, and ``masks`` says which they are.

    Attributes:
        tokens: int64 [R, k] ids in the target's vocabulary, by falling log-probability; 0 for a dead node.
        parents: int32 [R, k] each node's parent as an index into the beam before (0 at level 1).
        log_probs: float32 [R, k] of the path from the root; -inf for a dead node.
        masks: int32 [R, k, W], bit (i % 32) of word i // 32 set where scratch row i is the node or an ancestor of it.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    log_probs: torch.Tensor
    masks: torch.Tensor


@triton.jit
def as_log_prob(x):
    # A NaN compares false and so counts as impossible; above 0 there is no probability, and a child that beats its
    # parent would break the order.
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
    candidate_log_probs_ptr,  # float32 [S, C]
    candidate_tokens_ptr,  # int64 [S, C]
    candidate_parents_ptr,  # int32 [S, C], candidate that each is a child of; -1 for the root's
    candidates_stride,
    beam_tokens_ptr,  # int64 [D, S, k]
    beam_parents_ptr,  # int32 [D, S, k]
    beam_log_probs_ptr,  # float32 [D, S, k]
    beam_candidates_ptr,  # int32 [D, S, k], each beam node's own candidate index
    beam_stride,  # S * k
    beam_masks_ptr,  # int32 [D, S, k, W]
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
        score += tl.load(beam_log_probs_ptr + before + beam, mask=is_candidate, other=0.0)
        # Below its own limit a request has no candidates, whatever the rest of the batch still grows.
        score = tl.where(level < tl.load(limits_ptr + row), score, float("-inf"))
    source = row * tokens_stride_r + beam * tokens_stride_b + c % TOP_K
    token = tl.load(tokens_ptr + source, mask=is_candidate, other=0)
    above = tl.full([BLOCK_C], -1, tl.int32)
    if not IS_FIRST:
        above = tl.load(beam_candidates_ptr + before + beam, mask=is_candidate, other=0)

    target = row * candidates_stride + start + c
    tl.store(candidate_log_probs_ptr + target, score, mask=is_candidate)
    tl.store(candidate_tokens_ptr + target, token, mask=is_candidate)
    tl.store(candidate_parents_ptr + target, above, mask=is_candidate)

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
    tl.store(beam_tokens_ptr + now + j, tl.load(tokens_ptr + source, mask=is_live, other=0), mask=inside)
    tl.store(beam_parents_ptr + now + j, parent, mask=inside)
    tl.store(beam_log_probs_ptr + now + j, beam_score, mask=inside)
    tl.store(beam_candidates_ptr + now + j, start + chosen, mask=inside)

    word = tl.arange(0, BLOCK_W)[None, :]
    in_mask = inside[:, None] & (word < num_words)
    own_row = (first_row + level * TOP_K + j)[:, None]
    mask = tl.where(word == own_row // 32, tl.full([1, 1], 1, tl.int32) << (own_row % 32), 0)
    if IS_FIRST:  # what all rows see; the others inherit it
        mask = mask | tl.where(word == 0, (tl.full([1, 1], 1, tl.int32) << first_row) - 1, 0)
    if not IS_FIRST:
        inherited = (before + parent)[:, None] * num_words + word
        mask = mask | tl.load(beam_masks_ptr + inherited, mask=in_mask, other=0)
    tl.store(beam_masks_ptr + (now + j)[:, None] * num_words + word, mask, mask=in_mask)


@triton.jit
def _rank_kernel(
    candidate_log_probs_ptr,  # float32 [S, C]
    candidates_stride,
    ranks_ptr,  # int32 [S, C], place of each candidate among all of its request
    order_ptr,  # int32 [S, N], candidate of each place
    order_stride,
    sizes_ptr,  # int32 [R]
    caps_ptr,  # int32 [S], most nodes of each request
    num_candidates,
    num_nodes,
    HAS_CAPS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    scores = candidate_log_probs_ptr + row * candidates_stride
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
    tl.store(ranks_ptr + row * candidates_stride + i, rank, mask=is_live)
    tl.store(order_ptr + row * order_stride + rank, i, mask=is_live & (rank < num_nodes))
    if tl.program_id(1) == 0:
        size = tl.minimum(tl.sum(num_live, axis=0), num_nodes)
        if HAS_CAPS:
            size = tl.minimum(size, tl.load(caps_ptr + row))
        tl.store(sizes_ptr + row, size)


@triton.jit
def _gather_kernel(
    candidate_log_probs_ptr,  # float32 [S, C]
    candidate_tokens_ptr,  # int64 [S, C]
    candidate_parents_ptr,  # int32 [S, C]
    candidates_stride,
    ranks_ptr,  # int32 [S, C]
    order_ptr,  # int32 [S, N]
    order_stride,
    tokens_ptr,  # int64 [R, width]
    tokens_stride,
    parents_ptr,  # int32 [R, width]
    parents_stride,
    log_probs_ptr,  # float32 [R, width]
    log_probs_stride,
    sizes_ptr,  # int32 [R]
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    candidates = row * candidates_stride
    n = tl.arange(0, BLOCK)
    is_node = n < tl.load(sizes_ptr + row)
    c = tl.load(order_ptr + row * order_stride + n, mask=is_node, other=0)
    token = tl.load(candidate_tokens_ptr + candidates + c, mask=is_node, other=0)
    log_prob = tl.load(candidate_log_probs_ptr + candidates + c, mask=is_node, other=float("-inf"))

    parent = tl.load(candidate_parents_ptr + candidates + c, mask=is_node, other=-1)
    parent_row = tl.load(ranks_ptr + candidates + parent, mask=parent >= 0, other=-1) + 1

    inside = n < width
    tl.store(tokens_ptr + row * tokens_stride + n, token, mask=inside)
    tl.store(parents_ptr + row * parents_stride + n, parent_row, mask=inside)
    tl.store(log_probs_ptr + row * log_probs_stride + n, log_prob, mask=inside)


def ranking_blocks(count: int, device: torch.device) -> tuple[int, int]:
    """How many of ``count`` candidates a program ranks, and beside how many at once."""
    if not runs_kernels():  # there the number of operations is what costs, not their size
        return (min(1024, next_power_of_2(count)),) * 2
    return (64, 16) if device.type == "cpu" else (32, 128)


class Pool(NamedTuple):
    """The candidates of a batch, what is known of them, and room to order them; persistent buffers.

    Attributes:
        log_probs: float32 [S, C] of the path from the root; -inf for a dead candidate.
        tokens: int64 [S, C].
        parents: int32 [S, C], the candidate that each is a child of, no worse and earlier than it; -1 for the root's.
        ranks: int32 [S, C].
        order: int32 [S, N].
        caps: int32 [S] most nodes of each request's tree; None where all may have N.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    ranks: torch.Tensor
    order: torch.Tensor
    caps: torch.Tensor | None = None


def keep_best(pool: Pool, num_reqs: int, num_candidates: int, out: TokenTree) -> None:
    """The best N of all candidates as trees, in falling order, earlier ones first at ties; two launches.

    Args:
        pool: as it says; a candidate with N others before it may lack its parent.
        num_reqs: R, rows of ``pool`` that count.
        num_candidates: of each row that count, the first ones. Time grows with their square.
        out: its first R rows are written over their whole width >= N; dead nodes get token 0, parent 0 and
            log-probability -inf.
    """
    num_nodes, width = pool.order.shape[1], out.tokens.shape[1]
    block, others = ranking_blocks(num_candidates, pool.log_probs.device)
    assert num_nodes <= width
    _rank_kernel[(num_reqs, -(-num_candidates // block))](
        pool.log_probs,
        pool.log_probs.stride(0),
        pool.ranks,
        pool.order,
        pool.order.stride(0),
        out.sizes,
        pool.ranks if pool.caps is None else pool.caps,
        num_candidates,
        num_nodes,
        HAS_CAPS=pool.caps is not None,
        BLOCK_I=block,
        BLOCK_J=others,
    )
    _gather_kernel[(num_reqs,)](
        pool.log_probs,
        pool.tokens,
        pool.parents,
        pool.log_probs.stride(0),
        pool.ranks,
        pool.order,
        pool.order.stride(0),
        *out.arguments,
        width,
        BLOCK=next_power_of_2(width),
    )


class Grown(NamedTuple):
    """All that a tree was grown from so far, as views of persistent buffers; L levels.

    Attributes:
        log_probs: float32 [R, C] of every candidate's path: k of level 1, then k * k of every further level, child i
            of beam node b at b * k + i.
        beam_parents: int32 [L, R, k] each beam node's parent as an index into the beam before.
        beam_log_probs: float32 [L, R, k] of each beam node's path; -inf for a dead node.
    """

    log_probs: torch.Tensor
    beam_parents: torch.Tensor
    beam_log_probs: torch.Tensor


class DynamicTree:
    """Expand and rerank for a batch; every buffer is made here, so that a CUDA graph can hold all calls.

    One tree is built by :meth:`start`, then :meth:`expand` for the levels 2 to ``depth`` (or fewer), then
    :meth:`finish`. At exact ties the earlier candidate wins everywhere: the shallower one, and within a level the one
    whose parent stands earlier in the beam. Of two nodes a parent so always comes before its child.

    Memory of a request: 20 bytes a candidate, 20 + 4 W a beam node, 4 a draft node; 4.4 MB for 256 requests with the
    defaults.

    Args:
        num_nodes: N, most nodes of a tree, at most 255.
        depth: D, levels of the tree. SafeAILab's EAGLE counts the drafter's passes after the first, one less.
        top_k: children of a node, and nodes of a level that get children.
        max_num_reqs: S.
        device: of the drafter.
        first_row: row of the scratch in which the first beam begins, at most 31; all nodes see the rows before it.

    Attributes:
        limits: int32 [S] deepest level of each request of the batch; ``depth`` unless someone writes there.
        caps: int32 [S] most nodes of each request's tree, likewise ``num_nodes``.
    """

    def __init__(
        self, *, num_nodes: int, depth: int, top_k: int, max_num_reqs: int, device: torch.device, first_row: int = 0
    ):
        assert 1 <= num_nodes <= MAX_NODES and depth >= 1 and top_k >= 1 and 0 <= first_row < 32
        self.first_row = first_row
        self.num_nodes, self.depth, self.top_k, self.max_num_reqs = num_nodes, depth, top_k, max_num_reqs
        self.mask_words = -(-(first_row + depth * top_k) // 32)
        num_candidates = top_k + (depth - 1) * top_k * top_k

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._log_probs = empty(max_num_reqs, num_candidates, dtype=torch.float32)
        self._tokens = empty(max_num_reqs, num_candidates, dtype=torch.int64)
        self._parents = empty(max_num_reqs, num_candidates)
        self._ranks = empty(max_num_reqs, num_candidates)
        self._order = empty(max_num_reqs, num_nodes)
        self._beam_tokens = empty(depth, max_num_reqs, top_k, dtype=torch.int64)
        self._beam_parents = empty(depth, max_num_reqs, top_k)
        self._beam_log_probs = empty(depth, max_num_reqs, top_k, dtype=torch.float32)
        self._beam_candidates = empty(depth, max_num_reqs, top_k)
        self._beam_masks = empty(depth, max_num_reqs, top_k, self.mask_words)
        self.limits = torch.full((max_num_reqs,), depth, dtype=torch.int32, device=device)
        self.caps = torch.full((max_num_reqs,), num_nodes, dtype=torch.int32, device=device)
        self._num_reqs, self._levels = 0, 0
        self._block_c = [next_power_of_2(top_k), next_power_of_2(top_k * top_k)]
        self._block_k, self._block_w = self._block_c[0], next_power_of_2(self.mask_words)

    def start(self, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        """Take the root's children: level 1, and all of them the first beam.

        Args:
            log_probs: float [R, k] log-probabilities; -inf (and NaN) marks a child that must not be drafted, values
                above 0 count as 0.
            tokens: int64 [R, k] their ids in the target's vocabulary.

        Returns:
            Level 1, by falling log-probability.
        """
        self._num_reqs = log_probs.shape[0]
        return self._take(1, log_probs[:, None], tokens[:, None])

    def expand(self, level: int, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        """Take the children of the beam of ``level - 1``; the best ``top_k`` of them are the next beam.

        Args:
            level: of the children, 2 to ``depth``, one after another.
            log_probs: float [R, k, k] of the k children of each beam node, given the node; as in :meth:`start`.
            tokens: int64 [R, k, k].

        Returns:
            The next beam; after the last level nothing needs it.
        """
        assert level == self._levels + 1 <= self.depth and log_probs.shape[0] == self._num_reqs
        return self._take(level, log_probs, tokens)

    def grown(self) -> Grown:
        """The levels so far."""
        at = (slice(self._levels), slice(self._num_reqs))
        return Grown(self._log_probs[: self._num_reqs], self._beam_parents[at], self._beam_log_probs[at])

    def resume(self, num_reqs: int, levels: int) -> Beam:
        """Go on from what a captured graph has grown, without any launch: the beam of the last of ``levels``."""
        self._num_reqs, self._levels = num_reqs, levels
        return self._beam(levels)

    def _beam(self, level: int) -> Beam:
        at = (level - 1, slice(self._num_reqs))
        return Beam(self._beam_tokens[at], self._beam_parents[at], self._beam_log_probs[at], self._beam_masks[at])

    def finish(self, out: TokenTree) -> None:
        """Keep the best ``num_nodes`` of all candidates (of each request at most its own cap), in falling order.

        Args:
            out: its first R rows are written over their whole width >= ``num_nodes``; dead nodes get token 0,
                parent 0 and log-probability -inf. ``sizes`` is below the cap where there are fewer candidates.
        """
        assert self._levels
        pool = Pool(self._log_probs, self._tokens, self._parents, self._ranks, self._order, self.caps)
        keep_best(pool, self._num_reqs, self.top_k + (self._levels - 1) * self.top_k**2, out)
        self._levels = 0

    def _take(self, level: int, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        num_beams = 1 if level == 1 else self.top_k
        assert log_probs.shape == tokens.shape == (self._num_reqs, num_beams, self.top_k)
        assert log_probs.stride(2) == tokens.stride(2) == 1
        _expand_kernel[(self._num_reqs,)](
            log_probs,
            log_probs.stride(0),
            log_probs.stride(1),
            tokens,
            tokens.stride(0),
            tokens.stride(1),
            self._log_probs,
            self._tokens,
            self._parents,
            self._log_probs.stride(0),
            self._beam_tokens,
            self._beam_parents,
            self._beam_log_probs,
            self._beam_candidates,
            self._beam_tokens.stride(0),
            self._beam_masks,
            self.limits,
            level - 1,
            self.mask_words,
            self.first_row,
            IS_FIRST=level == 1,
            TOP_K=self.top_k,
            BLOCK_C=self._block_c[level > 1],
            BLOCK_K=self._block_k,
            BLOCK_W=self._block_w,
        )
        self._levels = level
        return self._beam(level)
