"""Tree attention on a CPU, in plain PyTorch: the development lane's backend for the target and the drafters.

The KV cache has FlashAttention's logical layout [blocks, Hkv, block_size, K|V], not that of vLLM's CPU kernel, whose
keys are ordered for the instruction set; so the compaction of the accepted path is the GPU's. Legend as in ``base``.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from vllm_crossspec.engine.attention.base import (
    DraftTail,
    TargetTail,
    merge_draft_tail,
    merge_target_tail,
    serves_target,
    soft_prompts_of,
    tail_of_step,
    unsupported_feature,
)
from vllm_crossspec.engine.attention.scratch import write_level_naive
from vllm_crossspec.verify.naive import unpack_bits
from vllm_crossspec.verify.tail_attention import soft_words


class TreeCpuBackend(AttentionBackend):
    """Stands in for vLLM's CPU_ATTN where trees are verified."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """The name of the member of vLLM's registry that it overrides."""
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """As vLLM's CPU backend, so that an engine's block size does not depend on the trees."""
        return [MultipleOf(32)]

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
        """For drafters; a target with a window is refused by ``base.check_backends``."""
        return True

    @staticmethod
    def get_impl_cls() -> type["TreeCpuImpl"]:
        """Of the layers."""
        return TreeCpuImpl

    @staticmethod
    def get_builder_cls() -> type["TreeCpuMetadataBuilder"]:
        """Of the metadata."""
        return TreeCpuMetadataBuilder


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


class _Request(NamedTuple):
    """One request of a batch: its query rows, its length, its line of the block table, whether it is causal."""

    rows: slice
    length: int
    blocks: torch.Tensor
    causal: bool


class TreeCpuImpl(AttentionImpl[TreeCpuMetadata]):
    """Softmax over the keys that a row may see, one request at a time, in float32.

    Attributes:
        two_passes: run the GPU's algorithm (dense part with its log-sum-exp, then our tail kernel merged in place)
            instead of one masked softmax. Set on the class, for tests.
    """

    two_passes: ClassVar[bool] = False
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
        self.alibi_slopes, self.logits_soft_cap, self.sinks = alibi_slopes, logits_soft_cap, sinks
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # A window is known here, but not in a tail; the others are not known at all.
        self.sliding_window: int | None = None
        problem = unsupported_feature(self)
        if problem:
            raise ValueError(
                f'draft trees cannot run on this attention: {problem}, or leave "tree" out of the speculative_config'
            )
        self.sliding_window = sliding_window

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write keys and values of the rows whose slot is not padding.

        Args:
            layer: not used.
            key: [at least T, Hkv, Dh].
            value: likewise.
            kv_cache: [blocks, Hkv, block_size, 2 * Dh].
            slot_mapping: int64 [T], -1 for padding.
        """
        real = slot_mapping >= 0
        slots, block_size = slot_mapping[real], kv_cache.shape[2]
        num_rows = slot_mapping.shape[0]
        content = torch.cat([key[:num_rows][real], value[:num_rows][real]], dim=-1)
        kv_cache[slots // block_size, :, slots % block_size] = content.to(kv_cache.dtype)

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
            self._attend_draft_level(query, key, value, kv_cache, attn_metadata, output)
            return output
        tail = None if layer.is_draft_layer else attn_metadata.target_tail
        if tail is not None and self.two_passes:
            self._attend_in_two_passes(query, kv_cache, attn_metadata, tail, output, soft_prompts_of(layer))
            return output
        for index, request in enumerate(_requests(attn_metadata)):
            if tail is not None and index < tail.num_reqs and int(tail.prefix_len[index]) < request.length:
                self._attend_target_rows(query, kv_cache, request, index, tail, output, soft_prompts_of(layer))
                continue
            keys, values = self._gather(kv_cache, request.blocks, request.length)
            visible = self._visible(request)
            output[request.rows] = attend(query[request.rows], keys, values, visible, self.scale)[0].to(output.dtype)
        return output

    def _attend_target_rows(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        request: _Request,
        index: int,
        tail: TargetTail,
        output: torch.Tensor,
        soft: torch.Tensor | None,
    ) -> None:
        """One request with a tail, in one softmax; its contemplate rows, if any, in one of their own.

        What the ordinary rows are computed with ends with the last key that one of them sees. So in float32 their
        output is the same bits with rows behind them and without.
        """
        rows, prefix_len = request.rows, int(tail.prefix_len[index])
        num_soft = 0 if soft is None else soft.shape[2]
        seen = unpack_bits(tail.row_mask[rows])
        seen, prompts = seen.tensor_split([32 * (tail.row_mask.shape[1] - soft_words(num_soft))], dim=1)
        softened = prompts.any(1).nonzero().flatten().tolist()
        ordinary = softened[0] if softened else len(seen)
        for part in (slice(0, ordinary), slice(ordinary, len(seen))):
            if part.start == part.stop:
                continue
            last_seen = int((seen[part] * torch.arange(1, seen.shape[1] + 1)).max())
            num_keys = min(last_seen, request.length - prefix_len)
            keys, values = self._gather(kv_cache, request.blocks, prefix_len + num_keys)
            visible = torch.ones(part.stop - part.start, prefix_len + num_keys, dtype=torch.bool)
            visible[:, prefix_len:] = seen[part, :num_keys]
            if part.start == ordinary and soft is not None:
                keys, values = (torch.cat([x, p.float()], dim=1) for x, p in zip((keys, values), soft, strict=True))
                visible = torch.cat([visible, prompts[part, :num_soft]], dim=1)
            mine = slice(rows.start + part.start, rows.start + part.stop)
            output[mine] = attend(query[mine], keys, values, visible, self.scale)[0].to(output.dtype)

    def _attend_draft_level(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeCpuMetadata,
        output: torch.Tensor,
    ) -> None:
        tail = metadata.draft_tail
        assert tail is not None
        num_rows = tail.num_reqs * tail.queries_per_req
        write_level_naive(
            key=key[:num_rows],
            value=value[:num_rows],
            scratch=tail.scratch,
            length=tail.length,
            queries_per_req=tail.queries_per_req,
            has_shared=tail.has_shared,
        )
        length = int(tail.length)
        lse = torch.empty(self.num_heads, num_rows) if self.two_passes else None
        for index, request in enumerate(_requests(metadata)[: tail.num_reqs]):
            keys, values = self._gather(kv_cache, request.blocks, request.length)
            visible = None
            if lse is None:
                tail_keys, tail_values = tail.scratch[index, :length].float().permute(1, 2, 0, 3)
                keys, values = torch.cat([keys, tail_keys], 1), torch.cat([values, tail_values], 1)
                visible = torch.ones(query[request.rows].shape[0], keys.shape[1], dtype=torch.bool)
                visible[:, request.length :] = unpack_bits(tail.row_mask[request.rows])[:, :length]
            rows, row_lse = attend(query[request.rows], keys, values, visible, self.scale)
            output[request.rows] = rows.to(output.dtype)
            if lse is not None:
                lse[:, request.rows] = row_lse
        if lse is not None:
            merge_draft_tail(query, output, lse, metadata, tail, self.scale)

    def _attend_in_two_passes(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeCpuMetadata,
        tail: TargetTail,
        output: torch.Tensor,
        soft: torch.Tensor | None,
    ) -> None:
        """The verification-shaped requests' rows see all of their prefix, then the kernel adds the tail."""
        lse = torch.empty(self.num_heads, query.shape[0])
        for index, request in enumerate(_requests(metadata)):
            split = index < tail.num_reqs
            length = int(tail.prefix_len[index]) if split else request.length
            keys, values = self._gather(kv_cache, request.blocks, length)
            visible = None if split else self._visible(request)
            rows, lse[:, request.rows] = attend(query[request.rows], keys, values, visible, self.scale)
            output[request.rows] = rows.to(output.dtype)
        merge_target_tail(query, output, lse, kv_cache, metadata, tail, tail.num_reqs, self.scale, soft)

    def _gather(self, kv_cache: torch.Tensor, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hkv, length, Dh] of one request's first tokens, in float32."""
        block_size = kv_cache.shape[2]
        paged = kv_cache[blocks[: -(-length // block_size)].long()]
        dense = paged.transpose(0, 1).flatten(1, 2)[:, :length].float()
        keys, values = dense.split(self.head_size, dim=-1)
        return keys, values

    def _visible(self, request: _Request) -> torch.Tensor:
        """Bools [rows, length] without any tree; a window is symmetric where there is no causal mask, as in vLLM."""
        num_rows = request.rows.stop - request.rows.start
        distance = torch.arange(request.length - num_rows, request.length)[:, None] - torch.arange(request.length)
        visible = distance >= 0 if request.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.sliding_window is not None:
            visible &= distance.abs() < self.sliding_window
        return visible


def _requests(metadata: TreeCpuMetadata) -> list[_Request]:
    """The batch's requests; those without query rows (padding) have an empty slice."""
    bounds, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    causal = metadata.causal
    flags = causal.bool().tolist() if isinstance(causal, torch.Tensor) else [causal] * metadata.num_reqs
    return [
        _Request(slice(bounds[index], bounds[index + 1]), lengths[index], metadata.block_table[index], flags[index])
        for index in range(metadata.num_reqs)
    ]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped-query attention of one request in float32.

    Args:
        query: [rows, Hq, Dh].
        keys: float32 [Hkv, n, Dh]; n may be 0.
        values: likewise.
        visible: bools [rows, n]; None if every row sees every key.
        scale: of the logits.

    Returns:
        The output [rows, Hq, Dh], zeros where there is no key, and the log-sum-exp [Hq, rows], there -inf.
    """
    num_kv_heads = keys.shape[0]
    grouped = query.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    logits = grouped @ keys[:, None].transpose(-1, -2) * scale
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    # A row that sees nothing (in vLLM's dummy runs) must not divide by nothing.
    weights = torch.exp(logits - lse.nan_to_num(neginf=0.0)[..., None])
    out = weights @ values[:, None]
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.flatten(0, 1)
