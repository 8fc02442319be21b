"""The kernel's twin in plain PyTorch, which tests compare it with."""

import torch

from vllm_crossspec.trees.builders.dynamic import Grown

_NEVER = float("-inf")


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Nats [...] of log-probabilities [..., k], normalised; -inf is impossible, and NaN results if all are."""
    normalised = log_probs.log_softmax(dim=-1)
    return -(normalised.exp() * normalised.masked_fill(log_probs == _NEVER, 0.0)).sum(dim=-1)


def assess(
    *,
    grown: Grown,
    levels: int,
    thresholds: torch.Tensor,
    extensions: torch.Tensor,
    widths: torch.Tensor,
    phi: torch.Tensor,
    bins: torch.Tensor,
    limits: torch.Tensor,
    caps: torch.Tensor,
) -> None:
    """As `kernels.assess`."""
    num_reqs, k = grown.log_probs.shape[0], grown.beam_parents.shape[2]
    rows = torch.arange(num_reqs, device=grown.log_probs.device)
    total = entropy(grown.log_probs[:, :k])
    if levels > 1:
        deeper = grown.log_probs[:, k : k + (levels - 1) * k * k].unflatten(1, (levels - 1, k, k))
        best = deeper[:, -1].amax(dim=2)
        confidence = torch.where(best > _NEVER, best - grown.beam_log_probs[levels - 2], _NEVER)
        node = confidence.argmax(dim=1)
        is_dead = confidence.amax(dim=1) == _NEVER
        for level in reversed(range(levels - 1)):
            total = total + entropy(deeper[rows, level, node])
            node = grown.beam_parents[level][rows, node].long()
        total = total.masked_fill(is_dead, float("nan"))
    chosen = (~(total[:, None] <= thresholds)).sum(dim=1)
    phi[:num_reqs], bins[:num_reqs] = total, chosen.to(bins.dtype)
    limits[:num_reqs], caps[:num_reqs] = levels + extensions[chosen], widths[chosen]
