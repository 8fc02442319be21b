"""Routing by experience: each drafter's accepted drafts so far, over the cost of its rounds; no training.

A drafter's expected drafts are the mean over all requests at this certainty of the target (entropy, nats). A drafter
that looks drafts up gives a forecast instead, which is multiplied by the share that came true. A factor from the
request's own last rounds corrects both. Text is easy or hard for all drafters without forecasts, so a request's rounds
with one of them also count a little for the others. A batch is decided as a whole: a second drafter in a round must be
worth its cost to the requests that take it.

Shape legend: R requests of the batch, S slots, N drafters.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_crossspec.arrays import Array
from vllm_crossspec.load.costs import MISSED_TOKENS
from vllm_crossspec.routing.kernels import OWN_MEMORY, merged_entropy

ALL_MEMORY = 0.99
"""Decay of all requests' statistics per round with that drafter; for a request's own it is ``OWN_MEMORY``."""
FADE = 0.998
"""Per-round decay of the statistics of a drafter that was not used: text may have changed."""
PRIOR_ROUNDS = 4.0
"""Weight of the prior, in rounds or forecast tokens."""
PRIOR_AT_LEVEL = 8.0
"""Weight of the mean over all levels of certainty, in rounds at one level."""
PRIOR_REQUEST = 8.0
"""Weight of all requests against a request's own rounds, in expected draft tokens of any drafter."""
PRIOR_OWN = 24.0
"""Weight of a request's rounds with all drafters against those with one, in draft tokens."""
LEVELS = 4
LEVEL_EDGES = (0.5, 1.5, 3.0)
"""Entropies, nats, at which the next level of certainty begins."""
PROBE_EVERY = 64
"""Rounds between two tries of a drafter by the whole batch, in turn."""
EARLY_TURNS, EARLY_EVERY = 4, 4
"""At first all drafters are tried unconditionally: number of turns, and rounds between two tries."""
HOPE = 2.0
"""A drafter is tried if 1 + HOPE / sqrt(its rounds + 1) times its expected drafts would make it the best."""
UNCONDITIONAL = 1e6
"""A hope that makes any drafter with expected drafts the best."""
MAX_TOGETHER = 2
"""Most drafters of one round."""
LEAST_REST = 16
"""Least number of tokens that an answer is assumed to have left."""
ROUND_TOKENS = 4.0
"""Assumed tokens of a round, to spread the cost of moving a request over its remaining rounds."""

_OWN_MEMORY, _ALL_MEMORY, _FADE = tl.constexpr(OWN_MEMORY), tl.constexpr(ALL_MEMORY), tl.constexpr(FADE)
_PRIOR, _PRIOR_AT_LEVEL = tl.constexpr(PRIOR_ROUNDS), tl.constexpr(PRIOR_AT_LEVEL)
_PRIOR_REQUEST, _PRIOR_OWN = tl.constexpr(PRIOR_REQUEST), tl.constexpr(PRIOR_OWN)
_LEVELS, (_EDGE_1, _EDGE_2, _EDGE_3) = tl.constexpr(LEVELS), (tl.constexpr(edge) for edge in LEVEL_EDGES)
EXPECT_ROWS = 16
_ROWS, _EXPECT_ROWS = tl.constexpr(64), tl.constexpr(EXPECT_ROWS)


class Known(NamedTuple):
    """Statistics of drafts; float32, on the device.

    Accepted drafts are counted per round, or per forecast draft token: the *measure*. Old rounds count less.
    """

    per_request: torch.Tensor  # [S, N, 2] by slot: accepted drafts in its rounds with each drafter, and expected ones
    all_requests: torch.Tensor  # [N, LEVELS, 2] by certainty of the target: accepted drafts, their measure
    priors: torch.Tensor  # [N] expected tokens of a round before any is known
    entropy: torch.Tensor  # [S] by row of the batch: nats of the target at the beginning of the round
    forecasts: torch.Tensor  # [S, N] by row of the batch: forecast accepted draft tokens; negative: no forecast
    arrivals: torch.Tensor  # [S, N] by row of the batch: see `arrivals`
    expected: torch.Tensor  # [S, N, 3] by row of the batch: tokens, measure, accepted drafts by all requests' rounds
    last_round: torch.Tensor  # [S, 3] by slot, of the last decision: measure, level, expected accepted drafts


@triton.jit(do_not_specialize=["num_rows"])
def _learn_kernel(
    per_request_ptr,  # float32 [S, N, 2]
    all_requests_ptr,  # float32 [N, LEVELS, 2]
    last_round_ptr,  # float32 [S, 3]
    idx_mapping_ptr,  # int [R]
    num_sampled_ptr,  # int32 [R]
    previous_ptr,  # int32 [S]
    num_rows,
    DRAFTERS: tl.constexpr,
):
    row, level = tl.arange(0, _ROWS), tl.arange(0, _LEVELS)
    rounds = 0
    for start in range(0, num_rows, _ROWS):
        inside = start + row < num_rows
        slot = tl.load(idx_mapping_ptr + start + row, mask=inside, other=-1).to(tl.int64)
        tokens = tl.load(num_sampled_ptr + start + row, mask=inside, other=0)
        previous = tl.load(previous_ptr + tl.maximum(slot, 0), mask=slot >= 0, other=-1)
        rounds += tl.sum(((previous >= 0) & (tokens > 0)).to(tl.int32), axis=0)
    for drafter in tl.static_range(DRAFTERS):
        count = tl.zeros([_LEVELS], tl.float32)
        accepted = tl.zeros([_LEVELS], tl.float32)
        measured = tl.zeros([_LEVELS], tl.float32)
        for start in range(0, num_rows, _ROWS):
            inside = start + row < num_rows
            slot = tl.load(idx_mapping_ptr + start + row, mask=inside, other=-1).to(tl.int64)
            tokens = tl.load(num_sampled_ptr + start + row, mask=inside, other=0).to(tl.float32)
            mine = (slot >= 0) & (tokens > 0)
            slot = tl.maximum(slot, 0)
            mine = mine & (tl.load(previous_ptr + slot, mask=mine, other=-1) == drafter)
            measure = tl.load(last_round_ptr + slot * 3, mask=mine, other=0.0)
            level_then = tl.load(last_round_ptr + slot * 3 + 1, mask=mine, other=0.0).to(tl.int32)
            expected = tl.load(last_round_ptr + slot * 3 + 2, mask=mine, other=0.0)
            at = per_request_ptr + (slot * DRAFTERS + drafter) * 2
            tl.store(at, tl.load(at, mask=mine, other=0.0) * _OWN_MEMORY + tokens - 1.0, mask=mine)
            tl.store(at + 1, tl.load(at + 1, mask=mine, other=0.0) * _OWN_MEMORY + expected, mask=mine)
            there = mine[:, None] & (level_then[:, None] == level[None, :])
            count += tl.sum(there.to(tl.float32), axis=0)
            accepted += tl.sum(tl.where(there, tokens[:, None] - 1.0, 0.0), axis=0)
            measured += tl.sum(tl.where(there, measure[:, None], 0.0), axis=0)
        drafted = tl.sum(count, axis=0) > 0
        kept = tl.where(drafted, tl.where(count > 0, _ALL_MEMORY, 1.0), tl.where(rounds > 0, _FADE, 1.0))
        known = all_requests_ptr + (drafter * _LEVELS + level) * 2
        tl.store(known, tl.load(known) * kept + accepted)
        tl.store(known + 1, tl.load(known + 1) * kept + measured)


@triton.jit
def _all_levels(all_requests_ptr, drafter):
    """Accepted drafts of a drafter at all levels, and their measure."""
    at = all_requests_ptr + (drafter * _LEVELS + tl.arange(0, _LEVELS)) * 2
    return tl.sum(tl.load(at), axis=0), tl.sum(tl.load(at + 1), axis=0)


@triton.jit
def _level(entropy):
    """Level of certainty."""
    level = (entropy >= _EDGE_1).to(tl.int32) + (entropy >= _EDGE_2).to(tl.int32)
    return level + (entropy >= _EDGE_3).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows"])
def _expect_kernel(
    per_request_ptr,  # float32 [S, N, 2]
    all_requests_ptr,  # float32 [N, LEVELS, 2]
    priors_ptr,  # float32 [N]
    forecasts_ptr,  # float32 [S, N]
    entropy_parts_ptr,  # float32 [R, splits, 3]
    entropy_ptr,  # float32 [S] out, its first R
    expected_ptr,  # float32 [S, N, 3] out, its first R
    idx_mapping_ptr,  # int [R]
    num_sampled_ptr,  # int32 [R]
    num_rows,
    DRAFTERS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row, split = tl.program_id(0) * _EXPECT_ROWS + tl.arange(0, _EXPECT_ROWS), tl.arange(0, BLOCK_S)
    inside = row < num_rows
    slot = tl.load(idx_mapping_ptr + row, mask=inside, other=-1).to(tl.int64)
    decides = (slot >= 0) & (tl.load(num_sampled_ptr + row, mask=inside, other=0) > 0)
    slot, row = tl.maximum(slot, 0), row.to(tl.int64)
    is_part = decides[:, None] & (split < SPLITS)[None, :]
    entropy = merged_entropy(entropy_parts_ptr + (row * SPLITS * 3)[:, None], split, is_part)
    entropy = tl.where(decides, entropy, 0.0)
    tl.store(entropy_ptr + row, entropy, mask=inside)
    level = _level(entropy)
    # Accepted over expected drafts, of all drafters without a forecast.
    came = tl.full([_EXPECT_ROWS], _PRIOR_REQUEST, tl.float32)
    awaited_then = tl.full([_EXPECT_ROWS], _PRIOR_REQUEST, tl.float32)
    for drafter in tl.static_range(DRAFTERS):
        counts = decides & (tl.load(forecasts_ptr + row * DRAFTERS + drafter, mask=decides, other=0.0) < 0.0)
        own = per_request_ptr + (slot * DRAFTERS + drafter) * 2
        came += tl.load(own, mask=counts, other=0.0)
        awaited_then += tl.load(own + 1, mask=counts, other=0.0)
    of_request = came / awaited_then
    for drafter in tl.static_range(DRAFTERS):
        forecast = tl.load(forecasts_ptr + row * DRAFTERS + drafter, mask=decides, other=-1.0)
        is_forecast = forecast >= 0.0
        measure = tl.where(is_forecast, forecast, 1.0)
        accepted, measured = _all_levels(all_requests_ptr, drafter)
        prior = tl.where(is_forecast, 1.0, tl.load(priors_ptr + drafter) - 1.0)
        mean = (accepted + prior * _PRIOR) / (measured + _PRIOR)
        known = all_requests_ptr + (drafter * _LEVELS + level) * 2
        rate = (tl.load(known) + mean * _PRIOR_AT_LEVEL) / (tl.load(known + 1) + _PRIOR_AT_LEVEL)
        awaited = measure * rate
        own = per_request_ptr + (slot * DRAFTERS + drafter) * 2
        usual = tl.where(is_forecast, 1.0, of_request)
        times = tl.load(own, mask=decides, other=0.0) + _PRIOR_OWN * usual
        times = times / (tl.load(own + 1, mask=decides, other=0.0) + _PRIOR_OWN)
        out = expected_ptr + (row * DRAFTERS + drafter) * 3
        tl.store(out, 1.0 + awaited * times, mask=inside)
        tl.store(out + 1, measure, mask=inside)
        tl.store(out + 2, awaited, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_sets", "probe", "hope"])
def _choose_kernel(
    all_requests_ptr,  # float32 [N, LEVELS, 2]
    entropy_ptr,  # float32 [S]
    expected_ptr,  # float32 [S, N, 3]
    arrivals_ptr,  # float32 [S, N]
    last_round_ptr,  # float32 [S, 3] out
    costs_ptr,  # float32 [3, N] seconds of the batch: drafting, verification, switch
    owners_ptr,  # int32 [N] whose cache each drafter uses
    sets_ptr,  # int32 [sets] drafters of a round as bits, single ones first
    num_sets,
    idx_mapping_ptr,
    num_sampled_ptr,
    previous_ptr,
    routes_ptr,  # int32 [R] out
    num_rows,
    probe,
    hope,
    DRAFTERS: tl.constexpr,
):
    row = tl.arange(0, _ROWS)
    best_value, best_set = 0.0, 1
    _, rounds = _all_levels(all_requests_ptr, tl.maximum(probe, 0))
    hope = 1.0 + hope / tl.sqrt(rounds + 1.0)
    # One turn computes the value of each set, one that of the drafter to try, and the last one decides.
    for turn in range(num_sets + 2):
        is_hope, is_last = turn == num_sets, turn == num_sets + 1
        members = tl.load(sets_ptr + turn, mask=turn < num_sets, other=0)
        if is_hope & (probe >= 0):
            members = 1 << probe
        if is_last:
            members = best_set
        draft = 0.0
        for drafter in tl.static_range(DRAFTERS):
            draft += tl.where(((members >> drafter) & 1) != 0, tl.load(costs_ptr + drafter), 0.0)
        all_tokens, all_seconds, num_deciding = 0.0, 0.0, 0.0
        for start in range(0, num_rows, _ROWS):
            inside = start + row < num_rows
            slot = tl.load(idx_mapping_ptr + start + row, mask=inside, other=-1).to(tl.int64)
            decides = (slot >= 0) & (tl.load(num_sampled_ptr + start + row, mask=inside, other=0) > 0)
            slot = tl.maximum(slot, 0)
            previous = tl.load(previous_ptr + slot, mask=decides, other=-1)
            owner = tl.where(previous < 0, -1, tl.load(owners_ptr + tl.maximum(previous, 0)))
            route = tl.full([_ROWS], -1, tl.int32)
            worth = tl.full([_ROWS], float("-inf"), tl.float32)
            tokens = tl.zeros([_ROWS], tl.float32)
            seconds = tl.zeros([_ROWS], tl.float32)
            for drafter in tl.static_range(DRAFTERS):
                at = expected_ptr + ((start + row) * DRAFTERS + drafter) * 3
                expected = tl.load(at, mask=decides, other=1.0)
                comes = decides & (owner != tl.load(owners_ptr + drafter))
                arrives = tl.load(arrivals_ptr + (start + row) * DRAFTERS + drafter, mask=comes, other=0.0)
                own = tl.load(costs_ptr + DRAFTERS + drafter)
                own = own + arrives * tl.load(costs_ptr + 2 * DRAFTERS + drafter)
                # Subtract the tokens that the best set so far would make in the time of this request's share.
                net = expected - best_value * own / num_rows
                if is_hope:
                    expected = 1.0 + (expected - 1.0) * hope
                takes = (((members >> drafter) & 1) != 0) & (net > worth)
                worth = tl.where(takes, net, worth)
                route = tl.where(takes, drafter, route)
                tokens = tl.where(takes, expected, tokens)
                seconds = tl.where(takes, own, seconds)
            all_tokens += tl.sum(tl.where(decides, tokens, 0.0), axis=0)
            all_seconds += tl.sum(tl.where(decides, seconds, 0.0), axis=0)
            num_deciding += tl.sum(decides.to(tl.float32), axis=0)
            if is_last:
                tl.store(routes_ptr + start + row, tl.where(decides, route, -1), mask=inside)
                tl.store(previous_ptr + slot, route, mask=decides)
                taken = expected_ptr + ((start + row) * DRAFTERS + tl.maximum(route, 0)) * 3
                level = _level(tl.load(entropy_ptr + start + row, mask=decides, other=0.0))
                tl.store(last_round_ptr + slot * 3, tl.load(taken + 1, mask=decides, other=0.0), mask=decides)
                tl.store(last_round_ptr + slot * 3 + 1, level.to(tl.float32), mask=decides)
                tl.store(last_round_ptr + slot * 3 + 2, tl.load(taken + 2, mask=decides, other=0.0), mask=decides)
        if num_deciding > 0:
            value = all_tokens / (draft + all_seconds / num_deciding)
            is_better = (value > best_value) & (turn <= num_sets)
            best_set = tl.where(is_better, members, best_set)
            best_value = tl.where(is_better, value, best_value)


class Experience:
    """Learns from drafts and chooses drafters: three launches per round, no wait. Arguments as in `RouterSettings`.

    Attributes:
        drafted: int32 [S] whose drafts the next step verifies, where decisions are carried out a round late;
            ``drafted_round`` is that decision's ``last_round``.
    """

    def __init__(
        self,
        owners: tuple[int, ...],
        priors: tuple[float, ...],
        explored: tuple[int, ...],
        max_num_reqs: int,
        device: torch.device,
        is_late: bool = False,
    ):
        num_drafters = len(owners)
        exact = {"dtype": torch.float32, "device": device}
        self.known = Known(
            per_request=torch.zeros(max_num_reqs, num_drafters, 2, **exact),
            all_requests=torch.zeros(num_drafters, LEVELS, 2, **exact),
            priors=torch.tensor(priors, **exact),
            entropy=torch.zeros(max_num_reqs, **exact),
            forecasts=torch.full((max_num_reqs, num_drafters), -1.0, **exact),
            arrivals=torch.ones(max_num_reqs, num_drafters, **exact),
            expected=torch.zeros(max_num_reqs, num_drafters, 3, **exact),
            last_round=torch.zeros(max_num_reqs, 3, **exact),
        )
        self.owners = torch.tensor(owners, dtype=torch.int32, device=device)
        self.sets = torch.tensor(drafter_sets(num_drafters), dtype=torch.int32, device=device)
        self.explored, self.num_rounds = explored, 0
        self._is_late = is_late
        self.drafted = torch.full((max_num_reqs,), -1, dtype=torch.int32, device=device)
        self.drafted_round = torch.zeros_like(self.known.last_round)

    def decide(
        self,
        costs: torch.Tensor,
        entropy_parts: torch.Tensor,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        previous: torch.Tensor,
        routes: torch.Tensor,
        carries_out: bool = True,
    ) -> None:
        """Learn from the last round, and choose a drafter for every request; see ``kernels.decide``.

        ``costs`` are float32 [3, N] seconds of this batch: drafting by each drafter, the target's pass over its drafts,
        and a switch of all requests to it. The round ``carries_out`` this decision, or else the one before it.
        """
        known, num_rows, num_drafters = self.known, idx_mapping.shape[0], self.owners.shape[0]
        splits = entropy_parts.shape[1]
        assert entropy_parts.is_contiguous() and entropy_parts.shape[0] >= num_rows
        self.num_rounds += 1
        probe, hope = probe_of(self.num_rounds, self.explored)
        batch = (idx_mapping, num_sampled, previous)
        drafted = (self.drafted_round, self.drafted) if self._is_late else (known.last_round, previous)
        _learn_kernel[(1,)](
            known.per_request, known.all_requests, drafted[0], idx_mapping, num_sampled, drafted[1], num_rows,
            DRAFTERS=num_drafters, num_warps=1,
        )  # fmt: skip
        if not carries_out:
            self._draft_by(previous)
        _expect_kernel[(triton.cdiv(num_rows, EXPECT_ROWS),)](
            known.per_request, known.all_requests, known.priors, known.forecasts, entropy_parts, known.entropy,
            known.expected, idx_mapping, num_sampled, num_rows,
            DRAFTERS=num_drafters, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
        _choose_kernel[(1,)](
            known.all_requests, known.entropy, known.expected, known.arrivals, known.last_round,
            costs, self.owners, self.sets, self.sets.shape[0], *batch, routes, num_rows, probe, hope,
            DRAFTERS=num_drafters, num_warps=1,
        )  # fmt: skip
        if carries_out and self._is_late:
            self._draft_by(previous)

    def _draft_by(self, decided: torch.Tensor) -> None:
        """The round drafts as was decided last. A request that is not in the batch counts as if it were."""
        self.drafted.copy_(decided)
        self.drafted_round.copy_(self.known.last_round)

    def release(self, slots: torch.Tensor) -> None:
        """Forget the last requests of ``slots`` (int64 [n])."""
        self.known.per_request.index_fill_(0, slots, 0.0)
        self.drafted.index_fill_(0, slots, -1)


def arrivals(missed: Array, answered: Array) -> Array:
    """float32 [R, N] cost of moving each request to each drafter in this round, in units of one measured switch.

    The cost spreads over the remaining rounds. We assume that an answer has as many tokens left as it already has
    (``answered``, int64 [R]). So short answers are not moved at too high a cost. ``missed`` are int64 [R, N] tokens
    that each drafter has to take in.
    """
    rounds = np.maximum(answered, LEAST_REST) / ROUND_TOKENS
    return (missed / (MISSED_TOKENS * rounds[:, None])).astype(np.float32)


def probe_of(number: int, explored: Sequence[int]) -> tuple[int, float]:
    """The drafter of ``explored`` that round ``number`` (from 1) may try (-1: none), and the hope."""
    early = EARLY_TURNS * EARLY_EVERY * len(explored)
    tries, between = divmod(number, EARLY_EVERY) if number <= early else divmod(number - early, PROBE_EVERY)
    if not explored or between or not tries:
        return -1, HOPE
    return explored[(tries - 1) % len(explored)], UNCONDITIONAL if number <= early else HOPE


def drafter_sets(num_drafters: int) -> list[int]:
    """Sets of drafters that a round may have, as bits, single ones first."""
    sizes = range(1, min(MAX_TOGETHER, num_drafters) + 1)
    return [sum(1 << i for i in chosen) for size in sizes for chosen in combinations(range(num_drafters), size)]
