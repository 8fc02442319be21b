"""Marks of time between steps, in vLLM's protocol."""

from typing import Any

import torch

from vllm_crossspec.metrics.stages import Marks


class StepClock(Marks):
    """Takes the place of the runner's own ``step_timing``, and keeps the marks of forward pass and drafting."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.marks: list[Any] = []

    def mark(self) -> None:
        self.marks.append(self.now())

    forward_start = forward_end = drafter_start = drafter_end = mark

    def record_batch(self, *arguments: Any, **options: Any) -> None:
        """Part of vLLM's protocol; the caller knows the batch."""

    def spans(self) -> list[float]:
        """Seconds between every pair of marks (first and second, third and fourth, ...); waits for the device."""
        self.wait(self.marks[-1])
        return [self.between(*pair) for pair in zip(self.marks[::2], self.marks[1::2], strict=True)]
