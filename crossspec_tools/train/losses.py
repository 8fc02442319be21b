"""Losses of drafters that draft a block at once."""

import torch

from crossspec_tools.train.generations import Batch, at
from crossspec_tools.train.states import Teacher


def drafted_places(
    teacher: Teacher, batch: Batch, first: torch.Tensor, steps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the teacher speaks of the tokens of blocks that are drafted at once.

    Returns (int64 [B, A, K] numbers of the teacher's places; bool, whether the token lies in the response).

    Args:
        first: int64 [B, A], the place whose next token is the block's first.
        steps: int64 [K], 0 to K - 1.
    """
    source = first[..., None] + steps
    return at(teacher.index, source), source + 1 < batch.ends[:, None, None]


def block_loss(
    losses: torch.Tensor, hits: torch.Tensor, valid: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean of the losses, and how often first and last drafts are right.

    Args:
        losses: [N] of the drafts that count.
        hits: bool [N], which of them are right.
        valid: bool [B, A, K], which drafts count.
        weights: [K] of a block's drafts.
    """
    weight = weights.expand(valid.shape)[valid]
    loss = (losses * weight).sum() / weight.sum().clamp(min=1e-6)
    ends = {f"hit_{i + 1}": hits[valid.nonzero()[:, 2] == i] for i in (0, len(weights) - 1)}
    return loss, {name: right.float().mean().item() for name, right in ends.items() if len(right)}
