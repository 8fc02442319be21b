"""Kernels for the inputs of a tree level's forward."""

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
        if (ROWS > TOP_K) & (node == 0):  # a future follows the level's nodes
            tl.store(positions_ptr + request * ROWS + TOP_K, tl.minimum(position + 1, last_position))
    if (ROWS > TOP_K) & (node == 0):
        future = tl.load(future_states_ptr + request * future_states_stride + column, mask=column < width)
        tl.store(states_ptr + (request * ROWS + TOP_K) * states_stride + column, future, mask=column < width)


@functools.cache
def _blocks_of(width: int) -> tuple[int, int]:
    """Size and number of a state's blocks; cached, because Triton's functions for it are slow."""
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
        future_states: [at least R, H] of an additional row after each request's nodes in ``states`` and ``positions``,
            at the next position; or None.
    """
    futures = states if future_states is None else future_states
    (num_reqs, top_k), width = beam_parents.shape, states.shape[1]
    block, num_blocks = _blocks_of(width)
    before = (parent_states, parent_states.stride(0), beam_parents, beam_parents.stride(0), root_positions)
    out = (states, states.stride(0), positions, futures, futures.stride(0))
    rows = {"ROWS": top_k + (future_states is not None), "ROWS_BEFORE": parent_states.shape[0] // num_reqs}
    grid, numbers = (num_reqs * top_k, num_blocks), (level, last_position, width)
    _prepare_level_kernel[grid](*before, *out, *numbers, TOP_K=top_k, **rows, BLOCK=block)


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
    """Make the batch of all levels: accepted tokens as the dense part, ``top_k`` query rows per request; one launch.

    Args:
        positions: int64 [at least S] of each request's last accepted token.
        seq_lens: int32 [S] of the first pass, including rejected drafts; rewritten without them. 0 marks the padding of
            a CUDA graph, after all requests, and stays.
        query_start_loc: int32 [S + 1], written.
        top_k: k.
    """
    block = triton.next_power_of_2(len(seq_lens) + 1)
    # One warp: a second one could read lengths that the first has rewritten.
    _prepare_growth_kernel[(1,)](positions, seq_lens, query_start_loc, len(seq_lens), top_k, BLOCK=block, num_warps=1)
