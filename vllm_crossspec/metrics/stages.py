"""Seconds of each stage of a round, without waiting for the device."""

import collections
import time
from typing import Any

import torch

MAX_PENDING = 64
"""Rounds whose events may be outstanding; older ones are dropped uncounted."""


class Marks:
    """Points in time: of the device's stream on a GPU, so that nothing waits between them, of the clock on a CPU.

    Args:
        device: of the stream.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        """A mark."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        """Whether the device is known to be through with it."""
        return not self._is_cuda or mark.query()

    def wait(self, mark: Any) -> None:
        """Until the device is through with it."""
        if self._is_cuda:
            mark.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that are past."""
        return float(start.elapsed_time(end) / 1e3 if self._is_cuda else end - start)


class StageClock:
    """Sums seconds by stage. What lies between two marks is read rounds later, when it is known without waiting.

    Args:
        stages: names, in the order in which a round goes through them.
        device: of the stream.
    """

    def __init__(self, stages: tuple[str, ...], device: torch.device):
        self.stages = stages
        self.seconds = dict.fromkeys(stages, 0.0)
        self._marks = Marks(device)
        self._round: list[Any] = []
        self._pending: collections.deque[list[Any]] = collections.deque(maxlen=MAX_PENDING)

    def mark(self) -> None:
        """A stage ends here and the next begins; the first mark of a round only begins."""
        self._round.append(self._marks.now())

    def end_round(self) -> None:
        """The marks so far are one round's, one more than there are stages; add what is known by now."""
        marks, self._round = self._round, []
        assert len(marks) == len(self.stages) + 1
        self._pending.append(marks)
        while self._pending and self._marks.is_past(self._pending[0][-1]):
            marks = self._pending.popleft()
            for stage, start, end in zip(self.stages, marks, marks[1:], strict=False):
                self.seconds[stage] += self._marks.seconds(start, end)

    def reset(self) -> None:
        """Forget everything."""
        self.seconds = dict.fromkeys(self.stages, 0.0)
        self._pending.clear()
        self._round.clear()
