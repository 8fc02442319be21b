"""What steps leave for a file: it waits on the device, and many steps' worth is moved to the host at once."""

from typing import NamedTuple

import torch
from safetensors.torch import save


class StepRecord(NamedTuple):
    """What one step leaves of R requests: vLLM's ids, and tensors [R, ...] by name."""

    request_ids: list[str]
    tensors: dict[str, torch.Tensor]


class StepRecords:
    """Records in the order of their steps, for collecting: after ``steps_on_device`` steps it waits for the device."""

    def __init__(self, steps_on_device: int):
        self._steps_on_device = steps_on_device
        self._waiting: list[StepRecord] = []
        self._on_host: list[StepRecord] = []

    def add(self, request_ids: list[str], tensors: dict[str, torch.Tensor]) -> None:
        """Keep a step's tensors; the caller no longer writes to them."""
        self._waiting.append(StepRecord(request_ids, tensors))
        if len(self._waiting) >= self._steps_on_device:
            self._move_to_host()

    def _move_to_host(self) -> None:
        """One copy per tensor for all waiting steps; waits for the device."""
        if not self._waiting:
            return
        ids = [request_id for record in self._waiting for request_id in record.request_ids]
        names = self._waiting[0].tensors
        joined = {name: torch.cat([record.tensors[name] for record in self._waiting]).cpu() for name in names}
        self._on_host.append(StepRecord(ids, joined))
        self._waiting = []

    def take(self) -> list[tuple[list[str], bytes]]:
        """What was added since the last call, as (request ids, tensors in safetensors' format); waits.

        Plain types, so that they pass between an engine's processes under any serialization.
        """
        self._move_to_host()
        taken, self._on_host = self._on_host, []
        return [(record.request_ids, save(record.tensors)) for record in taken]
