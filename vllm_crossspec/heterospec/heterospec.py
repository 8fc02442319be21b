"""HeteroSpec's rule: how deep and how wide a tree is, by the bin of its entropy.

If the drafter is sure, the tree grows deeper and fewer of its nodes are verified (HeteroSpec, section 4.3).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from vllm_crossspec.config.schema import AdaptivePolicy
from vllm_crossspec.kinds.settings import MAX_DRAFT_TOKENS

GAMMAS = (0.3, 0.6, 1.0)
"""Share of the nodes that the low bins keep, by bin (section 4.3)."""
MAX_THRESHOLDS = 7
"""Thresholds of a regression tree of depth 3."""
LEAF_SHARE = 0.05
"""Least share of the fitted paths that a bin must hold (``crossspec_tools.records.cart``)."""


class Reading(NamedTuple):
    """How to read section 4.3, which is ambiguous; the defaults measured better (research/notes/heterospec.md)."""

    first_bin: int = 0  # i of the surest bin in alpha - i: 0 as in section 4.2, 1 as section 4.3 numbers the gammas
    is_capped: bool = True  # whether no bin gets more nodes than the tree has; the paper adds levels to nodes


OURS = Reading()


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

    Raises ValueError: thresholds that do not rise, or bins of more nodes than a tree can have.

    Args:
        thresholds: rising values of Phi between the bins.
        num_nodes: N of the tree.
        alpha: the paper's; the levels that the surest bin adds, if bins are counted from 0.
        gammas: of the low bins; the others keep depth and nodes.
        max_extension: most levels that a bin adds; None: alpha.
    """
    if any(not before < after for before, after in pairwise(thresholds)):
        raise ValueError(f"thresholds of Phi must rise, not {list(thresholds)}; run 'crossspec calibrate heterospec'")
    num_bins = len(thresholds) + 1
    # With a single bin all trees are ordinary ones.
    num_low = min(len(gammas), num_bins) if num_bins > 1 else 0
    limit = alpha if max_extension is None else max_extension
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
    """The policy of trees that have one size, for which only Phi is computed."""
    return AdaptivePolicy((), (0,), (num_nodes,))
