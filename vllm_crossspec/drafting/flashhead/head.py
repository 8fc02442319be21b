"""The head, which makes token ids of hidden states; shapes by the folder's legend."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_crossspec.drafting.flashhead import kernels, merge
from vllm_crossspec.drafting.flashhead.assets import Assets

MAX_TOP_K = 64
_LARGEST_EXACT = 1 << 24
"""Largest id that float32, in which ranks exchange ids, holds exactly."""
NARROW = torch.float8_e4m3fn
_LOWEST_CAPABILITY = (8, 9)
"""Lowest capability of a CUDA device that supports ``NARROW``."""
logger = logging.getLogger(__name__)


class Noise(NamedTuple):
    """Functions of ``drafting.noise`` that change the scores of sampled requests in place.

    Attributes:
        of_candidates: takes scores, tokens, and the packed best of every ``kernels.SLOTS``.
        of_clusters: takes scores, the centroids' lengths, and the clusters' tokens.
    """

    of_candidates: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    of_clusters: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Shard(NamedTuple):
    """One rank's part of the output embedding.

    Attributes:
        first_token: the token of this rank's first row.
        gather: gathers float32 [B, n] of every rank to [B, R * n], rank by rank; a CUDA graph can hold it.
    """

    first_token: int
    gather: Callable[[torch.Tensor], torch.Tensor]


class FlashHead:
    """Next tokens of hidden states without the vocabulary's logits.

    All buffers are made here, so a CUDA graph can hold the calls; results are valid until the next call. Under
    tensor parallelism every rank probes the same clusters and scores the tokens whose rows it has; one gather then
    gives every rank the best.

    Args:
        weight: float [V, D], the drafter's output embedding or a ``shard``'s rows; copied only if ``grouped``.
        assets: its clusters.
        num_probes: P; None: the assets' number. More probes find the dense head's token more often and cost more.
        max_rows: most rows of a batch.
        top_k: K of :meth:`top_tokens`; 0 if it is never called.
        is_coupled: whether calls can pass noise.
        draws: whether noise also draws the clusters, by the stored centroids; otherwise the nearest are probed.
        grouped: whether to keep a copy of the rows in cluster order, which is read in longer pieces.
        centroid_dtype: of the centroids; None: the embedding's. float8_e4m3fn has one scale per centroid; a device
            without it keeps the rounded numbers in the embedding's type.
        shard: the rows of ``weight``; None: all of them.

    Raises:
        ValueError: the assets belong to another model, or a number is out of bounds.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        assets: Assets,
        *,
        num_probes: int | None = None,
        max_rows: int = 1,
        top_k: int = 0,
        is_coupled: bool = False,
        draws: bool = False,
        grouped: bool = False,
        centroid_dtype: torch.dtype | None = None,
        shard: Shard | None = None,
    ):
        num_clusters = len(assets.members)
        fitting = (assets.vocab_size, assets.centroids.shape[1])
        if weight.shape[1] != fitting[1] or (shard is None and len(weight) != fitting[0]):
            raise ValueError(
                f"the clusters are for an output embedding of {list(fitting)} and this one has {list(weight.shape)}: "
                "make them with `crossspec flashhead build` from this model"
            )
        self.num_probes = check_probes(assets.num_probes if num_probes is None else num_probes, num_clusters)
        if not 0 <= top_k <= MAX_TOP_K:
            raise ValueError(f"top_k {top_k}: the head gives at most {MAX_TOP_K} candidates")
        self.max_rows, self.top_k, self._vocab_size = max_rows, top_k, assets.vocab_size
        device = weight.device
        centroids = F.normalize(assets.centroids.to(device, torch.float32), dim=1)
        self._centroids, self._scales = _narrow(centroids, centroid_dtype or weight.dtype, weight.dtype)
        self._lengths = assets.centroids.to(device, torch.float32).norm(dim=1) if draws else None
        self._tokens, self._shard = _tokens(weight, assets, grouped, shard), shard
        width = max(1, top_k)
        self._best = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._top = torch.zeros(max_rows, width, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(max_rows, width, dtype=torch.float32, device=device)
        self._own = torch.zeros(max_rows, dtype=torch.float32, device=device)  # this rank's scores or log-sums
        self._buffers = kernels.make_buffers(max_rows, self._tokens, self.num_probes, top_k, is_coupled)

    def reads_less(self, num_rows: int) -> bool:
        """Whether so many rows read fewer vectors than the dense head has: centroids, and each row its own tokens."""
        of_row = self.num_probes * self._tokens.members.shape[1] + len(self._tokens.special_tokens)
        centroids = len(self._centroids) * -(-num_rows // kernels.ROWS_TOGETHER)
        return centroids + num_rows * of_row < self._vocab_size

    def best_token(self, hidden: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        """int64 [B] tokens with the highest score for states [B, D], after ``noise`` has changed the scores.

        It equals the dense head's token if that is a special token or in a probed cluster.
        """
        out = self._best[: self._check(hidden)]
        scores = None if self._shard is None else self._own[: len(hidden)]
        self._score(hidden, noise, keeps_all=noise is not None)
        kernels.best_token(packed=self._buffers.packed, out=out, scores=scores)
        return out if scores is None else self._best_of_ranks(out, scores)

    def top_tokens(self, hidden: torch.Tensor, noise: Noise | None = None) -> kernels.TopTokens:
        """The best ``top_k`` tokens of states [B, D], as in :meth:`best_token`; for trees."""
        assert self.top_k, "made without top_k"
        num_rows = self._check(hidden)
        out = kernels.TopTokens(self._top[:num_rows], self._log_probs[:num_rows])
        log_sums = None if self._shard is None else self._own[:num_rows]
        self._score(hidden, noise, keeps_all=True)
        kernels.top_tokens(buffers=self._buffers, out=out, log_sums=log_sums)
        return out if log_sums is None else self._top_of_ranks(out, log_sums)

    def _best_of_ranks(self, out: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Write each row's best token of all ranks, given this rank's best [B] and its score [B]."""
        assert self._shard is not None
        found = self._shard.gather(torch.stack((scores, out.float()), dim=1)).view(len(out), -1, 2)
        return out.copy_(merge.best_token(found[:, :, 0], found[:, :, 1].long()))

    def _top_of_ranks(self, out: kernels.TopTokens, log_sums: torch.Tensor) -> kernels.TopTokens:
        """Write each row's best tokens of all ranks, given this rank's and its log-sums [B]."""
        assert self._shard is not None
        own = torch.cat((out.log_probs, out.tokens.float(), log_sums[:, None]), dim=1)
        found = self._shard.gather(own).view(len(own), -1, own.shape[1])
        log_probs, tokens, sums = found.split((self.top_k, self.top_k, 1), dim=2)
        merged = merge.merge_top_tokens(tokens.long(), log_probs, sums[:, :, 0], self.top_k)
        out.tokens.copy_(merged[0])
        out.log_probs.copy_(merged[1])
        return out

    def _check(self, hidden: torch.Tensor) -> int:
        assert hidden.ndim == 2 and len(hidden) <= self.max_rows and hidden.shape[1] == self._centroids.shape[1]
        return len(hidden)

    def _score(self, hidden: torch.Tensor, noise: Noise | None, keeps_all: bool) -> None:
        """Write the candidates' scores and the best of every ``kernels.SLOTS`` into the buffers, by kernels."""
        buffers, rows = self._buffers, len(hidden)
        assert not keeps_all or buffers.candidate_scores.shape[1], "made without is_coupled"
        kernels.score_centroids(hidden=hidden, centroids=self._centroids, scores=buffers.scores, scales=self._scales)
        self._draw(buffers.scores[:rows], noise)
        kernels.select_clusters(scores=buffers.scores[:rows], clusters=buffers.clusters)
        kernels.score_tokens(hidden=hidden, tokens=self._tokens, buffers=buffers, keeps_all=keeps_all)
        if noise is not None:
            noise.of_candidates(buffers.candidate_scores[:rows], buffers.candidate_tokens[:rows], buffers.packed[:rows])

    def _draw(self, scores: torch.Tensor, noise: Noise | None) -> None:
        """Change the centroids' scores [B, C] in place, so that sampled rows draw their clusters."""
        if self._lengths is not None and noise is not None:
            noise.of_clusters(scores, self._lengths, self._tokens.members)


def _narrow(
    centroids: torch.Tensor, dtype: torch.dtype, usual: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Centroids [C, D] in ``dtype``, and their scales [C]; None: 1."""
    if dtype != NARROW:
        return centroids.to(dtype).contiguous(), None
    scales = centroids.abs().amax(dim=1) / torch.finfo(NARROW).max
    rounded = (centroids / scales[:, None]).to(NARROW)
    device = centroids.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LOWEST_CAPABILITY:
        return rounded, scales
    logger.warning("FlashHead: %s has no float8_e4m3fn; centroids are rounded to it and kept in %s", device, usual)
    return (rounded.float() * scales[:, None]).to(usual), None


def check_probes(num_probes: int, num_clusters: int, key: str = "num_probes") -> int:
    """``num_probes``; ValueError if it is not between 1 and the number of clusters."""
    if not 1 <= num_probes <= num_clusters:
        raise ValueError(f"{key} {num_probes}: give 1 to {num_clusters}, the number of clusters")
    return num_probes


def _tokens(weight: torch.Tensor, assets: Assets, grouped: bool, shard: Shard | None) -> kernels.Tokens:
    places = torch.empty(assets.vocab_size, dtype=torch.int32)
    places[assets.members.flatten()] = torch.arange(assets.vocab_size, dtype=torch.int32)
    special = torch.tensor(assets.special_token_ids, dtype=torch.int32)
    weight = weight.detach()
    assert shard is None or (not grouped and assets.vocab_size <= _LARGEST_EXACT)
    members = assets.members.to(weight.device)
    return kernels.Tokens(
        weight=weight.index_select(0, members.flatten()) if grouped else weight.contiguous(),
        members=members.to(torch.int32).contiguous(),
        special_tokens=special.to(weight.device),
        special_places=places[special.long()].to(weight.device),
        is_grouped=grouped,
        first_token=None if shard is None else shard.first_token,
    )
