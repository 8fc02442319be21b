"""Continuity-aware tree pruning (Liu et al. 2026, Algorithm 1, appendix D): a beam over a parallel drafter's marginals.

A parallel drafter gives likely tokens for each position, but not which of them go together. Each level adds two terms
to a path's score: the drafter's ln p, and the n-gram model's ln p of the token given the path. The best nodes of a
level are expanded. The best nodes of all levels are the tree.

Shape legend: R requests, S most requests, K positions (levels), D most levels, C candidates of a position, B beam
width, L context tokens of a lookup (the store's order - 1), N draft nodes. The pool keeps the best N candidates of each
level, the r-th best at level * N + r: no others can be among the best N of all.

Launches for any batch: 1 to weigh the drafter's log-probabilities, 1 per level to extend the beam, 2 to finish. N-grams
add 1 look-up per level after the first. That is 18 for 8 levels, and 11 without n-grams.
"""

# mypy: disable-error-code="no-untyped-def"
import math

import torch
import triton
import triton.language as tl

from vllm_crossspec.kernel_args import next_power_of_2
from vllm_crossspec.kinds.scoring import Scoring
from vllm_crossspec.ngram_store.kernels import look_up_level
from vllm_crossspec.ngram_store.store import EPSILON, NgramStore, check_backoff
from vllm_crossspec.trees.builders.dynamic import MAX_NODES, keep_best, make_pool, ranking_blocks
from vllm_crossspec.types import TokenTree

_EPSILON = tl.constexpr(EPSILON)
_LARGEST = tl.constexpr(3.0e38)


@triton.jit
def _weigh_kernel(
    log_probs_ptr,  # float [R, K, C]
    log_probs_stride_r,
    log_probs_stride_k,
    weights_ptr,  # float64 [D], of ln p at each level
    weighted_ptr,  # float32 [R, K, C] out
    num_levels,
    num_candidates,
    RENORMALISES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    level = tl.arange(0, BLOCK_K)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    inside = (level < num_levels) & (c < num_candidates)
    source = row * log_probs_stride_r + level.to(tl.int64) * log_probs_stride_k + c
    # In float64, so that every implementation rounds to the same float32.
    x = tl.load(log_probs_ptr + source, mask=inside, other=float("-inf")).to(tl.float64)
    # A NaN compares false and so counts as impossible.
    is_live = x > float("-inf")
    x = tl.where(is_live, tl.minimum(x, _LARGEST), -_LARGEST)
    if RENORMALISES:
        share = tl.where(is_live, tl.exp(x - tl.max(x, axis=1)[:, None]), 0.0)
        total = tl.sum(share, axis=1)[:, None]
        x = tl.log(share / tl.where(total > 0, total, 1.0) + _EPSILON)
    weight = tl.load(weights_ptr + level, mask=level < num_levels, other=0.0)
    x = tl.where(is_live, weight * tl.minimum(x, 0.0), float("-inf")).to(tl.float32)
    target = (row * num_levels + level) * num_candidates + c
    tl.store(weighted_ptr + target, x, mask=inside)


@triton.jit
def _scores(
    i,  # of a level's candidates
    inside,
    weighted_ptr,  # float32 [C]
    ngram_ptr,  # float32 [B * C]
    above_ptr,  # float32 [B], of the beam that they extend
    ngram_weight,
    IS_FIRST: tl.constexpr,
    HAS_NGRAM: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
):
    """Scores of a level's candidates; all callers compute the same sums, so ranks are consistent."""
    score = tl.load(weighted_ptr + i % NUM_CANDIDATES, mask=inside, other=float("-inf"))
    if HAS_NGRAM:
        score += tl.minimum(ngram_weight * tl.load(ngram_ptr + i, mask=inside, other=0.0), 0.0)
    if not IS_FIRST:
        score += tl.load(above_ptr + i // NUM_CANDIDATES, mask=inside, other=float("-inf"))
    return score


@triton.jit
def _may_go_on(score, token, stop_tokens_ptr, NUM_STOPS: tl.constexpr):
    """Whether a candidate is possible and not a stop token."""
    is_open = score > float("-inf")
    for stop in tl.static_range(NUM_STOPS):
        is_open = is_open & (token != tl.load(stop_tokens_ptr + stop))
    return is_open


@triton.jit(do_not_specialize=["level"])
def _extend_kernel(
    weighted_ptr,  # float32 [R, K, C]
    weighted_stride,  # K * C
    ngram_ptr,  # float32 [R, B, C] ln p after each beam node; read where HAS_NGRAM
    tokens_ptr,  # int64 [R, K, C]
    tokens_stride_r,
    tokens_stride_k,
    contexts_ptr,  # int [R, B, L], the last tokens of each beam node; [R, 1, L] at level 0
    contexts_stride_r,
    contexts_stride_b,
    stop_tokens_ptr,  # int64 [NUM_STOPS]
    pool,  # Pool: of [S, D * N] the scores, tokens and places of parents are written
    pool_stride,  # D * N
    beam_scores_ptr,  # float32 [D, S, B]
    beam_places_ptr,  # int32 [D, S, B], of the beam's nodes
    beam_stride,  # S * B
    beam_contexts_ptr,  # int32 [D, S, B, L]
    level,  # from 0
    ngram_weight,  # of this level
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,  # no beam is needed
    HAS_NGRAM: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,  # C
    NUM_NODES: tl.constexpr,  # N
    BEAM_WIDTH: tl.constexpr,  # B
    LONGEST: tl.constexpr,  # L; 0 without n-grams
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    now = level.to(tl.int64) * beam_stride + row * BEAM_WIDTH
    before = now - beam_stride
    weighted_ptr += row * weighted_stride + level * NUM_CANDIDATES
    ngram_ptr += row * BEAM_WIDTH * NUM_CANDIDATES
    tokens_ptr += row * tokens_stride_r + level.to(tl.int64) * tokens_stride_k
    num_children = NUM_CANDIDATES if IS_FIRST else BEAM_WIDTH * NUM_CANDIDATES

    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_mine = i < num_children
    token = tl.load(tokens_ptr + i % NUM_CANDIDATES, mask=is_mine, other=0)
    above = beam_scores_ptr + before
    score = _scores(i, is_mine, weighted_ptr, ngram_ptr, above, ngram_weight, IS_FIRST, HAS_NGRAM, NUM_CANDIDATES)
    parent = tl.full([BLOCK_I], -1, tl.int32)
    if not IS_FIRST:
        parent = tl.load(beam_places_ptr + before + i // NUM_CANDIDATES, mask=is_mine, other=0)
    is_open = _may_go_on(score, token, stop_tokens_ptr, NUM_STOPS)

    # Ranks among all candidates of the level, and among those that may be extended.
    rank = tl.zeros([BLOCK_I], tl.int32)
    open_rank = tl.zeros([BLOCK_I], tl.int32)
    num_live = tl.zeros([BLOCK_J], tl.int32)
    num_open = tl.zeros([BLOCK_J], tl.int32)
    for first in range(0, num_children, BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        is_other = j < num_children
        other = _scores(j, is_other, weighted_ptr, ngram_ptr, above, ngram_weight, IS_FIRST, HAS_NGRAM, NUM_CANDIDATES)
        is_tie = (other[None, :] == score[:, None]) & (j[None, :] < i[:, None])
        is_ahead = (other[None, :] > score[:, None]) | is_tie
        rank += tl.sum(is_ahead.to(tl.int32), axis=1)
        num_live += (other > float("-inf")).to(tl.int32)
        if NUM_STOPS > 0:
            other_token = tl.load(tokens_ptr + j % NUM_CANDIDATES, mask=is_other, other=0)
            goes_on = _may_go_on(other, other_token, stop_tokens_ptr, NUM_STOPS)
            open_rank += tl.sum((is_ahead & goes_on[None, :]).to(tl.int32), axis=1)
            num_open += goes_on.to(tl.int32)
    if NUM_STOPS == 0:
        open_rank = rank
        num_open = num_live

    is_kept = (score > float("-inf")) & (rank < NUM_NODES)
    kept = row * pool_stride + level * NUM_NODES
    tl.store(pool.log_probs + kept + rank, score, mask=is_kept)
    tl.store(pool.tokens + kept + rank, token, mask=is_kept)
    tl.store(pool.parents + kept + rank, parent, mask=is_kept)
    if tl.program_id(1) == 0:
        free = tl.arange(0, BLOCK_N)
        is_free = (free >= tl.sum(num_live, axis=0)) & (free < NUM_NODES)
        tl.store(pool.log_probs + kept + free, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=is_free)

    if not IS_LAST:
        enters = is_open & (open_rank < BEAM_WIDTH)
        slot = now + open_rank
        tl.store(beam_scores_ptr + slot, score, mask=enters)
        # A candidate behind N others has no place, and no child among the best N either.
        tl.store(beam_places_ptr + slot, level * NUM_NODES + tl.minimum(rank, NUM_NODES - 1), mask=enters)
        if LONGEST > 0:
            context = contexts_ptr + row * contexts_stride_r + (i // NUM_CANDIDATES).to(tl.int64) * contexts_stride_b
            for place in tl.static_range(1, LONGEST):
                seen = tl.load(context + place, mask=enters, other=-1).to(tl.int32)
                tl.store(beam_contexts_ptr + slot * LONGEST + place - 1, seen, mask=enters)
            tl.store(beam_contexts_ptr + slot * LONGEST + LONGEST - 1, token.to(tl.int32), mask=enters)
        if tl.program_id(1) == 0:
            # Unused beam places are dead, and so are their children.
            empty = tl.arange(0, BLOCK_B)
            is_empty = (empty >= tl.sum(num_open, axis=0)) & (empty < BEAM_WIDTH)
            tl.store(beam_scores_ptr + now + empty, tl.full([BLOCK_B], float("-inf"), tl.float32), mask=is_empty)
            tl.store(beam_places_ptr + now + empty, tl.zeros([BLOCK_B], tl.int32), mask=is_empty)
            nothing = tl.full([BLOCK_B], -1, tl.int32)
            for place in tl.static_range(LONGEST):
                tl.store(beam_contexts_ptr + (now + empty) * LONGEST + place, nothing, mask=is_empty)


class ContinuityTree:
    """Algorithm 1 for a batch; all buffers are made here, so a CUDA graph can hold :meth:`build`.

    At exact ties the earlier candidate wins: the shallower one, then the one whose parent is earlier in the beam, then
    the earlier candidate of the position. Scores never rise along a path, so a parent comes before its children.

    Difference from the authors' program: a path that ends in a stop token never enters the beam. Theirs puts it behind
    all others, so a beam wider than the number of other paths drafts tokens after a stop token.

    A request needs 16 KB with the paper's sizes (8 levels, 25 candidates, beam 20, 60 nodes, order 3).

    Args:
        num_nodes: N, most nodes of a tree, at most 255.
        depth: D.
        top_k: most candidates of a position.
        beam_width: nodes of a level that are expanded; B is at most N.
        max_num_reqs: S.
        scoring: the weights.
        store: n-grams that the device can read; None for no n-gram term.
        stop_tokens: ids after which nothing is drafted.
        backoff: None for the longest match, or the factor of stupid backoff.

    Raises:
        ValueError: ``backoff`` is not a valid factor.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        depth: int,
        top_k: int,
        beam_width: int,
        max_num_reqs: int,
        device: torch.device,
        scoring: Scoring,
        store: NgramStore | None,
        stop_tokens: tuple[int, ...] = (),
        backoff: float | None = None,
    ):
        assert 1 <= num_nodes <= MAX_NODES and depth >= 1 and top_k >= 1 and beam_width >= 1
        # A negative weight would let a child beat its parent.
        assert scoring.ngram_weight >= 0 and scoring.logit_decay >= 0
        check_backoff(backoff)
        self.num_nodes, self.depth, self.top_k, self.beam_width = num_nodes, depth, top_k, min(beam_width, num_nodes)
        self.max_num_reqs, self.scoring, self.backoff, self.num_stops = max_num_reqs, scoring, backoff, len(stop_tokens)
        self.store = store if scoring.ngram_weight else None
        weights = [scoring.logit_weight(level) for level in range(depth)]
        self._weights = torch.tensor(weights, dtype=torch.float64, device=device)
        self._stop_tokens = torch.tensor(stop_tokens or (-1,), dtype=torch.int64, device=device)
        longest = self.store.order - 1 if self.store is not None else 0
        in_beams = max_num_reqs * self.beam_width * top_k

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._weighted = zeros(max_num_reqs * depth * top_k, dtype=torch.float32)
        self._ngram = zeros(in_beams if longest else 1, dtype=torch.float32)
        self._beam_scores = zeros(depth, max_num_reqs, self.beam_width, dtype=torch.float32)
        self._beam_places = zeros(depth, max_num_reqs, self.beam_width)
        self._beam_contexts = zeros(depth, max_num_reqs, self.beam_width, longest)
        self._pool = make_pool(max_num_reqs, depth * num_nodes, num_nodes, device)

    def build(
        self, *, log_probs: torch.Tensor, tokens: torch.Tensor, contexts: torch.Tensor | None, out: TokenTree
    ) -> None:
        """Build the trees of a batch.

        Args:
            log_probs, tokens: [R, K, C] as in ``best_first``; K <= ``depth``, C <= ``top_k``.
            contexts: int [R, W] the last accepted tokens in order, -1 for none; W is at least the store's order - 1.
                None without a store.
            out: as in ``best_first``; ``log_probs`` holds the scores.
        """
        num_reqs, levels, num_candidates = log_probs.shape
        assert tokens.shape == log_probs.shape and tokens.stride(2) == log_probs.stride(2) == 1
        assert num_reqs <= self.max_num_reqs and levels <= self.depth and num_candidates <= self.top_k
        weighted = self._weighted[: log_probs.numel()]
        _weigh_kernel[(num_reqs,)](
            log_probs,
            *log_probs.stride()[:2],
            self._weights,
            weighted,
            levels,
            num_candidates,
            RENORMALISES=self.scoring.renormalises,
            BLOCK_K=next_power_of_2(levels),
            BLOCK_C=next_power_of_2(num_candidates),
        )
        before = self._first_contexts(contexts, num_reqs)
        for level in range(levels):
            if level and self.store is not None:
                shape = (num_reqs, self.beam_width, num_candidates)
                answers = self._ngram[: math.prod(shape)].view(shape)
                candidates = tokens[:, level : level + 1].expand(shape)
                look_up_level(self.store, before, candidates, answers, backoff=self.backoff)
            self._extend(level, levels, tokens, before)
            before = self._beam_contexts[level, :num_reqs]
        keep_best(self._pool, num_reqs, levels * self.num_nodes, out)

    def _first_contexts(self, contexts: torch.Tensor | None, num_reqs: int) -> torch.Tensor:
        """The contexts of the roots, [R, 1, L]."""
        longest = self._beam_contexts.shape[3]
        if not longest:
            return self._beam_contexts[0, :num_reqs]
        assert contexts is not None and len(contexts) == num_reqs and contexts.shape[1] >= longest
        assert contexts.stride(1) == 1
        return contexts[:, None, contexts.shape[1] - longest :]

    def _extend(self, level: int, levels: int, tokens: torch.Tensor, contexts: torch.Tensor) -> None:
        num_reqs, _, num_candidates = tokens.shape
        num_children = num_candidates * (self.beam_width if level else 1)
        block, others = ranking_blocks(num_children, tokens.device)
        _extend_kernel[(num_reqs, -(-num_children // block))](
            self._weighted,
            levels * num_candidates,
            self._ngram,
            tokens,
            *tokens.stride()[:2],
            contexts,
            *contexts.stride()[:2],
            self._stop_tokens,
            self._pool,
            self._pool.log_probs.stride(0),
            self._beam_scores,
            self._beam_places,
            self._beam_scores.stride(0),
            self._beam_contexts,
            level,
            self.scoring.continuity_weight(level),
            IS_FIRST=level == 0,
            IS_LAST=level == levels - 1,
            HAS_NGRAM=level > 0 and self.store is not None,
            NUM_STOPS=self.num_stops,
            NUM_CANDIDATES=num_candidates,
            NUM_NODES=self.num_nodes,
            BEAM_WIDTH=self.beam_width,
            LONGEST=self._beam_contexts.shape[3],
            BLOCK_I=block,
            BLOCK_J=others,
            BLOCK_N=next_power_of_2(self.num_nodes),
            BLOCK_B=next_power_of_2(self.beam_width),
            enable_fp_fusion=False,  # a fused sum would differ from the naive twin's
        )
