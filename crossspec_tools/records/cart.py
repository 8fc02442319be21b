"""The bins of Phi: a regression tree of depth 3 over recorded rounds (HeteroSpec, section 4.2)."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from crossspec_tools.records.rounds import Rounds
from vllm_crossspec.heterospec.calibration import BinFacts, Calibration
from vllm_crossspec.heterospec.heterospec import GAMMAS, LEAF_SHARE, OURS, Reading, default_alpha
from vllm_crossspec.names import counted

LEVELS = 3
"""Depth of the regression tree: at most 8 bins."""
REMEDY = "collect into another --out, from more prompts (--prompts, --limit) or longer answers (--max-tokens)"
MIN_LEAF = 10
"""Fewest paths of a bin, beside a share of all (``LEAF_SHARE``). Bins of a hundredth are cut around a few outliers, and
the low ones, which are all that trees are sized by, then are too rare to matter (research/notes/heterospec.md)."""
DIGITS = 6
"""Of a threshold, so that files are readable; it is far below what separates two contexts."""


class BinReport(NamedTuple):
    """How one bin did on the recorded rounds."""

    low: float  # of its Phi, nats; -inf and inf at the ends
    high: float  # of its Phi, nats; -inf and inf at the ends
    num_rounds: int  # in it
    full_share: float  # of its rounds, those whose accepted path reaches the tree's depth
    mean_rank: float  # terminal confidence rank of those
    mean_accepted: float  # draft tokens, of the whole tree
    mean_within: float  # draft tokens that are left where only `width` nodes are verified
    extension: int  # levels that its trees grow
    width: int  # nodes of its trees that are verified


def fit_thresholds(
    phi: np.ndarray, rank: np.ndarray, leaf_share: float = LEAF_SHARE, levels: int = LEVELS
) -> tuple[float, ...]:
    """Cut Phi [P] where the ranks [P] on both sides vary least (section 4.2, equation 2), ``levels`` times over.

    Returns at most 2 ** levels - 1 rising values; fewer where the ranks do not differ, or where a bin would have too
    few paths. Raises ValueError: scikit-learn is not installed. ``leaf_share``: of the paths, that a bin must hold, and
    10 at least; 0: one path is enough, scikit-learn's default.
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
    rounds: Rounds, alpha: int | None = None, *, reading: Reading = OURS, leaf_share: float = LEAF_SHARE, **made: Any
) -> Calibration:
    """Fit the bins to recorded rounds of whole trees; the same rounds give the same calibration.

    Raises ValueError: too few fully accepted paths, or their ranks have nothing to do with Phi. ``alpha``: levels that
    the surest bin adds; None: half the tree's depth, rounded up (section 5.3). ``made``: what the file says of itself.
    """
    tree, keep = rounds.facts.tree, ~rounds.phi.isnan()
    full = (rounds.accepted >= tree.depth) & keep
    if int(full.sum()) < 2 * MIN_LEAF:
        raise ValueError(
            f"{int(full.sum())} of {counted(len(full), 'round')} accepted a path down to level {tree.depth}, and bins "
            f"need {2 * MIN_LEAF}: {REMEDY}"
        )
    thresholds = fit_thresholds(rounds.phi[full].numpy(), rounds.rank[full].numpy(), leaf_share)
    if not thresholds:
        raise ValueError(
            f"the ranks of {counted(int(full.sum()), 'fully accepted path')} do not differ with Phi: no bins; {REMEDY}"
        )
    if leaf_share != LEAF_SHARE:
        made["leaf_share"] = leaf_share
    bins = bins_of(rounds.phi, thresholds)
    facts = []
    for i in range(len(thresholds) + 1):
        mine = (bins == i) & keep
        rank, accepted = rounds.rank[mine & full], rounds.accepted[mine]
        facts.append(BinFacts(_mean(rank), len(rank), len(accepted), _mean(accepted)))
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
    bins, full = bins_of(rounds.phi, calibration.thresholds), rounds.accepted >= calibration.tree.depth
    within = rounds.accepted_within(torch.tensor(policy.widths)[bins])
    edges = (-math.inf, *calibration.thresholds, math.inf)
    rows = []
    for i, (extension, width) in enumerate(zip(policy.extensions, policy.widths, strict=True)):
        mine = bins == i
        share, rank, accepted = _mean(full[mine]), _mean(rounds.rank[mine & full]), _mean(rounds.accepted[mine])
        worth = (int(mine.sum()), share, rank, accepted, _mean(within[mine]))
        rows.append(BinReport(edges[i], edges[i + 1], *worth, extension, width))
    return rows
