"""The router in plain PyTorch: the truth that the kernels are tested against."""

import torch
import torch.nn.functional as F

from vllm_crossspec.router.experience import ALL_MEMORY, OWN_MEMORY, PRIOR_FORECAST, PRIOR_ROUNDS


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


class Learned:
    """What a request and all of them have shown of every drafter, in plain numbers; see ``experience``.

    Args:
        priors: tokens of a round with each drafter before anything is known.
    """

    def __init__(self, priors: list[float]):
        self.priors = priors
        self.own: dict[int, list[list[float]]] = {}
        self.every = self._nothing()

    def learn(self, rounds: list[tuple[int, int, int, float]]) -> None:
        """Take in rounds of a batch: slot, drafter, tokens, and what had been forecast (negative: nothing)."""
        for drafter, known in enumerate(self.every):
            total = [0.0] * 4
            for slot, other, tokens, forecast in rounds:
                if other != drafter:
                    continue
                new = [tokens, 1.0, *((tokens - 1, forecast) if forecast >= 0 else (0.0, 0.0))]
                own = self.own.setdefault(slot, self._nothing())[drafter]
                own[:] = [OWN_MEMORY * old + more for old, more in zip(own, new, strict=True)]
                total = [old + more for old, more in zip(total, new, strict=True)]
            if total[1]:
                known[:] = [ALL_MEMORY * old + more for old, more in zip(known, total, strict=True)]

    def expected(self, slot: int, drafter: int, forecast: float) -> float:
        """Tokens of the next round of a request with a drafter."""
        tokens, rounds, accepted, forecasts = self.every[drafter]
        own = self.own.get(slot, self._nothing())[drafter]
        if forecast >= 0:
            trust = (accepted + PRIOR_ROUNDS) / (forecasts + PRIOR_ROUNDS)
            return 1 + forecast * (own[2] + PRIOR_FORECAST * trust) / (own[3] + PRIOR_FORECAST)
        mean = (tokens + PRIOR_ROUNDS * self.priors[drafter]) / (rounds + PRIOR_ROUNDS)
        return (own[0] + PRIOR_ROUNDS * mean) / (own[1] + PRIOR_ROUNDS)

    def _nothing(self) -> list[list[float]]:
        return [[0.0] * 4 for _ in self.priors]


def route_by_experience(
    expected: list[list[float]],
    costs: list[list[float]],
    owners: list[int],
    previous: list[int],
    sets: list[int],
    probe: int,
    hope: float,
    num_rows: int,
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
    """
    draft, verify, switch = costs

    def choose(members: int, worth: float, times: float = 1.0) -> tuple[list[int], float]:
        routes, tokens, seconds = [], 0.0, 0.0
        for own, last in zip(expected, previous, strict=True):
            price = [
                v + s * (last >= 0 and owners[last] != owners[drafter])
                for drafter, (v, s) in enumerate(zip(verify, switch, strict=True))
            ]
            net = {d: own[d] - worth * price[d] / num_rows for d in range(len(own)) if members >> d & 1}
            route = max(net, key=lambda d: net[d])
            routes.append(route)
            tokens += 1 + (own[route] - 1) * times
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
