"""The output layer of a drafter: how its last states become draft tokens.

Every proposer asks a head and makes no logits itself. :class:`DenseHead` is the checkpoint's own output layer;
:class:`RetrievalHead` scores the tokens of a few clusters of it (FlashHead). Heads are the drafter's alone: nothing
here is ever the target's.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_gather

from vllm_crossspec.engine.cpu_products import lane_ops
from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.noise import add_candidate_noise, add_cluster_noise, add_target_noise
from vllm_crossspec.heads.flashhead.check import check_fingerprint, head_assets
from vllm_crossspec.heads.flashhead.head import FlashHead, Noise, Shard


class NoiseKeys(NamedTuple):
    """What the target's sampler keys its noise by, for the tokens that are being drafted.

    Attributes:
        idx_mapping: int [rows / n] slot of every n consecutive rows; negative entries are padding.
        positions: int64 [rows] position of the token before the drafted one.
        temperature, seeds: [S] of every slot.
        use_fp64: whether the target samples with float64 noise.
        sharpness: factor of the logits of requests without noise, for the order of a tree's nodes.
    """

    idx_mapping: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    use_fp64: bool
    sharpness: float = 1.0


class DraftHead(ABC):
    """From states to draft tokens; a CUDA graph can hold every call.

    Attributes:
        offsets: int64 [draft vocabulary] target id minus draft id; None where they are the same.
    """

    offsets: torch.Tensor | None

    @abstractmethod
    def choose(self, hidden: torch.Tensor, keys: NoiseKeys | None) -> torch.Tensor:
        """First choices.

        Args:
            hidden: [rows, H] final states of the drafter.
            keys: None for drafts that do not look at the target's noise.

        Returns:
            int64 [rows] ids of the target's vocabulary.
        """

    @abstractmethod
    def candidates(self, hidden: torch.Tensor, keys: NoiseKeys | None, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens of every row, for trees.

        Args:
            hidden: [rows, H] final states of the drafter.
            keys: None for drafts that do not look at the target's noise.
            k: how many; where the draft vocabulary has fewer, all of it.

        Returns:
            float32 [rows, k] log-probabilities, falling, and int64 [rows, k] ids of the target's vocabulary.
        """

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 ids of the target's vocabulary, of draft ids of any shape."""
        return ids if self.offsets is None else ids + self.offsets[ids]


class DenseHead(DraftHead):
    """The whole output layer.

    The arg-max is taken in the drafter's own vocabulary and only the winner is mapped; ``d2t`` is ascending, so the
    winner, ties included, is the one that scattering all logits into the target's vocabulary would give.

    Args:
        logits: from states [rows, H] to logits [rows, draft vocabulary].
        offsets: int64 [draft vocabulary] target id minus draft id; None where they are the same.
    """

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor], offsets: torch.Tensor | None):
        self.logits, self.offsets = logits, offsets

    def choose(self, hidden: torch.Tensor, keys: NoiseKeys | None) -> torch.Tensor:
        """See the base class."""
        return self.to_target(ranked_logits(self.logits(hidden), keys, self.offsets).argmax(dim=-1))

    def candidates(self, hidden: torch.Tensor, keys: NoiseKeys | None, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        logits = ranked_logits(self.logits(hidden), keys, self.offsets)
        k = min(k, logits.shape[-1])
        if logits.device.type == "cpu" and logits.dtype == torch.float32 and (lane := lane_ops()):
            log_probs, ids = lane.top(logits, k)
            return log_probs, self.to_target(ids)
        top, ids = logits.topk(k, dim=-1)
        return top.float() - logits.float().logsumexp(dim=-1, keepdim=True), self.to_target(ids)


class RetrievalHead(DraftHead):
    """FlashHead: the tokens of the clusters that come nearest, and no others (Tranheden et al. 2026).

    Log-probabilities are over the tokens that were scored. Results lie in the head's buffers until its next call.

    Args:
        head: over the drafter's output embedding.
        offsets: int64 [draft vocabulary] target id minus draft id; None where they are the same.
    """

    def __init__(self, head: FlashHead, offsets: torch.Tensor | None):
        self.head, self.offsets = head, offsets

    def choose(self, hidden: torch.Tensor, keys: NoiseKeys | None) -> torch.Tensor:
        """See the base class."""
        return self.to_target(self.head.best_token(hidden, self._noise(keys)))

    def candidates(self, hidden: torch.Tensor, keys: NoiseKeys | None, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class; 0 and -inf where fewer tokens than ``k`` were scored."""
        found = self.head.top_tokens(hidden, self._noise(keys))
        return found.log_probs[:, :k], self.to_target(found.tokens[:, :k])

    def _noise(self, keys: NoiseKeys | None) -> Noise | None:
        if keys is None:
            return None
        given = {"offsets": self.offsets, **keys._asdict()}
        of_candidates = functools.partial(add_candidate_noise, **given)
        del given["sharpness"]  # orders tokens, and leaves the order of clusters as it is
        return Noise(of_candidates, functools.partial(add_cluster_noise, **given))


def ranked_logits(logits: torch.Tensor, keys: NoiseKeys | None, offsets: torch.Tensor | None) -> torch.Tensor:
    """The logits by which a drafter chooses: its own, or coupled with the target's noise.

    Args:
        logits: [rows, vocabulary] of the drafter.
        keys: None for drafts that do not look at the noise.
        offsets: int64 [vocabulary] target id minus draft id; None where they are the same.
    """
    return logits if keys is None else add_target_noise(logits, offsets=offsets, **keys._asdict())


def make_head(
    model: nn.Module,
    drafts: DraftSettings,
    *,
    max_rows: int,
    folder: str,
    vocab_size: int,
    has_weights: bool = True,
) -> DraftHead:
    """The output layer that the settings ask for, of a loaded drafter.

    Args:
        model: the drafter's, with an output layer and ``logits_processor``, its own or the target's.
        drafts: ``head`` and ``top_k`` are read.
        max_rows: most rows of one call.
        folder: the drafter's own, which may hold the clusters.
        vocab_size: of the target.
        has_weights: False where weights are made up, so that no clusters can be theirs.

    Raises:
        ValueError: one sentence: draft tokens that the target does not have, clusters of another output embedding, or
            one that cannot be clustered.
    """
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is not None and has_weights:
        check_drafted_tokens(offsets, vocab_size, f"speculative_config: {folder}")
    if drafts.head is None:
        layer = output_layer(model)
        return DenseHead(lambda hidden: model.logits_processor(layer, hidden), offsets)
    key = "speculative_config: head"
    weight, shard = output_embedding(model, key)
    assets = head_assets(drafts.head, folder, f"{key}.model")
    if has_weights:
        own = output_layer(model).weight.detach()
        whole = weight if shard is None else tensor_model_parallel_all_gather(own, dim=0)
        check_fingerprint(assets, whole[: assets.vocab_size], f"{key}.model")
    dtype = drafts.head.centroid_dtype
    top_k = min(drafts.top_k or 0, assets.vocab_size)
    head = FlashHead(
        weight,
        assets,
        num_probes=drafts.head.num_probes,
        max_rows=max_rows,
        top_k=top_k,
        is_coupled=drafts.is_coupled,
        draws=drafts.is_coupled and drafts.head.clusters == "drawn",
        grouped=drafts.head.grouped,
        centroid_dtype=None if dtype is None else getattr(torch, dtype),
        shard=shard,
    )
    return RetrievalHead(head, offsets)


def check_drafted_tokens(offsets: torch.Tensor, vocab_size: int, key: str) -> None:
    """Refuse a map of draft tokens that leads out of the target's vocabulary, for memory is read where it points.

    Args:
        offsets: int64 [draft vocabulary] target id minus draft id.
        vocab_size: of the target.
        key: begins the message.

    Raises:
        ValueError: one sentence.
    """
    ids = torch.arange(len(offsets)) + offsets.cpu()  # once, on the host: a simulated GPU adds nothing up
    lowest, highest = ids.aminmax()
    if int(lowest) < 0 or int(highest) >= vocab_size:
        raise ValueError(
            f"{key}: its d2t makes draft tokens the target's {int(lowest)} to {int(highest)}, which has {vocab_size}; "
            "copy the checkpoint again"
        )


def output_layer(model: Any) -> Any:
    """What a drafter's logits are products with: its ``lm_head``, or where vLLM's model has none its embedding."""
    return model.lm_head if hasattr(model, "lm_head") else model.model.embed_tokens


def output_embedding(model: Any, key: str) -> tuple[torch.Tensor, Shard | None]:
    """The output embedding of a loaded drafter, as it is on the device: a view, without vLLM's padding rows.

    Returns:
        [draft vocabulary, H], and None; under tensor parallelism this rank's rows, and which they are.

    Raises:
        ValueError: one sentence: it is quantised, or its logits are more than products.
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
