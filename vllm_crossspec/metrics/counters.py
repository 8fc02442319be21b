"""Acceptance by drafter, kept on the device."""

from collections.abc import Iterable
from typing import Any

import torch

from vllm_crossspec.metrics.kernel import mark_drafted, record_acceptance


class AcceptanceCounters:
    """Drafts, draft tokens, accepted tokens and accepted tokens per position, for every drafter.

    They count what the device verified of what was drafted. vLLM's own ``vllm:spec_decode_*`` counters differ from
    that in three ways: under async scheduling they leave out the one round in flight when a request ends, whose tokens
    vLLM drops; they have the placeholders of a prompt whose prefix was cached, which nobody drafted; and they count
    rows that the scheduler planned, contemplate rows and the rest of a cut tree among them.

    Args:
        names: of the drafters.
        max_num_reqs: S, request slots of the engine.
        num_positions: K, draft tokens of the longest drafter.
        device: where the counters live.
        rows_per_node: rows of the step for every draft; with 2, half of what is rejected are contemplate rows.

    Attributes:
        swaps: how often each drafter got new weights.
        has_stopped: whether drafting has stopped, for want of memory or of a file.
        modes: int32 [S] what each slot's request lets its drafter draft (``types``); to be replaced by the
            engine's own.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        max_num_reqs: int,
        num_positions: int,
        device: torch.device,
        rows_per_node: int = 1,
    ):
        self.names, self.num_positions, self.contemplates = names, num_positions, rows_per_node > 1
        self.swaps = dict.fromkeys(names, 0)
        self.has_stopped = False
        self.counts = torch.zeros(len(names), 3 + num_positions, dtype=torch.int64, device=device)
        self.drafted_by = torch.full((max_num_reqs,), -1, dtype=torch.int32, device=device)
        self.modes = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

    def reset(self) -> None:
        """Forget everything, drafts that wait for their verdict included."""
        self.counts.zero_()
        self.drafted_by.fill_(-1)

    def count_swaps(self, names: Iterable[str]) -> None:
        """These drafters got new weights."""
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
        """Add the verdicts of a step (see ``kernel.record_acceptance``)."""
        record_acceptance(
            self.counts,
            self.drafted_by,
            idx_mapping,
            num_sampled,
            num_rejected,
            num_computed,
            prefill_len,
            self.contemplates,
        )

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """The counters as numbers, by drafter; waits for the device.

        Returns:
            {name: {drafts, draft_tokens, accepted_tokens, accepted_per_position: [K]}}.
        """
        return self.describe(self.counts.cpu())

    def describe(self, counts: torch.Tensor) -> dict[str, dict[str, Any]]:
        """Name the columns of a host copy of the counters."""
        return {
            name: {
                "drafts": row[0],
                "draft_tokens": row[1],
                "accepted_tokens": row[2],
                "accepted_per_position": row[3:],
            }
            for name, row in zip(self.names, counts.tolist(), strict=True)
        }
