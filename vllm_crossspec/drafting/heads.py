"""Output layers of drafters, which make draft tokens of last states.

Proposers make no logits themselves. :class:`DenseHead` is the checkpoint's output layer; :class:`RetrievalHead` scores
only the tokens of a few clusters (FlashHead). The target's own output does not use heads.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_gather

from vllm_crossspec.config.schema import DrafterConfig
from vllm_crossspec.drafting.best_logits import MAX_K, best_logits
from vllm_crossspec.drafting.flashhead.check import check_fingerprint, head_assets
from vllm_crossspec.drafting.flashhead.head import FlashHead, Noise, Shard
from vllm_crossspec.drafting.noise import NoiseKeys, add_candidate_noise, add_cluster_noise, add_target_noise
from vllm_crossspec.platform import platform


class DraftHead(ABC):
    """Makes draft tokens of states; a CUDA graph can hold every call.

    Attributes:
        offsets: int64 [draft vocabulary] target id minus draft id; None if the vocabularies are the same.
    """

    offsets: torch.Tensor | None

    @abstractmethod
    def choose(self, hidden: torch.Tensor, keys: NoiseKeys | None) -> torch.Tensor:
        """int64 [rows] best target ids of final states [rows, H]; ``keys`` None: without the target's noise."""

    @abstractmethod
    def candidates(self, hidden: torch.Tensor, keys: NoiseKeys | None, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``k`` likeliest tokens of every row, or the whole draft vocabulary if it is smaller; for trees.

        Returns:
            float32 [rows, k] log-probabilities, falling, and int64 [rows, k] target ids.
        """

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 target ids of draft ids of any shape."""
        return ids if self.offsets is None else ids + self.offsets[ids]


class DenseHead(DraftHead):
    """The whole output layer; ``logits`` makes logits [rows, draft vocabulary] of states [rows, H].

    The arg-max is taken in the draft vocabulary, and only the winner is mapped. ``d2t`` ascends, so ties give the same
    token as in the target's vocabulary.
    """

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor], offsets: torch.Tensor | None):
        self.logits, self.offsets = logits, offsets

    def choose(self, hidden: torch.Tensor, keys: NoiseKeys | None) -> torch.Tensor:
        logits = self.logits(hidden)
        if platform().ranks_by_kernels:
            return best_logits(logits, 1, keys, self.offsets).tokens[:, 0]
        return self.to_target(self._ranked(logits, keys).argmax(dim=-1))

    def candidates(self, hidden: torch.Tensor, keys: NoiseKeys | None, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits(hidden)
        k = min(k, logits.shape[-1])
        if platform().ranks_by_kernels and k <= MAX_K:
            best = best_logits(logits, k, keys, self.offsets)
            return best.log_probs, best.tokens
        log_probs, ids = platform().top(self._ranked(logits, keys), k)
        return log_probs, self.to_target(ids)

    def _ranked(self, logits: torch.Tensor, keys: NoiseKeys | None) -> torch.Tensor:
        """The drafter's logits, coupled with the target's noise if there are keys."""
        return logits if keys is None else add_target_noise(keys._replace(offsets=self.offsets), logits)


class RetrievalHead(DraftHead):
    """FlashHead: scores only the tokens of the nearest clusters (Tranheden et al. 2026).

    Differences from ``DenseHead``:

    - Log-probabilities are normalised over the scored tokens; there are 0 and -inf past the last of them.
    - Results are valid until the next call.

    Every row reads clusters of its own. So many rows together read more than the whole output layer: then ``dense``
    takes the place of this head, if it is given.
    """

    def __init__(self, head: FlashHead, offsets: torch.Tensor | None, dense: DenseHead | None = None):
        self.head, self.offsets, self.dense = head, offsets, dense

    def choose(self, hidden: torch.Tensor, keys: NoiseKeys | None) -> torch.Tensor:
        if self.dense is not None and not self.head.reads_less(len(hidden)):
            return self.dense.choose(hidden, keys)
        return self.to_target(self.head.best_token(hidden, self._noise(keys)))

    def candidates(self, hidden: torch.Tensor, keys: NoiseKeys | None, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.dense is not None and not self.head.reads_less(len(hidden)):
            return self.dense.candidates(hidden, keys, k)
        found = self.head.top_tokens(hidden, self._noise(keys))
        return found.log_probs[:, :k], self.to_target(found.tokens[:, :k])

    def _noise(self, keys: NoiseKeys | None) -> Noise | None:
        if keys is None:
            return None
        keys = keys._replace(offsets=self.offsets)
        return Noise(functools.partial(add_candidate_noise, keys), functools.partial(add_cluster_noise, keys))


def make_head(
    model: nn.Module,
    drafter: DrafterConfig,
    *,
    is_coupled: bool,
    max_rows: int,
    folder: str,
    vocab_size: int,
    has_weights: bool = True,
) -> DraftHead:
    """Make the head that the settings ask for, of a loaded drafter.

    Args:
        model: the drafter's, with an output layer and ``logits_processor``, its own or the target's.
        drafter: its settings; ``head`` and ``tree`` are read.
        is_coupled: whether candidates are ranked with the target's noise.
        max_rows: most rows of one call.
        folder: the drafter's own, which may hold the clusters.
        vocab_size: of the target.
        has_weights: False for dummy weights, which fit no clusters.
    """
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is not None and has_weights:
        check_drafted_tokens(offsets, vocab_size, f"speculative_config: {folder}")
    layer = output_layer(model)
    dense = DenseHead(lambda hidden: model.logits_processor(layer, hidden), offsets)
    if drafter.head is None:
        return dense
    key = "speculative_config: head"
    weight, shard = output_embedding(model, key)
    assets = head_assets(drafter.head, folder, f"{key}.model")
    if has_weights:
        own = layer.weight.detach()
        whole = weight if shard is None else tensor_model_parallel_all_gather(own, dim=0)
        check_fingerprint(assets, whole[: assets.vocab_size], f"{key}.model")
    dtype = drafter.head.centroid_dtype
    top_k = min(drafter.tree.top_k or 0, assets.vocab_size)
    head = FlashHead(
        weight,
        assets,
        num_probes=drafter.head.num_probes,
        max_rows=max_rows,
        top_k=top_k,
        is_coupled=is_coupled,
        draws=is_coupled and drafter.head.clusters == "drawn",
        grouped=drafter.head.grouped,
        centroid_dtype=None if dtype is None else getattr(torch, dtype),
        shard=shard,
    )
    # On a CPU, where neither reading nor the number of rows decides, it would only hide the head from tests.
    return RetrievalHead(head, offsets, dense if platform().ranks_by_kernels else None)


def check_drafted_tokens(offsets: torch.Tensor, vocab_size: int, key: str) -> None:
    """Refuse a map of draft tokens with ids outside the target's vocabulary, which kernels would read."""
    ids = torch.arange(len(offsets)) + offsets.cpu()  # on the host, because a simulated GPU cannot add
    lowest, highest = ids.aminmax()
    if int(lowest) < 0 or int(highest) >= vocab_size:
        raise ValueError(
            f"{key}: its d2t makes draft tokens the target's {int(lowest)} to {int(highest)}, which has {vocab_size}; "
            "copy the checkpoint again"
        )


def output_layer(model: Any) -> Any:
    """The drafter's ``lm_head``, or its input embedding if vLLM's model has none."""
    return model.lm_head if hasattr(model, "lm_head") else model.model.embed_tokens


def output_embedding(model: Any, key: str) -> tuple[torch.Tensor, Shard | None]:
    """A view [draft vocabulary, H] of a loaded drafter's output embedding, without vLLM's padding rows.

    Under tensor parallelism it has this rank's rows, and their :class:`Shard` is returned too.
    """
    layer, processor = output_layer(model), model.logits_processor
    weight = getattr(layer, "weight", None)
    if weight is None or weight.ndim != 2 or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{key}: this drafter's output layer is quantised; leave out head, or use other weights")
    if getattr(layer, "bias", None) is not None or processor.scale != 1.0 or processor.soft_cap is not None:
        raise ValueError(f"{key}: this drafter's logits are scaled, capped or have a bias; leave out head")
    rows: torch.Tensor = weight.detach()
    if layer.tp_size == 1:
        return rows[: processor.org_vocab_size], None
    own = layer.shard_indices
    return rows[: own.num_org_elements], Shard(own.org_vocab_start_index, tensor_model_parallel_all_gather)
