"""Sizes a batch's trees by their Phi, once they have their base depth."""

import numpy as np
import numpy.typing as npt
import torch

from vllm_crossspec.config.schema import AdaptivePolicy
from vllm_crossspec.heterospec.kernels import assess
from vllm_crossspec.host_copy import HostCopy
from vllm_crossspec.trees.builders.dynamic import Grown
from vllm_crossspec.types import Sizing


class TreeSizer:
    """Phi and bins on the device, and bins on the host, which grows more levels by them.

    Args:
        policy: what each bin is given.
        depth: levels of the tree before it is sized.
        max_num_reqs: S.

    Attributes:
        phi: float32 [S] nats, bins: int32 [S], by row of the batch.
    """

    def __init__(self, policy: AdaptivePolicy, depth: int, max_num_reqs: int, device: torch.device):
        self.policy, self.depth = policy, depth
        self._table = {
            "thresholds": torch.tensor(policy.thresholds, dtype=torch.float32, device=device),
            "extensions": torch.tensor(policy.extensions, dtype=torch.int32, device=device),
            "widths": torch.tensor(policy.widths, dtype=torch.int32, device=device),
        }
        self._extensions = np.array(policy.extensions, dtype=np.int64)
        self._widths = np.array(policy.widths, dtype=np.int32)
        self.phi = torch.zeros(max_num_reqs, dtype=torch.float32, device=device)
        self.copied = HostCopy((max_num_reqs,), device)
        self.bins = self.copied.tensor

    def assess(self, grown: Grown, limits: torch.Tensor, caps: torch.Tensor) -> None:
        """Phi, bin, ``limits`` and ``caps`` of every tree (``kernels.assess``); one launch that CUDA graphs hold."""
        assess(grown=grown, levels=self.depth, **self._table, phi=self.phi, bins=self.bins, limits=limits, caps=caps)

    def fetch(self, num_reqs: int) -> npt.NDArray[np.int64]:
        """int64 [R] bins of the batch; waits for the device (the sync named "bin copy")."""
        self.copied.start()
        return self.copied.wait(num_reqs)

    def sizing(self, bins: npt.NDArray[np.int64], depths: torch.Tensor) -> Sizing:
        """Sizes of the trees of these bins (int64 [R]); ``depths`` is the ``limits`` of :meth:`assess`."""
        return Sizing(
            phi=self.phi[: len(bins)],
            depths=depths[: len(bins)],
            bins=bins,
            widths=self._widths[bins],
            extensions=self._extensions[bins],
        )
