"""Target states that wait to be fused for one drafter, so that a round in which others draft is short.

On a CPU a fuse of few rows takes as long as its weights take to be read, and of many no longer: half a millisecond a
drafter and round at hidden size 1024. And a prompt that nobody drafts for is never fused. On a GPU it hides behind the
round's one wait instead (``speculators.routed``).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vllm_crossspec.arrays import Array
from vllm_crossspec.catchup.kernels import join_rows
from vllm_crossspec.catchup.naive import join_rows_naive
from vllm_crossspec.twins import runs_kernels

MAX_ROWS = 1024
"""Most rows that wait: for the memory that their steps' states take."""


def joined(states: list[torch.Tensor], taps: list[int], rows: torch.Tensor | None = None) -> torch.Tensor:
    """[n, taps * H] of the states [T, H] that a drafter taps; width 0 where it taps none.

    ``rows`` are int64 [n]; None for all, in their order.
    """
    own = [states[i] for i in taps]
    if not own:
        return states[0][: None if rows is None else len(rows), :0]
    if rows is None:
        return torch.cat(own, dim=-1)
    return join_rows(own, rows) if runs_kernels() else join_rows_naive(own, rows)


class _Waiting(NamedTuple):
    """Rows of one step: the drafter's tapped states [T, H], int64 [n] which rows, int64 [n] where they belong."""

    states: list[torch.Tensor]
    rows: Array
    places: Array


class Unfused:
    """What waits for one drafter. The steps' tensors are held as they are, so they must not be written to again.

    Args:
        fuse: from [n, taps * H] to the drafter's features [n, F].
        taps: which of a step's states the drafter taps.
        features: the buffer in whose rows the features belong.
        capacity: rows of the buffer that a request has.
    """

    def __init__(
        self, fuse: Callable[[torch.Tensor], torch.Tensor], taps: list[int], features: torch.Tensor, capacity: int
    ):
        self.fuse, self.taps, self.features, self.capacity = fuse, taps, features, capacity
        self._waiting: list[_Waiting] = []

    @property
    def num_rows(self) -> int:
        """Rows that wait."""
        return sum(len(step.rows) for step in self._waiting)

    def add(self, states: list[torch.Tensor], rows: Array, places: Array) -> None:
        """Let rows of a step wait, at most :data:`MAX_ROWS`; what waits already is fused if there is no room.

        Args:
            states: [T, H] of every tapped layer.
            rows: int64 [n] of them.
            places: int64 [n] rows of the buffer.
        """
        if self.num_rows + len(rows) > MAX_ROWS:
            self.settle()
        self._waiting.append(_Waiting([states[i] for i in self.taps] or states[:1], rows, places))

    def forget(self, slots: Array) -> None:
        """Let go of all rows of some requests (int64 [k]), unfused."""
        self._take(slots)

    @torch.inference_mode()
    def settle(self, slots: Array | None = None) -> None:
        """Fuse what waits of some requests (int64 [k]; None: of all), whatever rows they are.

        Of two rows for one place the later holds: the earlier was a draft that was rejected.
        """
        steps = self._take(slots)
        if not steps:
            return
        places = np.concatenate([step.places for step in steps])
        places, from_end = np.unique(places[::-1], return_index=True)
        states = steps[0].states
        if len(steps) > 1:
            states = [torch.cat([step.states[i] for step in steps]) for i in range(len(states))]
        lengths = [len(step.states[0]) for step in steps]
        firsts = np.cumsum([0, *lengths[:-1]])
        rows = np.concatenate([step.rows + first for step, first in zip(steps, firsts, strict=True)])
        packed = np.stack((rows[len(rows) - 1 - from_end], places))
        on_device = torch.from_numpy(packed).to(self.features.device)
        self.features.index_copy_(0, on_device[1], self.fuse(joined(states, [*range(len(self.taps))], on_device[0])))

    def _take(self, slots: Array | None) -> list[_Waiting]:
        """What waits of some requests, which does not any longer."""
        steps, self._waiting = self._waiting, []
        if slots is None:
            return steps
        taken: list[_Waiting] = []
        for step in steps:
            wanted = np.isin(step.places // self.capacity, slots)
            for found, where in ((taken, wanted), (self._waiting, ~wanted)):
                if where.any():
                    found.append(_Waiting(step.states, step.rows[where], step.places[where]))
        return taken
