"""The router in plain PyTorch, against which the kernels are tested."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_crossspec.routing.experience import (
    ALL_MEMORY,
    FADE,
    LEVEL_EDGES,
    LEVELS,
    PRIOR_AT_LEVEL,
    PRIOR_OWN,
    PRIOR_REQUEST,
    PRIOR_ROUNDS,
)
from vllm_crossspec.routing.kernels import OWN_MEMORY, PRIOR_OF_CORRECTION


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """float32 [...] entropy (nats) of logits [..., V]; -inf forbids a token; 0 if all are forbidden."""
    log_probs = logits.double().log_softmax(dim=-1)
    terms = torch.where(log_probs > float("-inf"), -log_probs * log_probs.exp(), 0.0)
    # A row without a possible token is all NaN, for which comparisons are false.
    return terms.sum(dim=-1).float()


def gains(
    hidden_states: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
) -> torch.Tensor:
    """As `kernels.gain_parts`, with the last sum and bias: float32 [..., N - 1] of states [..., H]."""
    middle = F.gelu(F.linear(hidden_states.double(), w1.double(), b1.double()))
    return F.linear(middle, w2.double(), b2.double()).float()


def correct(
    row: list[float], own: torch.Tensor, mean_lengths: list[float], previous: int, tokens: int
) -> tuple[list[float], float]:
    """As `_correction`: the corrected gains ``row`` [N - 1], and the reference's tokens beyond its mean.

    ``own`` float32 [N, 2] adds the last round, of ``tokens`` with drafter ``previous`` (-1: none).
    """
    if previous >= 0:
        own[previous] = OWN_MEMORY * own[previous] + torch.tensor([float(tokens), 1.0])
    beyond = (own[:, 0] - own[:, 1] * torch.tensor(mean_lengths)) / (own[:, 1] + PRIOR_OF_CORRECTION)
    return (torch.tensor(row) + beyond[:-1] - beyond[-1]).tolist(), float(beyond[-1])


def route_by_entropy(value: float, thresholds: list[float]) -> int:
    """The first drafter whose threshold (nats) is exceeded, else the reference, ``len(thresholds)``."""
    return next((i for i, threshold in enumerate(thresholds) if value > threshold), len(thresholds))


def route_by_gain(row: list[float], thresholds: list[float]) -> int:
    """The drafter with the largest gain above its threshold (tokens), else the reference, ``len(thresholds)``."""
    best, route = 0.0, len(thresholds)
    for drafter, (gain, threshold) in enumerate(zip(row, thresholds, strict=True)):
        # In the kernel's precision, so that both see the same ties.
        value = float(torch.tensor(gain) - torch.tensor(threshold))
        if value > best:
            best, route = value, drafter
    return route


def route_by_goodput(
    row: list[float], costs: list[float], switches: list[float], mean_length: float, previous: int
) -> int:
    """The drafter with the most expected tokens per second, given gains ``row`` [N - 1] and seconds [N]."""
    reference = len(row)
    tokens = torch.tensor([*row, 0.0]).add(mean_length).clamp(min=1.0)
    others = torch.tensor([previous >= 0 and drafter != previous for drafter in range(reference + 1)])
    values = tokens / (torch.tensor(costs) + torch.where(others, torch.tensor(switches), 0.0))
    best = [drafter for drafter in range(reference + 1) if values[drafter] == values.max()]
    if previous in best:
        return previous
    return reference if reference in best else best[0]


class Round(NamedTuple):
    """A request's round with a drafter."""

    slot: int
    drafter: int
    tokens: float  # including the bonus token
    entropy: float  # of the target at its beginning, nats
    measure: float  # from `Learned.of_all` at its beginning, as `awaited`
    awaited: float


class Learned:
    """As `Experience`, in plain numbers; ``priors`` are expected tokens of a round before any is known."""

    def __init__(self, priors: list[float]):
        self.priors = priors
        self.per_request: dict[int, list[list[float]]] = {}
        self.all_requests = [[[0.0, 0.0] for _ in range(LEVELS)] for _ in priors]

    def learn(self, rounds: list[Round]) -> None:
        """As `_learn_kernel`."""
        for drafter, levels in enumerate(self.all_requests):
            mine = [r for r in rounds if r.drafter == drafter]
            for r in mine:
                own = self.per_request.setdefault(r.slot, [[0.0, 0.0] for _ in self.priors])[drafter]
                own[:] = [OWN_MEMORY * own[0] + r.tokens - 1, OWN_MEMORY * own[1] + r.awaited]
            for level, known in enumerate(levels):
                there = [r for r in mine if _level(r.entropy) == level]
                kept = (ALL_MEMORY if there else 1.0) if mine else FADE if rounds else 1.0
                known[0] = kept * known[0] + sum(r.tokens - 1 for r in there)
                known[1] = kept * known[1] + sum(r.measure for r in there)

    def expected(self, slot: int, forecasts: list[float], entropy: float = 0.0) -> list[float]:
        """Expected tokens of a request's next round with each drafter; ``forecasts`` [N], negative: none."""
        own = self.per_request.get(slot, [[0.0, 0.0] for _ in self.priors])
        unsaid = [counts for counts, forecast in zip(own, forecasts, strict=True) if forecast < 0]
        came, expected = (PRIOR_REQUEST + sum(counts[i] for counts in unsaid) for i in (0, 1))
        found = []
        for drafter, ((accepted, awaited), forecast) in enumerate(zip(own, forecasts, strict=True)):
            usual = came / expected if forecast < 0 else 1.0
            times = (accepted + PRIOR_OWN * usual) / (awaited + PRIOR_OWN)
            found.append(1 + self.of_all(drafter, forecast, entropy)[1] * times)
        return found

    def hope(self, drafter: int, hope: float) -> float:
        """Factor of a drafter's expected drafts in a round that may try it."""
        return 1 + hope / math.sqrt(1 + sum(measured for _, measured in self.all_requests[drafter]))

    def of_all(self, drafter: int, forecast: float, entropy: float) -> tuple[float, float]:
        """The measure of a round with a drafter, and the accepted drafts expected from all requests' rounds."""
        measure, prior = (forecast, 1.0) if forecast >= 0 else (1.0, self.priors[drafter] - 1)
        mean = sum(accepted for accepted, _ in self.all_requests[drafter]) + PRIOR_ROUNDS * prior
        mean /= sum(measured for _, measured in self.all_requests[drafter]) + PRIOR_ROUNDS
        accepted, measured = self.all_requests[drafter][_level(entropy)]
        return measure, measure * (accepted + PRIOR_AT_LEVEL * mean) / (measured + PRIOR_AT_LEVEL)


def _level(entropy: float) -> int:
    return sum(entropy >= edge for edge in LEVEL_EDGES)


def route_by_experience(
    expected: list[list[float]],
    costs: list[list[float]],
    owners: list[int],
    previous: list[int],
    sets: list[int],
    probe: int,
    hope: float,
    num_rows: int,
    arrivals: list[list[float]] | None = None,
) -> list[int]:
    """As `_choose_kernel`: drafters of a batch, by the set of drafters with the most tokens per second.

    Args:
        expected: [R][N] tokens.
        costs: [3][N] seconds of the batch: drafting, verification, switch.
        owners: [N] owner of each drafter's cache.
        previous: [R] drafter of the last round, -1 for none.
        sets: of drafters, as bits; each request takes the member that is best for it.
        probe, hope: a drafter (-1: none) that all try if it is the best with ``hope`` times its expected drafts.
        num_rows: of the batch, including rows that decide nothing.
        arrivals: [R][N] cost of moving to each drafter, in measured switches; None: 1.
    """
    draft, verify, switch = costs
    arrivals = arrivals or [[1.0] * len(draft)] * len(expected)

    def choose(members: int, worth: float, hoped: float = 1.0) -> tuple[list[int], float]:
        routes, tokens, seconds = [], 0.0, 0.0
        for own, last, times in zip(expected, previous, arrivals, strict=True):
            price = [
                v + s * n * (last < 0 or owners[last] != owners[drafter])
                for drafter, (v, s, n) in enumerate(zip(verify, switch, times, strict=True))
            ]
            net = {d: own[d] - worth * price[d] / num_rows for d in range(len(own)) if members >> d & 1}
            route = max(net, key=lambda d: net[d])
            routes.append(route)
            tokens += 1 + (own[route] - 1) * hoped
            seconds += price[route] / len(expected)
        return routes, tokens / (seconds + sum(draft[d] for d in range(len(draft)) if members >> d & 1))

    best, best_set = 0.0, 1
    for members in sets:
        _, value = choose(members, best)
        if value > best:
            best, best_set = value, members
    if probe >= 0 and choose(1 << probe, best, hope)[1] > best:
        best_set = 1 << probe
    return choose(best_set, best)[0]
