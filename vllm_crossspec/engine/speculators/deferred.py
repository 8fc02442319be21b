"""Accepted tokens of rounds in which nobody drafts, kept so that drafters take in many of them at once."""

from typing import Any

import torch

MAX_ROWS = 1024
"""Most tokens that are kept; what one call takes in, so that it is bounded as well."""
STEPS = 32
"""Rounds of the largest batch that are kept at most."""


class DeferredRows:
    """The target's states of tokens that the drafters have not taken in yet.

    A drafter that is to draft again must have every accepted token in its cache. While nobody drafts it is cheaper to
    keep the states that it needs and to make keys and values of them when somebody does: a round then costs a few
    copies in the place of a forward pass, and what is read of the drafter's weights is read once for many tokens.

    Everything is on the device and in order; the host knows how many rows there are and nothing else.

    Args:
        max_num_reqs: most requests of a batch.
        num_taps: target layers that are tapped.
        width: H.
        dtype: of the states.
        device: of everything.

    Attributes:
        num_rows: rows that are kept now.
    """

    def __init__(self, max_num_reqs: int, num_taps: int, width: int, dtype: torch.dtype, device: torch.device):
        capacity = min(STEPS * max_num_reqs, MAX_ROWS)
        self.states = [torch.zeros(capacity, width, dtype=dtype, device=device) for _ in range(num_taps)]
        self.slots = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.positions = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.num_rows = 0

    def takes(self, batch: Any) -> bool:
        """Whether a step's batch can be kept: one row a request, each of them accepted for certain, and room."""
        num_reqs = batch.num_reqs
        return batch.num_tokens == num_reqs and self.num_rows + num_reqs <= self.slots.shape[0]

    def add(self, batch: Any, tapped_states: list[torch.Tensor]) -> None:
        """Keep the rows of a batch that :meth:`takes` them; a copy a tapped layer and two more.

        Args:
            batch: vLLM's.
            tapped_states: [T, H] of each tapped layer.
        """
        num_reqs = batch.num_reqs
        rows = slice(self.num_rows, self.num_rows + num_reqs)
        for kept, states in zip(self.states, tapped_states, strict=True):
            kept[rows] = states[:num_reqs]
        self.slots[rows] = batch.idx_mapping[:num_reqs]
        self.positions[rows] = batch.positions[:num_reqs]
        self.num_rows += num_reqs

    def take(self) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """All that is kept, as views that hold until the next :meth:`add`: states [n, H], slots and positions [n]."""
        num_rows, self.num_rows = self.num_rows, 0
        return [states[:num_rows] for states in self.states], self.slots[:num_rows], self.positions[:num_rows]
