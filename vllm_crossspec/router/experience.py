"""Routing by experience: what each drafter's drafts have been worth, over what its rounds cost; no training.

A request's last rounds say what a drafter is worth to it, all requests' rounds what it is worth where it has not
drafted for this one, and a drafter that looks its drafts up says beforehand what it has found. A batch is decided as a
whole: two drafters in one round cost both, so that a second one must be worth that to the requests that take it.

Shape legend: R requests of the batch, S slots, N drafters.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
import triton
import triton.language as tl

OWN_MEMORY, ALL_MEMORY = 0.85, 0.99
"""What a round counts after the next one: of a request, of all requests."""
PRIOR_ROUNDS = 4.0
"""Rounds that count as much as what is expected without any; of a request, as what is known of all."""
PRIOR_FORECAST = 16.0
"""Draft tokens forecast to a request that count as much as what all requests' forecasts were worth."""
PROBE_EVERY = 64
"""Rounds between two in which the whole batch tries a drafter, by turns: exploring costs one round of these at most."""
EARLY_TURNS, EARLY_EVERY = 4, 4
"""At first nothing is known: so many turns of all drafters with so few rounds between two, whatever is expected."""
HOPE = 2.0
"""A drafter is tried where so many times the accepted drafts that are expected of it would make it the best."""
ALWAYS_EVERY = 4
"""Turns of all drafters of which in one they are tried whatever is expected: text may have changed."""
MAX_TOGETHER = 2
"""Most drafters of one round."""

UNCONDITIONAL = 1e6
"""A hope that makes any drafter the best that drafts at all."""

_OWN_MEMORY, _ALL_MEMORY = tl.constexpr(OWN_MEMORY), tl.constexpr(ALL_MEMORY)
_PRIOR, _PRIOR_FORECAST = tl.constexpr(PRIOR_ROUNDS), tl.constexpr(PRIOR_FORECAST)
_ROWS = tl.constexpr(64)


class Known(NamedTuple):
    """What is known of drafts; float32, on the device.

    Attributes:
        own: [S, N, 4] tokens of a request's rounds with each drafter, the bonus token included, and their number; of
            those with a forecast, accepted draft tokens, and how many had been forecast. Old rounds count less.
        every: [N, 4] the same of all requests.
        priors: [N] tokens of a round before anything is known.
        forecasts: [S, N] by row of the batch: draft tokens that are expected to be accepted; negative: no forecast.
        last_forecast: [S] by slot: of the drafter that drafted last, negative for none.
    """

    own: torch.Tensor
    every: torch.Tensor
    priors: torch.Tensor
    forecasts: torch.Tensor
    last_forecast: torch.Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _learn_kernel(
    own_ptr,  # float32 [S, N, 4]
    every_ptr,  # float32 [N, 4]
    last_forecast_ptr,  # float32 [S]
    idx_mapping_ptr,  # int [R]
    num_sampled_ptr,  # int32 [R]
    previous_ptr,  # int32 [S]
    num_rows,
    DRAFTERS: tl.constexpr,
):
    row = tl.arange(0, _ROWS)
    for drafter in tl.static_range(DRAFTERS):
        tokens_of_all, rounds_of_all, accepted, forecast_of_all = 0.0, 0.0, 0.0, 0.0
        for start in range(0, num_rows, _ROWS):
            inside = start + row < num_rows
            slot = tl.load(idx_mapping_ptr + start + row, mask=inside, other=-1).to(tl.int64)
            tokens = tl.load(num_sampled_ptr + start + row, mask=inside, other=0).to(tl.float32)
            mine = (slot >= 0) & (tokens > 0)
            slot = tl.maximum(slot, 0)
            mine = mine & (tl.load(previous_ptr + slot, mask=mine, other=-1) == drafter)
            forecast = tl.load(last_forecast_ptr + slot, mask=mine, other=-1.0)
            was_forecast = mine & (forecast >= 0.0)
            drafts = tl.where(was_forecast, tokens - 1.0, 0.0)
            forecast = tl.where(was_forecast, forecast, 0.0)
            at = own_ptr + (slot * DRAFTERS + drafter) * 4
            tl.store(at, tl.load(at, mask=mine, other=0.0) * _OWN_MEMORY + tokens, mask=mine)
            tl.store(at + 1, tl.load(at + 1, mask=mine, other=0.0) * _OWN_MEMORY + 1.0, mask=mine)
            tl.store(at + 2, tl.load(at + 2, mask=mine, other=0.0) * _OWN_MEMORY + drafts, mask=mine)
            tl.store(at + 3, tl.load(at + 3, mask=mine, other=0.0) * _OWN_MEMORY + forecast, mask=mine)
            tokens_of_all += tl.sum(tl.where(mine, tokens, 0.0), axis=0)
            rounds_of_all += tl.sum(mine.to(tl.float32), axis=0)
            accepted += tl.sum(drafts, axis=0)
            forecast_of_all += tl.sum(forecast, axis=0)
        if rounds_of_all > 0:
            at = every_ptr + drafter * 4
            tl.store(at, tl.load(at) * _ALL_MEMORY + tokens_of_all)
            tl.store(at + 1, tl.load(at + 1) * _ALL_MEMORY + rounds_of_all)
            tl.store(at + 2, tl.load(at + 2) * _ALL_MEMORY + accepted)
            tl.store(at + 3, tl.load(at + 3) * _ALL_MEMORY + forecast_of_all)


@triton.jit
def _expected(own_ptr, every_ptr, priors_ptr, forecasts_ptr, slot, row, decides, drafter, DRAFTERS: tl.constexpr):
    """Tokens of a round with a drafter, for some rows of the batch."""
    of_all = every_ptr + drafter * 4
    mean = (tl.load(of_all) + tl.load(priors_ptr + drafter) * _PRIOR) / (tl.load(of_all + 1) + _PRIOR)
    own = own_ptr + (slot * DRAFTERS + drafter) * 4
    tokens = tl.load(own, mask=decides, other=0.0) + mean * _PRIOR
    expected = tokens / (tl.load(own + 1, mask=decides, other=0.0) + _PRIOR)
    forecast = tl.load(forecasts_ptr + row * DRAFTERS + drafter, mask=decides, other=-1.0)
    trust = (tl.load(of_all + 2) + _PRIOR) / (tl.load(of_all + 3) + _PRIOR)
    accepted = tl.load(own + 2, mask=decides, other=0.0) + trust * _PRIOR_FORECAST
    trust = accepted / (tl.load(own + 3, mask=decides, other=0.0) + _PRIOR_FORECAST)
    return tl.where(forecast >= 0.0, 1.0 + forecast * trust, expected)


@triton.jit(do_not_specialize=["num_rows", "num_sets", "probe", "hope"])
def _choose_kernel(
    own_ptr,
    every_ptr,
    priors_ptr,
    forecasts_ptr,
    last_forecast_ptr,
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
    # The last turn decides with the set that was best; those before only look what a set is worth, and the one between
    # whether the drafter that is to be tried could be the best.
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
            owner = tl.load(owners_ptr + tl.maximum(previous, 0))
            route = tl.full([_ROWS], -1, tl.int32)
            worth = tl.full([_ROWS], float("-inf"), tl.float32)
            tokens = tl.zeros([_ROWS], tl.float32)
            seconds = tl.zeros([_ROWS], tl.float32)
            chosen_forecast = tl.full([_ROWS], -1.0, tl.float32)
            for drafter in tl.static_range(DRAFTERS):
                expected = _expected(
                    own_ptr, every_ptr, priors_ptr, forecasts_ptr, slot, start + row, decides, drafter, DRAFTERS
                )
                is_switch = (previous >= 0) & (owner != tl.load(owners_ptr + drafter))
                own = tl.load(costs_ptr + DRAFTERS + drafter)
                own = own + tl.where(is_switch, tl.load(costs_ptr + 2 * DRAFTERS + drafter), 0.0)
                # A request's share of the step, at what a second of it is worth so far.
                net = expected - best_value * own / num_rows
                if is_hope:
                    expected = 1.0 + (expected - 1.0) * hope
                takes = (((members >> drafter) & 1) != 0) & (net > worth)
                worth = tl.where(takes, net, worth)
                route = tl.where(takes, drafter, route)
                tokens = tl.where(takes, expected, tokens)
                seconds = tl.where(takes, own, seconds)
                forecast = tl.load(forecasts_ptr + (start + row) * DRAFTERS + drafter, mask=decides, other=-1.0)
                chosen_forecast = tl.where(takes, forecast, chosen_forecast)
            all_tokens += tl.sum(tl.where(decides, tokens, 0.0), axis=0)
            all_seconds += tl.sum(tl.where(decides, seconds, 0.0), axis=0)
            num_deciding += tl.sum(decides.to(tl.float32), axis=0)
            if is_last:
                tl.store(routes_ptr + start + row, tl.where(decides, route, -1), mask=inside)
                tl.store(previous_ptr + slot, route, mask=decides)
                tl.store(last_forecast_ptr + slot, chosen_forecast, mask=decides)
        if num_deciding > 0:
            value = all_tokens / (draft + all_seconds / num_deciding)
            is_better = (value > best_value) & (turn <= num_sets)
            best_set = tl.where(is_better, members, best_set)
            best_value = tl.where(is_better, value, best_value)


class Experience:
    """What drafts have been worth, and the choice that follows from it: two launches a round, no wait.

    Args:
        owners: [N] whose cache each drafter uses, as numbers of drafters.
        priors: [N] tokens of a round before anything is known.
        tried: drafters that are tried every now and then, by turns, to see what they are worth now; none: no round is.
        max_num_reqs: S.
        device: where it lives.

    Attributes:
        known: what there is to go by.
    """

    def __init__(
        self,
        owners: tuple[int, ...],
        priors: tuple[float, ...],
        tried: tuple[int, ...],
        max_num_reqs: int,
        device: torch.device,
    ):
        num_drafters = len(owners)
        exact = {"dtype": torch.float32, "device": device}
        self.known = Known(
            own=torch.zeros(max_num_reqs, num_drafters, 4, **exact),
            every=torch.zeros(num_drafters, 4, **exact),
            priors=torch.tensor(priors, **exact),
            forecasts=torch.full((max_num_reqs, num_drafters), -1.0, **exact),
            last_forecast=torch.full((max_num_reqs,), -1.0, **exact),
        )
        self.owners = torch.tensor(owners, dtype=torch.int32, device=device)
        self.sets = torch.tensor(drafter_sets(num_drafters), dtype=torch.int32, device=device)
        self.tried, self.num_rounds = tried, 0

    def decide(
        self,
        costs: torch.Tensor,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        previous: torch.Tensor,
        routes: torch.Tensor,
    ) -> None:
        """Learn from the round that has ended, and choose a drafter for every request.

        Args:
            costs: float32 [3, N] seconds of this batch: drafting by each drafter, the target's pass over its drafts,
                all requests' coming to it from another.
            idx_mapping: int [R] slot of each request; negative entries are padding.
            num_sampled: int32 [at least R] tokens accepted in this step; 0 inside a prompt.
            previous: int32 [S] last drafter of every slot, -1 for none; takes the new one.
            routes: int32 [at least R], written; -1 for padding and inside prompts.
        """
        known, num_rows, num_drafters = self.known, idx_mapping.shape[0], self.owners.shape[0]
        batch = (idx_mapping, num_sampled, previous)
        _learn_kernel[(1,)](
            known.own, known.every, known.last_forecast, *batch, num_rows, DRAFTERS=num_drafters, num_warps=1
        )
        _choose_kernel[(1,)](
            *known, costs, self.owners, self.sets, self.sets.shape[0], *batch, routes, num_rows, *self._probe(),
            DRAFTERS=num_drafters, num_warps=1,
        )  # fmt: skip

    def release(self, slots: torch.Tensor) -> None:
        """Forget what the last requests of ``slots`` (int64 [n]) have shown."""
        self.known.own.index_fill_(0, slots, 0.0)

    def _probe(self) -> tuple[int, float]:
        """The drafter that is to be tried in this round, -1 for none; and how much is to be hoped of it."""
        self.num_rounds += 1
        return probe_of(self.num_rounds, self.tried)


def probe_of(number: int, tried: Sequence[int]) -> tuple[int, float]:
    """The drafter that is to be tried in a round, -1 for none, and how often what is expected of it is to be hoped.

    Args:
        number: of the round, from 1.
        tried: drafters that take turns.
    """
    early = EARLY_TURNS * EARLY_EVERY * len(tried)
    tries, between = divmod(number, EARLY_EVERY) if number <= early else divmod(number - early, PROBE_EVERY)
    if not tried or between or not tries:
        return -1, HOPE
    turn, place = divmod(tries - 1, len(tried))
    always = number <= early or turn % ALWAYS_EVERY == 0
    return tried[place], UNCONDITIONAL if always else HOPE


def drafter_sets(num_drafters: int) -> list[int]:
    """The sets of drafters that a round may have, as bits; single ones first."""
    sizes = range(1, min(MAX_TOGETHER, num_drafters) + 1)
    return [sum(1 << i for i in chosen) for size in sizes for chosen in combinations(range(num_drafters), size)]
