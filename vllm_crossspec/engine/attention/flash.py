"""Tree attention on CUDA: FlashAttention over the dense part, then one Triton launch over the tail, merged in place.

FlashAttention (3 on Hopper) has no mask of its own for paged caches, but it gives the log-sum-exp of what it did. So
the rows of a tail first attend to everything before it without a causal mask, and the softmax goes on over the tail.
Layers of drafters, and steps without drafts, run vLLM's own code. Legend as in ``base``.

Layers with a sliding window have a prefix pass of our own (``verify.window_attention`` says why), which takes the place
of FlashAttention's. Sinks are left out of either and join with the tail.

FlashAttention knows 16-bit types alone; ``exact`` takes its place in float32.

Over a cache in float8, whose queries vLLM quantises, too, FlashAttention 3 rounds the weights of its softmax to float8.
The tail's kernel multiplies the same numbers and keeps its weights in the model's type.

This module is imported by its name in vLLM's registry; it can be imported without a GPU.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata, max_decode_query_len
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_crossspec.engine.attention.base import (
    DraftTail,
    TargetTail,
    attend_window,
    merge_draft_tail,
    merge_target_tail,
    scales_of,
    serves_target,
    soft_prompts_of,
    softmax_of,
    tail_of_step,
    unsupported_feature,
)
from vllm_crossspec.engine.attention.exact import exact_attention
from vllm_crossspec.engine.attention.scratch import write_level
from vllm_crossspec.types import FLOAT8
from vllm_crossspec.verify.tail_attention import Scales, Softmax


def is_exact(dtype: torch.dtype) -> bool:
    """Whether FlashAttention does not take the type, and ``exact`` does."""
    return dtype == torch.float32


class TreeFlashBackend(FlashAttentionBackend):
    """Stands in for vLLM's FLASH_ATTN where trees are verified; its name stays that."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [*FlashAttentionBackend.supported_dtypes, torch.float32]

    @staticmethod
    def get_impl_cls() -> type["TreeFlashImpl"]:
        """Of the layers."""
        return TreeFlashImpl

    @staticmethod
    def get_builder_cls() -> type["TreeFlashMetadataBuilder"]:
        """Of the metadata."""
        return TreeFlashMetadataBuilder


@dataclass
class TreeFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata of the whole batch, causal, and how the target's layers split it.

    Attributes:
        target_tail: verification rows of the step.
        draft_tail: level of a drafter's trees; set by its proposer.
        split_reqs: leading requests of the prefix pass.
        split_tokens: their query rows.
        prefix_schedule: FlashAttention 3's work plan of the prefix pass; None lets every layer plan for itself.
        rest: the requests after them, as a batch of vLLM's own; None if there are none.
    """

    target_tail: TargetTail | None = None
    draft_tail: DraftTail | None = None
    split_reqs: int = 0
    split_tokens: int = 0
    prefix_schedule: torch.Tensor | None = None
    rest: FlashAttentionMetadata | None = None


class TreeFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Splits a step's batch into verification rows and the rest, and plans the prefix pass."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if is_exact(kv_cache_spec.dtype):
            self.aot_schedule = False  # there is nothing to plan for
        self.serves_target = serves_target(vllm_config, layer_names)
        keeps_schedules = self.use_full_cuda_graph and self.aot_schedule and self.serves_target
        # Graphs read the plan of the prefix pass from here. Not vLLM's own buffer: the graph of a drafter's first
        # pass, which is captured and replayed with this builder's metadata, too, may hold a plan that lies there.
        self.prefix_schedule = torch.zeros_like(self.scheduler_metadata) if keeps_schedules else None
        self.num_kept = 0

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """One code path in a graph: batches of verification rows only, not those mixed with prompts."""
        return AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> int | None:
        """Verification rows may differ in number: their boundaries are read on the device."""
        return max_decode_query_len(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TreeFlashMetadata:
        """See vLLM's base class."""
        return self._build(common_attn_metadata, fast_build, capturing=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> TreeFlashMetadata:
        """See vLLM's base class."""
        return self._build(common_attn_metadata, False, capturing=True)

    def _build(self, common: CommonAttentionMetadata, fast_build: bool, capturing: bool) -> TreeFlashMetadata:
        tail = tail_of_step(common, capturing) if self.serves_target else None
        if tail is None:
            self._forget_schedule()
            return TreeFlashMetadata(**vars(super().build(0, common, fast_build)))
        if self.aot_sliding_window is None:
            # The first build with a plan looks up the layers' windows; without one it would never be done.
            super().build(0, common)
        # What is left of vLLM's own metadata serves a drafter's first pass, whose few layers plan for themselves.
        metadata = TreeFlashMetadata(**vars(super().build(0, common, fast_build=True)), target_tail=tail)
        metadata.split_reqs = common.num_reqs if tail.is_whole_batch else tail.num_reqs
        metadata.split_tokens = common.num_actual_tokens if tail.is_whole_batch else tail.num_tokens
        plans = self.aot_schedule and not fast_build and not envs.VLLM_BATCH_INVARIANT
        schedule = self._get_scheduler_metadata(
            # Where layers differ in their windows vLLM plans nothing; where all have one the prefix pass is our own.
            aot_schedule=plans and self.aot_sliding_window == (-1, -1),
            batch_size=metadata.split_reqs,
            cu_query_lens=metadata.query_start_loc[: metadata.split_reqs + 1],
            max_query_len=tail.max_query_len,
            seqlens=tail.prefix_len[: metadata.split_reqs],
            max_seq_len=metadata.max_seq_len,
            causal=False,
            max_num_splits=metadata.max_num_splits,
        )
        metadata.prefix_schedule = self._keep(schedule)
        if metadata.split_reqs < common.num_reqs:
            metadata.rest = self._rest(metadata, plans)
        return metadata

    def _forget_schedule(self) -> None:
        """Leave no plan of another batch to a graph that is replayed for no one (a dummy batch has no tail).

        Such a plan would send FlashAttention to rows that this batch does not have; zeros are no work at all.
        """
        if self.prefix_schedule is not None and self.num_kept:
            self.prefix_schedule.zero_()
            self.num_kept = 0

    def _keep(self, schedule: torch.Tensor | None) -> torch.Tensor | None:
        """The plan in the buffer that graphs read; what lies behind it must be zero, or it would be run, too."""
        if schedule is None or self.prefix_schedule is None:
            return schedule
        num_entries = schedule.shape[0]
        self.prefix_schedule[:num_entries] = schedule
        if self.num_kept > num_entries:
            self.prefix_schedule[num_entries : self.num_kept] = 0
        self.num_kept = num_entries
        return self.prefix_schedule[:num_entries]

    def _rest(self, metadata: TreeFlashMetadata, plans: bool) -> FlashAttentionMetadata:
        """The requests behind the verification rows; such a batch is never captured, so that it may allocate."""
        first, token = metadata.split_reqs, metadata.split_tokens
        query_start_loc = metadata.query_start_loc[first:] - token
        schedule = self._get_scheduler_metadata(
            aot_schedule=plans,
            batch_size=metadata.seq_lens.shape[0] - first,
            cu_query_lens=query_start_loc,
            max_query_len=metadata.max_query_len,
            seqlens=metadata.seq_lens[first:],
            max_seq_len=metadata.max_seq_len,
            causal=metadata.causal,
            max_num_splits=metadata.max_num_splits,
        )
        return FlashAttentionMetadata(
            num_actual_tokens=metadata.num_actual_tokens - token,
            max_query_len=metadata.max_query_len,
            query_start_loc=query_start_loc,
            max_seq_len=metadata.max_seq_len,
            seq_lens=metadata.seq_lens[first:],
            block_table=metadata.block_table[first:],
            slot_mapping=metadata.slot_mapping[token:],
            scheduler_metadata=schedule,
            max_num_splits=metadata.max_num_splits,
            causal=metadata.causal,
        )


class TreeFlashImpl(FlashAttentionImpl):
    """vLLM's FlashAttention, which also takes tails."""

    reads_trees: ClassVar[bool] = True

    @staticmethod
    def kv_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor]:
        """Of a cache [blocks, Hkv, block_size, 2 * Dh] what a token's keys and values lie in: all of it, K beside V."""
        return (kv_cache,)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TreeFlashMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; arguments as of ``cpu.TreeCpuImpl.forward``, the cache of any strides.

        ``output_scale`` and ``output_block_scale`` are refused by vLLM's own code.
        """
        metadata, fused = attn_metadata, (output_scale, output_block_scale)
        tail = None
        if metadata is not None:
            tail = metadata.draft_tail if layer.is_draft_layer else metadata.target_tail
        if metadata is None or tail is None or fused != (None, None):
            return self._forward_plain(layer, query, key, value, kv_cache, metadata, output, *fused)
        if isinstance(tail, DraftTail):
            self._attend_draft_level(layer, query, key, value, kv_cache, metadata, tail, output)
            return output
        split, num_reqs = metadata.split_tokens, metadata.split_reqs
        softmax, soft, scales = softmax_of(self), soft_prompts_of(layer), scales_of(layer, self)
        cache = self._typed(kv_cache)
        if softmax.window:
            lse = self._new_lse(query[:split])
            attend_window(query, output, lse, cache, metadata, tail, num_reqs, softmax, scales)
        else:
            lse = self._attend_dense(
                query[:split],
                cache,
                metadata,
                output[:split],
                num_reqs=num_reqs,
                lengths=tail.prefix_len,
                max_query_len=tail.max_query_len,
                schedule=metadata.prefix_schedule,
                scales=scales,
            )
        merge_target_tail(query, output, lse, cache, metadata, tail, num_reqs, softmax, soft, scales)
        if metadata.rest is not None:
            rest = (query[split:], key[split:], value[split:], kv_cache, metadata.rest, output[split:])
            self._forward_plain(layer, *rest)
        return output

    def _typed(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The cache with the type of its numbers: vLLM's own of a quantised one are bytes."""
        float8 = FLOAT8.get(self.kv_cache_dtype)
        return kv_cache if float8 is None else kv_cache.view(float8)

    def _forward_plain(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows without a tail, by vLLM's own code where there is any for their type."""
        fused = (output_scale, output_block_scale)
        if not is_exact(query.dtype) or metadata is None or fused != (None, None):
            return super().forward(layer, query, key, value, kv_cache, metadata, output, *fused)
        rows = metadata.num_actual_tokens
        self._attend_exactly(
            query[:rows],
            kv_cache,
            metadata,
            output[:rows],
            num_reqs=metadata.seq_lens.shape[0],
            lengths=metadata.seq_lens,
            max_query_len=metadata.max_query_len,
            softmax=softmax_of(self),
            causal=bool(metadata.causal),
        )
        return output

    def _attend_draft_level(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeFlashMetadata,
        tail: DraftTail,
        output: torch.Tensor,
    ) -> None:
        """The level's rows see the whole paged cache and, in the scratch, their ancestors."""
        num_rows = tail.num_reqs * tail.queries_per_req
        write_level(key[:num_rows], value[:num_rows], tail)
        softmax, scales, cache = softmax_of(self), scales_of(layer, self), self._typed(kv_cache)
        if softmax.window:
            lse = self._new_lse(query[:num_rows])
            attend_window(query, output, lse, cache, metadata, tail, tail.num_reqs, softmax, scales)
            merge_draft_tail(query, output, lse, metadata, tail, softmax, scales)
            return
        # The builder's plan fits if it was made for the same requests and, as is asked for here, without a causal mask.
        fits = metadata.causal is False and metadata.seq_lens.shape[0] == tail.num_reqs
        lse = self._attend_dense(
            query[:num_rows],
            cache,
            metadata,
            output[:num_rows],
            num_reqs=tail.num_reqs,
            lengths=metadata.seq_lens,
            max_query_len=tail.queries_per_req,
            schedule=metadata.scheduler_metadata if fits else None,
            scales=scales,
        )
        merge_draft_tail(query, output, lse, metadata, tail, softmax, scales)

    @staticmethod
    def _new_lse(query: torch.Tensor) -> torch.Tensor:
        """Room for the log-sum-exp [Hq, rows] of a prefix pass, as FlashAttention makes it for its own."""
        return torch.empty(query.shape[1], query.shape[0], dtype=torch.float32, device=query.device)

    def _attend_dense(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeFlashMetadata,
        output: torch.Tensor,
        *,
        num_reqs: int,
        lengths: torch.Tensor,
        max_query_len: int,
        schedule: torch.Tensor | None,
        scales: Scales,
    ) -> torch.Tensor:
        """FlashAttention of the leading requests' rows over their first ``lengths`` tokens, without a mask or sinks.

        Returns:
            float32 [Hq, rows] log-sum-exp; infinite (the sign depends on the version) for a length of 0, whose output
            is then not to be read.
        """
        if is_exact(query.dtype):
            sizes = {"num_reqs": num_reqs, "lengths": lengths, "max_query_len": max_query_len}
            without_sinks = softmax_of(self)._replace(sinks=None)
            return self._attend_exactly(query, kv_cache, metadata, output, **sizes, softmax=without_sinks, causal=False)
        # TMA wants the strides of dimensions of one element to be as if they were longer; see vLLM's own forward.
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        by_head = (num_reqs, self.num_kv_heads)
        descales = [None if scale is None else scale.expand(by_head) for scale in scales]
        _, lse = flash_attn.flash_attn_varlen_func(
            q=query,
            k=canonicalize_singleton_dim_strides(keys),
            v=canonicalize_singleton_dim_strides(values),
            out=output,
            cu_seqlens_q=metadata.query_start_loc[: num_reqs + 1],
            max_seqlen_q=max_query_len,
            seqused_k=lengths[:num_reqs],
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            window_size=[-1, -1],
            softcap=softmax_of(self).soft_cap,
            block_table=metadata.block_table[:num_reqs],
            return_softmax_lse=True,
            scheduler_metadata=schedule,
            q_descale=descales[0],
            k_descale=descales[1],
            v_descale=descales[2],
            fa_version=self.vllm_flash_attn_version,
            num_splits=metadata.max_num_splits,
        )
        return lse

    def _attend_exactly(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        *,
        num_reqs: int,
        lengths: torch.Tensor,
        max_query_len: int,
        softmax: Softmax,
        causal: bool,
    ) -> torch.Tensor:
        """In float32.

        Raises:
            ValueError: the layer has something that this attention does not know.
        """
        if problem := unsupported_feature(self):
            raise ValueError(f"a layer's attention has no float32 on a GPU: {problem}, or start vLLM in bfloat16")
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return exact_attention(
            query=query,
            keys=keys,
            values=values,
            out=output,
            query_start_loc=metadata.query_start_loc[: num_reqs + 1],
            lengths=lengths[:num_reqs],
            block_table=metadata.block_table[:num_reqs],
            max_query_len=max_query_len,
            max_length=metadata.max_seq_len,
            softmax=softmax,
            causal=causal,
        )
