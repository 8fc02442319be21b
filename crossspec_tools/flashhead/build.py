"""Clusters of equal size: spherical k-means (Dhillon and Modha 2001) whose clusters all take V / C tokens.

Tokens ask their nearest clusters in turn, and a cluster keeps the nearest tokens, until none is turned away: a stable
matching, by rounds of whole-tensor operations. Shapes: V tokens, C clusters, D hidden size.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_crossspec.drafting.flashhead.assets import MAX_CLUSTERS

Progress = Callable[[str, int, int], None]
"""Called with the stage, how much of it is done and how much there is."""
_LIST = 32
"""Nearest clusters that a token asks before it takes one that is left."""
_BLOCK_ELEMENTS = 1 << 25


class Clustering(NamedTuple):
    """What :func:`cluster` found."""

    # float32 [C, D] on the CPU: the direction of the members' mean, as long as they are on average
    centroids: torch.Tensor
    assignments: torch.Tensor  # int64 [V] on the CPU, the cluster of each token
    cosine: float  # mean cosine of tokens and their centroids
    iterations: int  # how many were done


def check_cluster_size(vocab_size: int, cluster_size: int, key: str = "--cluster-size") -> None:
    """Raises ValueError, one sentence that names sizes that serve, unless V tokens make clusters of that size."""
    if cluster_size > 0 and vocab_size % cluster_size == 0 and vocab_size // cluster_size <= MAX_CLUSTERS:
        return
    fitting = [
        size for size in range(1, vocab_size + 1) if vocab_size % size == 0 and vocab_size // size <= MAX_CLUSTERS
    ]
    nearest = sorted(sorted(fitting, key=lambda size: abs(size - cluster_size))[:4])
    raise ValueError(
        f"{key} {cluster_size}: {vocab_size} tokens do not make at most {MAX_CLUSTERS} clusters of that size; "
        f"choose one of {', '.join(map(str, nearest))}"
    )


def cluster(
    weight: torch.Tensor,
    *,
    cluster_size: int = 16,
    iterations: int = 12,
    seed: int = 0,
    progress: Progress = lambda *told: None,
) -> Clustering:
    """Cluster the rows of an output embedding into groups of one size.

    Raises ValueError: the size does not divide V, there is no iteration, or the embedding holds values that are no
    numbers.

    Args:
        weight: float [V, D], on the device that is to do the work.
        iterations: most rounds of k-means; it ends early where a round changes nothing that counts.
        seed: of the first centroids. The same seed on the same device gives the same clusters.
    """
    vocab_size = len(weight)
    check_cluster_size(vocab_size, cluster_size)
    if iterations < 1:
        raise ValueError(f"--iterations {iterations}: give 1 or more")
    rows = weight.detach().float()
    if not rows.isfinite().all():
        raise ValueError("the output embedding holds values that are no numbers; copy the model again")
    lengths = rows.norm(dim=1)
    units = F.normalize(rows, dim=1)
    num_clusters = vocab_size // cluster_size
    first = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:num_clusters]
    centroids, before = units[first.to(units.device)], -1.0
    for done in range(1, iterations + 1):
        assignments = _assign(units, centroids, cluster_size, partial(progress, f"iteration {done} of {iterations}"))
        members = assignments.argsort(stable=True)
        # Sums of gathered rows, not scattered additions: those come in another order on every GPU run.
        means = units[members].view(num_clusters, cluster_size, -1).sum(dim=1)
        # A cluster whose members cancel out keeps the direction that it had.
        centroids = torch.where(means.norm(dim=1, keepdim=True) > 1e-6, F.normalize(means, dim=1), centroids)
        cosine = float((units * centroids[assignments]).sum(dim=1).mean())
        if cosine - before < 1e-4:
            break
        before = cosine
    # Rows of zeros have no direction, but no centroid may be zero.
    centroids[centroids.norm(dim=1) < 0.5, 0] = 1.0
    scale = lengths[assignments.argsort(stable=True)].view(num_clusters, cluster_size).mean(dim=1)
    centroids = centroids * scale.clamp(min=1e-6)[:, None]
    return Clustering(centroids.cpu(), assignments.cpu(), cosine, done)


def _assign(
    units: torch.Tensor, centroids: torch.Tensor, cluster_size: int, tell: Callable[[int, int], None]
) -> torch.Tensor:
    """int64 [V]: every cluster gets ``cluster_size`` tokens, near ones first."""
    num_tokens, num_clusters = len(units), len(centroids)
    assignments = torch.full((num_tokens,), -1, dtype=torch.int64, device=units.device)
    left = torch.full((num_clusters,), cluster_size, dtype=torch.int64, device=units.device)
    waiting = torch.arange(num_tokens, device=units.device)
    while len(waiting):
        open_clusters = (left > 0).nonzero()[:, 0]
        values, places = _nearest(units, waiting, centroids[open_clusters], tell)
        taken = match(values, places, left[open_clusters])
        served = taken >= 0
        assignments[waiting[served]] = open_clusters[taken[served]]
        left -= torch.bincount(assignments[waiting[served]], minlength=num_clusters)
        waiting = waiting[~served]
    return assignments


def _nearest(
    units: torch.Tensor, tokens: torch.Tensor, centroids: torch.Tensor, tell: Callable[[int, int], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and places [tokens, T] of each token's nearest centroids, falling. A pass over all tokens is told of."""
    rows = max(1, _BLOCK_ELEMENTS // max(len(centroids), units.shape[1]))
    found, done = [], 0
    for part in tokens.split(rows):
        found.append((units[part] @ centroids.t()).topk(min(_LIST, len(centroids)), dim=1))
        done += len(part)
        if len(tokens) == len(units):
            tell(done, len(tokens))
    values, places = map(torch.cat, zip(*found, strict=True))
    return values, places


def match(values: torch.Tensor, places: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """A stable matching: no token and cluster would both rather have each other.

    Returns int64 [n], the cluster that keeps each token; -1 for those that all T turned away.

    Args:
        values: float [n, T], how much a token and the clusters that it asks like each other, falling.
        places: int64 [n, T], those clusters.
        room: int64 [clusters], how many tokens each may keep.
    """
    num_tokens, length = values.shape
    asked = torch.zeros(num_tokens, dtype=torch.int64, device=values.device)
    tokens = torch.arange(num_tokens, device=values.device)
    while True:
        asking = tokens[asked < length]
        wanted = places[asking, asked[asking]]
        order = values[asking, asked[asking]].sort(descending=True, stable=True).indices
        order = order[wanted[order].sort(stable=True).indices]
        sorted_clusters = wanted[order]
        start = torch.searchsorted(sorted_clusters, sorted_clusters)
        rank = torch.arange(len(order), device=values.device) - start
        turned_away = asking[order[rank >= room[sorted_clusters]]]
        if not len(turned_away):
            break
        asked[turned_away] += 1
    return torch.full_like(asked, -1).index_copy(0, asking, wanted)
