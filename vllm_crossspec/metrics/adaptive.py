"""Sizes of adaptive trees by bin, counted on the host, which knows the bins anyway."""

from typing import Any

import numpy as np

from vllm_crossspec.types import Sizing

BY_BIN = ("trees", "extra_levels", "nodes")


class TreeSizeCounters:
    """Trees, levels and nodes of one drafter, by the ``num_bins`` bins of its policy."""

    def __init__(self, num_bins: int):
        self.num_bins = num_bins
        self.reset()

    def reset(self) -> None:
        self.rounds = self.extra_passes = 0
        self.trees, self.extra_levels, self.nodes = np.zeros((3, self.num_bins), dtype=np.int64)

    def count(self, sizing: Sizing) -> None:
        self.rounds += 1
        self.extra_passes += int(sizing.extensions.max())
        np.add.at(self.trees, sizing.bins, 1)
        np.add.at(self.extra_levels, sizing.bins, sizing.extensions)
        np.add.at(self.nodes, sizing.bins, sizing.widths)

    def snapshot(self) -> dict[str, Any]:
        """``rounds``; ``extra_passes`` of the drafter beyond those of an ordinary tree; and, by bin, ``trees``, their
        ``extra_levels``, and ``nodes``, the most that they were allowed.
        """
        by_bin = {name: getattr(self, name).tolist() for name in BY_BIN}
        return {"rounds": self.rounds, "extra_passes": self.extra_passes, **by_bin}
