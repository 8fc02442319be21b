"""Kernels of contemplate tokens: three launches around the target's pass, without a sync.

Shape legend: R requests of the batch, S request slots, T token rows of the step, L logits rows, H hidden size, n
experts, K of them mixed. ``contemplate_layout`` defines the order of a request's rows.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_crossspec.kinds.contemplate_layout import verified_nodes
from vllm_crossspec.step.request_rows import request_rows
from vllm_crossspec.types import AcceptedPaths

SPLIT_ROWS = 128
WRITTEN_ROWS = 16
"""Contemplate rows per program that writes their embeddings."""
MAX_COLUMNS = 1024


@triton.jit
def _split_rows_kernel(
    query_start_loc_ptr,  # int32 [R + 1]
    cu_rows_ptr,  # int32 [R + 1]
    cu_nodes_ptr,  # int32 [R + 1]
    idx_mapping_ptr,  # int [R]
    logits_indices_ptr,  # int64 [L], written
    expanded_idx_mapping_ptr,  # int [L], written
    expanded_local_pos_ptr,  # int32 [L], written
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + request)
    first, _, _ = request_rows(query_start_loc_ptr, cu_rows_ptr, request)
    begin = tl.load(cu_nodes_ptr + request)
    num_ordinary = tl.load(cu_nodes_ptr + request + 1) - begin
    for start in range(0, num_ordinary, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < num_ordinary
        entry = begin.to(tl.int64) + row
        tl.store(logits_indices_ptr + entry, first + row, mask=mask)
        tl.store(expanded_idx_mapping_ptr + entry, tl.zeros((BLOCK,), slot.dtype) + slot, mask=mask)
        tl.store(expanded_local_pos_ptr + entry, row, mask=mask)


def split_rows(
    *,
    query_start_loc: torch.Tensor,
    cu_rows: torch.Tensor,
    cu_nodes: torch.Tensor,
    idx_mapping: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> None:
    """Write the rows that get logits (the root and the draft nodes) and their requests; one launch.

    Args:
        query_start_loc: int32 [at least R + 1] first token row of each request.
        cu_rows: int32 [R + 1]; a request's verification rows are its last ones.
        cu_nodes: int32 [R + 1] the same of rows with logits, which come first.
        idx_mapping: int [R] slot of each request.
        logits_indices: int64 [L], written: token row.
        expanded_idx_mapping: [L] of the type of ``idx_mapping``, written: slot of the row's request.
        expanded_local_pos: int32 [L], written: the row's number in its request, 0 for the root.
    """
    assert expanded_idx_mapping.dtype == idx_mapping.dtype
    given, out = (query_start_loc, cu_rows, cu_nodes, idx_mapping), (logits_indices, expanded_idx_mapping)
    _split_rows_kernel[(len(idx_mapping),)](*given, *out, expanded_local_pos, BLOCK=SPLIT_ROWS, num_warps=1)


@triton.jit
def _best_experts(
    logits,  # float32 [EXPERTS], -inf past the last one
    expert,  # int32 [EXPERTS]
    TOP: tl.constexpr,
):
    """Softmax weights [EXPERTS] of the best ``TOP``, normalised to 1; 0 for the others. The lower one wins ties."""
    shares = tl.exp(logits - tl.max(logits, axis=0))
    shares = shares / tl.sum(shares, axis=0)
    left = shares
    weights = tl.zeros_like(shares)
    for _ in tl.static_range(TOP):
        best = tl.min(tl.where(left == tl.max(left, axis=0), expert, expert.shape[0]), axis=0)
        weights = tl.where(expert == best, shares, weights)
        left = tl.where(expert == best, -1.0, left)
    return weights / tl.sum(weights, axis=0)


@triton.jit
def _contemplate_kernel(
    taps,  # tuple of pointers to [T, H]
    tap_strides,  # tuple of their row strides
    final_ptr,  # [T, H]
    final_stride,
    idx_mapping_ptr,  # int [R]
    query_start_loc_ptr,  # int32 [R + 1]
    cu_rows_ptr,  # int32 [R + 1]
    num_sampled_ptr,  # int32 [R]
    path_ptr,  # int32 [R, width]
    path_stride,
    router_ptr,  # [n, taps * H]
    experts_ptr,  # [n, H]
    embeds_ptr,  # [S, H], written
    embeds_stride,
    futures_ptr,  # [S, H], written
    futures_stride,
    has_future_ptr,  # int32 [S], written
    hidden,  # H
    num_experts,  # n
    epsilon,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    if slot >= 0:
        first, num_rows, nodes = request_rows(query_start_loc_ptr, cu_rows_ptr, request)
        length = tl.load(num_sampled_ptr + request)
        has_future = (num_rows > 1) & (length > 0)
        # Without verification the path belongs to another step.
        step = tl.where(num_rows > 1, tl.maximum(length - 1, 0), 0)
        last = tl.load(path_ptr + request * path_stride + step)
        last = tl.where(num_rows > 1, tl.minimum(tl.maximum(last, 0), nodes), num_rows - 1)
        row = first + last
        expert = tl.arange(0, EXPERTS)
        is_expert = expert < num_experts
        width = len(taps) * hidden
        column = tl.arange(0, BLOCK)
        products = tl.zeros((EXPERTS, BLOCK), tl.float32)
        squares = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(len(taps)):
            for start in range(0, hidden, BLOCK):
                at = start + column
                state = tl.load(taps[i] + row * tap_strides[i] + at, mask=at < hidden, other=0.0).to(tl.float32)
                source = router_ptr + expert[:, None].to(tl.int64) * width + i * hidden + at[None, :]
                router = tl.load(source, mask=is_expert[:, None] & (at < hidden)[None, :], other=0.0)
                products += router.to(tl.float32) * state[None, :]
                squares += state * state
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + epsilon)
        logits = tl.where(is_expert, tl.sum(products, axis=1) * factor, float("-inf"))
        weights = _best_experts(logits, expert, TOP)

        tl.store(has_future_ptr + slot, has_future.to(tl.int32))
        future_row = first + nodes + 1 + last
        kept_columns = tl.where(has_future, hidden, 0)
        for start in range(0, hidden, BLOCK):
            at = start + column
            source = experts_ptr + expert[:, None].to(tl.int64) * hidden + at[None, :]
            chosen = tl.load(source, mask=(weights > 0)[:, None] & (at < hidden)[None, :], other=0.0)
            embed = tl.sum(weights[:, None] * chosen.to(tl.float32), axis=0)
            tl.store(embeds_ptr + slot * embeds_stride + at, embed.to(embeds_ptr.dtype.element_ty), mask=at < hidden)
            kept = at < kept_columns
            future = tl.load(final_ptr + future_row * final_stride + at, mask=kept)
            tl.store(futures_ptr + slot * futures_stride + at, future.to(futures_ptr.dtype.element_ty), mask=kept)


def contemplate(
    *,
    taps: Sequence[torch.Tensor],
    final_states: torch.Tensor,
    idx_mapping: torch.Tensor,
    paths: AcceptedPaths,
    router: torch.Tensor,
    experts: torch.Tensor,
    top: int,
    contemplate_embeds: torch.Tensor,
    futures: torch.Tensor,
    has_future: torch.Tensor,
) -> None:
    """Write each request's future and next contemplate embedding; one launch (Qin et al. 2026, sections 3.1 and 3.2).

    The future is the final state of the contemplate row of the last accepted row. The embedding is a mixture of the K
    experts that the last accepted row's tapped states choose. These states are concatenated and RMS-normed without a
    weight, in float32. The lower of equal experts wins. Call it before the accepted path is moved.

    Args:
        taps: 1 to 3 times [at least T, H], the tapped states; concatenated in this order.
        final_states: [at least T, H] after the target's last norm.
        idx_mapping: int [R] slot of each request; nothing is written for negative ones.
        paths: of the step; read for requests with more than one row.
        router: [n, taps * H] contiguous.
        experts: [n, H] contiguous.
        top: K, at most n.
        contemplate_embeds: [S, H], written.
        futures: [S, H], written for requests with a future.
        has_future: int32 [S], written: 0 for requests with one row, and for those that sampled nothing.
    """
    num_experts, hidden = experts.shape
    assert 1 <= len(taps) <= 3 and 1 <= top <= num_experts
    assert router.shape == (num_experts, len(taps) * hidden) and router.is_contiguous() and experts.is_contiguous()
    assert all(x.shape[1] == hidden and x.stride(1) == 1 for x in (*taps, final_states, contemplate_embeds, futures))
    states = (tuple(taps), tuple(x.stride(0) for x in taps), final_states, final_states.stride(0))
    out = (contemplate_embeds, contemplate_embeds.stride(0), futures, futures.stride(0), has_future)
    given = (*states, idx_mapping, *paths, paths.path.stride(0), router, experts)
    sizes = (hidden, num_experts, torch.finfo(torch.float32).eps)
    block = min(MAX_COLUMNS, triton.next_power_of_2(hidden))
    constants = {"TOP": top, "EXPERTS": triton.next_power_of_2(num_experts), "BLOCK": block}
    _contemplate_kernel[(len(idx_mapping),)](*given, *out, *sizes, **constants, num_warps=8)


@triton.jit
def _write_contemplate_rows_kernel(
    embeds_ptr,  # [T, H], written
    embeds_stride,
    contemplate_embeds_ptr,  # [S, H]
    contemplate_embeds_stride,
    idx_mapping_ptr,  # int [R]
    query_start_loc_ptr,  # int32 [R + 1]
    cu_rows_ptr,  # int32 [R + 1]
    hidden,  # H
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    first, num_rows, nodes = request_rows(query_start_loc_ptr, cu_rows_ptr, request)
    begin = nodes + 1 + tl.program_id(1) * ROWS
    if (slot >= 0) & (begin < num_rows):
        row = begin + tl.arange(0, ROWS)
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = column < hidden
        embed = tl.load(contemplate_embeds_ptr + slot * contemplate_embeds_stride + column, mask=inside)
        target = embeds_ptr + (first + row)[:, None] * embeds_stride + column[None, :]
        embed = tl.broadcast_to(embed.to(embeds_ptr.dtype.element_ty)[None, :], (ROWS, BLOCK))
        tl.store(target, embed, mask=(row < num_rows)[:, None] & inside[None, :])


def write_contemplate_rows(
    *,
    embeds: torch.Tensor,
    contemplate_embeds: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_rows: torch.Tensor,
    max_rows: int,
) -> None:
    """Give every contemplate row of a step its request's embedding, dead ones too; one launch.

    Args:
        embeds: [at least T, H] the target's input embeddings, rewritten in those rows.
        contemplate_embeds: [S, H] from :func:`contemplate`.
        idx_mapping: int [R] slot of each request; rows of negative ones stay unchanged.
        query_start_loc, cu_rows: as in :func:`split_rows`.
        max_rows: most rows of a request.
    """
    hidden = embeds.shape[1]
    assert embeds.stride(1) == contemplate_embeds.stride(1) == 1 and contemplate_embeds.shape[1] == hidden
    if max_rows < 2:
        return
    block = min(MAX_COLUMNS // 4, triton.next_power_of_2(hidden))
    blocks_of_rows = triton.cdiv(max_rows - 1 - verified_nodes(max_rows - 1, contemplates=True), WRITTEN_ROWS)
    grid = (len(idx_mapping), blocks_of_rows, triton.cdiv(hidden, block))
    states = (embeds, embeds.stride(0), contemplate_embeds, contemplate_embeds.stride(0))
    rows = (idx_mapping, query_start_loc, cu_rows)
    _write_contemplate_rows_kernel[grid](*states, *rows, hidden, ROWS=WRITTEN_ROWS, BLOCK=block)
