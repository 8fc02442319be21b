"""Shared parts of the attention backends: tails and their source, registration with vLLM, and refusals.

Shape legend: R requests of the batch, T tokens of the step, W int32 mask words of a row, Hq and Hkv query and KV heads,
Dh head size, s soft prompts.

A *tail* is the last rows of a request. Each row sees the dense part before the tail and the tail rows whose bits are
set in its mask: itself and its ancestors. A layer's attention is the softmax over the dense part, continued over the
tail.

With a sliding window a row sees the last tokens of its own path: a row at depth d is d tokens after the root, wherever
its slot is. So rows of different depth see different beginnings of the dense part.

Every key that a tail row needs is still in the cache: vLLM frees only blocks before P - window + 1, where P is the
number of verified tokens. The root is at P, or later in a step planned behind others. Drafts have slots from P on.

The KV cache may be float8. Tree rows then read its numbers times the layer's scales, as in plain decoding, and the
accepted path is moved as bytes. Soft prompts and scratches are not quantised.

A target layer may have ``soft_prompts`` [2, Hkv, s, Dh]: keys (0, after rotation) and values (1) that contemplate rows
see before everything else. The last ceil(s / 32) words of a row's mask say which of them it sees.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionLayer, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_crossspec.platform import platform
from vllm_crossspec.trees.verify import tail_attention as kernels
from vllm_crossspec.trees.verify.tail_attention import DenseTail, PagedTail, QueryRows, Scales, Softmax
from vllm_crossspec.types import FLOAT8


class TargetTail(NamedTuple):
    """The verification rows of a step; they come first in the batch. A drafter's layers ignore it.

    A request's tail is all of its query rows: the root, the draft nodes, then contemplate rows. Its first row is at
    ``prefix_len``. Requests with one query row and no drafts are allowed: their ``prefix_len`` is their whole length.
    """

    prefix_len: torch.Tensor  # int32 [at least R] tokens before each request's tail; 0 for the padding of a CUDA graph
    # int32 [at least T, W] mask of each token row; [at least T, W + ceil(s / 32)] for soft prompts
    row_mask: torch.Tensor
    num_reqs: int  # leading requests that are verification-shaped
    num_tokens: int  # their query rows
    max_query_len: int  # the most query rows that one of them has
    is_whole_batch: bool  # no other requests in the step; padding counts as verification. CUDA graphs need this


class DraftTail(NamedTuple):
    """One level of an autoregressive drafter's trees; its proposer adds it to the metadata of one layer.

    Every request has ``queries_per_req`` query rows, whose dense part is its whole paged cache (``seq_lens``). The
    layer writes the level's keys and values into ``scratch``, as the tail's last rows, and none into the paged cache.
    """

    # [at least R, rows, 2, Hkv, Dh] keys (0) and values (1) of the tree's rows so far; one layer's own
    scratch: torch.Tensor
    row_mask: torch.Tensor  # int32 [at least R * queries_per_req, W] mask of each query row over the scratch's rows
    length: torch.Tensor  # int32 [1] on the device, rows of the tail, this level's last
    num_reqs: int  # requests, the padding of a CUDA graph included
    queries_per_req: int  # query rows of every request
    # Whether each request's last query row is not a node but an entry that all levels share (a future). Every level
    # writes it to row 0 of the scratch again.
    has_shared: bool = False

    @property
    def max_query_len(self) -> int:
        return self.queries_per_req

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.queries_per_req


Tail = TargetTail | DraftTail
TreeSource = Callable[[Any, bool], TargetTail | None]
_tree_source: TreeSource | None = None


def set_tree_source(source: TreeSource | None) -> None:
    """Set the function that returns the step's tail to the metadata builders of the target's layers; None removes it.

    It takes vLLM's ``CommonAttentionMetadata`` and whether a CUDA graph is being captured. It returns None for a step
    without drafts. Every batch that replays a graph captured with a tail needs one, including vLLM's dummy batches.
    """
    global _tree_source
    _tree_source = source


def tail_of_step(common_metadata: Any, capturing: bool) -> TargetTail | None:
    """The step's tail from the source; None without a source."""
    return None if _tree_source is None else _tree_source(common_metadata, capturing)


def serves_target(vllm_config: VllmConfig, layer_names: Iterable[str]) -> bool:
    """Whether any of these layers is the target's; only then a builder asks for the tail."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layer_names))
    return any(not layer.is_draft_layer for layer in layers.values())


def soft_prompts_of(layer: Any) -> torch.Tensor | None:
    """The layer's soft prompts [2, Hkv, s, Dh], or None."""
    return getattr(layer, "soft_prompts", None)


def softmax_of(impl: Any, layer: AttentionLayer | None = None) -> Softmax:
    """A layer's softmax parameters; without the layer, without its soft prompts and a quantised cache's scales."""
    window = impl.sliding_window  # its size, or tokens on either side
    if isinstance(window, tuple):
        window = window[0] + 1
    scales = Scales()
    if layer is not None and impl.kv_cache_dtype in FLOAT8:
        scales = Scales(layer._q_scale if impl.supports_quant_query_input else None, layer._k_scale, layer._v_scale)
    sinks = getattr(impl, "sinks", None)
    sizes = (impl.scale, max(window or 0, 0), float(impl.logits_soft_cap or 0.0))
    return Softmax(*sizes, sinks, scales, soft_prompts_of(layer))


def dtype_beside_cache(layer: Any) -> torch.dtype:
    """The dtype of keys and values outside a layer's cache: the cache's, or the model's if the cache is quantised."""
    dtype: torch.dtype = layer.dtype if layer.kv_cache_dtype in FLOAT8 else layer.kv_cache_torch_dtype
    return dtype


def rows_of(query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, metadata: Any, tail: Tail) -> QueryRows:
    """The query rows of a tail; query and out are [rows, Hq, Dh], lse float32 [Hq, rows]."""
    return QueryRows(query, out, lse, metadata.query_start_loc, tail.row_mask, tail.num_reqs, tail.max_query_len)


def attend_window(rows: QueryRows, kv_cache: torch.Tensor, metadata: Any, tail: Tail, softmax: Softmax) -> None:
    """The prefix pass of a layer with a sliding window; arguments as in :func:`merge_tail`."""
    lengths = tail.prefix_len if isinstance(tail, TargetTail) else metadata.seq_lens
    prefix = PagedTail(kv_cache, metadata.block_table, lengths, metadata.seq_lens)
    kernels.window_attention(rows, prefix, softmax, tails_in_cache=isinstance(tail, TargetTail))


def merge_tail(rows: QueryRows, kv_cache: torch.Tensor, metadata: Any, tail: Tail, softmax: Softmax) -> None:
    """Continue the softmax of the prefix pass over the tail, in place.

    Args:
        rows: of the tail (:func:`rows_of`).
        kv_cache: [blocks, Hkv, block_size, 2 * Dh], with a target's tail already written; float8 if quantised.
        metadata, tail: of the step, or of a drafter's level, whose prefix is the whole cache.
        softmax: of the layer.
    """
    if isinstance(tail, DraftTail):
        kernels.tail_attention(rows, DenseTail(tail.scratch, tail.length), softmax)
    else:
        kernels.tail_attention(
            rows, PagedTail(kv_cache, metadata.block_table, tail.prefix_len, metadata.seq_lens), softmax
        )


# -- registration -----------------------------------------------------------------------------------------------------


_replaced: list[AttentionBackendEnum] = []
"""vLLM's backends that ours replaces."""


def register() -> None:
    """Replace vLLM's backend for this platform with ours, under its name; idempotent; needed in every process.

    Raises:
        ValueError: the platform has no tree attention.
    """
    member, path = platform().attention()
    if member.get_path() == path:
        return
    register_backend(member, path)
    _replaced.append(member)
    # vLLM caches its choice, which matters if one process starts several engines.
    selector._cached_get_attn_backend.cache_clear()


def unregister() -> None:
    """Restore vLLM's own backend, for a later engine without trees in the same process."""
    set_tree_source(None)
    for member in _replaced:
        member.clear_override()
        selector._cached_get_attn_backend.cache_clear()
    _replaced.clear()


# -- refusals ---------------------------------------------------------------------------------------------------------


def check_backends(vllm_config: VllmConfig, draft_layers: Iterable[str] = ()) -> None:
    """Refuse a model whose attention cannot take trees; call it after its layers and the drafters' are built.

    ``draft_layers`` names the drafters' layers that get a :class:`DraftTail`. Other drafters' layers are not checked.

    Raises:
        ValueError: names the layer and the remedy.
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError(
            "draft trees cannot be split over context-parallel ranks: set decode_context_parallel_size and "
            'prefill_context_parallel_size to 1, or leave "tree" out of the speculative_config'
        )
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        raise ValueError(
            "draft trees cannot be verified by a part of the layers: leave out --kv-sharing-fast-prefill, or "
            '"tree" in the speculative_config'
        )
    trees_of_drafts = set(draft_layers)
    for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
        if layer.is_draft_layer and name not in trees_of_drafts:
            continue
        problem = _backend_problem(layer) or unsupported_feature(layer.impl)
        if problem:
            raise ValueError(
                f'draft trees cannot run on layer {name}: {problem}, or leave "tree" out of the speculative_config'
            )


def _backend_problem(layer: AttentionLayerBase) -> str | None:
    if getattr(layer, "attention_chunk_size", None):
        return "it attends within chunks of the context; use a target without it"
    if soft_prompts_of(layer) is not None and softmax_of(layer.impl).window:
        return "it has soft prompts and a sliding window, which ends before them; use a target without it"
    if getattr(getattr(layer, "impl", None), "reads_trees", False):
        return None
    found, wanted = layer.get_attn_backend().get_name(), platform().attention()[0].name
    return f"its attention is {found}; start vLLM with --attention-backend {wanted}, where the target can use that"


def unsupported_feature(impl: Any) -> str | None:
    """The feature of a layer's attention that the tail's softmax lacks, and what to do; None if it lacks nothing."""
    if is_quantized_kv_cache(impl.kv_cache_dtype) and impl.kv_cache_dtype not in FLOAT8:
        return f"its KV cache is {impl.kv_cache_dtype}; set kv_cache_dtype to auto or fp8"
    if impl.alibi_slopes is not None:
        return "it has ALiBi slopes; use a target without it"
    if impl.attn_type != AttentionType.DECODER:
        return "it is not a decoder's self-attention; use a decoder-only target"
    if getattr(impl, "fa4_hd256", False):
        return "heads of 256 on Blackwell return no log-sum-exp; use another target"
    return None
