"""What one drafter has not taken into its cache yet: fused target features of the tokens that it missed.

Everything here is bookkeeping on the host with whole arrays, one entry a request; the features themselves stay on the
device. S request slots, B tokens of a request that the buffer holds, F width of the drafter's fused features.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_crossspec.arrays import Array, ranges

NO_SLOT = -1
"""The request slot of a token that only pads."""


class Tokens(NamedTuple):
    """Some tokens of some requests, one entry a token.

    Attributes:
        slots: int64 [n] request slot.
        positions: int64 [n].
        rows: int64 [n] where their features are: rows of the buffer, or of the step.
    """

    slots: Array
    positions: Array
    rows: Array


class StepRows(NamedTuple):
    """Rows of the target's step that may hold accepted tokens, by request.

    Attributes:
        slots: int64 [R].
        starts: int64 [R] position of the first row.
        firsts: int64 [R] row of it among the packed rows of the step.
        counts: int64 [R] rows; of drafts it is not known yet how many were accepted.
        certain: int64 [R] rows, at least one, that are accepted for certain: a prompt's, and a draft's root.
    """

    slots: Array
    starts: Array
    firsts: Array
    counts: Array
    certain: Array

    def without(self, dropped: Array) -> "StepRows":
        """The same without the first rows of each request; int64 [R] how many."""
        return StepRows(
            self.slots, self.starts + dropped, self.firsts + dropped, self.counts - dropped, self.certain - dropped
        )


class Backlog:
    """The buffer of one drafter, and how far its cache has come for every request.

    Row ``slot * capacity`` of the buffer holds the features of position ``bases[slot]``, the next row those of the next
    position, and so on. It starts anew where the drafter has caught up with all that came before.

    Args:
        num_slots: S.
        capacity: B.
        width: F.
        dtype: of the features.
        device: where they live.

    Attributes:
        features: [S * B, F].
        cached: int64 [S] tokens whose keys and values are in the drafter's cache.
        bases: int64 [S].
    """

    def __init__(self, num_slots: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device):
        self.capacity = capacity
        self.features = torch.zeros(num_slots * capacity, width, dtype=dtype, device=device)
        self.cached = np.zeros(num_slots, dtype=np.int64)
        self.bases = np.zeros(num_slots, dtype=np.int64)

    def crowded(self, rows: StepRows) -> npt.NDArray[np.bool_]:
        """bool [R]: which requests must catch up before a step's rows are stored, for want of room."""
        used = rows.starts - self.bases[rows.slots]
        return (self.cached[rows.slots] < rows.starts) & (used + rows.counts > self.capacity)

    def oversized(self, rows: StepRows) -> npt.NDArray[np.bool_]:
        """bool [R]: which requests bring more rows than the buffer holds (long prompts)."""
        return rows.counts > self.capacity

    def place(self, rows: StepRows) -> Array:
        """int64 [sum of counts]: the buffer's row for each of the step's rows; call it when there is room."""
        slots = rows.slots
        self.bases[slots] = np.where(self.cached[slots] == rows.starts, rows.starts, self.bases[slots])
        return ranges(self.rows_at(slots, rows.starts), rows.counts)

    def missed(self, slots: Array, ends: Array) -> Tokens:
        """The tokens of ``slots`` (int64 [k]) from where the cache ends up to ``ends`` (int64 [k], exclusive)."""
        starts = self.cached[slots]
        counts = np.maximum(ends - starts, 0)
        return Tokens(
            slots=np.repeat(slots, counts),
            positions=ranges(starts, counts),
            rows=ranges(self.rows_at(slots, starts), counts),
        )

    def rows_at(self, slots: Array, positions: Array) -> Array:
        """int64 [k]: the buffer's row of one token a slot."""
        return slots * self.capacity + positions - self.bases[slots]
