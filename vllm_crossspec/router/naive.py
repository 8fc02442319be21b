"""The router in plain PyTorch: the truth that the kernels are tested against."""

import torch
import torch.nn.functional as F


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
