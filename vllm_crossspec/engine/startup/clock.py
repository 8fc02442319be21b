"""Marks of time between steps that are measured at start-up."""

from typing import Any

import torch

from vllm_crossspec.metrics.stages import Marks


class StepClock:
    """Takes the place of the runner's own ``step_timing``, which marks forward pass and drafting, and keeps the marks.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device):
        self._marks = Marks(device)
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Note the time."""
        self.marks.append(self._marks.now())

    forward_start = forward_end = drafter_start = drafter_end = mark

    def record_batch(self, *arguments: Any, **options: Any) -> None:
        """Part of vLLM's protocol; the caller knows the batch."""

    def spans(self) -> list[float]:
        """Seconds between every pair of marks (first and second, third and fourth, ...); waits for the device."""
        self._marks.wait(self.marks[-1])
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        return [self._marks.seconds(*pair) for pair in pairs]
