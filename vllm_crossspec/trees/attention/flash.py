"""Tree attention on CUDA: FlashAttention over the dense part, then one Triton launch over the tail, merged in place.

FlashAttention (3 on Hopper) takes no mask for paged caches, but it returns the log-sum-exp. So a tail's rows first
attend to everything before the tail without a causal mask, then the softmax continues over the tail. Drafters' layers,
and steps without drafts, run vLLM's own code. Legend as in ``base``. Two cases do not use FlashAttention:

- ``window_attention`` computes the prefix of layers with a sliding window. Sinks join later in both cases.
- The module ``float32`` serves that type, because FlashAttention has 16-bit types only.

With a float8 cache vLLM also quantises queries, and FlashAttention 3 rounds its softmax weights to float8. The tail's
kernel keeps its weights in the model's type. vLLM's registry imports this module by name, also without a GPU.
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

from vllm_crossspec.trees.attention import base
from vllm_crossspec.trees.attention.base import DraftTail, Tail, TargetTail, softmax_of
from vllm_crossspec.trees.attention.float32 import exact_attention
from vllm_crossspec.trees.attention.scratch import write_level
from vllm_crossspec.trees.verify.tail_attention import Softmax
from vllm_crossspec.types import FLOAT8


def is_exact(dtype: torch.dtype) -> bool:
    """Whether the type needs ``float32`` instead of FlashAttention."""
    return dtype == torch.float32


class TreeFlashBackend(FlashAttentionBackend):
    """Replaces vLLM's FLASH_ATTN, under its name, in engines that verify trees."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [*FlashAttentionBackend.supported_dtypes, torch.float32]

    @staticmethod
    def get_impl_cls() -> type["TreeFlashImpl"]:
        return TreeFlashImpl

    @staticmethod
    def get_builder_cls() -> type["TreeFlashMetadataBuilder"]:
        return TreeFlashMetadataBuilder


@dataclass
class TreeFlashMetadata(FlashAttentionMetadata):
    """vLLM's causal metadata of the whole batch, and its split for the target's layers."""

    target_tail: TargetTail | None = None  # verification rows of the step, the padding of a CUDA graph included
    draft_tail: DraftTail | None = None  # level of a drafter's trees; set by its proposer
    # FlashAttention 3's work plan of the prefix pass; None: every layer makes its own
    prefix_schedule: torch.Tensor | None = None
    # the requests after the verification rows, as a batch of vLLM's; None if there are none
    rest: FlashAttentionMetadata | None = None


class TreeFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Splits a step's batch into verification rows and the rest, and plans the prefix pass."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if is_exact(kv_cache_spec.dtype):
            self.aot_schedule = False  # `exact_attention` needs no plan
        self.serves_target = base.serves_target(vllm_config, layer_names)
        keeps_schedules = self.use_full_cuda_graph and self.aot_schedule and self.serves_target
        # Graphs read the prefix pass's plan here. vLLM's buffer may hold the plan of a drafter's first pass, whose
        # graph uses this builder's metadata too.
        self.prefix_schedule = torch.zeros_like(self.scheduler_metadata) if keeps_schedules else None
        self.num_kept = 0

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        # A graph has one code path: batches of verification rows only, without prompts.
        return AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> int | None:
        # Requests may have different numbers of verification rows, because kernels read the boundaries on the device.
        return max_decode_query_len(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TreeFlashMetadata:
        return self._build(common_attn_metadata, fast_build, capturing=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> TreeFlashMetadata:
        return self._build(common_attn_metadata, False, capturing=True)

    def _build(self, common: CommonAttentionMetadata, fast_build: bool, capturing: bool) -> TreeFlashMetadata:
        tail = base.tail_of_step(common, capturing) if self.serves_target else None
        if tail is None:
            self._keep(None)
            return TreeFlashMetadata(**vars(super().build(0, common, fast_build)))
        if self.aot_sliding_window is None:
            # The first build with a plan looks up the layers' windows.
            super().build(0, common)
        if tail.is_whole_batch:
            tail = tail._replace(num_reqs=common.num_reqs, num_tokens=common.num_actual_tokens)
        # vLLM's part of the metadata serves a drafter's first pass, whose few layers make their own plans.
        metadata = TreeFlashMetadata(**vars(super().build(0, common, fast_build=True)), target_tail=tail)
        plans = self.aot_schedule and not fast_build and not envs.VLLM_BATCH_INVARIANT
        sizes = {"max_seq_len": metadata.max_seq_len, "max_num_splits": metadata.max_num_splits}
        schedule = self._get_scheduler_metadata(
            # vLLM makes no plan if layers differ in their windows; if all have one, our kernel runs the prefix pass.
            aot_schedule=plans and self.aot_sliding_window == (-1, -1),
            batch_size=tail.num_reqs,
            cu_query_lens=metadata.query_start_loc[: tail.num_reqs + 1],
            max_query_len=tail.max_query_len,
            seqlens=tail.prefix_len[: tail.num_reqs],
            causal=False,
            **sizes,
        )
        metadata.prefix_schedule = self._keep(schedule)
        if tail.num_reqs < common.num_reqs:  # such a batch is never captured, so it may allocate
            rest = {"max_query_len": metadata.max_query_len, "causal": metadata.causal, **sizes}
            query_start_loc = metadata.query_start_loc[tail.num_reqs :] - tail.num_tokens
            seq_lens = metadata.seq_lens[tail.num_reqs :]
            schedule = self._get_scheduler_metadata(
                aot_schedule=plans,
                batch_size=seq_lens.shape[0],
                cu_query_lens=query_start_loc,
                seqlens=seq_lens,
                **rest,
            )
            metadata.rest = FlashAttentionMetadata(
                num_actual_tokens=metadata.num_actual_tokens - tail.num_tokens,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=metadata.block_table[tail.num_reqs :],
                slot_mapping=metadata.slot_mapping[tail.num_tokens :],
                scheduler_metadata=schedule,
                **rest,
            )
        return metadata

    def _keep(self, schedule: torch.Tensor | None) -> torch.Tensor | None:
        """Copy the plan to the buffer that graphs read, and zero the rest: FlashAttention would run it too.

        None clears the buffer, for a graph replayed by a dummy batch, which has no tail. An old plan would send
        FlashAttention to rows that this batch does not have.
        """
        kept, num_entries = self.prefix_schedule, 0 if schedule is None else len(schedule)
        if kept is None:
            return schedule
        if schedule is not None:
            kept[:num_entries] = schedule
        if self.num_kept > num_entries:
            kept[num_entries : self.num_kept] = 0
        self.num_kept = num_entries
        return None if schedule is None else kept[:num_entries]


class TreeFlashImpl(FlashAttentionImpl):
    """vLLM's FlashAttention with support for tails."""

    reads_trees: ClassVar[bool] = True

    @staticmethod
    def kv_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor]:
        """Views [blocks, Hkv, block_size, width] of a cache that together hold keys and values: here all of it."""
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
        """Attend; arguments as in vLLM's method, the cache of any strides."""
        metadata, fused = attn_metadata, (output_scale, output_block_scale)  # vLLM's own code refuses scales
        tail: Tail | None = None
        if metadata is not None and fused == (None, None):
            tail = metadata.draft_tail if layer.is_draft_layer else metadata.target_tail
        if metadata is None or tail is None:
            return self._forward_plain(layer, query, key, value, kv_cache, metadata, output, *fused)
        split, softmax = tail.num_tokens, softmax_of(self, layer)
        if isinstance(tail, DraftTail):
            write_level(key[:split], value[:split], tail)
        float8 = FLOAT8.get(self.kv_cache_dtype)  # vLLM's own cache of a quantised layer is bytes
        cache = kv_cache if float8 is None else kv_cache.view(float8)
        if softmax.window:  # FlashAttention allocates its own log-sum-exp
            lse = torch.empty(query.shape[1], split, dtype=torch.float32, device=query.device)
        else:
            lse = self._attend_dense(query[:split], cache, metadata, output[:split], tail, softmax)
        rows = base.rows_of(query, output, lse, metadata, tail)
        if softmax.window:
            base.attend_window(rows, cache, metadata, tail, softmax)
        base.merge_tail(rows, cache, metadata, tail, softmax)
        if isinstance(tail, TargetTail) and metadata.rest is not None:
            rest = (query[split:], key[split:], value[split:], kv_cache, metadata.rest, output[split:])
            self._forward_plain(layer, *rest)
        return output

    def _forward_plain(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        *fused: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend without a tail, with vLLM's own code if it supports the type."""
        if not is_exact(query.dtype) or metadata is None or any(scale is not None for scale in fused):
            return super().forward(layer, query, key, value, kv_cache, metadata, output, *fused)
        rows, lengths, causal = metadata.num_actual_tokens, metadata.seq_lens, bool(metadata.causal)
        sizes = (metadata, lengths, metadata.max_query_len)
        self._attend_exactly(query[:rows], kv_cache, output[:rows], *sizes, softmax_of(self), causal)
        return output

    def _attend_dense(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TreeFlashMetadata,
        output: torch.Tensor,
        tail: Tail,
        softmax: Softmax,
    ) -> torch.Tensor:
        """FlashAttention of a tail's rows over everything before the tail, without a mask or sinks.

        Returns:
            float32 [Hq, rows] log-sum-exp. For a length of 0 it is infinite, of either sign, and the output is invalid.
        """
        num_reqs, max_query_len = tail.num_reqs, tail.max_query_len
        if isinstance(tail, TargetTail):
            lengths, schedule = tail.prefix_len[:num_reqs], metadata.prefix_schedule
        else:
            # The builder's plan fits if it was made for the same requests, without a mask.
            fits = metadata.causal is False and metadata.seq_lens.shape[0] == num_reqs
            lengths, schedule = metadata.seq_lens[:num_reqs], metadata.scheduler_metadata if fits else None
        if is_exact(query.dtype):
            without_sinks = softmax._replace(sinks=None)
            return self._attend_exactly(query, kv_cache, output, metadata, lengths, max_query_len, without_sinks, False)
        # TMA needs canonical strides for dimensions of one element; see vLLM's own forward.
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        by_head = (num_reqs, self.num_kv_heads)
        descales = [None if scale is None else scale.expand(by_head) for scale in softmax.scales]
        _, lse = flash_attn.flash_attn_varlen_func(
            q=query,
            k=canonicalize_singleton_dim_strides(keys),
            v=canonicalize_singleton_dim_strides(values),
            out=output,
            cu_seqlens_q=metadata.query_start_loc[: num_reqs + 1],
            max_seqlen_q=max_query_len,
            seqused_k=lengths,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            window_size=[-1, -1],
            softcap=softmax.soft_cap,
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

    def _attend_exactly(self, *arguments: Any) -> torch.Tensor:
        """:func:`exact_attention`; ValueError if it lacks a feature of the layer."""
        if problem := base.unsupported_feature(self):
            raise ValueError(f"a layer's attention has no float32 on a GPU: {problem}, or start vLLM in bfloat16")
        return exact_attention(*arguments)
