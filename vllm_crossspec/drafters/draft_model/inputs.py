"""What a draft model reads at the start of a round: two rows a request, the last accepted token and the bonus token.

Its cache holds every token of the text but, at most, these two. The last accepted token was the last draft where all
drafts were accepted, and a last draft is never fed; otherwise its keys and values are there already and are written
once more. So a round needs two rows whatever was accepted, and no forward over rejected rows.

Shape legend: R requests, S request slots, T target tokens of the step, P rows that the buffers hold.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.types import StepInputs

NUM_ROWS = 2
"""Rows of a request."""
NOBODY = -1
"""The slot of rows that write nothing."""


class PairRows(NamedTuple):
    """Persistent buffers for the rows of a round, request by request; rows past P are not wanted.

    Attributes:
        input_ids: int32 [P]; positions: int64 [P].
        query_start_loc: int32 [S + 1]; seq_lens: int32 [S], past the batch 0.
        bonus_positions: int64 [S] of each request's second row, past the batch 0.
        request_slots: int64 [S]; ``NOBODY`` past the batch and for requests that are still inside their prompts.
        temperature: float32 [S], seeds: int64 [S], by slot.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    bonus_positions: torch.Tensor
    request_slots: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


@triton.jit(do_not_specialize=["num_reqs"])
def _prepare_pairs_kernel(
    input_ids_ptr,  # int32 [P]
    positions_ptr,  # int64 [P]
    query_start_loc_ptr,  # int32 [S + 1]
    seq_lens_ptr,  # int32 [S]
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
):
    # One program a request of the buffers; those past the batch are padded for CUDA graphs.
    request = tl.program_id(0).to(tl.int64)
    row = 2 * request
    if request < num_reqs:
        last = tl.load(target_starts_ptr + request + 1).to(tl.int64) - tl.load(num_rejected_ptr + request) - 1
        slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
        has_bonus = tl.load(num_sampled_ptr + request) > 0
        accepted = tl.load(target_ids_ptr + last)
        bonus = tl.where(has_bonus, tl.load(last_sampled_ptr + slot), accepted).to(tl.int32)
        # Requests inside their prompts take the two rows along without a slot: what they read is short, and unused.
        position = tl.where(has_bonus, tl.load(target_positions_ptr + last), 0)
        following = tl.minimum(position + 1, max_model_len - 1)
        tl.store(input_ids_ptr + row, accepted, mask=row < capacity)
        tl.store(input_ids_ptr + row + 1, bonus, mask=row + 1 < capacity)
        tl.store(positions_ptr + row, position, mask=row < capacity)
        tl.store(positions_ptr + row + 1, following, mask=row + 1 < capacity)
        tl.store(query_start_loc_ptr + request, row.to(tl.int32))
        tl.store(seq_lens_ptr + request, (following + 1).to(tl.int32))
        tl.store(bonus_positions_ptr + request, following)
        if WRITES:
            tl.store(request_slots_ptr + request, tl.where(has_bonus, slot, -1))
        else:
            tl.store(request_slots_ptr + request, -1)
        tl.store(out_temperature_ptr + slot, tl.load(temperature_ptr + slot))
        tl.store(out_seeds_ptr + slot, tl.load(seeds_ptr + slot))
    else:
        tl.store(input_ids_ptr + row, 0, mask=row < capacity)
        tl.store(input_ids_ptr + row + 1, 0, mask=row + 1 < capacity)
        tl.store(positions_ptr + row, 0, mask=row < capacity)
        tl.store(positions_ptr + row + 1, 0, mask=row + 1 < capacity)
        tl.store(query_start_loc_ptr + request, 2 * num_reqs)
        tl.store(seq_lens_ptr + request, 0)
        tl.store(bonus_positions_ptr + request, 0)
        tl.store(request_slots_ptr + request, -1)
    if request == tl.num_programs(0) - 1:
        tl.store(query_start_loc_ptr + request + 1, 2 * num_reqs)


def prepare_pairs(step: StepInputs, num_reqs: int, *, max_model_len: int, writes: bool, out: PairRows) -> None:
    """Fill ``out`` for a batch; one launch, whatever the batch.

    Args:
        step: in the target's rows of each request the accepted ones come first.
        num_reqs: R, requests to look at; the first ones of the batch.
        max_model_len: positions end before it.
        writes: False for rows whose keys and values must not be cached (dummy rounds).
        out: written.
    """
    batch = step.batch
    _prepare_pairs_kernel[(out.seq_lens.shape[0],)](
        out.input_ids,
        out.positions,
        out.query_start_loc,
        out.seq_lens,
        out.bonus_positions,
        out.request_slots,
        out.temperature,
        out.seeds,
        batch.input_ids,
        batch.positions,
        batch.query_start_loc,
        batch.idx_mapping,
        step.num_sampled,
        step.num_rejected,
        step.last_sampled,
        step.temperature,
        step.seeds,
        num_reqs,
        min(out.input_ids.shape[0], out.positions.shape[0]),
        max_model_len,
        WRITES=writes,
        num_warps=1,
    )
