"""What a round costs, and the thresholds that follow from it.

Costs are kept as JSON: ``drafters`` [N] names, ``owners`` [N] those of the drafters whose cache they use,
``batch_sizes`` [B], and ``draft``, ``verify``, ``switch``, each [B][N] seconds.

Shape legend: B measured batch sizes, N drafters in routing order, the last of which is the reference.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import add
from pathlib import Path
from typing import Any

from vllm_crossspec.router.checkpoint import EntropyGain, RouterFacts
from vllm_crossspec.router.policies import policy_kind

Table = tuple[tuple[float, ...], ...]

ALWAYS = -1.0
"""An entropy threshold that every distribution exceeds: 0 would not do, for a certain token has entropy 0."""

MISSED_TOKENS = 90
"""What a drafter is taken to have missed of a request when it is chosen again: 80 to 90 on average (WhiFlash, section
6). Switches are measured with so many."""

PRIOR_NATS = 1.0
"""Where the entropy threshold of two drafters stands before anything was measured or trained.

1 nat is the entropy of e = 2.7 equally likely tokens. It is a starting point and no measurement: WhiFlash finds its
threshold by grid search (section 3.3.1, "Calibration"), as ``crossspec calibrate`` does.
"""


@dataclass(frozen=True)
class RoundCosts:
    """Seconds that the parts of a round take, by batch size; measured at start-up.

    Attributes:
        batch_sizes: [B] requests, ascending.
        draft: [B][N] one draft of every request with this drafter.
        verify: [B][N] the target's pass over this drafter's drafts.
        switch: [B][N] every request coming to this drafter: its catch-up over :data:`MISSED_TOKENS` of each.
        owners: [N] whose cache each drafter uses, as numbers of drafters: a switch between two with the same costs
            nothing. Empty: each its own.
    """

    batch_sizes: tuple[int, ...]
    draft: Table
    verify: Table
    switch: Table
    owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        assert sizes and sizes[0] > 0 and all(a < b for a, b in pairwise(sizes)), sizes
        for table in (self.draft, self.verify, self.switch):
            assert len(table) == len(sizes) and all(len(row) == self.num_drafters for row in table)
            assert len(self.owners) in (0, self.num_drafters), self.owners
        assert all(0 <= seconds < inf for row in table for seconds in row)
        assert all(seconds > 0 for row in range(len(sizes)) for seconds in self.round_seconds(row))

    @property
    def num_drafters(self) -> int:
        """N."""
        return len(self.draft[0])

    def row(self, num_reqs: int) -> int:
        """Index of the measured batch size nearest to ``num_reqs``; of two equally near ones, the smaller."""
        return nearest(self.batch_sizes, num_reqs)

    def round_seconds(self, row: int) -> tuple[float, ...]:
        """[N] seconds of a whole round with each drafter: its draft and the target's pass over it."""
        return tuple(a + b for a, b in zip(self.draft[row], self.verify[row], strict=True))


def parse_costs(found: Any, drafters: Sequence[str], where: str) -> RoundCosts:
    """The costs of some drafters, from what a file says.

    Args:
        found: the parsed JSON; its ``drafters`` may be more than those asked for, in any order, or be left out where
            columns are in routing order; so may ``owners``, where each drafter has its own cache.
        drafters: [N] names in routing order.
        where: names the file in messages.

    Raises:
        ValueError: there is no such drafter among them, or they are no tables of seconds.
    """
    names = found.get("drafters", drafters) if isinstance(found, Mapping) else drafters
    names = list(names) if isinstance(names, Sequence) and not isinstance(names, str) else []
    if unknown := [name for name in drafters if name not in names]:
        others = ", ".join(map(str, names))
        raise ValueError(f"{where} has no costs of drafter {unknown[0]!r}; its drafters are {others}")
    columns = [names.index(name) for name in drafters]
    try:
        sizes = tuple(int(size) for size in found["batch_sizes"])
        tables: dict[str, Table] = {}
        for key in ("draft", "verify", "switch"):
            assert all(len(row) == len(names) for row in found[key])
            tables[key] = tuple(tuple(float(row[column]) for column in columns) for row in found[key])
        owners = [found.get("owners", names)[column] for column in columns]
        return RoundCosts(sizes, **tables, owners=tuple(map(owners.index, owners)))
    except (KeyError, IndexError, TypeError, ValueError, AssertionError) as problem:
        raise ValueError(
            f"{where} must give positive seconds: `batch_sizes` [B] rising, and `draft`, `verify` and `switch`, each "
            f"[B][{len(names)}] for {', '.join(map(str, names))}"
        ) from problem


def read_costs(file: str | Path, drafters: Sequence[str], key: str) -> RoundCosts:
    """The costs of some drafters from a file that ``crossspec costs`` wrote, or someone by hand.

    Raises:
        ValueError: it is no such file, or has not got all of these drafters; begins with ``key``.
    """
    where = f"{key} {file}"
    try:
        found = json.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"{where} is no file of costs that `crossspec costs` writes: {problem}") from problem
    return parse_costs(found, drafters, where)


def as_json(costs: RoundCosts, drafters: Sequence[str]) -> dict[str, Any]:
    """What :func:`parse_costs` reads."""
    return {
        "drafters": list(drafters),
        "owners": [drafters[owner] for owner in costs.owners or range(len(drafters))],
        "batch_sizes": list(costs.batch_sizes),
        **{key: [list(row) for row in getattr(costs, key)] for key in ("draft", "verify", "switch")},
    }


def nearest(batch_sizes: Sequence[int], num_reqs: int) -> int:
    """Index of the batch size nearest to ``num_reqs``; of two equally near ones, the smaller."""
    return min(range(len(batch_sizes)), key=lambda row: abs(batch_sizes[row] - num_reqs))


def auto_thresholds(policy: str, costs: RoundCosts | None, facts: RouterFacts | None, num_drafters: int) -> Table:
    """What ``"threshold": "auto"`` means: thresholds at which a drafter just breaks even with the reference.

    A drafter i that accepts tau tokens more than the reference's L, in rounds that take c_i seconds instead of c_ref,
    yields as many tokens per second where (L + tau) / c_i = L / c_ref, that is at tau_i = L (c_i / c_ref - 1). Equal
    costs, or costs that nobody could measure (on a CPU), make it 0. This is WhiFlash's hardware-aware decision (section
    3.3.2) with the threshold computed instead of searched. A switch is paid once and used for as long as the router
    stays, which is not known beforehand: policy ``goodput`` weighs it in every round, these thresholds leave it out.

    neural: tau_i and the trained router's margin, tokens. entropy: the entropy (nats) from which on the trained
    router's fit of mean gain by entropy says that drafter i is worth more than tau_i and than every later drafter;
    ``inf`` where it never is, ``ALWAYS`` where it always is. Without such a fit a prior stands in, which no cost can
    move: 1 nat for two drafters, values spread evenly between 2 and 0 for more.

    Args:
        policy: a routing policy; those without thresholds get zeros.
        costs: as measured; None where they were not.
        facts: of the trained router; None where there is none.
        num_drafters: N.

    Returns:
        [B][N - 1], a row for each batch size of ``costs``; one row without costs.
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

    Args:
        round_seconds: [N].
        length: tokens a round of the last drafter.
    """
    *others, reference = round_seconds
    return tuple(length * (seconds / reference - 1.0) for seconds in others)


def _entropies(fit: EntropyGain, margins: tuple[float, ...]) -> tuple[float, ...]:
    """[N - 1] nats from which on each drafter pays; see :func:`auto_thresholds`."""
    net = [[gain - margin for gain in row] for row, margin in zip(fit.gain, margins, strict=True)]
    net.append([0.0] * len(fit.entropy))
    thresholds = []
    for drafter, row in enumerate(net[:-1]):
        rivals = [max(values) for values in zip(*net[drafter + 1 :], strict=True)]
        losing = [index for index, (own, rival) in enumerate(zip(row, rivals, strict=True)) if own <= rival]
        first = losing[-1] + 1 if losing else 0
        edges = (ALWAYS, *fit.entropy[1:], inf)
        thresholds.append(edges[first])
    return tuple(thresholds)
