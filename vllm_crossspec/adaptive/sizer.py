"""Sizes a batch's trees by their Phi, half-way through their growth."""

import numpy as np
import numpy.typing as npt
import torch

from vllm_crossspec.adaptive import kernels, naive
from vllm_crossspec.adaptive.heterospec import AdaptivePolicy
from vllm_crossspec.host_copy import HostCopy
from vllm_crossspec.tree.dynamic import Grown
from vllm_crossspec.twins import runs_kernels
from vllm_crossspec.types import Sizing


class TreeSizer:
    """Phi and bins on the device, and the bins on the host, which decides how many more levels are grown.

    Args:
        policy: what each bin is given.
        depth: levels of the tree before it is sized.
        max_num_reqs: S, most requests of a batch.
        device: of the drafter.

    Attributes:
        phi: float32 [S] nats, of the batch's rows.
        bins: int32 [S] likewise.
        copied: the bins on their way to the host.
    """

    def __init__(self, policy: AdaptivePolicy, depth: int, max_num_reqs: int, device: torch.device):
        self.policy, self.depth = policy, depth
        self._assess = kernels.assess if runs_kernels() else naive.assess
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
        """Phi and bin of every tree, and from these its depth and width; one launch that a CUDA graph can hold.

        Args:
            grown: R trees of the base depth.
            limits: int32 [S], of which the first R are written: the deepest level of each tree.
            caps: int32 [S], likewise: the most nodes of each tree.
        """
        self._assess(
            grown=grown, levels=self.depth, **self._table, phi=self.phi, bins=self.bins, limits=limits, caps=caps
        )

    def fetch(self, num_reqs: int) -> npt.NDArray[np.int64]:
        """int64 [R] bins of the batch; waits for the device (the sync named "bin copy")."""
        self.copied.start()
        return self.copied.wait(num_reqs)

    def sizing(self, bins: npt.NDArray[np.int64], depths: torch.Tensor) -> Sizing:
        """What the trees of these bins (int64 [R]) are given; ``depths`` is what :meth:`assess` wrote."""
        num_reqs = len(bins)
        extensions = self._extensions[bins]
        return Sizing(
            phi=self.phi[:num_reqs],
            depths=depths[:num_reqs],
            bins=bins,
            widths=self._widths[bins],
            extensions=extensions,
        )
