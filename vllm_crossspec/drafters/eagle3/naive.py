"""The kernel in plain PyTorch, against which it is tested."""

import torch


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
    """As ``prepare_level``."""
    num_reqs, top_k = beam_parents.shape
    rows_before = parent_states.shape[0] // num_reqs
    parents = beam_parents if rows_before > 1 else torch.zeros_like(beam_parents)
    sources = torch.arange(num_reqs, device=parents.device)[:, None] * rows_before + parents
    rows_per_req = top_k + (future_states is not None)
    num_rows = num_reqs * rows_per_req
    level_states = states[:num_rows].view(num_reqs, rows_per_req, -1)
    level_states[:, :top_k] = parent_states[sources]
    deeper = root_positions[:num_reqs, None] + level + torch.zeros_like(parents, dtype=root_positions.dtype)
    if future_states is not None:
        level_states[:, top_k] = future_states[:num_reqs]
        deeper = torch.cat([deeper, deeper[:, :1] + 1], dim=1)
    positions[:num_rows] = deeper.clamp(max=last_position).flatten()
