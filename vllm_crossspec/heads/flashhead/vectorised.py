"""The head as PyTorch operations, for CPUs: rows of the probed clusters are gathered and multiplied.

Results and ties are those of the kernels, but for clusters whose centroids tie for the last probe, and for embeddings
in half precision: PyTorch rounds products to theirs, as the dense head does. Shapes by the room's legend.
"""

import torch

from vllm_crossspec.heads.flashhead.kernels import Tokens

_NEVER = float("-inf")
_GATHERED_ELEMENTS = 1 << 24
"""Of the output embedding at once, 64 MB of float32; at least one row's candidates."""


def select_clusters(
    hidden: torch.Tensor, centroids: torch.Tensor, num_probes: int, margin: float | None
) -> torch.Tensor:
    """int64 [B, P] clusters to probe, in any order; -1 for those that the margin leaves out."""
    scores = (hidden.to(centroids.dtype) @ centroids.t()).float()
    found = _numbers(scores).topk(num_probes, dim=1, sorted=margin is not None)
    if margin is None:
        return found.indices
    lowest = found.values[:, :1] - margin * hidden.float().norm(dim=1, keepdim=True)
    probed = found.values >= lowest
    # A decoding CPU waits for nobody: columns that no row probes need not be gathered.
    return found.indices.masked_fill(~probed, -1)[:, : int(probed.sum(dim=1).max())]


def score(
    hidden: torch.Tensor, tokens: Tokens, clusters: torch.Tensor, is_unique: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scores and int64 ids [B, N] of the candidates; -inf and 0 for one that is none.

    Args:
        hidden: float [B, D].
        tokens: the output embedding and its clusters.
        clusters: int64 [B, P] of :func:`select_clusters`.
        is_unique: no token may be there twice.
    """
    num_rows, size = len(hidden), tokens.members.shape[1]
    is_live = (clusters >= 0).repeat_interleave(size, dim=1)
    safe = clusters.clamp(min=0)
    ids = tokens.members[safe].flatten(1).long()
    scores = torch.empty(num_rows, ids.shape[1])
    step = max(1, _GATHERED_ELEMENTS // max(1, ids.shape[1] * hidden.shape[1]))
    for begin in range(0, num_rows, step):
        part = slice(begin, begin + step)
        rows = _gather(tokens, safe[part], ids[part])
        scores[part] = _products(rows, hidden[part].to(rows.dtype))
    scores = _numbers(scores).masked_fill(~is_live, _NEVER)
    if len(tokens.special_tokens):
        special_scores, special = _special(hidden, tokens, clusters, is_unique)
        scores, ids = torch.cat((scores, special_scores), dim=1), torch.cat((ids, special), dim=1)
    return scores, ids.masked_fill(scores == _NEVER, 0)


def _gather(tokens: Tokens, clusters: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[b, P * M, D] rows; where a cluster's lie together, as one piece."""
    weight, size = tokens.weight, tokens.members.shape[1]
    if tokens.is_grouped:
        found = weight.view(len(tokens.members), -1).index_select(0, clusters.flatten())
    else:
        found = weight.index_select(0, ids.flatten())
    return found.view(len(clusters), clusters.shape[1] * size, weight.shape[1])


def _products(rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """[b, n] of [b, n, D] and [b, D]. One row is a matrix times a vector, which is quicker than a batch of one."""
    if len(hidden) == 1:
        return torch.mv(rows[0], hidden[0])[None].float()
    return torch.bmm(rows, hidden[:, :, None])[:, :, 0].float()


def _special(
    hidden: torch.Tensor, tokens: Tokens, clusters: torch.Tensor, is_unique: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and ids [B, S]."""
    places = (tokens.special_places if tokens.is_grouped else tokens.special_tokens).long()
    weight = tokens.weight.index_select(0, places)
    scores = _numbers((hidden.to(weight.dtype) @ weight.t()).float())
    if is_unique:
        own = tokens.special_places.long() // tokens.members.shape[1]
        scores = scores.masked_fill((clusters[:, None, :] == own[None, :, None]).any(dim=2), _NEVER)
    return scores, tokens.special_tokens.long().expand(len(hidden), -1)


def _numbers(scores: torch.Tensor) -> torch.Tensor:
    return torch.where(scores == scores, scores, _NEVER)


def best_token(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 [B], the smallest id among those of the highest score; 0 where all are -inf."""
    is_best = (scores == scores.amax(dim=1, keepdim=True)) & (scores > _NEVER)
    best = torch.where(is_best, ids, torch.iinfo(torch.int64).max).amin(dim=1)
    return best.masked_fill(~is_best.any(dim=1), 0)


def top_tokens(scores: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 and float32 [B, K], falling, smaller ids first among equals; 0 and -inf where there are fewer."""
    if scores.shape[1] < k:
        short = k - scores.shape[1]
        scores = torch.nn.functional.pad(scores, (0, short), value=_NEVER)
        ids = torch.nn.functional.pad(ids, (0, short))
    by_id = ids.sort(dim=1, stable=True).indices
    scores, ids = scores.gather(1, by_id), ids.gather(1, by_id)
    found = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    log_sum = scores.logsumexp(dim=1, keepdim=True)
    best = scores.gather(1, found)
    return ids.gather(1, found), torch.where(best > _NEVER, best - log_sum, _NEVER)
