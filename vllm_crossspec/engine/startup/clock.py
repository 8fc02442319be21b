"""Marks of time between steps that are measured at start-up."""

import time
from typing import Any

import torch


class StepClock:
    """Takes the place of the runner's own ``step_timing``, which marks forward pass and drafting, and keeps the marks.

    Args:
        device: of the model; a GPU's marks are events in its stream, so that nothing waits between the steps.
    """

    def __init__(self, device: torch.device):
        self.is_cuda = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Note the time."""
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    forward_start = forward_end = drafter_start = drafter_end = mark

    def record_batch(self, *arguments: Any) -> None:
        """Part of vLLM's protocol; the caller knows the batch."""

    def spans(self) -> list[float]:
        """Seconds between every pair of marks (first and second, third and fourth, ...); waits for the device."""
        if self.is_cuda:
            self.marks[-1].synchronize()
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        return [start.elapsed_time(end) / 1e3 if self.is_cuda else end - start for start, end in pairs]
