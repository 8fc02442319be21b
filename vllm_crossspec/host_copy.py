"""Copies of a few numbers per round from the device to the host."""

import numpy as np
import numpy.typing as npt
import torch


class HostCopy:
    """int32 numbers on the device that reach the host by one copy and one counted wait.

    Attributes:
        tensor: int32, written by kernels.
        num_waits: how often the host has waited.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        self.num_waits = 0
        self._on_device = device.type != "cpu"
        if self._on_device:
            self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
            self._event = torch.Event(device)

    def start(self) -> None:
        """Start the copy to the host."""
        if self._on_device:
            self._host.copy_(self.tensor, non_blocking=True)
            self._event.record()

    def wait(self, count: int, is_old: bool = False) -> npt.NDArray[np.int64]:
        """Wait for the device; return int64, the first ``count`` of the last axis.

        A copy that ``is_old`` was started a round ago, and counts as a wait only if it has not arrived yet.
        """
        if self._on_device:
            self.num_waits += not (is_old and self._event.query())
            self._event.synchronize()
        else:
            self.num_waits += not is_old
        numbers = self._host if self._on_device else self.tensor
        return numbers[..., :count].numpy().astype(np.int64)
