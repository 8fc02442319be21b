"""The few numbers of a round that host code must know of the device."""

import numpy as np
import numpy.typing as npt
import torch


class HostCopy:
    """int32 numbers on the device, and their way to the host: one copy, and one wait that is counted.

    Args:
        shape: of the numbers.
        device: that writes them.

    Attributes:
        tensor: int32, to be written by kernels.
        num_waits: times that the host has waited.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        self.num_waits = 0
        self._on_device = device.type != "cpu"
        if self._on_device:
            self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
            self._event = torch.Event(device)

    def start(self) -> None:
        """Send them on their way."""
        if self._on_device:
            self._host.copy_(self.tensor, non_blocking=True)
            self._event.record()

    def wait(self, count: int) -> npt.NDArray[np.int64]:
        """int64, the first ``count`` of the last axis; waits for the device."""
        self.num_waits += 1
        if self._on_device:
            self._event.synchronize()
        numbers = self._host if self._on_device else self.tensor
        return numbers[..., :count].numpy().astype(np.int64)
