"""Inputs of DART's one forward: the last accepted entry of every request, and masks after it.

The entry at position p joins the target's features of p with the embedding of the token at p + 1. Entries before the
last accepted one need only keys and values. The last one and K - 1 masks are a request's K query rows, at positions p,
p + 1, ... Masks write keys and values after the accepted tokens. The next round overwrites them before they are read.

Shape legend: R requests, S request slots, T target tokens of the step, K query rows (draft tokens) of a request.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.types import StepInputs

PAD_SLOT = -1  # the cache slot of rows that write nothing


class DartRows(NamedTuple):
    """Persistent buffers for the rows of a round; S most requests, T most target tokens, P at most S * K query rows.

    Attributes:
        context_positions: int64 [T] of accepted entries; 0 in other rows.
        context_tokens: int64 [T] id of the token after each; 0 in other rows.
        context_slots: int64 [T] cache slot of each; ``PAD_SLOT`` for the last accepted entry, which is a query row,
            and for rejected rows.
        entry_rows: int64 [S] row of the last accepted entry in the context buffers.
        entry_tokens: int64 [S] id of the token after it.
        positions: int64 [P] of the query rows, request by request; rows past P are dropped.
        slots: int64 [P] cache slot of each.
        query_start_loc: int32 [S + 1]; seq_lens: int32 [S], past the batch 0.
        predicted_positions: int64 [S * K] of the token that each query row drafts.
        request_slots: int64 [S * K] slot of each query row's request; -1 past the batch.
        temperature: float32 [S], seeds: int64 [S], by slot.
    """

    context_positions: torch.Tensor
    context_tokens: torch.Tensor
    context_slots: torch.Tensor
    entry_rows: torch.Tensor
    entry_tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    predicted_positions: torch.Tensor
    request_slots: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


@triton.jit
def _cache_slot(block_table_ptr, position, block_size, num_blocks, is_wanted):
    # Block 0 means no block; blocks past the table do not exist.
    block = position // block_size
    is_wanted = is_wanted & (block < num_blocks)
    number = tl.load(block_table_ptr + block, mask=is_wanted, other=0).to(tl.int64)
    return tl.where(is_wanted & (number != 0), number * block_size + position % block_size, -1)


@triton.jit(do_not_specialize=["kept"])
def _context_rows_kernel(
    context_positions_ptr,  # int64 [T]
    context_tokens_ptr,  # int64 [T]
    context_slots_ptr,  # int64 [T]
    input_ids_ptr,  # int32 [T]
    target_positions_ptr,  # int64 [T]
    target_starts_ptr,  # int32 [R + 1]
    num_rejected_ptr,  # int32 [R]
    entry_tokens_ptr,  # int64 [S]
    block_table_ptr,  # int32 [R, blocks]
    block_table_stride,
    num_blocks,
    block_size,
    kept,  # rows of each request in the buffers; 0: all that it has
    TAKES_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(target_starts_ptr + request).to(tl.int64)
    end = tl.load(target_starts_ptr + request + 1).to(tl.int64)
    accepted = end - tl.load(num_rejected_ptr + request)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = start + offset
    place = tl.where(kept > 0, request * kept + offset, row)
    is_kept = offset < tl.where(kept > 0, tl.minimum(end - start, kept), end - start)
    is_accepted = row < accepted
    is_last = row == accepted - 1
    position = tl.load(target_positions_ptr + row, mask=is_accepted, other=0)
    token = tl.load(input_ids_ptr + row + 1, mask=is_accepted & (row < accepted - 1), other=0).to(tl.int64)
    token = tl.where(is_last, tl.load(entry_tokens_ptr + request), token)
    writes = is_accepted
    if not TAKES_LAST:
        writes = is_accepted & (row < accepted - 1)
    table = block_table_ptr + request * block_table_stride
    slot = _cache_slot(table, position, block_size, num_blocks, writes)
    tl.store(context_positions_ptr + place, position, mask=is_kept)
    tl.store(context_tokens_ptr + place, token, mask=is_kept)
    tl.store(context_slots_ptr + place, slot, mask=is_kept)


@triton.jit(do_not_specialize=["num_reqs", "kept"])
def _query_rows_kernel(
    entry_rows_ptr,  # int64 [S]
    entry_tokens_ptr,  # int64 [S]
    positions_ptr,  # int64 [P]
    slots_ptr,  # int64 [P]
    query_start_loc_ptr,  # int32 [S + 1]
    seq_lens_ptr,  # int32 [S]
    predicted_positions_ptr,  # int64 [S * K]
    request_slots_ptr,  # int64 [S * K]
    out_temperature_ptr,  # float32 [S]
    out_seeds_ptr,  # int64 [S]
    target_positions_ptr,  # int64 [T]
    target_starts_ptr,  # int32 [R + 1]
    idx_mapping_ptr,  # int [R]
    last_sampled_ptr,  # int64 [S]
    next_prefill_tokens_ptr,  # int [S]
    num_sampled_ptr,  # int32 [R]
    num_rejected_ptr,  # int32 [R]
    temperature_ptr,  # float32 [S]
    seeds_ptr,  # int64 [S]
    block_table_ptr,  # int32 [R, blocks]
    block_table_stride,
    num_blocks,
    block_size,
    num_reqs,
    num_queries,  # K
    capacity,  # P
    kept,  # rows of each request in the buffers; 0: all that it has
    max_model_len,
    BLOCK: tl.constexpr,
):
    # One program per request of the buffers; those past the batch are padding for CUDA graphs.
    request = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    inside = offset < num_queries
    rows = request * num_queries + offset
    has_room = inside & (rows < capacity)
    if request < num_reqs:
        start = tl.load(target_starts_ptr + request).to(tl.int64)
        last = tl.load(target_starts_ptr + request + 1).to(tl.int64) - tl.load(num_rejected_ptr + request) - 1
        slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
        sampled = tl.load(last_sampled_ptr + slot).to(tl.int64)
        in_prompt = tl.load(next_prefill_tokens_ptr + slot).to(tl.int64)
        position = tl.load(target_positions_ptr + last) + offset
        is_possible = inside & (position < max_model_len)
        table = block_table_ptr + request * block_table_stride
        cache_slot = _cache_slot(table, position, block_size, num_blocks, is_possible)
        tl.store(entry_rows_ptr + request, tl.where(kept > 0, request * kept + last - start, last))
        tl.store(entry_tokens_ptr + request, tl.where(tl.load(num_sampled_ptr + request) > 0, sampled, in_prompt))
        tl.store(positions_ptr + rows, tl.minimum(position, max_model_len - 1), mask=has_room)
        tl.store(slots_ptr + rows, cache_slot, mask=has_room)
        tl.store(predicted_positions_ptr + rows, position + 2, mask=inside)
        tl.store(request_slots_ptr + rows, tl.zeros([BLOCK], tl.int64) + slot, mask=inside)
        length = tl.load(target_positions_ptr + last) + num_queries
        tl.store(seq_lens_ptr + request, tl.minimum(length, max_model_len).to(tl.int32))
        tl.store(query_start_loc_ptr + request, (request * num_queries).to(tl.int32))
        tl.store(out_temperature_ptr + slot, tl.load(temperature_ptr + slot))
        tl.store(out_seeds_ptr + slot, tl.load(seeds_ptr + slot))
    else:
        zeros = tl.zeros([BLOCK], tl.int64)
        tl.store(entry_rows_ptr + request, 0)
        tl.store(entry_tokens_ptr + request, 0)
        tl.store(positions_ptr + rows, zeros, mask=has_room)
        tl.store(slots_ptr + rows, zeros - 1, mask=has_room)
        tl.store(predicted_positions_ptr + rows, zeros, mask=inside)
        tl.store(request_slots_ptr + rows, zeros - 1, mask=inside)
        tl.store(seq_lens_ptr + request, 0)
        tl.store(query_start_loc_ptr + request, num_reqs * num_queries)
    if request == tl.num_programs(0) - 1:
        tl.store(query_start_loc_ptr + request + 1, num_reqs * num_queries)


def prepare_rows(
    step: StepInputs,
    *,
    block_table: torch.Tensor,
    block_size: int,
    num_queries: int,
    max_model_len: int,
    takes_last: bool,
    kept: int,
    out: DartRows,
) -> None:
    """Fill ``out`` for a batch; two launches.

    Args:
        step: among a request's target rows the accepted ones come first.
        block_table: int32 [>= R, blocks] of the drafter's cache group.
        block_size: tokens of a block.
        num_queries: K.
        max_model_len: later positions are not cached.
        kept: number of first rows of every request in the buffers, which include all accepted ones; 0: the buffers hold
            all target rows.
        takes_last: whether to cache the last accepted entry as context too, because no query rows follow.
        out: written.
    """
    batch, context, queries = step.batch, out[:3], out[3:]
    target = (batch.positions, batch.query_start_loc, batch.idx_mapping, step.last_sampled, step.next_prefill_tokens)
    sampled = (step.num_sampled, step.num_rejected, step.temperature, step.seeds)
    blocks = (block_table, block_table.stride(0), block_table.shape[1], block_size)
    sizes = (batch.num_reqs, num_queries, min(len(out.positions), len(out.slots)), kept, max_model_len)
    _query_rows_kernel[(len(out.entry_rows),)](
        *queries, *target, *sampled, *blocks, *sizes, BLOCK=triton.next_power_of_2(num_queries), num_warps=1
    )
    longest = batch.max_query_len or int(batch.num_scheduled_tokens.max())
    longest = min(longest, kept) if kept else longest
    # Only two block sizes, because each is compiled, and a prompt's chunk can have any length.
    block = 64 if longest <= 64 else 256
    grid = (batch.num_reqs, triton.cdiv(longest, block))
    rows = (batch.input_ids, batch.positions, batch.query_start_loc, step.num_rejected, out.entry_tokens)
    _context_rows_kernel[grid](*context, *rows, *blocks, kept, TAKES_LAST=takes_last, BLOCK=block, num_warps=1)
