"""What the backends share: tails, the hook that asks for them, registration with vLLM, and what is refused.

Shape legend: R requests of the batch, T tokens of the step, W int32 mask words of a row, Hq and Hkv query and KV heads,
Dh head size, s soft prompts.

A *tail* is the last rows of a request, of which each sees the dense part before the tail and, among the tail's rows,
those whose bits its mask holds (itself and its ancestors). Every layer's attention is then the softmax over the dense
part, continued over the tail.

With a sliding window a row sees the last tokens of its own line: a row at depth d of the tail stands d tokens behind
its root, wherever its slot is, so that rows of different depth see different beginnings of the dense part.

What such a tail sees is there. vLLM frees the blocks behind a group's window, of a request with P tokens those of
tokens before P - window + 1, and counts in P what is verified alone: neither drafts nor steps under way. The root
stands at P or, in a step that was planned behind others, later, so that nothing which one of its rows sees was freed.
Drafts have slots from P on, and are moved down within them. A level of a drafter's tree stands behind all that is
cached.

The KV cache may be quantised, in float8: what rows of a tree see of it are its own numbers times the layer's scales, as
in plain decoding, and the accepted path is moved as bytes. Soft prompts and scratches are not quantised.

A layer of the target may have ``soft_prompts``, a tensor [2, Hkv, s, Dh] of its own: keys (0, as after rotation) and
values (1) that some rows of the tail (ConFu's contemplate rows) see in front of everything else. Which ones, the last
ceil(s / 32) words of their masks say.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_crossspec.types import FLOAT8
from vllm_crossspec.verify.tail_attention import UNSCALED, DenseTail, PagedTail, Scales, Softmax, tail_attention
from vllm_crossspec.verify.window_attention import window_attention

_CPU_BACKEND = "vllm_crossspec.engine.attention.cpu.TreeCpuBackend"
_CUDA_BACKEND = "vllm_crossspec.engine.attention.flash.TreeFlashBackend"


class TargetTail(NamedTuple):
    """The verification rows of a step; they lead the batch. Layers of a drafter ignore it.

    A request's tail is its rows from ``prefix_len`` on: the root, the draft nodes and, behind them, contemplate rows if
    there are any; all of its query rows. A request
    of one query row and no drafts may stand among them (its ``prefix_len`` is its whole length), a longer chunk of a
    prompt may not.

    Attributes:
        prefix_len: int32 [at least R] tokens before each request's tail; 0 for the padding of a CUDA graph.
        row_mask: int32 [at least T, W] mask of each token row; [at least T, W + ceil(s / 32)] for soft prompts.
        num_reqs: leading requests that are verification-shaped.
        num_tokens: their query rows.
        max_query_len: the most query rows that one of them has.
        is_whole_batch: there are no other requests in the step; padded ones count as verification-shaped. The only form
            that is captured in CUDA graphs, so a batch that replays one must be of it, too.
    """

    prefix_len: torch.Tensor
    row_mask: torch.Tensor
    num_reqs: int
    num_tokens: int
    max_query_len: int
    is_whole_batch: bool


class DraftTail(NamedTuple):
    """One level of an autoregressive drafter's trees; put on the metadata of one layer by its proposer.

    Every request has ``queries_per_req`` query rows and its whole paged cache (the metadata's ``seq_lens``) as dense
    part of all of them. The layer writes the level's keys and values into ``scratch``, as the last rows of the tail,
    and nothing into the paged cache: its rows have no slots there.

    Attributes:
        scratch: [at least R, rows, 2, Hkv, Dh] keys (0) and values (1) of the tree's rows so far; one layer's own.
        row_mask: int32 [at least R * queries_per_req, W] mask of each query row over the scratch's rows.
        length: int32 [1] on the device, rows of the tail, this level included; the level begins at
            ``length - queries_per_req``.
        num_reqs: requests, the padding of a CUDA graph included.
        queries_per_req: query rows of every request.
        has_shared: the last query row of each request is no node of its level but an entry that all levels share
            (ConFu's future): it is written to row 0 of the scratch anew in every level, and the level itself begins at
            ``length - queries_per_req + 1``. Masks say which rows see it, as with any other.
    """

    scratch: torch.Tensor
    row_mask: torch.Tensor
    length: torch.Tensor
    num_reqs: int
    queries_per_req: int
    has_shared: bool = False


TreeSource = Callable[[Any, bool], TargetTail | None]
_tree_source: TreeSource | None = None


def set_tree_source(source: TreeSource | None) -> None:
    """Name the function that knows the step's tail; the metadata builders of the target's layers call it.

    Args:
        source: takes vLLM's ``CommonAttentionMetadata`` and whether a CUDA graph is being captured; returns the step's
            tail, or None for a step without drafts. Where a graph was captured with a tail, every batch that replays
            it needs one, vLLM's dummy batches included. None removes the source.
    """
    global _tree_source
    _tree_source = source


def tail_of_step(common_metadata: Any, capturing: bool) -> TargetTail | None:
    """The step's tail as the source tells it; None without a source."""
    return None if _tree_source is None else _tree_source(common_metadata, capturing)


def serves_target(vllm_config: VllmConfig, layer_names: Iterable[str]) -> bool:
    """Whether any of these layers is the target's; a builder of drafters' layers alone never asks for the tail."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layer_names))
    return any(not layer.is_draft_layer for layer in layers.values())


def soft_prompts_of(layer: Any) -> torch.Tensor | None:
    """The layer's soft prompts [2, Hkv, s, Dh]; None for layers without, vLLM's own among them."""
    return getattr(layer, "soft_prompts", None)


def softmax_of(impl: Any) -> Softmax:
    """What a layer's attention is made of; backends write a window as its size or as what lies on either side."""
    window = impl.sliding_window
    if isinstance(window, tuple):
        window = window[0] + 1
    return Softmax(impl.scale, max(window or 0, 0), float(impl.logits_soft_cap or 0.0), getattr(impl, "sinks", None))


def scales_of(layer: Any, impl: Any) -> Scales:
    """What a layer's quantised numbers are multiplied with; nothing where its cache is not quantised."""
    if impl.kv_cache_dtype not in FLOAT8:
        return UNSCALED
    query = layer._q_scale if impl.supports_quant_query_input else None
    return Scales(query, layer._k_scale, layer._v_scale)


def dtype_beside_cache(layer: Any) -> torch.dtype:
    """Of keys and values that lie beside a layer's cache: the cache's, or the model's where that one is quantised."""
    dtype: torch.dtype = layer.dtype if layer.kv_cache_dtype in FLOAT8 else layer.kv_cache_torch_dtype
    return dtype


def attend_window(
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    tail: TargetTail | DraftTail,
    num_reqs: int,
    softmax: Softmax,
    scales: Scales = UNSCALED,
) -> None:
    """The prefix pass of a layer with a sliding window; arguments as of :func:`merge_target_tail`.

    Args:
        out: written.
        lse: written.
        tail: of the step, or of a drafter's level, whose prefix is all of the cache.
    """
    is_level = isinstance(tail, DraftTail)
    dense = metadata.seq_lens if isinstance(tail, DraftTail) else tail.prefix_len
    window_attention(
        query=query,
        out=out,
        lse=lse,
        prefix=PagedTail(kv_cache, metadata.block_table, dense, metadata.seq_lens),
        query_start_loc=metadata.query_start_loc,
        row_mask=tail.row_mask,
        softmax=softmax,
        num_reqs=num_reqs,
        max_query_len=tail.queries_per_req if isinstance(tail, DraftTail) else tail.max_query_len,
        tails_in_cache=not is_level,
        scales=scales,
    )


def merge_target_tail(
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    tail: TargetTail,
    num_reqs: int,
    softmax: Softmax,
    soft: torch.Tensor | None = None,
    scales: Scales = UNSCALED,
) -> None:
    """Continue the softmax of the prefix pass over the target's tail, in place.

    Args:
        query: [rows, Hq, Dh].
        out: [rows, Hq, Dh] output of the prefix pass, rewritten.
        lse: float32 [Hq, rows] its log-sum-exp.
        kv_cache: [blocks, Hkv, block_size, 2 * Dh], the tail's keys and values written already; float8 if quantised.
        metadata: of the step: block table, lengths, query boundaries.
        tail: of the step.
        num_reqs: leading requests to work on.
        softmax: of the layer.
        soft: [2, Hkv, s, Dh] the layer's soft prompts; None where it has none.
        scales: of the layer.
    """
    tail_attention(
        query=query,
        out=out,
        lse=lse,
        tail=PagedTail(kv_cache, metadata.block_table, tail.prefix_len, metadata.seq_lens),
        query_start_loc=metadata.query_start_loc,
        row_mask=tail.row_mask,
        softmax=softmax,
        num_reqs=num_reqs,
        max_query_len=tail.max_query_len,
        soft=soft,
        scales=scales,
    )


def merge_draft_tail(
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    metadata: Any,
    tail: DraftTail,
    softmax: Softmax,
    scales: Scales = UNSCALED,
) -> None:
    """Continue the softmax over the paged cache over one level's tree, in place; arguments as above."""
    tail_attention(
        query=query,
        out=out,
        lse=lse,
        tail=DenseTail(tail.scratch, tail.length),
        query_start_loc=metadata.query_start_loc,
        row_mask=tail.row_mask,
        softmax=softmax,
        num_reqs=tail.num_reqs,
        max_query_len=tail.queries_per_req,
        scales=scales,
    )


# -- registration -----------------------------------------------------------------------------------------------------


def register() -> None:
    """Put our backend in the place of vLLM's for this platform; idempotent, and to be called in every process.

    The name stays vLLM's, so that everything that asks for it by name finds it.

    Raises:
        ValueError: on a platform that has neither FlashAttention nor vLLM's CPU lane.
    """
    member, path = _override()
    if member.get_path() == path:
        return
    register_backend(member, path)
    # vLLM remembers what it chose, which matters where one process starts several engines.
    selector._cached_get_attn_backend.cache_clear()


def unregister() -> None:
    """Give vLLM its own backend back, for an engine without trees that starts in the same process."""
    set_tree_source(None)
    overrides = {AttentionBackendEnum.CPU_ATTN: _CPU_BACKEND, AttentionBackendEnum.FLASH_ATTN: _CUDA_BACKEND}
    for member, path in overrides.items():
        if member.get_path() == path:
            member.clear_override()
            selector._cached_get_attn_backend.cache_clear()


def _override() -> tuple[AttentionBackendEnum, str]:
    if current_platform.is_cpu():
        return AttentionBackendEnum.CPU_ATTN, _CPU_BACKEND
    if current_platform.is_cuda():
        return AttentionBackendEnum.FLASH_ATTN, _CUDA_BACKEND
    raise ValueError(
        f"draft trees need an NVIDIA GPU (or a CPU, for development), not {current_platform.device_name}; "
        'leave "tree" out of the speculative_config, or set it to {"type": "chain"}'
    )


# -- refusals ---------------------------------------------------------------------------------------------------------


def check_backends(vllm_config: VllmConfig, draft_layers: Iterable[str] = ()) -> None:
    """Refuse a model whose attention cannot take trees; to be called once its layers and the drafters' are built.

    Args:
        vllm_config: of the engine.
        draft_layers: names of the drafters' layers that will be given a :class:`DraftTail`; other drafters' layers are
            not looked at, for they attend as vLLM's do.

    Raises:
        ValueError: one sentence that names the layer and what to change.
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
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    for name, layer in layers.items():
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
    found, wanted = layer.get_attn_backend().get_name(), _override()[0].name
    return f"its attention is {found}; start vLLM with --attention-backend {wanted}, where the target can use that"


def unsupported_feature(impl: Any) -> str | None:
    """What of a layer's attention the tail's softmax does not know, with the way out; None if there is nothing.

    Args:
        impl: the attention implementation of a layer.
    """
    if is_quantized_kv_cache(impl.kv_cache_dtype) and impl.kv_cache_dtype not in FLOAT8:
        return f"its KV cache is {impl.kv_cache_dtype}; set kv_cache_dtype to auto or fp8"
    if impl.alibi_slopes is not None:
        return "it has ALiBi slopes; use a target without it"
    if impl.attn_type != AttentionType.DECODER:
        return "it is not a decoder's self-attention; use a decoder-only target"
    if getattr(impl, "fa4_hd256", False):
        return "heads of 256 on Blackwell return no log-sum-exp; use another target"
    return None
