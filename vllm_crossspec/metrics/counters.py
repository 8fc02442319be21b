"""Acceptance by drafter, kept on the device."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm_crossspec.metrics.kernel import mark_drafted, record_acceptance


class AcceptanceCounters:
    """Drafts, draft tokens, accepted tokens and accepted tokens per position, for every drafter.

    They count the drafts that the device verified. vLLM's own ``vllm:spec_decode_*`` counters leave out the round in
    flight when a request ends (async scheduling). They include placeholders of a prompt whose prefix was cached,
    contemplate rows, and the rest of a cut tree.

    Args:
        depths: by drafter, the most draft tokens that can be accepted in a round; K is the largest.
        max_num_reqs: S.
        rows_per_node: rows of the step for every draft; with 2, half of the rejected rows are contemplate rows.

    Attributes:
        swaps: how often each drafter got new weights.
        has_stopped: whether drafting has stopped, for lack of memory or of a file.
        modes: int32 [S] what each slot's request lets its drafter draft (``types``). The engine puts its own here.
    """

    def __init__(self, depths: Mapping[str, int], max_num_reqs: int, device: torch.device, rows_per_node: int = 1):
        self.depths, self.contemplates = dict(depths), rows_per_node > 1
        self.swaps = dict.fromkeys(depths, 0)
        self.has_stopped = False
        self.counts = torch.zeros(len(depths), 3 + max(1, *depths.values()), dtype=torch.int64, device=device)
        self.drafted_by = torch.full((max_num_reqs,), -1, dtype=torch.int32, device=device)
        self.modes = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

    def reset(self) -> None:
        """Forget everything, including drafts that wait for their verification."""
        self.counts.zero_()
        self.drafted_by.fill_(-1)

    def count_swaps(self, names: Iterable[str]) -> None:
        for name in names:
            self.swaps[name] += 1

    def mark_drafted(self, idx_mapping: torch.Tensor, drafter: int) -> None:
        """Note that ``drafter`` drafted for these slots, int [R]; not for requests that opted out."""
        mark_drafted(self.drafted_by, self.modes, idx_mapping, drafter)

    def count_verified(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        num_computed: torch.Tensor,
        prefill_len: torch.Tensor,
    ) -> None:
        """As :func:`record_acceptance`."""
        step = (idx_mapping, num_sampled, num_rejected, num_computed, prefill_len)
        record_acceptance(self.counts, self.drafted_by, *step, self.contemplates)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """``drafts``, ``draft_tokens``, ``accepted_tokens``, ``accepted_per_position`` by drafter. Syncs."""
        return self.describe(self.counts.cpu())

    def describe(self, counts: torch.Tensor) -> dict[str, dict[str, Any]]:
        """The same, from a copy of the counters on the host."""
        return {
            name: {
                "drafts": row[0],
                "draft_tokens": row[1],
                "accepted_tokens": row[2],
                "accepted_per_position": row[3 : 3 + depth],
            }
            for (name, depth), row in zip(self.depths.items(), counts.tolist(), strict=True)
        }
