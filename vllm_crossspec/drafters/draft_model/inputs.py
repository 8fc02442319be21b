"""Inputs of a draft model at the start of a round: a fixed number of rows per request, for its newest tokens.

The cache holds all earlier tokens. With chains it may lack the last draft, which is never fed, and the bonus token, so
two rows per request suffice. With trees it lacks the whole accepted path, because a tree's keys and values are in a
scratch: the rows are the longest path and two. Cached tokens are written again. So no pass runs over rejected rows.

Shape legend: R requests, S request slots, N rows of a request, T target tokens of the step, P rows of the buffers.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.types import StepInputs

CHAIN_ROWS = 2
"""Rows of a request whose drafts are chains."""
NO_SLOT = -1  # the slot of rows that write nothing


class RoundRows(NamedTuple):
    """Persistent buffers for the rows of a round, request by request; rows past P are dropped.

    Attributes:
        input_ids: int32 [P]; positions: int64 [P].
        row_slots: int64 [P] request slot that each row writes for; ``NO_SLOT`` for unused rows, for requests inside
            their prompts, and past the batch.
        query_start_loc: int32 [S + 1]; seq_lens: int32 [S], past the batch 0.
        bonus_rows: int64 [S] row of each request's bonus token; bonus_positions: int64 [S]. Past the batch 0.
        request_slots: int64 [S]; ``NO_SLOT`` past the batch and for requests inside their prompts.
        temperature: float32 [S], seeds: int64 [S], by slot.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    row_slots: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    bonus_rows: torch.Tensor
    bonus_positions: torch.Tensor
    request_slots: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


@triton.jit(do_not_specialize=["num_reqs"])
def _prepare_rows_kernel(
    input_ids_ptr,  # int32 [P]
    positions_ptr,  # int64 [P]
    row_slots_ptr,  # int64 [P]
    query_start_loc_ptr,  # int32 [S + 1]
    seq_lens_ptr,  # int32 [S]
    bonus_rows_ptr,  # int64 [S]
    bonus_positions_ptr,  # int64 [S]
    request_slots_ptr,  # int64 [S]
    out_temperature_ptr,  # float32 [S]
    out_seeds_ptr,  # int64 [S]
    target_ids_ptr,  # int32 [T]
    target_positions_ptr,  # int64 [T]
    target_starts_ptr,  # int32 [R + 1]
    idx_mapping_ptr,  # int [R]
    num_sampled_ptr,  # int32 [R]
    num_rejected_ptr,  # int32 [R]
    last_sampled_ptr,  # int64 [S]
    temperature_ptr,  # float32 [S]
    seeds_ptr,  # int64 [S]
    num_reqs,
    capacity,  # P
    max_model_len,
    WRITES: tl.constexpr,
    ROWS: tl.constexpr,  # N
    BLOCK: tl.constexpr,
):
    # One program per request of the buffers; those past the batch are padding for CUDA graphs.
    request = tl.program_id(0).to(tl.int64)
    first_row = ROWS * request
    i = tl.arange(0, BLOCK)
    inside = (i < ROWS) & (first_row + i < capacity)
    if request < num_reqs:
        last = tl.load(target_starts_ptr + request + 1).to(tl.int64) - tl.load(num_rejected_ptr + request) - 1
        known = last + 1 - tl.load(target_starts_ptr + request)
        slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
        has_bonus = tl.load(num_sampled_ptr + request) > 0
        accepted = tl.load(target_ids_ptr + last)
        bonus = tl.where(has_bonus, tl.load(last_sampled_ptr + slot), accepted).to(tl.int32)
        # Requests inside their prompts get rows without a slot: they read little, and nothing uses the result.
        count = tl.where(has_bonus, tl.minimum(known, ROWS - 1), 1)
        position = tl.where(has_bonus, tl.load(target_positions_ptr + last), 0)
        following = tl.minimum(position + 1, max_model_len - 1)
        first = position - count + 1
        # Near the longest position the rows begin earlier, and the first ones write nothing.
        base = tl.minimum(first, max_model_len - ROWS)
        place = base + i
        shown = tl.minimum(tl.maximum(place, first), following)
        token = tl.load(target_ids_ptr + last - tl.maximum(position - shown, 0), mask=inside, other=0)
        token = tl.where(shown == following, bonus, token)
        owner = tl.where(has_bonus, slot, -1) if WRITES else tl.full([], -1, tl.int64)
        tl.store(input_ids_ptr + first_row + i, token, mask=inside)
        tl.store(positions_ptr + first_row + i, place, mask=inside)
        tl.store(row_slots_ptr + first_row + i, tl.where(shown == place, owner, -1), mask=inside)
        tl.store(request_slots_ptr + request, owner)
        tl.store(query_start_loc_ptr + request, first_row.to(tl.int32))
        tl.store(seq_lens_ptr + request, (base + ROWS).to(tl.int32))
        tl.store(bonus_rows_ptr + request, first_row + following - base)
        tl.store(bonus_positions_ptr + request, following)
        tl.store(out_temperature_ptr + slot, tl.load(temperature_ptr + slot))
        tl.store(out_seeds_ptr + slot, tl.load(seeds_ptr + slot))
    else:
        nothing = tl.zeros([BLOCK], tl.int32)
        tl.store(input_ids_ptr + first_row + i, nothing, mask=inside)
        tl.store(positions_ptr + first_row + i, nothing.to(tl.int64), mask=inside)
        tl.store(row_slots_ptr + first_row + i, nothing.to(tl.int64) - 1, mask=inside)
        tl.store(query_start_loc_ptr + request, ROWS * num_reqs)
        tl.store(seq_lens_ptr + request, 0)
        tl.store(bonus_rows_ptr + request, 0)
        tl.store(bonus_positions_ptr + request, 0)
        tl.store(request_slots_ptr + request, -1)
    if request == tl.num_programs(0) - 1:
        tl.store(query_start_loc_ptr + request + 1, ROWS * num_reqs)


def prepare_rows(
    step: StepInputs, num_reqs: int, *, num_rows: int, max_model_len: int, writes: bool, out: RoundRows
) -> None:
    """Fill ``out`` for a batch; one launch.

    A request's rows are its accepted tokens of the step (at most the newest N - 1), then its bonus token, then unused
    rows.

    Args:
        step: among a request's target rows the accepted ones come first.
        num_reqs: R, first requests of the batch.
        num_rows: N, at least 2 and at most ``max_model_len``.
        max_model_len: positions end before it.
        writes: False if keys and values must not be cached (dummy rounds).
        out: written.
    """
    target = (step.batch.input_ids, step.batch.positions, step.batch.query_start_loc, step.batch.idx_mapping)
    sampled = (step.num_sampled, step.num_rejected, step.last_sampled, step.temperature, step.seeds)
    sizes = (num_reqs, min(len(out.input_ids), len(out.positions), len(out.row_slots)), max_model_len)
    constants = {"WRITES": writes, "ROWS": num_rows, "BLOCK": triton.next_power_of_2(num_rows)}
    _prepare_rows_kernel[(len(out.seq_lens),)](*out, *target, *sampled, *sizes, **constants, num_warps=1)
