"""How often the head finds the dense head's token, by number of probes; shapes by the legend of the room."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_crossspec.heads.flashhead.assets import Assets

_ROWS = 256


class Ranks(NamedTuple):
    """Where the right clusters of some hidden states come among all.

    Attributes:
        ranks: int64 [n], clusters that come before the one that holds the dense arg-max; 0 for a special token, which
            is always a candidate.
        cosines: float32 [n, C], of states and centroids, falling.
    """

    ranks: torch.Tensor
    cosines: torch.Tensor


class Recall(NamedTuple):
    """One line of a report.

    Attributes:
        num_probes: P, at most.
        mean_probes: clusters that were probed on average; P without a margin.
        recall: share of the states whose dense arg-max is a candidate.
    """

    num_probes: int
    mean_probes: float
    recall: float


def rank_clusters(weight: torch.Tensor, assets: Assets, hidden: torch.Tensor) -> Ranks:
    """Score states both ways.

    Args:
        weight: float [V, D] output embedding.
        assets: its clusters.
        hidden: float [n, D] final hidden states, as the dense head takes them.
    """
    device, dtype = weight.device, torch.float32
    centroids = F.normalize(assets.centroids.to(device, dtype), dim=1)
    clusters = assets.assignments.to(device)
    rows = weight.to(dtype)
    special = torch.zeros(len(weight), dtype=torch.bool, device=device)
    special[list(assets.special_token_ids)] = True
    ranks, cosines = [], []
    for part in hidden.to(device, dtype).split(_ROWS):
        best = (part @ rows.t()).argmax(dim=1)
        found = (F.normalize(part, dim=1) @ centroids.t()).sort(dim=1, descending=True, stable=True)
        rank = (found.indices == clusters[best][:, None]).int().argmax(dim=1)
        ranks.append(rank.masked_fill(special[best], 0).cpu())
        cosines.append(found.values.cpu())
    return Ranks(torch.cat(ranks), torch.cat(cosines))


def recall(found: Ranks, num_probes: int, margin: float | None = None) -> Recall:
    """Recall at a number of probes, or at an adaptive one of at most so many (``FlashHead``'s ``margin``)."""
    if margin is None:
        return Recall(num_probes, float(num_probes), float((found.ranks < num_probes).float().mean()))
    cosines = found.cosines[:, :num_probes]
    probed = (cosines >= cosines[:, :1] - margin).sum(dim=1)
    return Recall(num_probes, float(probed.float().mean()), float((found.ranks < probed).float().mean()))


def usual_probes(num_clusters: int) -> list[int]:
    """Powers of two up to all clusters, for a table."""
    return [2**n for n in range(num_clusters.bit_length()) if 2**n < num_clusters] + [num_clusters]


def least_probes(found: Ranks, wanted: float) -> int:
    """The smallest number of probes whose recall is at least ``wanted``, a share of the states up to 1."""
    needed = min(len(found.ranks), max(1, math.ceil(wanted * len(found.ranks))))
    return int(found.ranks.sort().values[needed - 1]) + 1
