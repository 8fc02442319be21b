"""The bins of Phi: a regression tree of depth 3 over recorded rounds (HeteroSpec, section 4.2)."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_crossspec.adaptive.calibration import BinFacts, Calibration
from vllm_crossspec.adaptive.heterospec import GAMMAS, LEAF_SHARE, OURS, Reading, default_alpha
from vllm_crossspec.adaptive.rounds import Rounds

LEVELS = 3
"""Depth of the regression tree: at most 8 bins."""
MIN_LEAF = 10
"""Fewest paths of a bin, beside a share of all (``LEAF_SHARE``). Bins of a hundredth are cut around a few outliers, and
the low ones, which are all that trees are sized by, then are too rare to matter (docs/papers/heterospec.md)."""
DIGITS = 6
"""Of a threshold, so that files are readable; it is far below what separates two contexts."""


class BinReport(NamedTuple):
    """How one bin did on the recorded rounds.

    Attributes:
        low, high: of its Phi, nats; -inf and inf at the ends.
        num_rounds: in it.
        full_share: of its rounds, those whose accepted path reaches the tree's depth.
        mean_rank: terminal confidence rank of those.
        mean_accepted: draft tokens, of the whole tree.
        mean_within: draft tokens that are left where only ``width`` nodes are verified.
        extension: levels that its trees grow.
        width: nodes of its trees that are verified.
    """

    low: float
    high: float
    num_rounds: int
    full_share: float
    mean_rank: float
    mean_accepted: float
    mean_within: float
    extension: int
    width: int


def fully_accepted(rounds: Rounds, depth: int) -> torch.Tensor:
    """bool [M]: whether a round's accepted path reaches the last of ``depth`` levels."""
    return rounds.accepted >= depth


def fit_thresholds(
    phi: np.ndarray, rank: np.ndarray, leaf_share: float = LEAF_SHARE, levels: int = LEVELS
) -> tuple[float, ...]:
    """Cut Phi where the ranks on both sides vary least (section 4.2, equation 2), three times over.

    Args:
        phi: float [P] of the paths, nats.
        rank: [P] their terminal confidence ranks.
        leaf_share: of the paths, that a bin must hold, and 10 at least; 0: one path is enough, scikit-learn's default.
        levels: of the regression tree; calibrations have 3.

    Returns:
        At most 2 ** levels - 1 rising values; fewer where the ranks do not differ, or where a bin would have too few
        paths.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.tree import DecisionTreeRegressor
    except ModuleNotFoundError:
        raise ValueError('fitting bins needs scikit-learn: run `pip install "vllm-crossspec[train]"`') from None
    leaf = max(MIN_LEAF, math.ceil(leaf_share * len(phi))) if leaf_share else 1
    cart = DecisionTreeRegressor(max_depth=levels, criterion="squared_error", min_samples_leaf=leaf, random_state=0)
    cart.fit(phi.astype(np.float64)[:, None], rank.astype(np.float64))
    inner = cart.tree_.children_left >= 0
    return tuple(sorted({round(float(value), DIGITS) for value in cart.tree_.threshold[inner]}))


def low_bins(num_bins: int) -> int:
    """How many of the bins are low: 3 of 8 (section 4.3), and never more than half of fewer."""
    return min(len(GAMMAS), num_bins // 2)


def calibrate(
    rounds: Rounds,
    alpha: int | None = None,
    *,
    reading: Reading = OURS,
    leaf_share: float = LEAF_SHARE,
    **made: Any,
) -> Calibration:
    """Fit the bins to recorded rounds; the same rounds give the same calibration.

    Args:
        rounds: at temperature 0 or above, of whole trees.
        alpha: levels that the surest bin adds; None: half the tree's depth, rounded up (section 5.3).
        reading: of section 4.3.
        leaf_share: see :func:`fit_thresholds`.
        made: what the file should say of how it came about.

    Raises:
        ValueError: too few fully accepted paths, or their ranks have nothing to do with Phi.
    """
    tree, keep = rounds.facts.tree, ~rounds.phi.isnan()
    full = fully_accepted(rounds, tree.depth) & keep
    if int(full.sum()) < 2 * MIN_LEAF:
        raise ValueError(
            f"{int(full.sum())} of {len(full)} rounds accepted a path down to level {tree.depth}, and bins need "
            f"{2 * MIN_LEAF}: give more prompts (--prompts, --limit) or longer answers (--max-tokens)"
        )
    thresholds = fit_thresholds(rounds.phi[full].numpy(), rounds.rank[full].numpy(), leaf_share)
    if not thresholds:
        raise ValueError(
            f"the ranks of {int(full.sum())} fully accepted paths do not differ with Phi, so that there are no bins: "
            "give more prompts (--prompts, --limit)"
        )
    if leaf_share != LEAF_SHARE:
        made["leaf_share"] = leaf_share
    bins = bins_of(rounds.phi, thresholds)
    facts = []
    for i in range(len(thresholds) + 1):
        mine = (bins == i) & keep
        facts.append(
            BinFacts(
                _mean(rounds.rank[mine & full]),
                int((mine & full).sum()),
                int(mine.sum()),
                _mean(rounds.accepted[mine]),
            )
        )
    return Calibration(
        thresholds=thresholds,
        bins=tuple(facts),
        gammas=GAMMAS[: low_bins(len(facts))],
        alpha=default_alpha(tree.depth) if alpha is None else alpha,
        tree=tree,
        target=rounds.facts.target,
        drafter=rounds.facts.drafter,
        made={**made, "rounds": int(keep.sum()), "fully_accepted": int(full.sum())},
        reading=reading,
    )


def _mean(values: torch.Tensor) -> float:
    """Rounded, so that files are readable; 0 of nothing."""
    return round(float(values.double().mean()), 4) if len(values) else 0.0


def bins_of(phi: torch.Tensor, thresholds: tuple[float, ...]) -> torch.Tensor:
    """int64 [M] bin of each Phi; NaN is in the last (as ``AdaptivePolicy.bin_of``)."""
    return (~(phi[:, None] <= torch.tensor(thresholds, dtype=torch.float32))).sum(dim=1)


def report(rounds: Rounds, calibration: Calibration) -> list[BinReport]:
    """How every bin did."""
    policy = calibration.policy()
    bins, full = bins_of(rounds.phi, calibration.thresholds), fully_accepted(rounds, calibration.tree.depth)
    within = rounds.accepted_within(torch.tensor(policy.widths)[bins])
    edges = (-math.inf, *calibration.thresholds, math.inf)
    rows = []
    for i, (extension, width) in enumerate(zip(policy.extensions, policy.widths, strict=True)):
        mine = bins == i
        rows.append(
            BinReport(
                edges[i],
                edges[i + 1],
                int(mine.sum()),
                _mean(full[mine]),
                _mean(rounds.rank[mine & full]),
                _mean(rounds.accepted[mine]),
                _mean(within[mine]),
                extension,
                width,
            )
        )
    return rows
