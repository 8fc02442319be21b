"""The best tokens of all ranks, by PyTorch operations; every rank has scored its own rows of the embedding.

Shapes by the folder's legend; R ranks.
"""

import torch

_NEVER = float("-inf")


def best_token(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 [B], the smallest id with the highest score; 0 if all scores are -inf."""
    is_best = (scores == scores.amax(dim=1, keepdim=True)) & (scores > _NEVER)
    best = torch.where(is_best, ids, torch.iinfo(torch.int64).max).amin(dim=1)
    return best.masked_fill(~is_best.any(dim=1), 0)


def best_few(scores: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ids and float32 scores [B, K] of candidates [B, N], in falling order, smaller ids first at ties."""
    if scores.shape[1] < k:
        short = k - scores.shape[1]
        scores = torch.nn.functional.pad(scores, (0, short), value=_NEVER)
        ids = torch.nn.functional.pad(ids, (0, short))
    by_id = ids.sort(dim=1, stable=True).indices
    scores, ids = scores.gather(1, by_id), ids.gather(1, by_id)
    found = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return ids.gather(1, found), scores.gather(1, found)


def merge_top_tokens(
    tokens: torch.Tensor, log_probs: torch.Tensor, log_sums: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the best tokens of R ranks, which score disjoint ones; as :func:`best_few`.

    Args:
        tokens: int64 [B, R, K]
        log_probs: float32 [B, R, K], normalised over each rank's candidates; -inf past its last candidate.
        log_sums: float32 [B, R], each rank's ``logsumexp``; -inf without a candidate.
        k: K.
    """
    is_one = log_probs > _NEVER
    shares = log_sums - log_sums.logsumexp(dim=1, keepdim=True)
    merged = torch.where(is_one, log_probs + shares[:, :, None], _NEVER)
    return best_few(merged.flatten(1), torch.where(is_one, tokens, 0).flatten(1), k)
