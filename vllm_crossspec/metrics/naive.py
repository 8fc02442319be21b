"""The acceptance counters in plain PyTorch, which the kernels are tested against."""

import torch

from vllm_crossspec.kinds.contemplate_layout import verified_nodes
from vllm_crossspec.types import NO_DRAFTS


def mark_drafted(drafted_by: torch.Tensor, modes: torch.Tensor, idx_mapping: torch.Tensor, drafter: int) -> None:
    """As `kernel.mark_drafted`."""
    slots = idx_mapping[idx_mapping >= 0].long()
    drafted_by[slots[modes[slots] != NO_DRAFTS]] = drafter


def record_acceptance(
    counts: torch.Tensor,
    drafted_by: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    num_computed: torch.Tensor,
    prefill_len: torch.Tensor,
    contemplates: bool = False,
) -> None:
    """As `kernel.record_acceptance`."""
    for row, slot in enumerate(idx_mapping.tolist()):
        if slot < 0:
            continue
        drafter = int(drafted_by[slot])
        sampled, drafted = int(num_sampled[row]), int(num_sampled[row] + num_rejected[row]) - 1
        drafted = verified_nodes(drafted, contemplates)
        drafted_by[slot] = -1
        starts_in_prompt = int(num_computed[slot]) - sampled < int(prefill_len[slot])
        if drafter < 0 or drafted <= 0 or starts_in_prompt:
            continue
        counts[drafter, :3] += torch.tensor([1, drafted, sampled - 1], device=counts.device)
        counts[drafter, 3 : 2 + sampled] += 1
