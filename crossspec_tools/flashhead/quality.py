"""How often the head finds the dense head's token, by number of probes."""

import math

import torch
import torch.nn.functional as F

from vllm_crossspec.drafting.flashhead.assets import Assets

_ROWS = 256


def rank_clusters(weight: torch.Tensor, assets: Assets, hidden: torch.Tensor) -> torch.Tensor:
    """int64 [n] clusters that come before the one with the dense arg-max; 0 for special tokens, always candidates.

    Args:
        weight: float [V, D] output embedding.
        hidden: float [n, D] final hidden states, as the dense head takes them.
    """
    device, dtype = weight.device, torch.float32
    centroids = F.normalize(assets.centroids.to(device, dtype), dim=1)
    clusters = assets.assignments.to(device)
    rows = weight.to(dtype)
    special = torch.zeros(len(weight), dtype=torch.bool, device=device)
    special[list(assets.special_token_ids)] = True
    ranks = []
    for part in hidden.to(device, dtype).split(_ROWS):
        best = (part @ rows.t()).argmax(dim=1)
        found = (F.normalize(part, dim=1) @ centroids.t()).sort(dim=1, descending=True, stable=True).indices
        rank = (found == clusters[best][:, None]).int().argmax(dim=1)
        ranks.append(rank.masked_fill(special[best], 0).cpu())
    return torch.cat(ranks)


def recall(ranks: torch.Tensor, num_probes: int) -> float:
    """Share of the states whose dense arg-max is a candidate; ``ranks`` of :func:`rank_clusters`."""
    return float((ranks < num_probes).float().mean())


def usual_probes(num_clusters: int) -> list[int]:
    """Powers of two up to all clusters, for a table."""
    return [2**n for n in range(num_clusters.bit_length()) if 2**n < num_clusters] + [num_clusters]


def least_probes(ranks: torch.Tensor, wanted: float) -> int:
    """The smallest number of probes whose recall is at least ``wanted``, a share of the states up to 1."""
    needed = min(len(ranks), max(1, math.ceil(wanted * len(ranks))))
    return int(ranks.sort().values[needed - 1]) + 1
