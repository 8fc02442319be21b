"""Thresholds of routing policies, computed from the rounds' costs.

Shape legend: B measured batch sizes, N drafters in routing order (the last one is the reference).
"""

from collections.abc import Sequence
from math import inf
from operator import add

from vllm_crossspec.kinds.policy import policy_kind
from vllm_crossspec.load.costs import RoundCosts, Table
from vllm_crossspec.routing.checkpoint import EntropyGain, RouterFacts

ALWAYS = -1.0
"""An entropy threshold that every distribution exceeds; the lowest entropy is 0."""
PRIOR_NATS = 1.0
"""Threshold of two drafters without measurement or training: the entropy of e = 2.7 equally likely tokens.

WhiFlash finds its threshold by grid search (section 3.3.1, "Calibration"), as ``crossspec calibrate`` does.
"""


def auto_thresholds(policy: str, costs: RoundCosts | None, facts: RouterFacts | None, num_drafters: int) -> Table:
    """[B][N - 1] "auto" thresholds, at which a drafter breaks even with the reference; one row without costs.

    This is WhiFlash's hardware-aware decision (section 3.3.2), computed instead of searched. Switches are left out,
    because it is unknown how long a request will stay. A policy without thresholds gets zeros.

    - neural: :func:`break_even` plus the trained router's margin, tokens.
    - entropy: the entropy (nats) above which the trained router's fit gives drafter i a gain above break-even and above
      every later drafter's; ``inf`` for never, ``ALWAYS`` for always. Without a fit the prior does not depend on costs:
      1 nat for two drafters, values spread evenly between 2 and 0 for more.
    """
    kind, others = policy_kind(policy, "policy"), num_drafters - 1
    rows = range(len(costs.batch_sizes)) if costs else range(1)
    if not kind.takes_threshold:
        return tuple((0.0,) * others for _ in rows)
    assert costs is None or costs.num_drafters == num_drafters
    length = facts.mean_lengths[-1] if facts else 0.0
    margins = tuple(break_even(costs.round_seconds(row), length) if costs else (0.0,) * others for row in rows)
    if kind.needs_hidden:
        assert facts, f"policy {policy} without a trained router"
        own = facts.margins or (0.0,) * others
        return tuple(tuple(map(add, row, own)) for row in margins)
    if facts is None or facts.entropy_gain is None:
        prior = tuple(2 * PRIOR_NATS * (num_drafters - 1 - i) / num_drafters for i in range(others))
        return tuple(prior for _ in rows)
    return tuple(_entropies(facts.entropy_gain, row) for row in margins)


def break_even(round_seconds: Sequence[float], length: float) -> tuple[float, ...]:
    """[N - 1] tokens by which each drafter must beat the reference's ``length`` to be worth its longer round.

    With L tokens in c seconds for the reference and c_i seconds for drafter i, tau solves (L + tau) / c_i = L / c.
    """
    *others, reference = round_seconds
    return tuple(length * (seconds / reference - 1.0) for seconds in others)


def _entropies(fit: EntropyGain, margins: tuple[float, ...]) -> tuple[float, ...]:
    """[N - 1] nats above which each drafter pays off."""
    net = [[gain - margin for gain in row] for row, margin in zip(fit.gain, margins, strict=True)]
    net.append([0.0] * len(fit.entropy))
    edges, thresholds = (ALWAYS, *fit.entropy[1:], inf), []
    for drafter, row in enumerate(net[:-1]):
        rivals = [max(values) for values in zip(*net[drafter + 1 :], strict=True)]
        losing = [index for index, (own, rival) in enumerate(zip(row, rivals, strict=True)) if own <= rival]
        thresholds.append(edges[losing[-1] + 1 if losing else 0])
    return tuple(thresholds)
