"""What sizes trees were given by their bins, counted on the host, which knows the bins anyway."""

from typing import Any

import numpy as np

from vllm_crossspec.adaptive.heterospec import AdaptivePolicy
from vllm_crossspec.types import Sizing

BY_BIN = ("trees", "extra_levels", "nodes")


class TreeSizeCounters:
    """Trees, levels and nodes of one drafter, by bin.

    Args:
        policy: that sizes its trees.
    """

    def __init__(self, policy: AdaptivePolicy):
        self.num_bins = len(policy.widths)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.rounds = self.extra_passes = 0
        self.trees, self.extra_levels, self.nodes = np.zeros((3, self.num_bins), dtype=np.int64)

    def count(self, sizing: Sizing) -> None:
        """Add a round's trees."""
        self.rounds += 1
        self.extra_passes += int(sizing.extensions.max())
        np.add.at(self.trees, sizing.bins, 1)
        np.add.at(self.extra_levels, sizing.bins, sizing.extensions)
        np.add.at(self.nodes, sizing.bins, sizing.widths)

    def snapshot(self) -> dict[str, Any]:
        """The counts as numbers.

        Returns:
            ``rounds``; ``extra_passes`` of the drafter beyond those of an ordinary tree; and, by bin, ``trees``,
            ``extra_levels`` of them, and ``nodes``, the most that they were allowed.
        """
        by_bin = {name: getattr(self, name).tolist() for name in BY_BIN}
        return {"rounds": self.rounds, "extra_passes": self.extra_passes, **by_bin}
