"""Inputs of a level of EAGLE-3's tree: what each beam node brings to the drafter's next forward."""

# mypy: disable-error-code="no-untyped-def"
import functools

import torch
import triton
import triton.language as tl


@triton.jit
def _prepare_level_kernel(
    parent_states_ptr,  # [R * ROWS_BEFORE, H]
    parent_states_stride,
    beam_parents_ptr,  # int32 [R, k], index into the level before
    beam_parents_stride,
    root_positions_ptr,  # int64 [R]
    states_ptr,  # [R * ROWS, H], written where there are nodes
    states_stride,
    positions_ptr,  # int64 [R * ROWS], written likewise
    future_states_ptr,  # [R, H]; unread where there are no futures
    future_states_stride,
    level,
    last_position,
    width,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,  # of a request: k, and rows that are no nodes
    ROWS_BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, node = tl.program_id(0).to(tl.int64) // TOP_K, tl.program_id(0).to(tl.int64) % TOP_K
    row = request * ROWS + node
    parent = tl.load(beam_parents_ptr + request * beam_parents_stride + node).to(tl.int64)
    source = request * ROWS_BEFORE + (parent if ROWS_BEFORE > 1 else 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    states = tl.load(parent_states_ptr + source * parent_states_stride + column, mask=column < width)
    tl.store(states_ptr + row * states_stride + column, states, mask=column < width)
    if tl.program_id(1) == 0:
        position = tl.load(root_positions_ptr + request) + level
        tl.store(positions_ptr + row, tl.minimum(position, last_position))
        if (ROWS > TOP_K) & (node == 0):  # a future stands behind the level's nodes
            tl.store(positions_ptr + request * ROWS + TOP_K, tl.minimum(position + 1, last_position))
    if (ROWS > TOP_K) & (node == 0):
        future = tl.load(future_states_ptr + request * future_states_stride + column, mask=column < width)
        tl.store(states_ptr + (request * ROWS + TOP_K) * states_stride + column, future, mask=column < width)


@functools.cache
def _blocks_of(width: int) -> tuple[int, int]:
    """Size and number of the blocks of a state; kept, for Triton's functions for it take longer than they seem to."""
    block = min(1024, triton.next_power_of_2(width))
    return block, triton.cdiv(width, block)


def prepare_level(
    *,
    parent_states: torch.Tensor,
    beam_parents: torch.Tensor,
    root_positions: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    level: int,
    last_position: int,
    future_states: torch.Tensor | None = None,
) -> None:
    """Give every beam node of a level its parent's state and its position; one launch.

    Args:
        parent_states: [R, H] the roots' at level 1, else [R * k, H] of the level before.
        beam_parents: int32 [R, k] each node's parent in the level before.
        root_positions: int64 [R] position of the drafter's row that proposed the first level.
        states: [R * k, H], written.
        positions: int64 [R * k], written.
        level: from 1.
        last_position: no position is larger (the model's length minus one).
        future_states: [at least R, H] of one row more for every request, behind its nodes' rows in ``states`` and
            ``positions``, which gets the position after theirs (ConFu). None where there is none.
    """
    has_future = future_states is not None
    futures = states if future_states is None else future_states
    (num_reqs, top_k), width = beam_parents.shape, states.shape[1]
    block, num_blocks = _blocks_of(width)
    _prepare_level_kernel[(num_reqs * top_k, num_blocks)](
        parent_states,
        parent_states.stride(0),
        beam_parents,
        beam_parents.stride(0),
        root_positions,
        states,
        states.stride(0),
        positions,
        futures,
        futures.stride(0),
        level,
        last_position,
        width,
        TOP_K=top_k,
        ROWS=top_k + has_future,
        ROWS_BEFORE=parent_states.shape[0] // num_reqs,
        BLOCK=block,
    )


@triton.jit
def _prepare_growth_kernel(
    positions_ptr,  # int64 [S]
    seq_lens_ptr,  # int32 [S], rewritten
    query_start_loc_ptr,  # int32 [S + 1], written
    max_num_reqs,
    top_k,
    BLOCK: tl.constexpr,
):
    request = tl.arange(0, BLOCK)
    inside = request < max_num_reqs
    real = tl.load(seq_lens_ptr + request, mask=inside, other=0) > 0
    length = tl.load(positions_ptr + request, mask=real, other=-1) + 1
    tl.store(seq_lens_ptr + request, length.to(tl.int32), mask=inside)
    num_reqs = tl.sum(real.to(tl.int32), axis=0)
    tl.store(query_start_loc_ptr + request, tl.minimum(request, num_reqs) * top_k, mask=request < max_num_reqs + 1)


def prepare_growth(
    *, positions: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, top_k: int
) -> None:
    """The batch of all levels: the accepted tokens of each request as its dense part, ``top_k`` query rows; one launch.

    It reads what the first pass leaves, so that a CUDA graph can hold it.

    Args:
        positions: int64 [at least S] of each request's last accepted token.
        seq_lens: int32 [S] of the first pass, rejected draft tokens included; rewritten without those. 0 marks the
            padding of a CUDA graph, behind all requests, and stays.
        query_start_loc: int32 [S + 1], written.
        top_k: k.
    """
    max_num_reqs = seq_lens.shape[0]
    _prepare_growth_kernel[(1,)](
        positions, seq_lens, query_start_loc, max_num_reqs, top_k, BLOCK=triton.next_power_of_2(max_num_reqs + 1)
    )
