"""The attention of a verification step's trees, one layer: FlashAttention and our tail beside a chain's causal pass.

FlexAttention is the truth. Where they are installed, two kernels with masks of their own stand beside: FlashAttention 4
with a ``mask_mod``, and FlashInfer with a custom mask.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from shapes import Shape
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from tree_cases import BLOCK_SIZE, DEPTH, Case, Step

from vllm_crossspec.verify.rows import prepare_rows
from vllm_crossspec.verify.tail_attention import PagedTail, Softmax, tail_attention

# vLLM's own bound on the splits of a request's keys where CUDA graphs are captured.
MAX_SPLITS = 32
# What an alternative that is not there, or not for this device, says so with.
NOT_THERE = (ImportError, NotImplementedError, RuntimeError, AssertionError, AttributeError, TypeError, ValueError)


class Batch(NamedTuple):
    """One layer of a verification step. R requests, w rows of each, T = R * w.

    Attributes:
        query: [T, Hq, Dh].
        cache: [blocks, Hkv, BLOCK_SIZE, 2 * Dh], K beside V, tokens before heads in memory, as vLLM lays it out.
        block_table: int32 [R, blocks of a request].
        starts: int32 [R + 1] first row of each request.
        prefix_len, seq_lens: int32 [R].
        row_mask: int32 [T, W].
        width: w.
        context: tokens before the tree.
        scale: of the scores.
    """

    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    starts: torch.Tensor
    prefix_len: torch.Tensor
    seq_lens: torch.Tensor
    row_mask: torch.Tensor
    width: int
    context: int
    scale: float

    @property
    def num_reqs(self) -> int:
        """R."""
        return self.block_table.shape[0]

    @property
    def heads(self) -> tuple[int, int, int]:
        """Hq, Hkv, Dh."""
        return self.query.shape[1], self.cache.shape[1], self.query.shape[2]


def make_batch(step: Step, context: int, shape: Shape) -> Batch:
    """Random queries, keys and values; the tree's values are large, so that a wrong mask cannot hide in rounding."""
    num_reqs, nodes = step.parents.shape
    width, device = nodes + 1, step.parents.device
    per_request = -(-(context + width) // BLOCK_SIZE)
    num_blocks, head_size = num_reqs * per_request, shape.head_dim
    memory = torch.randn(num_blocks, BLOCK_SIZE, shape.num_kv_heads, 2 * head_size, device=device, dtype=torch.bfloat16)
    cache = memory.transpose(1, 2)
    table = torch.randperm(num_blocks, device=device).view(num_reqs, per_request).int()
    rows = torch.arange(context, context + width, device=device)
    cache[table[:, rows // BLOCK_SIZE].long(), :, rows % BLOCK_SIZE, head_size:] *= context / 64

    def int32(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    out = {"prefix_len": int32(num_reqs), "num_live": int32(num_reqs)}
    row_mask = int32(num_reqs * width, -(-width // 32))
    inputs = {name: getattr(step, name) for name in Step._fields[:8] if name != "cu_num_logits"}
    inputs["cu_rows"] = step.cu_num_logits
    prepare_rows(**inputs, **out, row_mask=row_mask, max_depth=DEPTH)
    # Not what the kernel says: a rehearsal's kernels say nothing, and their lengths would be zero.
    prefix_len = torch.full_like(out["prefix_len"], context)
    return Batch(
        query=torch.randn(num_reqs * width, shape.num_heads, head_size, device=device, dtype=torch.bfloat16),
        cache=cache,
        block_table=table,
        starts=step.query_start_loc,
        prefix_len=prefix_len,
        seq_lens=step.seq_lens,
        row_mask=row_mask,
        width=width,
        context=context,
        scale=head_size**-0.5,
    )


def oracle(batch: Batch) -> torch.Tensor:
    """FlexAttention over the same keys laid out densely, in float32: [T, Hq, Dh]."""
    (_, _, head_size), end = batch.heads, batch.context + batch.width
    words = batch.row_mask.view(batch.num_reqs, batch.width, -1)

    def sees(request, head, row, key):
        node = (key - batch.context).clamp(min=0)
        bit = (words[request, row, node // 32] >> (node % 32)) & 1
        return (key < batch.context) | (bit == 1)

    dense = batch.cache[batch.block_table.long()].transpose(1, 2).flatten(2, 3)[:, :, :end].float()
    query = batch.query.view(batch.num_reqs, batch.width, *batch.query.shape[1:]).transpose(1, 2).float()
    mask = create_block_mask(sees, batch.num_reqs, None, batch.width, end, device=str(query.device))
    keys, values = dense[..., :head_size].contiguous(), dense[..., head_size:].contiguous()
    out = flex_attention(query, keys, values, block_mask=mask, scale=batch.scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(batch.query.shape)


def agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within bfloat16's rounding of weights and results: 2^-9 each, and sums of some dozens of large values."""
    return torch.allclose(found.float(), expected, rtol=2e-2, atol=4e-3)


# -- FlashAttention and our tail -----------------------------------------------------------------------------------


def flash(
    batch: Batch, lengths: torch.Tensor, causal: bool, version: int, out: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """One pass of vLLM's FlashAttention over the first ``lengths`` tokens, planned beforehand as vLLM plans a step.

    Returns:
        A function that runs it into ``out`` and returns the log-sum-exp, float32 [Hq, T].
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata

    num_heads, num_kv_heads, head_size = batch.heads
    longest, schedule = batch.context + batch.width, None
    if version == 3:
        schedule = get_scheduler_metadata(
            batch_size=batch.num_reqs,
            max_seqlen_q=batch.width,
            max_seqlen_k=longest,
            num_heads_q=num_heads,
            num_heads_kv=num_kv_heads,
            headdim=head_size,
            cache_seqlens=lengths,
            qkv_dtype=batch.query.dtype,
            cu_seqlens_q=batch.starts,
            page_size=BLOCK_SIZE,
            causal=causal,
            window_size=(-1, -1),
            num_splits=MAX_SPLITS,
        )
    keys, values = batch.cache.transpose(1, 2).split(head_size, dim=-1)

    def run() -> torch.Tensor:
        _, lse = flash_attn_varlen_func(
            q=batch.query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=batch.starts,
            max_seqlen_q=batch.width,
            seqused_k=lengths,
            max_seqlen_k=longest,
            softmax_scale=batch.scale,
            causal=causal,
            window_size=[-1, -1],
            block_table=batch.block_table,
            return_softmax_lse=True,
            scheduler_metadata=schedule,
            fa_version=version,
            num_splits=MAX_SPLITS if version == 3 else 0,
        )
        return lse

    return run


def merge_tail(batch: Batch, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Our kernel: the softmax goes on over the tree."""
    tail_attention(
        query=batch.query,
        out=out,
        lse=lse,
        tail=PagedTail(batch.cache, batch.block_table, batch.prefix_len, batch.seq_lens),
        query_start_loc=batch.starts,
        row_mask=batch.row_mask,
        softmax=Softmax(batch.scale),
        num_reqs=batch.num_reqs,
        max_query_len=batch.width,
    )


def attention_cases(step: Step, context: int, shape: Shape) -> Iterator[Case]:
    """A chain's pass, a tree's, the tree's by its parts, and what else could do it."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    batch, version = make_batch(step, context, shape), get_flash_attn_version()
    assert version is not None
    out, expected = torch.empty_like(batch.query), oracle(batch)
    chain = flash(batch, batch.seq_lens, True, version, out)
    prefix = flash(batch, batch.prefix_len, False, version, out)
    figures = {"fa_version": version, "rows": batch.query.shape[0]}
    yield Case("chain: FlashAttention, causal", chain, None, figures)

    def tree() -> torch.Tensor:
        merge_tail(batch, out, prefix())
        return out

    yield Case("tree: prefix and tail", tree, lambda: agrees(tree(), expected), figures)
    yield Case("tree: prefix alone", prefix, None, figures)
    lse = prefix().clone()
    yield Case("tree: tail alone", lambda: merge_tail(batch, out, lse), None, {})
    for name, make in {
        "tree: FlashAttention 4, mask_mod": flash_4,
        "tree: FlashInfer, custom mask": flashinfer,
    }.items():
        try:
            run = make(batch)
            run()  # an alternative may also find out here that this is not for it
        except NOT_THERE as error:
            yield Case(name, None, None, {"not_there": f"{type(error).__name__}: {error}"[:200]})
        else:
            yield Case(name, run, lambda run=run: agrees(run(), expected), {})


# -- alternatives --------------------------------------------------------------------------------------------------


def flash_4(batch: Batch) -> Callable[[], torch.Tensor]:
    """FlashAttention 4, whose ``mask_mod`` looks up the rows' words; in vLLM's form of such functions."""
    from vllm.vllm_flash_attn.flash_attn_interface import fa_version_unsupported_reason, flash_attn_varlen_func

    reason = fa_version_unsupported_reason(4)
    if reason is not None:
        raise NotImplementedError(reason)
    keys, values = (part.contiguous() for part in batch.cache.transpose(1, 2).split(batch.heads[2], dim=-1))
    out, mask_mod = torch.empty_like(batch.query), _mask_mod()

    def run() -> torch.Tensor:
        flash_attn_varlen_func(
            q=batch.query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=batch.starts,
            max_seqlen_q=batch.width,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.context + batch.width,
            softmax_scale=batch.scale,
            causal=False,
            block_table=batch.block_table,
            fa_version=4,
            mask_mod=mask_mod,
            aux_tensors=[batch.row_mask, batch.starts],
        )
        return out

    return run


def _mask_mod() -> Any:
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32
    from vllm.vllm_flash_attn.cute.utils import scalar_to_ssa, ssa_to_scalar

    @cute.jit
    def sees(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        words, starts = aux_tensors[0], aux_tensors[1]
        # Rows and keys of partial tiles lie outside; what is read for them counts nowhere.
        row = starts[batch_idx[0]] + cutlass.min(ssa_to_scalar(q_idx), seqlen_info.seqlen_q - Int32(1))
        node = ssa_to_scalar(kv_idx) - (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
        inside = cutlass.min(cutlass.max(node, Int32(0)), seqlen_info.seqlen_q - Int32(1))
        bit = (words[row, inside // 32] >> (inside % 32)) & Int32(1)
        return (scalar_to_ssa(node, Int32) < scalar_to_ssa(Int32(0), Int32)) | (
            scalar_to_ssa(bit, Int32) == scalar_to_ssa(Int32(1), Int32)
        )

    sees.__vec_size__ = 1  # row and key are taken from lane 0
    return sees


def flashinfer(batch: Batch) -> Callable[[], torch.Tensor]:
    """FlashInfer's paged prefill with a mask of one bit for every row and key; what its plan takes is not timed."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    (num_heads, num_kv_heads, head_size), end = batch.heads, batch.context + batch.width
    device, (num_reqs, per_request) = batch.query.device, batch.block_table.shape
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    shifts = torch.arange(32, device=device)
    bits = (batch.row_mask[:, :, None] >> shifts) & 1
    mask = torch.ones(batch.query.shape[0], end, dtype=torch.bool, device=device)
    mask[:, batch.context :] = bits.flatten(1)[:, : batch.width].bool()
    wrapper.plan(
        batch.starts,
        torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * per_request,
        batch.block_table.flatten(),
        torch.full((num_reqs,), end - (math.ceil(end / BLOCK_SIZE) - 1) * BLOCK_SIZE, dtype=torch.int32, device=device),
        num_heads,
        num_kv_heads,
        head_size,
        BLOCK_SIZE,
        custom_mask=mask.flatten(),
        sm_scale=batch.scale,
        q_data_type=batch.query.dtype,
    )
    keys, values = (part.contiguous() for part in batch.cache.transpose(1, 2).split(head_size, dim=-1))
    out = torch.empty_like(batch.query)
    return lambda: wrapper.run(batch.query, (keys, values), out=out)
