"""HeteroSpec's rule: how deep and how wide a tree is, by the bin that its entropy falls into.

Where the drafter is sure of itself the tree grows deeper and fewer of its nodes are verified (HeteroSpec, section 4.3).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from vllm_crossspec.config import MAX_DRAFT_TOKENS

GAMMAS = (0.3, 0.6, 1.0)
"""Share of the nodes that the low bins keep, by bin (section 4.3)."""
MAX_THRESHOLDS = 7
"""Of a regression tree of depth 3."""
LEAF_SHARE = 0.05
"""Of the paths that bins are fitted to, the least that one must hold (``adaptive.cart``)."""


class Reading(NamedTuple):
    """Where section 4.3 can be read in two ways; by default as its trees measured better (docs/papers/heterospec.md).

    Attributes:
        first_bin: number of the surest bin in ``alpha - i``: 0 as section 4.2 numbers the bins, 1 as section 4.3
            numbers their gammas.
        is_capped: whether no bin is given more nodes than the tree has, where the paper adds levels to nodes.
    """

    first_bin: int = 0
    is_capped: bool = True


OURS = Reading()


class AdaptivePolicy(NamedTuple):
    """What the tree of a request in bin i is given; B bins, the surest first.

    A tree with Phi at or below ``thresholds[i]``, and above those before, is in bin i; above all of them, and where
    Phi is not a number, in the last.

    Attributes:
        thresholds: B - 1 rising values of Phi, in nats.
        extensions: B numbers of levels beyond the tree's depth.
        widths: B most draft nodes that are verified.
    """

    thresholds: tuple[float, ...]
    extensions: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def max_extension(self) -> int:
        """Most levels beyond the tree's depth."""
        return max(self.extensions)

    @property
    def is_flat(self) -> bool:
        """Whether all bins are given the same."""
        return len(set(zip(self.extensions, self.widths, strict=True))) == 1

    def bin_of(self, phi: float) -> int:
        """The bin of one tree, from 0."""
        return sum(not phi <= threshold for threshold in self.thresholds)


def default_alpha(depth: int) -> int:
    """Levels that the surest bin adds to a tree of ``depth`` (section 5.3: half its depth, rounded up, is best)."""
    return math.ceil(depth / 2)


def make_policy(
    *,
    thresholds: Sequence[float],
    num_nodes: int,
    alpha: int,
    gammas: Sequence[float] = GAMMAS,
    max_extension: int | None = None,
    reading: Reading = OURS,
) -> AdaptivePolicy:
    """The policy of section 4.3: bin i of the low ones adds alpha - i levels and keeps gamma_i N + (alpha - i) nodes.

    Args:
        thresholds: rising values of Phi between the bins.
        num_nodes: N of the tree.
        alpha: as the paper's; the levels that the surest bin adds where bins are counted from 0.
        gammas: of the low bins; the others keep depth and nodes.
        max_extension: most levels that a bin adds; None: no other bound than alpha.
        reading: of the paper.

    Raises:
        ValueError: for thresholds that do not rise, and bins of more nodes than a tree can have.
    """
    if any(not before < after for before, after in pairwise(thresholds)):
        raise ValueError(f"thresholds of Phi must rise, not {list(thresholds)}; run 'crossspec calibrate heterospec'")
    num_bins = len(thresholds) + 1
    # A table with a single bin distinguishes nothing, so that all trees are ordinary ones.
    num_low = min(len(gammas), num_bins) if num_bins > 1 else 0
    limit = alpha if max_extension is None else min(alpha, max_extension)
    extensions = [max(0, min(alpha - i - reading.first_bin, limit)) for i in range(num_low)]
    widths = [max(1, round(gammas[i] * num_nodes) + extensions[i]) for i in range(num_low)]
    if reading.is_capped:
        widths = [min(num_nodes, width) for width in widths]
    if max(widths, default=0) > MAX_DRAFT_TOKENS:
        raise ValueError(
            f"trees of {num_nodes} nodes would be given {max(widths)}, and a request has at most {MAX_DRAFT_TOKENS}: "
            "calibrate them with --cap, or with fewer num_nodes"
        )
    extensions += [0] * (num_bins - num_low)
    widths += [num_nodes] * (num_bins - num_low)
    return AdaptivePolicy(tuple(thresholds), tuple(extensions), tuple(widths))


def flat_policy(num_nodes: int) -> AdaptivePolicy:
    """All trees are the same; what is left is Phi."""
    return AdaptivePolicy((), (0,), (num_nodes,))
