"""Plain twins of the kernels."""

from collections.abc import Sequence

import torch


def locate_naive(
    slots: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    all_token_ids: torch.Tensor,
    pad: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kernels.locate``: the cache slots and the next tokens, int64 [n] each."""
    live, rows = slots >= 0, slots.clamp(min=0)
    blocks = torch.where(live, block_table[rows, positions // block_size].long(), 0)
    kv_slots = torch.where(blocks == 0, pad, blocks * block_size + positions % block_size)
    following = (positions + 1).clamp(max=all_token_ids.shape[1] - 1)
    return kv_slots, torch.where(live, all_token_ids[rows, following].long(), 0)


def accepted_lengths_naive(
    idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, num_rejected: torch.Tensor, num_computed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kernels.accepted_lengths``: int64 [R] last rows, int32 [R] computed tokens."""
    num_reqs = idx_mapping.shape[0]
    last_rows = query_start_loc[1 : num_reqs + 1].long() - num_rejected - 1
    computed = torch.where(idx_mapping < 0, 0, num_computed[idx_mapping.clamp(min=0).long()])
    return last_rows, computed.int()


def join_rows_naive(states: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """As ``kernels.join_rows``."""
    return torch.cat([s.index_select(0, rows) for s in states], dim=-1)
