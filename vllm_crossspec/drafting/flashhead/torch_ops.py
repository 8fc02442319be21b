"""The head as PyTorch operations, for CPUs: rows of the probed clusters are gathered and multiplied.

Differences from the kernels: centroids that tie for the last probe, and half precision, to which PyTorch rounds
products as the dense head does. Shapes by the folder's legend.
"""

import torch

from vllm_crossspec.drafting.flashhead.kernels import Tokens

_NEVER = float("-inf")
_GATHERED_ELEMENTS = 1 << 18
"""Elements of the embedding gathered at once: 1 MB of float32, which stays in the core's cache and in the allocator."""


def score_centroids(hidden: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """float32 [B, C] inner products of states and centroids."""
    rounded = hidden.to(centroids.dtype)
    if rounded.itemsize == 1:  # PyTorch has no products of eight bits
        rounded, centroids = rounded.float(), centroids.float()
    return (rounded @ centroids.t()).float()


def select_clusters(scores: torch.Tensor, num_probes: int) -> torch.Tensor:
    """int64 [B, P] clusters to probe, in any order."""
    return _numbers(scores).topk(num_probes, dim=1, sorted=False).indices


def score(
    hidden: torch.Tensor, tokens: Tokens, clusters: torch.Tensor, is_unique: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scores and int64 ids [B, N] of the candidates; -inf and 0 for duplicates and other ranks' tokens.

    ``clusters`` are int64 [B, P] of :func:`select_clusters`; ``is_unique``: whether to remove duplicates.
    """
    ids = tokens.members[clusters].flatten(1).long()
    scores = _numbers(_products(hidden.to(tokens.weight.dtype), tokens, clusters, ids).float())
    if tokens.first_token is not None:
        scores = scores.masked_fill(~_rows(tokens, ids)[1], _NEVER)
    if len(tokens.special_tokens):
        special_scores, special = _special(hidden, tokens, clusters, is_unique)
        scores, ids = torch.cat((scores, special_scores), dim=1), torch.cat((ids, special), dim=1)
    return scores, ids.masked_fill(scores == _NEVER, 0)


def _products(hidden: torch.Tensor, tokens: Tokens, clusters: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[B, P * M] products in the embedding's precision; a grouped cluster's rows are gathered as one."""
    (num_clusters, size), hidden_size = tokens.members.shape, hidden.shape[1]
    source, index = tokens.weight, _rows(tokens, ids)[0]
    if tokens.is_grouped:
        source, index = source.view(num_clusters, -1), clusters
    each = 1 if tokens.is_grouped else size
    step = max(1, _GATHERED_ELEMENTS // (size * hidden_size))
    scratch = source.new_empty(min(step, clusters.shape[1]) * each, source.shape[1])
    scores = hidden.new_empty(ids.shape)
    for row, state in enumerate(hidden):
        for begin in range(0, clusters.shape[1], step):
            piece = index[row, begin * each : (begin + step) * each]
            rows = torch.index_select(source, 0, piece, out=scratch[: len(piece)])
            torch.mv(rows.view(-1, hidden_size), state, out=scores[row, begin * size : (begin + step) * size])
    return scores


def _special(
    hidden: torch.Tensor, tokens: Tokens, clusters: torch.Tensor, is_unique: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and ids [B, S] of the special tokens."""
    places = (tokens.special_places if tokens.is_grouped else tokens.special_tokens).long()
    rows, is_own = _rows(tokens, places)
    weight = tokens.weight.index_select(0, rows)
    scores = _numbers((hidden.to(weight.dtype) @ weight.t()).float()).masked_fill(~is_own, _NEVER)
    if is_unique:
        own = tokens.special_places.long() // tokens.members.shape[1]
        scores = scores.masked_fill((clusters[:, None, :] == own[None, :, None]).any(dim=2), _NEVER)
    return scores, tokens.special_tokens.long().expand(len(hidden), -1)


def _rows(tokens: Tokens, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the weight (any row for another rank's token), and whether each token is this rank's."""
    if tokens.first_token is None:
        return places, torch.ones_like(places, dtype=torch.bool)
    rows, last = places - tokens.first_token, len(tokens.weight) - 1
    return rows.clamp(0, last), (rows >= 0) & (rows <= last)


def _numbers(scores: torch.Tensor) -> torch.Tensor:
    return torch.where(scores == scores, scores, _NEVER)


def best_token(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 [B], the smallest id with the highest score; 0 if all scores are -inf."""
    is_best = (scores == scores.amax(dim=1, keepdim=True)) & (scores > _NEVER)
    best = torch.where(is_best, ids, torch.iinfo(torch.int64).max).amin(dim=1)
    return best.masked_fill(~is_best.any(dim=1), 0)


def top_tokens(scores: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ids and float32 log-probabilities [B, K] of the best candidates, as ``kernels.top_tokens``."""
    ids, best = best_few(scores, ids, k)
    return ids, torch.where(best > _NEVER, best - scores.logsumexp(dim=1, keepdim=True), _NEVER)


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
    """Merge the :func:`top_tokens` of R ranks, which score disjoint tokens.

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
