"""Kernels of catching up: cache slots and next tokens of missed tokens, accepted lengths, joined states."""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence

import torch
import triton
import triton.language as tl


# One variant for every number of tokens, so that no request waits for a compilation.
@triton.jit(do_not_specialize=["slots_ptr", "positions_ptr", "kv_slots_ptr", "next_tokens_ptr", "num_tokens"])
def _locate_kernel(
    slots_ptr,  # int64 [n] request slot, negative: padding
    positions_ptr,  # int64 [n]
    block_table_ptr,  # int32 [S, max_blocks]
    block_table_stride,
    all_token_ids_ptr,  # int32 [S, max_model_len]
    all_token_ids_stride,
    kv_slots_ptr,  # int64 [n] out
    next_tokens_ptr,  # int64 [n] out
    num_tokens,
    block_size,
    last_position,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=inside, other=-1)
    live = slot >= 0
    position = tl.load(positions_ptr + token, mask=live, other=0)
    block = tl.load(block_table_ptr + slot * block_table_stride + position // block_size, mask=live, other=0)
    kv_slot = block.to(tl.int64) * block_size + position % block_size
    # Block 0 is no request's: a sliding window has dropped the token.
    tl.store(kv_slots_ptr + token, tl.where(block == 0, PAD, kv_slot), mask=inside)
    following = tl.minimum(position + 1, last_position)
    next_token = tl.load(all_token_ids_ptr + slot * all_token_ids_stride + following, mask=live, other=0)
    tl.store(next_tokens_ptr + token, next_token.to(tl.int64), mask=inside)


def locate(
    *,
    slots: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    all_token_ids: torch.Tensor,
    kv_slots: torch.Tensor,
    next_tokens: torch.Tensor,
    pad: int,
) -> None:
    """Find the cache slot of each token and the token after it.

    Args:
        slots: int64 [n] request slot of each token; negative for padding, which gets ``pad`` and token 0.
        positions: int64 [n].
        block_table: int32 [S, max_blocks] of every slot; 0 is no block.
        block_size: tokens a block.
        all_token_ids: int32 [S, L] prompt and accepted tokens of every slot.
        kv_slots: int64 [n], written; ``pad`` where there is no block.
        next_tokens: int64 [n], written; id of the token at the next position.
        pad: the cache slot that means "none".
    """
    num_tokens, block = slots.shape[0], 256
    _locate_kernel[(triton.cdiv(num_tokens, block),)](
        slots,
        positions,
        block_table,
        block_table.stride(0),
        all_token_ids,
        all_token_ids.stride(0),
        kv_slots,
        next_tokens,
        num_tokens,
        block_size,
        all_token_ids.shape[1] - 1,
        PAD=pad,
        BLOCK=block,
    )


@triton.jit
def _accepted_lengths_kernel(
    idx_mapping_ptr,  # int [R]
    query_start_loc_ptr,  # int32 [R + 1]
    num_rejected_ptr,  # int32 [R]
    num_computed_ptr,  # int32 [S]
    last_rows_ptr,  # int64 [R] out
    computed_ptr,  # int32 [R] out
):
    row = tl.program_id(0)
    end = tl.load(query_start_loc_ptr + row + 1) - tl.load(num_rejected_ptr + row)
    tl.store(last_rows_ptr + row, end.to(tl.int64) - 1)
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    computed = tl.load(num_computed_ptr + tl.maximum(slot, 0))
    tl.store(computed_ptr + row, tl.where(slot < 0, 0, computed))


def accepted_lengths(
    *,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor,
    num_computed: torch.Tensor,
    last_rows: torch.Tensor,
    computed: torch.Tensor,
) -> None:
    """Write, after a step, the row of each request's last accepted token and its number of tokens.

    Args:
        idx_mapping: int [R] slot of each request; negative entries are padding.
        query_start_loc: int32 [R + 1].
        num_rejected: int32 [R].
        num_computed: int32 [S], already counting this step.
        last_rows: int64 [R], written.
        computed: int32 [R], written.
    """
    _accepted_lengths_kernel[(idx_mapping.shape[0],)](
        idx_mapping, query_start_loc, num_rejected, num_computed, last_rows, computed
    )


@triton.jit(do_not_specialize=["given_ptr", "stride", "num_rows"])
def _last_tokens_kernel(
    given_ptr,  # int64 [3, R]
    stride,
    accepted_ptr,  # int32 [batch]
    positions_ptr,  # int64 [R] out
    kept_ptr,  # int64 [R] out
    lengths_ptr,  # int32 [R] out
    num_rows,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_rows
    row = tl.load(given_ptr + i, mask=inside, other=0)
    first = tl.load(given_ptr + 2 * stride + i, mask=inside, other=0)
    length = tl.load(accepted_ptr + row, mask=inside, other=1)
    position = length.to(tl.int64) - 1
    tl.store(positions_ptr + i, position, mask=inside)
    tl.store(kept_ptr + i, first + position, mask=inside)
    tl.store(lengths_ptr + i, length, mask=inside)


def last_tokens(
    given: torch.Tensor, accepted: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Find the last accepted token of requests whose lengths the host does not know yet; one launch.

    Args:
        given: int64 [3, R]: the requests' numbers in the batch, their slots, and the buffer's row of position 0.
        accepted: int32 [batch] accepted tokens.
        positions, kept: int64 [R], written: of the last accepted token, and the buffer's row of it.
        lengths: int32 [R], written: accepted tokens.
    """
    num_rows, block = given.shape[1], 128
    _last_tokens_kernel[(triton.cdiv(num_rows, block),)](
        given, given.stride(0), accepted, positions, kept, lengths, num_rows, BLOCK=block
    )


# One variant for every batch, so that no request waits for a compilation.
@triton.jit(do_not_specialize=["rows_ptr"])
def _join_rows_kernel(
    states,  # tuple of pointers to [T, H]
    strides,  # tuple of their row strides
    rows_ptr,  # int64 [n]
    out_ptr,  # [n, taps * H] out
    width,  # H
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(rows_ptr + row)
    for i in tl.static_range(len(states)):
        values = tl.load(states[i] + source * strides[i] + column, mask=inside)
        tl.store(out_ptr + (row * len(states) + i) * width + column, values, mask=inside)


def join_rows(states: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """[n, taps * H]: rows (int64 [n]) of all states ([T, H], rows contiguous), side by side; one launch."""
    num_rows, width = rows.shape[0], states[0].shape[1]
    assert all(s.shape[1] == width and s.stride(1) == 1 and s.dtype == states[0].dtype for s in states)
    out = states[0].new_empty(num_rows, len(states) * width)
    block = min(1024, triton.next_power_of_2(width))
    _join_rows_kernel[(num_rows, triton.cdiv(width, block))](
        tuple(states), tuple(s.stride(0) for s in states), rows, out, width, BLOCK=block
    )
    return out


def joined(states: list[torch.Tensor], taps: list[int], rows: torch.Tensor | None = None) -> torch.Tensor:
    """[n, taps * H] of the tapped states [T, H] at ``rows`` (int64 [n]; None: all); width 0 without taps."""
    own = [states[i] for i in taps]
    if not own:
        return states[0][: None if rows is None else len(rows), :0]
    if rows is None:
        return torch.cat(own, dim=-1)
    return join_rows(own, rows)
