"""The step that is under way: all that belongs to it alone."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Step:
    """Made when vLLM has laid out a batch, dropped when its rows have been sampled and their drafts verified.

    Attributes:
        batch: vLLM's ``InputBatch``, as features see to it (``Feature.split``).
        has_drafts: whether any request brought draft tokens; a dummy step's are nobody's, so that it has none.
        planned_rows: int32 [R + 1] on the device, first row of each request of the step among all rows that the
            scheduler planned, where these are more than the rows with logits; else None.
        tapped: the [T, H] target states that drafters read; empty before the forward pass, and in dummy steps.
        logits: [L, vocabulary] of the rows with logits, once they are computed.
        num_sampled: int32 [R] tokens that each request got, 0 inside a prompt; once they are sampled.
    """

    batch: Any
    has_drafts: bool = False
    planned_rows: torch.Tensor | None = None
    tapped: list[torch.Tensor] = field(default_factory=list)
    logits: torch.Tensor | None = None
    num_sampled: torch.Tensor | None = None

    @property
    def cu_rows(self) -> torch.Tensor:
        """int32 [R + 1], first row of each request among all rows that the step brings."""
        return self.batch.cu_num_logits if self.planned_rows is None else self.planned_rows
