"""What DART's one forward reads: the last accepted entry of every request, and masks after it.

The entry at position p joins the target's features of p with the embedding of the token at p + 1. Entries before the
last accepted one need keys and values alone; the last one and K - 1 masks are the K query rows of a request, at
positions p, p + 1, ... Masks write their keys and values behind the accepted tokens, where the entries of the next
round take their place before anything reads them.

Shape legend: R requests, S request slots, T target tokens of the step, K query rows (draft tokens) of a request.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.types import StepInputs

PAD_SLOT = -1
"""The cache slot of rows that write nothing."""


class DartRows(NamedTuple):
    """Persistent buffers for the rows of a round; S most requests, T most target tokens, P at most S * K query rows.

    Attributes:
        context_positions: int64 [T] of every row in the buffers that is an accepted entry, 0 elsewhere.
        context_tokens: int64 [T] id of the token after each, 0 elsewhere.
        context_slots: int64 [T] cache slot of each; ``PAD_SLOT`` for the last accepted entry, which is a query row,
            and for rejected rows.
        entry_rows: int64 [S] place in the buffers of the last accepted entry.
        entry_tokens: int64 [S] id of the token after it.
        positions: int64 [P] of the query rows, request by request; rows past P are not wanted.
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
    # Block 0 holds nothing; blocks past the table do not exist.
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
    # One program a request of the buffers; those past the batch are padded for CUDA graphs.
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
    """Fill ``out`` for a batch; two launches, whatever the batch.

    Args:
        step: in the target's rows of each request the accepted ones come first.
        block_table: int32 [>= R, blocks] of the drafter's cache group.
        block_size: tokens of a block.
        num_queries: K.
        max_model_len: positions from there on are not cached.
        kept: the buffers hold so many rows of every request, the first ones, among which all accepted ones are; 0: the
            buffers hold all rows of the target.
        takes_last: whether the last accepted entry is to be cached as context, too (no query rows will follow).
        out: written.
    """
    batch, num_slots, num_blocks = step.batch, out.entry_rows.shape[0], block_table.shape[1]
    _query_rows_kernel[(num_slots,)](
        out.entry_rows,
        out.entry_tokens,
        out.positions,
        out.slots,
        out.query_start_loc,
        out.seq_lens,
        out.predicted_positions,
        out.request_slots,
        out.temperature,
        out.seeds,
        batch.positions,
        batch.query_start_loc,
        batch.idx_mapping,
        step.last_sampled,
        step.next_prefill_tokens,
        step.num_sampled,
        step.num_rejected,
        step.temperature,
        step.seeds,
        block_table,
        block_table.stride(0),
        num_blocks,
        block_size,
        batch.num_reqs,
        num_queries,
        min(out.positions.shape[0], out.slots.shape[0]),
        kept,
        max_model_len,
        BLOCK=triton.next_power_of_2(num_queries),
        num_warps=1,
    )
    longest = int(batch.num_scheduled_tokens.max())
    longest = min(longest, kept) if kept else longest
    # Two sizes: each is compiled anew, and a chunk of a prompt can be of any length.
    block = 64 if longest <= 64 else 256
    _context_rows_kernel[(batch.num_reqs, triton.cdiv(longest, block))](
        out.context_positions,
        out.context_tokens,
        out.context_slots,
        batch.input_ids,
        batch.positions,
        batch.query_start_loc,
        step.num_rejected,
        out.entry_tokens,
        block_table,
        block_table.stride(0),
        num_blocks,
        block_size,
        kept,
        TAKES_LAST=takes_last,
        BLOCK=block,
        num_warps=1,
    )
