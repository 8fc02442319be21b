"""Seconds between points of a round, without waiting for the device."""

import collections
import itertools
import time
from typing import Any

import torch

MAX_PENDING = 64
"""Rounds whose events may be outstanding; older ones are dropped uncounted."""


class Marks:
    """Marks of time: CUDA events on a GPU, so that nothing waits between them, the clock's seconds on a CPU."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        """Mark the current time."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        """Whether the device is known to have reached it."""
        return not self._is_cuda or mark.query()

    def wait(self, mark: Any) -> None:
        """Wait until the device has reached it."""
        if self._is_cuda:
            mark.synchronize()

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two marks that are past."""
        return float(start.elapsed_time(end) / 1e3 if self._is_cuda else end - start)


class StageClock(Marks):
    """Sums seconds by the ``stages`` of a round. They are read rounds later, when they are known without waiting."""

    def __init__(self, stages: tuple[str, ...], device: torch.device):
        super().__init__(device)
        self.stages = stages
        self._pending: collections.deque[list[Any]] = collections.deque(maxlen=MAX_PENDING)
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(self.stages, 0.0)
        self._round: list[Any] = []
        self._pending.clear()

    def mark(self) -> None:
        """A stage ends here and the next begins; the first mark of a round only begins."""
        self._round.append(self.now())

    def end_round(self) -> None:
        """End a round of one more mark than stages; add what is known by now."""
        marks, self._round = self._round, []
        assert len(marks) == len(self.stages) + 1
        self._pending.append(marks)
        while self._pending and self.is_past(self._pending[0][-1]):
            for stage, pair in zip(self.stages, itertools.pairwise(self._pending.popleft()), strict=True):
                self.seconds[stage] += self.between(*pair)
