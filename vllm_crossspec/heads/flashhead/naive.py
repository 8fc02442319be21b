"""The kernels of the head, one row at a time: what they must equal. Shapes by the room's legend."""

import math

import torch


def score_centroids(hidden: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """float32 [B, C] of :func:`vllm_crossspec.heads.flashhead.kernels.score_centroids`."""
    return torch.stack([centroids.float() @ row.to(centroids.dtype).float() for row in hidden])


def select_clusters(scores: torch.Tensor, num_probes: int) -> torch.Tensor:
    """int32 [B, P] of :func:`vllm_crossspec.heads.flashhead.kernels.select_clusters`."""
    clusters = torch.empty(len(scores), num_probes, dtype=torch.int32)
    for row, line in enumerate(scores):
        known = [(-math.inf if math.isnan(score) else score) for score in line.tolist()]
        chosen = [c for _, c in sorted((-score, c) for c, score in enumerate(known))][:num_probes]
        clusters[row] = torch.tensor(sorted(chosen), dtype=torch.int32)
    return clusters


def candidates(clusters: torch.Tensor, members: torch.Tensor, special: tuple[int, ...]) -> list[int]:
    """The ids that a row with these probed clusters [P] scores, each once."""
    probed = [int(token) for c in clusters.tolist() for token in members[c]]
    return sorted({*probed, *special})


def top_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    members: torch.Tensor,
    special: tuple[int, ...],
    clusters: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 and float32 [B, K] of :func:`vllm_crossspec.heads.flashhead.kernels.top_tokens`; K = 1 is the arg-max.

    Args:
        hidden: float [B, D].
        weight: float [V, D], by token.
        members: int [C, M].
        special: S ids.
        clusters: int32 [B, P], the probed ones.
        k: K.
    """
    tokens = torch.zeros(len(hidden), k, dtype=torch.int64)
    log_probs = torch.full((len(hidden), k), -math.inf)
    for row, state in enumerate(hidden):
        ids = candidates(clusters[row], members, special)
        scores = weight[ids].float() @ state.float()
        best = scores.sort(descending=True, stable=True)
        found = min(k, len(ids))
        tokens[row, :found] = torch.tensor(ids)[best.indices[:found]]
        log_probs[row, :found] = scores.log_softmax(0)[best.indices[:found]]
    return tokens, log_probs
