"""Seconds of each stage of a round, without waiting for the device."""

import collections
import time
from typing import Any

import torch

MAX_PENDING = 64
"""Rounds whose events may be outstanding; older ones are dropped uncounted."""


class StageClock:
    """Sums seconds by stage: of the device's stream on a GPU, of the clock on a CPU.

    On a GPU a mark is an event in the stream; what lies between two marks is read rounds later, when it is known
    without waiting.

    Args:
        stages: names, in the order in which a round goes through them.
        device: of the stream.
    """

    def __init__(self, stages: tuple[str, ...], device: torch.device):
        self.stages = stages
        self.seconds = dict.fromkeys(stages, 0.0)
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self._pending: collections.deque[list[Any]] = collections.deque(maxlen=MAX_PENDING)

    def mark(self) -> None:
        """A stage ends here and the next begins; the first mark of a round only begins."""
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def end_round(self) -> None:
        """The marks so far are one round's, one more than there are stages; add what is known by now."""
        marks, self._marks = self._marks, []
        assert len(marks) == len(self.stages) + 1
        self._pending.append(marks)
        while self._pending and (not self._is_cuda or self._pending[0][-1].query()):
            self._add(self._pending.popleft())

    def _add(self, marks: list[Any]) -> None:
        for stage, start, end in zip(self.stages, marks, marks[1:], strict=False):
            self.seconds[stage] += start.elapsed_time(end) / 1e3 if self._is_cuda else end - start

    def reset(self) -> None:
        """Forget everything."""
        self.seconds = dict.fromkeys(self.stages, 0.0)
        self._pending.clear()
        self._marks.clear()
