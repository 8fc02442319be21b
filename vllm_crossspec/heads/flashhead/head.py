"""The head itself: clusters and an output embedding in, token ids out; shapes by the legend of the room."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_crossspec.heads.flashhead import kernels, torch_ops
from vllm_crossspec.heads.flashhead.assets import Assets
from vllm_crossspec.twins import kernels_multiply

MAX_TOP_K = 64
_LARGEST_EXACT = 1 << 24
"""Ids up to here are float32 numbers, as which ranks tell them."""
NARROW = torch.float8_e4m3fn
_LOWEST_CAPABILITY = (8, 9)
"""Of a CUDA device that reads ``NARROW``."""
logger = logging.getLogger(__name__)


class Noise(NamedTuple):
    """What sampled requests change in place before the best are chosen.

    Attributes:
        of_candidates: changes scores float32 [B, N] of tokens int [B, N]; -inf, which is none, stays. The third are the
            best of every ``kernels.SLOTS`` candidates, packed, to be written anew; None without kernels.
        of_clusters: changes scores float32 [B, C], given the centroids' lengths float32 [C] and the clusters' tokens
            int [C, M]; then whether kernels serve.
    """

    of_candidates: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]
    of_clusters: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]


class TopTokens(NamedTuple):
    """The best few candidates of each row, falling.

    Attributes:
        tokens: int64 [B, K]; 0 where there are fewer.
        log_probs: float32 [B, K], over the tokens that were scored: a little too high, by the mass of all others;
            -inf where there are fewer.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor


class Shard(NamedTuple):
    """The rows that one of several ranks has of the output embedding, and how ranks tell each other what they found.

    Attributes:
        first_token: whose row is this rank's first.
        gather: from float32 [B, n] of every rank to [B, R * n], rank by rank; a CUDA graph can hold it.
    """

    first_token: int
    gather: Callable[[torch.Tensor], torch.Tensor]


class FlashHead:
    """Next tokens of hidden states without the logits of the vocabulary.

    Every buffer is made here, so that a CUDA graph can hold the calls; results lie in them until the next call. On a
    GPU the kernels serve, elsewhere PyTorch operations.

    Under tensor parallelism every rank probes the same clusters and scores those of their tokens whose rows it has, in
    the mean one in R. One gathering of two numbers a row (of 2 K + 1 for the best few) then tells every rank the best.

    Args:
        weight: float [V, D], the drafter's whole output embedding, shared, not copied, but for ``grouped``; of a
            ``shard`` its rows.
        assets: its clusters.
        num_probes: P; None: what the assets name. More find the dense head's token more often and cost more.
        max_rows: most rows of a batch.
        top_k: K of :meth:`top_tokens`; 0: it is never called.
        is_coupled: whether calls may bring noise.
        draws: whether noise draws the clusters, too, by centroids as they are stored; if not, the nearest are probed.
        grouped: keep a copy of the rows in the order of the clusters. As large as the embedding, and read in longer
            pieces.
        centroid_dtype: of the centroids; None: the embedding's. float8_e4m3fn has one scale a centroid; a device that
            does not know it keeps numbers so rounded in the embedding's format.
        use_kernels: whether the kernels serve; None: on a GPU.
        shard: which rows ``weight`` has and how they are told; None: all of them.

    Raises:
        ValueError: one sentence: the assets are another model's, or a number is out of its bounds.
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
        use_kernels: bool | None = None,
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
        self.max_rows, self.top_k = max_rows, top_k
        device = weight.device
        self._uses_kernels = kernels_multiply(device) if use_kernels is None else use_kernels
        centroids = F.normalize(assets.centroids.to(device, torch.float32), dim=1)
        self._centroids, self._scales = _narrow(centroids, centroid_dtype or weight.dtype, weight.dtype)
        self._lengths = assets.centroids.to(device, torch.float32).norm(dim=1) if draws else None
        self._tokens, self._shard = _tokens(weight, assets, grouped, shard), shard
        width = max(1, top_k)
        self._best = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._top = torch.zeros(max_rows, width, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(max_rows, width, dtype=torch.float32, device=device)
        self._own = torch.zeros(max_rows, dtype=torch.float32, device=device)  # what ranks weigh their own by
        self._keeps_all = is_coupled
        self._buffers = self._make_buffers(self.num_probes)

    def _make_buffers(self, num_probes: int) -> kernels.Buffers:
        """What the kernels write, for so many clusters; nothing where they do not serve."""
        num_clusters, size = self._tokens.members.shape
        return kernels.make_buffers(
            rows=self.max_rows if self._uses_kernels else 0,
            num_clusters=num_clusters,
            num_probes=num_probes,
            num_candidates=num_probes * size + len(self._tokens.special_tokens),
            top_k=self.top_k,
            keeps_all=self._keeps_all,
            device=self._best.device,
        )

    def best_token(self, hidden: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        """The token of the highest score.

        Args:
            hidden: float [B, D] final hidden states, B at most ``max_rows``.
            noise: changes the scores first.

        Returns:
            int64 [B]. Where the cluster of the dense head's arg-max is among the probed ones, or it is a special
            token, this is that token.
        """
        out = self._best[: self._check(hidden)]
        scores = None if self._shard is None else self._own[: len(hidden)]
        if self._uses_kernels:
            self._score(hidden, noise, keeps_all=noise is not None)
            kernels.best_token(packed=self._buffers.packed, out=out, scores=scores)
        else:
            own, ids = self._candidates(hidden, noise, is_unique=False)
            out.copy_(torch_ops.best_token(own, ids))
            if scores is not None:
                scores.copy_(own.amax(dim=1))
        return out if scores is None else self._best_of_ranks(out, scores)

    def top_tokens(self, hidden: torch.Tensor, noise: Noise | None = None) -> TopTokens:
        """The best ``top_k`` tokens of states [B, D], for trees; arguments as in :meth:`best_token`."""
        assert self.top_k, "made without top_k"
        num_rows = self._check(hidden)
        out = TopTokens(self._top[:num_rows], self._log_probs[:num_rows])
        log_sums = None if self._shard is None else self._own[:num_rows]
        if self._uses_kernels:
            self._score(hidden, noise, keeps_all=True)
            kernels.top_tokens(buffers=self._buffers, tokens=out.tokens, log_probs=out.log_probs, log_sums=log_sums)
        else:
            scores, ids = self._candidates(hidden, noise, is_unique=True)
            _write(out, torch_ops.top_tokens(scores, ids, self.top_k))
            if log_sums is not None:
                log_sums.copy_(scores.logsumexp(dim=1))
        return out if log_sums is None else self._top_of_ranks(out, log_sums)

    def _best_of_ranks(self, out: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Write each row's best token over all ranks, given this rank's best [B] and its score [B]."""
        assert self._shard is not None
        found = self._shard.gather(torch.stack((scores, out.float()), dim=1)).view(len(out), -1, 2)
        return out.copy_(torch_ops.best_token(found[:, :, 0], found[:, :, 1].long()))

    def _top_of_ranks(self, out: TopTokens, log_sums: torch.Tensor) -> TopTokens:
        """Write each row's best few over all ranks, given this rank's and what it divided by, [B]."""
        assert self._shard is not None
        own = torch.cat((out.log_probs, out.tokens.float(), log_sums[:, None]), dim=1)
        found = self._shard.gather(own).view(len(own), -1, own.shape[1])
        log_probs, tokens, sums = found.split((self.top_k, self.top_k, 1), dim=2)
        return _write(out, torch_ops.merge_top_tokens(tokens.long(), log_probs, sums[:, :, 0], self.top_k))

    def _check(self, hidden: torch.Tensor) -> int:
        assert hidden.ndim == 2 and len(hidden) <= self.max_rows and hidden.shape[1] == self._centroids.shape[1]
        return len(hidden)

    def _candidates(
        self, hidden: torch.Tensor, noise: Noise | None, is_unique: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids [B, N] by PyTorch operations."""
        scores = torch_ops.score_centroids(hidden, self._centroids)
        self._draw(scores, noise)
        clusters = torch_ops.select_clusters(scores, self.num_probes)
        scores, ids = torch_ops.score(hidden, self._tokens, clusters, is_unique)
        if noise is not None:
            noise.of_candidates(scores, ids, None)
        return scores, ids

    def _score(self, hidden: torch.Tensor, noise: Noise | None, keeps_all: bool) -> None:
        """Scores of all candidates and the best of every few, by kernels, in the buffers."""
        buffers = self._buffers
        assert not keeps_all or buffers.candidate_scores.shape[1], "made without is_coupled"
        kernels.score_centroids(hidden=hidden, centroids=self._centroids, scores=buffers.scores, scales=self._scales)
        scores = buffers.scores[: len(hidden)]
        self._draw(scores, noise)
        kernels.select_clusters(scores=scores, clusters=buffers.clusters)
        kernels.score_tokens(hidden=hidden, tokens=self._tokens, buffers=buffers, keeps_all=keeps_all)
        if noise is not None:
            rows = len(hidden)
            noise.of_candidates(buffers.candidate_scores[:rows], buffers.candidate_tokens[:rows], buffers.packed[:rows])

    def _draw(self, scores: torch.Tensor, noise: Noise | None) -> None:
        """Change the scores [B, C] of the centroids, in place, so that the best of sampled rows are drawn ones."""
        if self._lengths is not None and noise is not None:
            noise.of_clusters(scores, self._lengths, self._tokens.members, self._uses_kernels)


def _write(out: TopTokens, found: tuple[torch.Tensor, torch.Tensor]) -> TopTokens:
    for buffer, one in zip(out, found, strict=True):
        buffer.copy_(one)
    return out


def _narrow(
    centroids: torch.Tensor, dtype: torch.dtype, usual: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Centroids [C, D] in ``dtype``, and the scales [C] that they are to be multiplied by; None: 1."""
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
    """The number itself; ValueError where there are not so many clusters."""
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
