"""Tree attention on a CPU: vLLM's own kernel, and other products where a row does not see all before it.

The KV cache is that of vLLM's kernel for vectors: in each block and head keys by dimension, then values by token.
Chains, prompts and rows without drafts are that kernel's; rows of trees read the same cache in place, in float32 by the
lane (``products``), else by PyTorch, which is also what reads float8. Legend as in the plugin's
``trees.attention.base``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from crossspec_cpu_lane.vllm.products import lane_ops
from vllm_crossspec import devices
from vllm_crossspec.trees.attention.base import (
    DraftTail,
    TargetTail,
    serves_target,
    soft_prompts_of,
    softmax_of,
    tail_of_step,
    unsupported_feature,
)
from vllm_crossspec.trees.attention.scratch import write_level_naive
from vllm_crossspec.trees.verify.naive import cap, in_window, unpack_bits
from vllm_crossspec.trees.verify.tail_attention import Softmax, soft_words
from vllm_crossspec.types import FLOAT8


class TreeCpuBackend(AttentionBackend):
    """Stands in for vLLM's CPU_ATTN where trees are verified."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *FLOAT8]

    @staticmethod
    def get_name() -> str:
        """The name of the member of vLLM's registry that it overrides."""
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """As vLLM's CPU backend, so that an engine's block size does not depend on the trees."""
        return [MultipleOf(32)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Those of vLLM's kernel."""
        return CPUAttentionBackend.get_supported_head_sizes()

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks with the heads outside and the tokens inside."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """DFlash drafts without a causal mask."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """As vLLM's."""
        return True

    @staticmethod
    def get_impl_cls() -> type["TreeCpuImpl"]:
        """Of the layers."""
        return TreeCpuImpl

    @staticmethod
    def get_builder_cls() -> type["TreeCpuMetadataBuilder"]:
        """Of the metadata."""
        return TreeCpuMetadataBuilder


class _Request(NamedTuple):
    """One request of a batch: its query rows, its length, its line of the block table, as numbers and as a tensor."""

    rows: slice
    length: int
    blocks: list[int]
    line: torch.Tensor


class _Part(NamedTuple):
    """Query rows of one request that see a tree, in one softmax.

    Attributes:
        rows: of the batch.
        request: whose rows they are.
        first_key: of the request's tokens whose keys are read, the first of a block.
        num_keys: of those tokens.
        hidden: float32 [rows, m], -inf where a row does not see one of the last m keys, else 0.
        sees_prompts: whether the soft prompts of the layer lie behind the keys.
    """

    rows: slice
    request: _Request
    first_key: int
    num_keys: int
    hidden: torch.Tensor
    sees_prompts: bool


class _Rows(NamedTuple):
    """How the rows of a batch are attended.

    Attributes:
        parts: those that see trees.
        others: whether there are rows that see all before them; what is written for the rest is overwritten.
    """

    parts: list[_Part]
    others: bool


@dataclass
class _Reused:
    """What does not change between the target's layers of a step.

    Attributes:
        rows: of the layers, by the number of their soft prompts and by their window.
        schedules: of vLLM's kernel, by the number of the layers' heads and by their window.
    """

    rows: dict[tuple[int, int], _Rows] = field(default_factory=dict)
    schedules: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


@dataclass
class TreeCpuMetadata(AttentionMetadata):
    """Of one batch; the tensors are the runner's own, read when a layer runs.

    Attributes:
        num_actual_tokens, num_reqs, max_query_len, max_seq_len: sizes.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R].
        block_table: int32 [R, blocks].
        slot_mapping: int64 [T].
        causal: for all requests, or int32 [R].
        target_tail: verification rows of the step; read by the target's layers.
        draft_tail: level of a drafter's trees; read by the drafter's layer.
        reused: what the target's first layer leaves to the others.
    """

    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    target_tail: TargetTail | None = None
    draft_tail: DraftTail | None = None
    reused: _Reused = field(default_factory=_Reused)


class TreeCpuMetadataBuilder(AttentionMetadataBuilder[TreeCpuMetadata]):
    """Takes vLLM's common metadata and the step's tail."""

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.serves_target = serves_target(vllm_config, layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TreeCpuMetadata:
        """See vLLM's base class."""
        common = common_attn_metadata
        return TreeCpuMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            target_tail=tail_of_step(common, False) if self.serves_target else None,
        )


class TreeCpuImpl(AttentionImpl[TreeCpuMetadata]):
    """vLLM's kernel for rows that see all before them; for rows of trees a softmax in float32, request by request."""

    reads_trees: ClassVar[bool] = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes, self.logits_soft_cap, self.sinks = alibi_slopes, logits_soft_cap or 0.0, sinks
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        problem = unsupported_feature(self)
        if kv_cache_dtype in FLOAT8 and head_size % 32:
            problem = f"its heads are no multiple of 32, as {kv_cache_dtype} needs on a CPU; set kv_cache_dtype to auto"
        elif kv_cache_dtype in FLOAT8 and not devices.has_avx512():
            problem = f"{kv_cache_dtype} needs a processor with AVX-512; set kv_cache_dtype to auto"
        if problem:
            raise ValueError(
                f'draft trees cannot run on this attention: {problem}, or leave "tree" out of the speculative_config'
            )
        # Keys lie by dimension for both; "vec" takes heads of whole 32s.
        self.isa = "vec" if head_size % 32 == 0 else "vec16"

    @staticmethod
    def kv_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [blocks, Hkv, block_size, Dh], of a cache [blocks, Hkv, block_size, 2 * Dh]."""
        num_blocks, num_heads, block_size, width = kv_cache.shape
        shape, head_size, first = (num_blocks, num_heads, block_size, width // 2), width // 2, kv_cache.storage_offset()
        strides = kv_cache.stride()[:2]
        keys = kv_cache.as_strided(shape, (*strides, 1, block_size), first)
        return keys, kv_cache.as_strided(shape, (*strides, head_size, 1), first + block_size * head_size)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write keys and values of the rows whose slot is not padding.

        Args:
            layer: has the scales of a quantised cache.
            key: [at least T, Hkv, Dh].
            value: likewise.
            kv_cache: [blocks, Hkv, block_size, 2 * Dh].
            slot_mapping: int64 [T], -1 for padding.
        """
        num_rows, (keys, values) = slot_mapping.shape[0], _as_vllm_takes_it(kv_cache)
        form = self._quantised(layer)
        if not form and key.dtype != kv_cache.dtype:
            key, value = key.to(kv_cache.dtype), value.to(kv_cache.dtype)
        ops.cpu_attn_reshape_and_cache(key[:num_rows], value[:num_rows], keys, values, slot_mapping, self.isa, **form)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TreeCpuMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; the keys and values are in the cache already, but for those of a draft tail.

        Args:
            layer: tells the target's layers from the drafters', and may have soft prompts.
            query: [at least T, Hq, Dh].
            key: [at least T, Hkv, Dh], read for a draft tail only.
            value: likewise.
            kv_cache: [blocks, Hkv, block_size, 2 * Dh].
            attn_metadata: of the batch; None while memory is profiled.
            output: as ``query``, written.
            output_scale, output_block_scale: not supported, as in vLLM's own backend.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization is not supported by the CPU tree attention")
        if attn_metadata is None:
            return output.fill_(0)
        if layer.is_draft_layer and attn_metadata.draft_tail is not None:
            self._attend_draft_level(layer, query, key, value, kv_cache, attn_metadata, output)
            return output
        tail = None if layer.is_draft_layer else attn_metadata.target_tail
        # The lengths of a drafter's batch may change between two passes with the same metadata.
        schedules = {} if layer.is_draft_layer else attn_metadata.reused.schedules
        if tail is None:
            self._attend_all(layer, query, kv_cache, attn_metadata, schedules, output)
            return output
        soft, softmax = soft_prompts_of(layer), softmax_of(self)
        kind = 0 if soft is None else soft.shape[2], softmax.window
        if kind not in attn_metadata.reused.rows:
            attn_metadata.reused.rows[kind] = _rows_of(attn_metadata, tail, kv_cache.shape[2], *kind)
        rows = attn_metadata.reused.rows[kind]
        if rows.others:
            self._attend_all(layer, query, kv_cache, attn_metadata, schedules, output)
        lane = _lane_for(query, kv_cache)
        for part in rows.parts:
            if lane is not None and not part.sees_prompts:
                mine, line = query[part.rows], part.request.line[part.first_key // kv_cache.shape[2] :]
                sizes = (self.scale, softmax.soft_cap, self._lane_sinks())
                lane.attend(mine, kv_cache, line, part.num_keys, part.hidden, *sizes, output[part.rows])
                continue
            spans = self.spans(layer, kv_cache, part.request, part.num_keys, part.first_key)
            if part.sees_prompts:
                assert soft is not None
                spans.append((soft[0].transpose(1, 2), soft[1]))
            output[part.rows] = attend(query[part.rows], spans, part.hidden, softmax)
        return output

    def _lane_sinks(self) -> torch.Tensor | None:
        """The layer's sinks as the CPU lane takes them."""
        return None if self.sinks is None else self.sinks.float().contiguous()

    def _quantised(self, layer: AttentionLayer) -> dict[str, Any]:
        """What vLLM's kernels are told of a quantised cache; nothing of another."""
        if self.kv_cache_dtype not in FLOAT8:
            return {}
        scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        return {**scales, "kv_cache_dtype": self.kv_cache_dtype}

    def spans(
        self, layer: AttentionLayer, kv_cache: torch.Tensor, request: _Request, length: int, first_key: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """:func:`_spans` of a cache, with a quantised one's numbers as they are after scaling, in float32."""
        float8 = FLOAT8.get(self.kv_cache_dtype)
        if float8 is None:
            return _spans(kv_cache, request, length, first_key)
        of_keys, of_values = layer._k_scale_float, layer._v_scale_float
        spans = _spans(kv_cache.view(float8), request, length, first_key)
        return [(keys.float() * of_keys, values.float() * of_values) for keys, values in spans]

    def _attend_all(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeCpuMetadata,
        schedules: dict[tuple[int, int], torch.Tensor],
        output: torch.Tensor,
    ) -> None:
        """vLLM's kernel, for all rows."""
        num_reqs, num_tokens, causal = metadata.num_reqs, metadata.num_actual_tokens, metadata.causal
        by_request = causal if isinstance(causal, torch.Tensor) else None
        is_causal = by_request is None and bool(causal)
        bounds, lengths = metadata.query_start_loc[: num_reqs + 1], metadata.seq_lens[:num_reqs]
        window = -1 if self.sliding_window is None else self.sliding_window
        kind, form = (self.num_heads, window), self._quantised(layer)
        if kind not in schedules:
            schedules[kind] = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=num_reqs,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_size,
                seq_lens=lengths,
                dtype=query.dtype,
                query_start_loc=bounds,
                causal=is_causal,
                sliding_window_size=window,
                isa=self.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=by_request,
                kv_cache_dtype=form.get("kv_cache_dtype", "auto"),
            )
        keys, values = _as_vllm_takes_it(kv_cache)
        ops.cpu_attention_with_kv_cache(
            query=query[:num_tokens],
            key_cache=keys,
            value_cache=values,
            output=output[:num_tokens],
            query_start_loc=bounds,
            seq_lens=lengths,
            scale=self.scale,
            causal=is_causal,
            alibi_slopes=None,
            sliding_window=window,
            block_table=metadata.block_table[:num_reqs],
            softcap=self.logits_soft_cap,
            scheduler_metadata=schedules[kind],
            s_aux=self.sinks if self.sinks is None or self.sinks.dtype == torch.bfloat16 else self.sinks.float(),
            dynamic_causal=by_request,
            **form,
        )

    def _attend_draft_level(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeCpuMetadata,
        output: torch.Tensor,
    ) -> None:
        tail, softmax = metadata.draft_tail, softmax_of(self)
        assert tail is not None
        length, num_rows = min(int(tail.length), tail.scratch.shape[1]), tail.queries_per_req
        lane = _lane_for(query, kv_cache, tail.scratch)
        if lane is not None:
            table, lengths, reqs = metadata.block_table, metadata.seq_lens, tail.num_reqs
            cached, tree = (kv_cache, table, lengths), (tail.scratch, tail.row_mask)
            sizes = (reqs, num_rows, int(tail.length), tail.has_shared)
            form = (self.scale, softmax.window, softmax.soft_cap, self._lane_sinks())
            lane.attend_level(query, key, value, *cached, *tree, *sizes, *form, output)
            return
        write_level_naive(key[: tail.num_reqs * num_rows], value[: tail.num_reqs * num_rows], tail)
        seen = unpack_bits(tail.row_mask)
        for request, scratch in zip(_requests(metadata)[: tail.num_reqs], tail.scratch, strict=False):
            mine, (keys, values) = request.rows, scratch[:length].unbind(1)
            first, visible = _windowed(seen[mine], length, request.length, kv_cache.shape[2], softmax.window)
            spans = self.spans(layer, kv_cache, request, request.length - first, first)
            spans.append((keys.permute(1, 2, 0), values.transpose(0, 1)))
            output[mine] = attend(query[mine], spans, hide(visible), softmax)


def _lane_for(*tensors: torch.Tensor) -> Any | None:
    """The CPU lane's operations, where they are for these tensors."""
    return lane_ops() if all(tensor.dtype == torch.float32 for tensor in tensors) else None


def _as_vllm_takes_it(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache [blocks, Hkv, block_size, 2 * Dh] under the shape that vLLM's kernels ask for."""
    num_blocks, num_heads, block_size, width = kv_cache.shape
    keys, values = kv_cache.view(num_blocks, num_heads, 2 * block_size, width // 2).chunk(2, dim=2)
    return keys, values


def _requests(metadata: TreeCpuMetadata) -> list[_Request]:
    """The batch's requests; those without query rows (padding) have an empty slice."""
    bounds, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    table = metadata.block_table[: metadata.num_reqs]
    blocks = table.tolist()
    return [
        _Request(slice(bounds[index], bounds[index + 1]), lengths[index], blocks[index], table[index])
        for index in range(metadata.num_reqs)
    ]


def _rows_of(metadata: TreeCpuMetadata, tail: TargetTail, block_size: int, num_soft: int, window: int) -> _Rows:
    """All rows of a batch: those of trees part by part; chains are as good as no tree."""
    requests = _requests(metadata)
    parts = []
    for request, prefix_len in zip(requests, tail.prefix_len[: tail.num_reqs].tolist(), strict=False):
        if prefix_len < request.length and request.rows.start < request.rows.stop:
            parts += _tree_parts(request, prefix_len, tail.row_mask[request.rows], block_size, num_soft, window)
    num_rows = sum(part.rows.stop - part.rows.start for part in parts)
    return _Rows(parts, others=num_rows < sum(request.rows.stop - request.rows.start for request in requests))


def _tree_parts(
    request: _Request, prefix_len: int, row_mask: torch.Tensor, block_size: int, num_soft: int, window: int
) -> list[_Part]:
    """One request with a tail: its ordinary rows, unless they are a chain, and its contemplate rows, if any.

    Each has a softmax of its own. What the ordinary rows of a tree are computed with ends with the last key that one of
    them sees. So in float32 their output is the same bits with rows behind them and without.
    """
    seen = unpack_bits(row_mask)
    seen, prompts = seen.tensor_split([32 * (row_mask.shape[1] - soft_words(num_soft))], dim=1)
    softened = prompts.any(1).nonzero().flatten().tolist()
    ordinary = softened[0] if softened else len(seen)
    is_chain = bool((seen[:ordinary] == torch.ones(ordinary, seen.shape[1], dtype=torch.bool).tril()).all())
    parts = []
    for rows, sees_prompts in ((slice(is_chain * ordinary, ordinary), False), (slice(ordinary, len(seen)), True)):
        if rows.start == rows.stop:
            continue
        last_seen = int((seen[rows] * torch.arange(1, seen.shape[1] + 1)).max())
        num_keys = min(last_seen, request.length - prefix_len)
        first_key, visible = _windowed(seen[rows], num_keys, prefix_len, block_size, window)
        if sees_prompts:
            visible = torch.cat([visible, prompts[rows, :num_soft]], dim=1)
        mine = slice(request.rows.start + rows.start, request.rows.start + rows.stop)
        total = prefix_len + num_keys - first_key
        parts.append(_Part(mine, request, first_key, total, hide(visible), sees_prompts))
    return parts


def _windowed(
    seen: torch.Tensor, num_keys: int, prefix_len: int, block_size: int, window: int
) -> tuple[int, torch.Tensor]:
    """What a layer's window leaves of what rows see.

    Args:
        seen: bools [rows, at least num_keys] of the tail: each row's line.
        num_keys: rows of the tail that are looked at.
        prefix_len: tokens before the tail.
        block_size: of the cache.
        window: 0 for a layer without.

    Returns:
        The first token whose key has to be read, the first of a block, and bools [rows, m] for the last m keys: all
        from there on, or, without a window, the tail's.
    """
    if not window:
        return 0, seen[:, :num_keys]
    begin = prefix_len + seen.sum(1) - window  # of a row's window
    first = max(int(begin.min()), 0) // block_size * block_size
    # With a tail in a scratch all of the prefix may lie behind the windows; the prefix then ends with a whole block.
    first = min(first, prefix_len)
    prefix = torch.arange(first, prefix_len) >= begin[:, None]
    return first, torch.cat([prefix, in_window(seen, window)[:, :num_keys]], dim=1)


def _spans(
    kv_cache: torch.Tensor, request: _Request, length: int, first_key: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys [Hkv, Dh, n] and values [Hkv, n, Dh] of ``length`` tokens from a block's first one on, block by block."""
    _, num_heads, block_size, width = kv_cache.shape
    block_stride, head_stride = kv_cache.stride()[:2]
    head_size, first, spans = width // 2, kv_cache.storage_offset(), []
    blocks = request.blocks[first_key // block_size :]
    for start, block in zip(range(0, length, block_size), blocks, strict=False):
        place, num_keys = first + block * block_stride, min(block_size, length - start)
        keys = kv_cache.as_strided((num_heads, head_size, num_keys), (head_stride, block_size, 1), place)
        place += block_size * head_size
        values = kv_cache.as_strided((num_heads, num_keys, head_size), (head_stride, head_size, 1), place)
        spans.append((keys, values))
    return spans


def attend(
    query: torch.Tensor,
    spans: list[tuple[torch.Tensor, torch.Tensor]],
    hidden: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """Grouped-query attention of one request in float32; the query heads of a KV head are rows of one product.

    Args:
        query: [rows, Hq, Dh].
        spans: the keys [Hkv, Dh, n] and values [Hkv, n, Dh] that are read, one behind the other; maybe none.
        hidden: float32 [rows, m], -inf where a row does not see one of the last m keys, else 0.
        softmax: of the layer; ``hidden`` knows its window.

    Returns:
        The output [rows, Hq, Dh] in float32, zeros where there is no key.
    """
    if not spans:
        return torch.zeros_like(query, dtype=torch.float32)
    (num_rows, num_heads, head_size), num_kv_heads = query.shape, spans[0][0].shape[0]
    # One pass over the query, into the order that the products want.
    grouped = torch.mul(query.float().transpose(0, 1), softmax.scale, out=torch.empty(num_heads, num_rows, head_size))
    grouped = grouped.view(num_kv_heads, -1, head_size)
    each = [torch.bmm(grouped, keys.float()) for keys, _ in spans]
    logits = each[0] if len(each) == 1 else torch.cat(each, dim=-1)
    num_keys, num_hidden = logits.shape[-1], hidden.shape[1]
    logits = cap(logits, softmax.soft_cap)
    # Not added: a key's NaN would stay one.
    last = logits.view(num_heads, num_rows, num_keys)[..., num_keys - num_hidden :]
    last.masked_fill_(hidden.isneginf(), float("-inf"))
    if softmax.sinks is not None:
        sinks = softmax.sinks.float()[:, None].expand(-1, num_rows).reshape(*logits.shape[:2], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    shares = torch.softmax(logits, dim=-1)[..., :num_keys].split([values.shape[1] for _, values in spans], dim=-1)
    out = _weigh(shares, [values.float() for _, values in spans])
    out = out.view(num_heads, num_rows, head_size).transpose(0, 1)
    if num_hidden == num_keys:
        # A row that sees nothing (in vLLM's dummy runs) was divided by nothing.
        out.masked_fill_(hidden.isneginf().all(1)[:, None, None], 0.0)
    return out


def _weigh(shares: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """:func:`_sums`, to which a share of 0 adds nothing, even of a value that is no finite number."""
    out = _sums(shares, values)
    if out.isfinite().all():
        return out
    flaws = [~some.isfinite() for some in values]
    out = _sums(shares, [some.masked_fill(flaw, 0.0) for some, flaw in zip(values, flaws, strict=True)])
    takes_flaws = _sums([(share != 0).float() for share in shares], [flaw.float() for flaw in flaws]) > 0
    return out.masked_fill_(takes_flaws, float("nan"))


def _sums(shares: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Shares [heads, rows, n] times values [heads, n, Dh], added up over all spans."""
    out = torch.bmm(shares[0], values[0])
    for share, some in zip(shares[1:], values[1:], strict=True):
        out.baddbmm_(share, some)
    return out


def hide(visible: torch.Tensor) -> torch.Tensor:
    """float32 of bools: 0 where a key is seen and -inf where it is not."""
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
