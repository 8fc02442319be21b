"""The head's kernels in plain PyTorch, one row at a time. Shapes by the folder's legend."""

import math

import torch

from vllm_crossspec.drafting.flashhead.assets import Assets


def score_centroids(hidden: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """As ``kernels.score_centroids``: float32 [B, C]."""
    return torch.stack([centroids.float() @ row.to(centroids.dtype).float() for row in hidden])


def select_clusters(scores: torch.Tensor, num_probes: int) -> torch.Tensor:
    """As ``kernels.select_clusters``: int32 [B, P]."""
    clusters = torch.empty(len(scores), num_probes, dtype=torch.int32)
    for row, line in enumerate(scores):
        known = [(-math.inf if math.isnan(score) else score) for score in line.tolist()]
        chosen = [c for _, c in sorted((-score, c) for c, score in enumerate(known))][:num_probes]
        clusters[row] = torch.tensor(sorted(chosen), dtype=torch.int32)
    return clusters


def candidates(clusters: torch.Tensor, members: torch.Tensor, special: tuple[int, ...]) -> list[int]:
    """Ids that a row with these probed clusters [P] scores, without duplicates."""
    probed = [int(token) for c in clusters.tolist() for token in members[c]]
    return sorted({*probed, *special})


def top_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, assets: Assets, clusters: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kernels.top_tokens``, of states [B, D], weights [V, D] and probed clusters [B, P]; K = 1 is the arg-max."""
    tokens = torch.zeros(len(hidden), k, dtype=torch.int64)
    log_probs = torch.full((len(hidden), k), -math.inf)
    for row, state in enumerate(hidden):
        ids = candidates(clusters[row], assets.members, assets.special_token_ids)
        scores = weight[ids].float() @ state.float()
        best = scores.sort(descending=True, stable=True)
        found = min(k, len(ids))
        tokens[row, :found] = torch.tensor(ids)[best.indices[:found]]
        log_probs[row, :found] = scores.log_softmax(0)[best.indices[:found]]
    return tokens, log_probs
