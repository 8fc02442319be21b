"""The router in plain PyTorch: the truth that the kernels are tested against."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_crossspec.router.experience import (
    ALL_MEMORY,
    FADE,
    LEVEL_EDGES,
    LEVELS,
    PRIOR_AT_LEVEL,
    PRIOR_OWN,
    PRIOR_REQUEST,
    PRIOR_ROUNDS,
)
from vllm_crossspec.router.kernels import OWN_MEMORY, PRIOR_OF_CORRECTION


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of the next-token distribution, nats (Kwon et al. 2026, section 3.3.1).

    Args:
        logits: float [..., V]; -inf forbids a token.

    Returns:
        float32 [...]; 0 where every token is forbidden.
    """
    log_probs = logits.double().log_softmax(dim=-1)
    terms = torch.where(log_probs > float("-inf"), -log_probs * log_probs.exp(), 0.0)
    # A row without any possible token is NaN all over, which no comparison admits.
    return terms.sum(dim=-1).float()


def gains(
    hidden_states: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
) -> torch.Tensor:
    """Predicted tokens by which each drafter beats the reference (Kwon et al. 2026, appendix A).

    Args:
        hidden_states: float [..., H] final states of the target.
        w1: [m, H]. b1: [m]. w2: [N - 1, m]. b2: [N - 1].

    Returns:
        float32 [..., N - 1].
    """
    middle = F.gelu(F.linear(hidden_states.double(), w1.double(), b1.double()))
    return F.linear(middle, w2.double(), b2.double()).float()


def correct(
    row: list[float], own: torch.Tensor, mean_lengths: list[float], previous: int, tokens: int
) -> tuple[list[float], float]:
    """Take in a request's last round, and correct what is predicted by what its rounds have brought.

    Args:
        row: [N - 1] predicted gains.
        own: float32 [N, 2] the request's tokens and rounds by drafter; takes in the round.
        mean_lengths: [N] tokens of a round with each drafter as a rule.
        previous: the round's drafter, -1 for none.
        tokens: that it brought.

    Returns:
        The gains [N - 1], and how much the reference brings beyond its mean.
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
        # In the kernel's precision, or a tie there would be none here.
        value = float(torch.tensor(gain) - torch.tensor(threshold))
        if value > best:
            best, route = value, drafter
    return route


def route_by_goodput(
    row: list[float], costs: list[float], switches: list[float], mean_length: float, previous: int
) -> int:
    """The drafter with the most expected tokens per second.

    Args:
        row: [N - 1] gains against the reference, tokens.
        costs: [N] seconds of a round.
        switches: [N] seconds of a switch to each drafter.
        mean_length: of the reference, tokens.
        previous: the drafter that drafted last, -1 for none.
    """
    reference = len(row)
    tokens = torch.tensor([*row, 0.0]).add(mean_length).clamp(min=1.0)
    others = torch.tensor([previous >= 0 and drafter != previous for drafter in range(reference + 1)])
    values = tokens / (torch.tensor(costs) + torch.where(others, torch.tensor(switches), 0.0))
    best = [drafter for drafter in range(reference + 1) if values[drafter] == values.max()]
    if previous in best:
        return previous
    return reference if reference in best else best[0]


def settle(
    wanted: list[int],
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    previous: torch.Tensor,
) -> list[int]:
    """Turn what the policy wants for every row into routes, and note them in ``previous``; see ``kernels.decide``."""
    routes = []
    for row, (drafter, slot) in enumerate(zip(wanted, idx_mapping.tolist(), strict=True)):
        if slot < 0 or num_sampled[row] == 0:
            routes.append(-1)
            continue
        routes.append(drafter)
        previous[slot] = routes[-1]
    return routes


class Round(NamedTuple):
    """A request's round with a drafter.

    Attributes:
        slot: of the request.
        drafter: its number.
        tokens: that it brought, the bonus token included.
        entropy: of the target where it began, nats.
        measure, awaited: what :meth:`Learned.of_all` said of it then.
    """

    slot: int
    drafter: int
    tokens: float
    entropy: float
    measure: float
    awaited: float


class Learned:
    """What a request and all of them have shown of every drafter, in plain numbers; see ``experience``.

    Args:
        priors: tokens of a round with each drafter before anything is known.
    """

    def __init__(self, priors: list[float]):
        self.priors = priors
        self.own: dict[int, list[list[float]]] = {}
        self.every = [[[0.0, 0.0] for _ in range(LEVELS)] for _ in priors]

    def learn(self, rounds: list[Round]) -> None:
        """Take in the rounds of a batch."""
        for drafter, levels in enumerate(self.every):
            mine = [r for r in rounds if r.drafter == drafter]
            for r in mine:
                own = self.own.setdefault(r.slot, [[0.0, 0.0] for _ in self.priors])[drafter]
                own[:] = [OWN_MEMORY * own[0] + r.tokens - 1, OWN_MEMORY * own[1] + r.awaited]
            for level, known in enumerate(levels):
                there = [r for r in mine if _level(r.entropy) == level]
                kept = (ALL_MEMORY if there else 1.0) if mine else FADE if rounds else 1.0
                known[0] = kept * known[0] + sum(r.tokens - 1 for r in there)
                known[1] = kept * known[1] + sum(r.measure for r in there)

    def expected(self, slot: int, forecasts: list[float], entropy: float = 0.0) -> list[float]:
        """Tokens of the next round of a request with each drafter; ``forecasts`` [N], negative for none."""
        own = self.own.get(slot, [[0.0, 0.0] for _ in self.priors])
        unsaid = [counts for counts, forecast in zip(own, forecasts, strict=True) if forecast < 0]
        came, expected = (PRIOR_REQUEST + sum(counts[i] for counts in unsaid) for i in (0, 1))
        found = []
        for drafter, ((accepted, awaited), forecast) in enumerate(zip(own, forecasts, strict=True)):
            usual = came / expected if forecast < 0 else 1.0
            times = (accepted + PRIOR_OWN * usual) / (awaited + PRIOR_OWN)
            found.append(1 + self.of_all(drafter, forecast, entropy)[1] * times)
        return found

    def hope(self, drafter: int, hope: float) -> float:
        """How many times the accepted drafts that are expected of a drafter may come, for one that is to be tried."""
        return 1 + hope / math.sqrt(1 + sum(measured for _, measured in self.every[drafter]))

    def of_all(self, drafter: int, forecast: float, entropy: float) -> tuple[float, float]:
        """The measure of a round with a drafter, and the accepted drafts that all requests' rounds let expect of it."""
        measure, prior = (forecast, 1.0) if forecast >= 0 else (1.0, self.priors[drafter] - 1)
        mean = sum(accepted for accepted, _ in self.every[drafter]) + PRIOR_ROUNDS * prior
        mean /= sum(measured for _, measured in self.every[drafter]) + PRIOR_ROUNDS
        accepted, measured = self.every[drafter][_level(entropy)]
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
    """The drafter of every request of a batch; the set of drafters that makes most tokens a second.

    Args:
        expected: [R][N] tokens.
        costs: [3][N] seconds of the batch: drafting, verification, switch.
        owners: [N] whose cache each drafter uses.
        previous: [R] drafter of the last round, -1 for none.
        sets: of drafters, as bits; each request takes the member that is worth most to it.
        probe: a drafter that all are to try if it is the best as soon as ``hope`` times the accepted drafts that are
            expected of it come; -1 for none.
        hope: see ``probe``.
        num_rows: of the batch, R and those that decide nothing.
        arrivals: [R][N] as how many switches it counts to come to each drafter; None: as one.
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
