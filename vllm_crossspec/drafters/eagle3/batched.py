"""Inputs of a tree's level as PyTorch operations over the batch, for machines on which kernels are interpreted."""

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
) -> None:
    """See :func:`vllm_crossspec.drafters.eagle3.levels.prepare_level`."""
    num_reqs, top_k = beam_parents.shape
    rows_before = parent_states.shape[0] // num_reqs
    parents = beam_parents if rows_before > 1 else torch.zeros_like(beam_parents)
    sources = torch.arange(num_reqs, device=parents.device)[:, None] * rows_before + parents
    num_rows = num_reqs * top_k
    states[:num_rows] = parent_states[sources.reshape(num_rows)]
    deeper = (root_positions[:num_reqs] + level).clamp(max=last_position)
    positions[:num_rows] = deeper.repeat_interleave(top_k)
