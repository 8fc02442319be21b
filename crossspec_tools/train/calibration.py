"""Thresholds by grid search over records (WhiFlash, section 3.3.1), and the table of oracles beside them (section 4).

Shape legend: M records, N drafters in routing order (the last is the reference), G values of a grid.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from crossspec_tools.records import simulate
from crossspec_tools.records.simulate import Outcome, Rule, Signal, Value
from crossspec_tools.train.records import Records
from crossspec_tools.train.router import trajectories
from vllm_crossspec.load.schedule import expected_tokens

OVERALL = "all"
SWEEPS = 3
"""Rounds over the thresholds of more than two drafters, each searched while the others stand."""

Thresholds = tuple[float, ...]


class Found(NamedTuple):
    """The best thresholds for some texts, and what they are worth there."""

    thresholds: Thresholds
    value: float


class Calibration(NamedTuple):
    """What the grid search found."""

    grid: tuple[tuple[float, ...], ...]  # [N - 1] values of each threshold, rising
    by_category: dict[str, Found]  # the best thresholds of each category
    overall: Found  # those with the best mean over the categories
    # by category and `all`: [N - 1][G] worth along each threshold, the others at the overall best
    curves: dict[str, list[list[float]]]


class Row(NamedTuple):
    """One method of a table."""

    method: str  # its name
    values: dict[str, float]  # what it is worth by category, and their `mean`
    lengths: dict[str, float]  # tokens a round by category, and their `mean`, whatever it is judged by
    shares: list[float]  # [N] of the rounds by drafter
    switches: float  # a round


def groups_of(records: Records) -> dict[str, list[int]]:
    """Text indices by category."""
    groups: dict[str, list[int]] = {}
    for index, text in enumerate(records.texts):
        groups.setdefault(text.category, []).append(index)
    return groups


def grid_of(signal: torch.Tensor, points: int) -> tuple[float, ...]:
    """At most ``points`` values: quantiles of a signal [M], rounded to three digits, and one below and above all.

    Entropy is never below 0, so 0 stands for "always" there.
    """
    values = torch.quantile(signal.double(), torch.linspace(0, 1, max(points - 2, 1), dtype=torch.float64))
    low, high = math.floor(float(signal.min())), math.ceil(float(signal.max()) + 1e-9)
    return tuple(sorted({float(low), *(round(float(v), 3) for v in values), float(high)}))


def calibrate(records: Records, signal: Signal, value: Value, points: int) -> Calibration:
    """Search the thresholds of a policy."""
    paths, groups = trajectories(records), groups_of(records)
    others = len(records.facts.drafters) - 1
    columns = signal.values.reshape(len(records.entropy), -1).expand(-1, others)
    grid = tuple(grid_of(column, points) for column in columns.T)
    known: dict[Thresholds, Outcome] = {}

    def outcome(thresholds: Thresholds) -> Outcome:
        if thresholds not in known:
            known[thresholds] = simulate.walk(paths, signal.rule(paths, thresholds))
        return known[thresholds]

    def worth(category: str) -> Callable[[Thresholds], float]:
        return lambda thresholds: value(outcome(thresholds).of(groups[category]))

    def mean(thresholds: Thresholds) -> float:
        return sum(worth(category)(thresholds) for category in groups) / len(groups)

    falling = signal.policy == "entropy"
    overall = search(mean, grid, falling)
    scores = {**{category: worth(category) for category in groups}, OVERALL: mean}
    curves = {
        name: [
            [score((*overall.thresholds[:i], value_, *overall.thresholds[i + 1 :])) for value_ in column]
            for i, column in enumerate(grid)
        ]
        for name, score in scores.items()
    }
    return Calibration(grid, {c: search(worth(c), grid, falling) for c in groups}, overall, curves)


def search(score: Callable[[Thresholds], float], grid: Sequence[Sequence[float]], falling: bool) -> Found:
    """The thresholds of the grid with the highest score, one threshold after the other.

    Of equal ones the highest wins, which routes most to the reference. ``falling``: whether no threshold may be above
    the one before.
    """
    best = tuple(column[-1] for column in grid)
    found = Found(best, score(best))
    for _ in range(SWEEPS if len(grid) > 1 else 1):
        for i, column in enumerate(grid):
            for value in sorted(column, reverse=True):
                tried = (*found.thresholds[:i], value, *found.thresholds[i + 1 :])
                if falling and list(tried) != sorted(tried, reverse=True):
                    continue
                if (worth := score(tried)) > found.value:
                    found = Found(tried, worth)
    return found


def oracle_rules(records: Records, value: Value) -> dict[str, Rule]:
    """Every single drafter and the three oracles (section 4, "Baselines")."""
    paths = trajectories(records)
    rules = {name: simulate.always(index) for index, name in enumerate(records.facts.drafters)}
    rules["oracle-task"] = simulate.oracle_by_group(paths, list(groups_of(records).values()), value)
    rules["oracle-prompt"] = simulate.oracle_by_group(paths, [[i] for i in range(len(records.texts))], value)
    rules["oracle-token"] = simulate.oracle_token(paths, value)
    return rules


def rule_by_category(records: Records, signal: Signal, found: Calibration) -> Rule:
    """The policy with every category's own thresholds, for one walk."""
    paths, groups = trajectories(records), groups_of(records)
    group_of = torch.tensor([list(groups).index(text.category) for text in records.texts])[paths.text_of]
    rules = [signal.rule(paths, found.by_category[category].thresholds) for category in groups]

    def rule(at: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        drafters = torch.empty_like(at)
        for number, of_group in enumerate(rules):
            mine = group_of[at] == number
            drafters[mine] = of_group(at[mine], before[mine])
        return drafters

    return rule


def goodput_rule(records: Records, value: Value, turns: Sequence[int] | None = None) -> Rule:
    """Policy ``goodput`` without a model, at these costs, which must be known.

    ``turns``: texts in the order in which they are asked for; None: categories by turns, as requests of a server do.
    """
    assert value.costs is not None
    if turns is None:
        turns = by_turns(groups_of(records).values())
    paths = trajectories(records, [records.texts[text] for text in turns])
    tried = [drafter for drafter, foreseen in enumerate((records.forecasts >= 0).any(dim=0).tolist()) if not foreseen]
    priors = list(map(expected_tokens, records.facts.depths))
    known = (records.forecasts, records.entropy, priors, tried)
    return simulate.by_experience(paths, *known, value.costs, value.batch_size)


def by_turns(groups: Iterable[Sequence[int]]) -> list[int]:
    """One text of each group, then the next of each."""
    return [text for turn in zip_longest(*groups) for text in turn if text is not None]


def table(records: Records, rules: dict[str, Rule], value: Value) -> list[Row]:
    """A row per rule."""
    paths, groups = trajectories(records), groups_of(records)
    rows = []
    for method, rule in rules.items():
        outcome = simulate.walk(paths, rule)
        worth, lengths = (
            {category: judge(outcome.of(texts)) for category, texts in groups.items()} for judge in (value, Value())
        )
        for counts in (worth, lengths):
            counts["mean"] = sum(counts.values()) / len(counts)
        rounds = max(int(outcome.rounds.sum()), 1)
        rows.append(Row(method, worth, lengths, outcome.shares, outcome.num_switches / rounds))
    return rows
