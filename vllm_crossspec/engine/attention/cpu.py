"""Tree attention on a CPU, of PyTorch's products: the development lane's backend for the target and the drafters.

The KV cache has FlashAttention's logical layout [blocks, Hkv, block_size, K|V], not that of vLLM's CPU kernel, whose
keys are ordered for the instruction set; so the compaction of the accepted path is the GPU's. Legend as in ``base``.
"""

from dataclasses import dataclass, field
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
    serves_target,
    soft_prompts_of,
    tail_of_step,
    unsupported_feature,
)
from vllm_crossspec.engine.attention.copies import (
    append_level,
    append_level_naive,
    copy_tail,
    hide,
    write_cache,
    write_cache_naive,
)
from vllm_crossspec.twins import runs_kernels
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


class _Request(NamedTuple):
    """One request of a batch: its query rows, its length, its line of the block table, whether it is causal."""

    rows: slice
    length: int
    blocks: list[int]
    causal: bool


class _Part(NamedTuple):
    """Query rows of one request that are attended in one softmax.

    Attributes:
        rows: of the batch.
        request: whose rows they are.
        num_keys: leading tokens of the request whose keys are read.
        hidden: float32 [rows, m] added to the logits of the last m keys, 0 or -inf; None where every row sees all.
        sees_prompts: whether the soft prompts of the layer lie behind the keys.
    """

    rows: slice
    request: _Request
    num_keys: int
    hidden: torch.Tensor | None
    sees_prompts: bool = False

    @property
    def is_one_row(self) -> bool:
        """Whether it is a request's newest token, which sees everything before it: without drafts most are."""
        is_one = self.rows.stop - self.rows.start == 1
        return is_one and self.hidden is None and not self.sees_prompts and self.num_keys > 0


@dataclass
class _Prefixes:
    """What the levels of a drafter's trees read in one layer.

    Attributes:
        requests: of the batch.
        dense: float32 [R, Hkv, longest + rows of the scratch, 2 * Dh] keys and values of each request's tokens, and
            behind them the rows of its tree so far.
        num_rows: how many those are.
    """

    requests: list[_Request]
    dense: torch.Tensor
    num_rows: int = 0


@dataclass
class _Reused:
    """What does not change between the target's layers of a step, or the levels of a drafter's trees.

    ``dataclasses.replace`` carries it from one level's metadata to the next one's.

    Attributes:
        parts: of the target's layers, by the number of their soft prompts.
        prefixes: of each drafter's layer, by the layer's implementation.
    """

    parts: dict[int, list[_Part]] = field(default_factory=dict)
    prefixes: dict[int, _Prefixes] = field(default_factory=dict)


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
        reused: what the first layer or level leaves to the others.
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
    """Softmax over the keys that a row may see, one request at a time, in float32."""

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
        write = write_cache if runs_kernels() else write_cache_naive
        write(key, value, kv_cache, slot_mapping)

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
        # The lengths of a drafter's batch may change between two passes with the same metadata.
        reused = {} if layer.is_draft_layer else attn_metadata.reused.parts
        soft = soft_prompts_of(layer)
        num_soft = 0 if soft is None else soft.shape[2]
        if num_soft not in reused:
            reused[num_soft] = self._parts(attn_metadata, tail, num_soft)
        for part in reused[num_soft]:
            if part.is_one_row and kv_cache.dtype == query.dtype == torch.float32:
                attend_row(query[part.rows.start], kv_cache, part.request, self.scale, output[part.rows.start])
                continue
            keys, values = self._halves(self._gather(kv_cache, part.request, part.num_keys))
            if part.sees_prompts:
                assert soft is not None
                keys, values = (torch.cat([x, p.float()], dim=1) for x, p in zip((keys, values), soft, strict=True))
            output[part.rows] = attend(query[part.rows], keys, values, part.hidden, self.scale)
        return output

    def _parts(self, metadata: TreeCpuMetadata, tail: TargetTail | None, num_soft: int) -> list[_Part]:
        """All rows of a batch; those without query rows (padding) have no part."""
        parts: list[_Part] = []
        for index, request in enumerate(_requests(metadata)):
            prefix_len = int(tail.prefix_len[index]) if tail is not None and index < tail.num_reqs else request.length
            if tail is not None and prefix_len < request.length:
                parts += _tree_parts(request, prefix_len, tail.row_mask[request.rows], num_soft)
            else:
                parts.append(_Part(request.rows, request, request.length, self._hidden(request)))
        return [part for part in parts if part.rows.start < part.rows.stop]

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
        key, value = key[:num_rows], value[:num_rows]
        prefixes = metadata.reused.prefixes.get(id(self))
        if prefixes is None:
            prefixes = metadata.reused.prefixes[id(self)] = self._prefixes(kv_cache, metadata, tail)
        dense, length = prefixes.dense, int(tail.length)
        above = length - tail.queries_per_req + tail.has_shared
        if prefixes.num_rows != above:
            copy_tail(tail.scratch, above, dense, [request.length for request in prefixes.requests])
        append = append_level if runs_kernels() else append_level_naive
        hidden = append(key, value, tail, length, dense, metadata.seq_lens)
        prefixes.num_rows = length
        for request, content in zip(prefixes.requests, dense, strict=True):
            mine = request.rows
            keys, values = self._halves(content[:, : request.length + length])
            output[mine] = attend(query[mine], keys, values, hidden[mine], self.scale)

    def _prefixes(self, kv_cache: torch.Tensor, metadata: TreeCpuMetadata, tail: DraftTail) -> _Prefixes:
        """Of a batch whose trees have no rows yet."""
        requests = _requests(metadata)[: tail.num_reqs]
        _, num_heads, _, width = kv_cache.shape
        longest = max(request.length for request in requests)
        dense = torch.empty(len(requests), num_heads, longest + tail.scratch.shape[1], width)
        for request, content in zip(requests, dense, strict=True):
            _gather_into(content, kv_cache, request, request.length)
        return _Prefixes(requests, dense)

    def _gather(self, kv_cache: torch.Tensor, request: _Request, length: int) -> torch.Tensor:
        """Keys and values, float32 [Hkv, length, 2 * Dh], of a request's first tokens; maybe a view of the cache."""
        _, num_heads, block_size, width = kv_cache.shape
        if 0 < length <= block_size:
            return kv_cache[request.blocks[0], :, :length].float()
        dense = torch.empty(num_heads, length, width)
        _gather_into(dense, kv_cache, request, length)
        return dense

    def _halves(self, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hkv, n, Dh] of both beside each other, as views."""
        return dense[..., : self.head_size], dense[..., self.head_size :]

    def _hidden(self, request: _Request) -> torch.Tensor | None:
        """What a request's rows do not see without any tree, as in :class:`_Part`.

        A window is symmetric where there is no causal mask, as in vLLM.
        """
        length, num_rows, window = request.length, request.rows.stop - request.rows.start, self.sliding_window
        if window is None and (not request.causal or num_rows <= 1):
            return None
        # All rows see what lies before the first of them, but for a window.
        first = 0 if window is not None else max(0, length - num_rows)
        distance = torch.arange(length - num_rows, length)[:, None] - torch.arange(first, length)
        visible = distance >= 0 if request.causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            visible &= distance.abs() < window
        return hide(visible)


def _requests(metadata: TreeCpuMetadata) -> list[_Request]:
    """The batch's requests; those without query rows (padding) have an empty slice."""
    bounds, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    causal = metadata.causal
    flags = causal.bool().tolist() if isinstance(causal, torch.Tensor) else [causal] * metadata.num_reqs
    blocks = metadata.block_table[: metadata.num_reqs].tolist()
    return [
        _Request(slice(bounds[index], bounds[index + 1]), lengths[index], blocks[index], flags[index])
        for index in range(metadata.num_reqs)
    ]


def _tree_parts(request: _Request, prefix_len: int, row_mask: torch.Tensor, num_soft: int) -> list[_Part]:
    """One request with a tail: its ordinary rows and its contemplate rows, if any, each in a softmax of their own.

    What the ordinary rows are computed with ends with the last key that one of them sees. So in float32 their output
    is the same bits with rows behind them and without.
    """
    seen = unpack_bits(row_mask)
    seen, prompts = seen.tensor_split([32 * (row_mask.shape[1] - soft_words(num_soft))], dim=1)
    softened = prompts.any(1).nonzero().flatten().tolist()
    ordinary = softened[0] if softened else len(seen)
    parts = []
    for rows, sees_prompts in ((slice(0, ordinary), False), (slice(ordinary, len(seen)), num_soft > 0)):
        if rows.start == rows.stop:
            continue
        last_seen = int((seen[rows] * torch.arange(1, seen.shape[1] + 1)).max())
        num_keys = min(last_seen, request.length - prefix_len)
        visible = seen[rows, :num_keys]
        if sees_prompts:
            visible = torch.cat([visible, prompts[rows, :num_soft]], dim=1)
        mine = slice(request.rows.start + rows.start, request.rows.start + rows.stop)
        parts.append(_Part(mine, request, prefix_len + num_keys, hide(visible), sees_prompts))
    return parts


def _gather_into(dense: torch.Tensor, kv_cache: torch.Tensor, request: _Request, length: int) -> None:
    """Copy keys and values of a request's first tokens to the front of ``dense`` [Hkv, at least length, 2 * Dh]."""
    block_size = kv_cache.shape[2]
    starts = range(0, length, block_size)
    for start, block in zip(starts, request.blocks[: len(starts)], strict=True):
        stop = min(start + block_size, length)
        dense[:, start:stop] = kv_cache[block, :, : stop - start]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Grouped-query attention of one request in float32; the query heads of a KV head are rows of one product.

    Args:
        query: [rows, Hq, Dh].
        keys: float32 [Hkv, n, Dh]; n may be 0.
        values: likewise.
        hidden: float32 [rows, m] added to the logits of the last m keys, 0 or -inf; None if every row sees every key.
        scale: of the logits.

    Returns:
        The output [rows, Hq, Dh] in float32, zeros where there is no key.
    """
    (num_rows, num_heads, head_size), (num_kv_heads, num_keys, _) = query.shape, keys.shape
    # One pass over the query, into the order that the products want.
    grouped = torch.mul(query.float().transpose(0, 1), scale, out=torch.empty(num_heads, num_rows, head_size))
    grouped = grouped.view(num_kv_heads, -1, head_size)
    logits = torch.bmm(grouped, keys.transpose(1, 2))
    if hidden is not None:
        logits.view(num_heads, num_rows, num_keys)[..., num_keys - hidden.shape[1] :] += hidden
    out = torch.bmm(torch.softmax(logits, dim=-1), values)
    out = out.view(num_heads, num_rows, head_size).transpose(0, 1)
    if hidden is not None and hidden.shape[1] == num_keys:
        # A row that sees nothing (in vLLM's dummy runs) was divided by nothing.
        out.masked_fill_(hidden.isneginf().all(1)[:, None, None], 0.0)
    return out


def attend_row(
    query: torch.Tensor, kv_cache: torch.Tensor, request: _Request, scale: float, output: torch.Tensor
) -> None:
    """:func:`attend` for one row that sees all tokens of its request, all in float32: read in place, block by block.

    Args:
        query: [Hq, Dh].
        kv_cache: [blocks, Hkv, block_size, 2 * Dh].
        request: whose newest token it is.
        scale: of the logits.
        output: [Hq, Dh], written.
    """
    _, num_kv_heads, block_size, width = kv_cache.shape
    block_stride, head_stride, token_stride, _ = kv_cache.stride()
    head_size, length, first = width // 2, request.length, kv_cache.storage_offset()
    query, output = query.reshape(num_kv_heads, -1, head_size), output.view(num_kv_heads, -1, head_size)
    spans = [
        (first + block * block_stride, start, min(start + block_size, length))
        for start, block in zip(range(0, length, block_size), request.blocks, strict=False)
    ]
    logits = []
    for offset, start, stop in spans:
        shape, strides = (num_kv_heads, head_size, stop - start), (head_stride, 1, token_stride)
        logits.append(torch.bmm(query, kv_cache.as_strided(shape, strides, offset)))
    whole = logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)
    shares = torch.softmax(whole.mul_(scale), dim=-1)
    for offset, start, stop in spans:
        shape, strides = (num_kv_heads, stop - start, head_size), (head_stride, token_stride, 1)
        values = kv_cache.as_strided(shape, strides, offset + head_size)
        if start == 0:
            torch.bmm(shares[..., :stop], values, out=output)
        else:
            output.baddbmm_(shares[..., start:stop], values)
