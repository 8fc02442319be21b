"""What a router's training may count on where it meets kinds of text that it has not seen.

Every kind (a category of the records) is left out once: a network learns from the others and is judged on it. A router
that is then trained on all kinds takes over the epoch and the thresholds that are best for the kind that fares worst.
The paper splits its texts at random (WhiFlash, section 3.3.2), where every kind stands on both sides.

Shape legend: M records, N drafters in routing order (the last is the reference), E epochs.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from crossspec_tools.records import simulate
from crossspec_tools.records.simulate import Outcome, Signal, Value
from crossspec_tools.train.calibration import grid_of, groups_of, search
from crossspec_tools.train.recipes import RouterConfig
from crossspec_tools.train.records import Records
from crossspec_tools.train.router import (
    Carried,
    Progress,
    RouterNet,
    Split,
    explained,
    fit,
    gains_of,
    lessons_of,
    predicted_gains,
    rows_of,
    trajectories,
)
from vllm_crossspec.routing.thresholds import break_even


class Kind(NamedTuple):
    """A kind of text, by routers that have not seen it."""

    num_texts: int  # of it
    r2: tuple[float, ...]  # [N - 1] share of the variance of its gains that is explained
    best: str  # name of its best single drafter
    single: float  # what that is worth there, as the value counts
    routed: float  # what the router is worth with the thresholds that were found
    foreign: float  # what it is worth with those that are best for the worst of the other kinds: this one chose nothing
    oracle: float  # what the best drafter of every round is worth


class Transfer(NamedTuple):
    """What leaving every kind out has taught."""

    carried: Carried  # what a router of all kinds takes over
    thresholds: tuple[float, ...]  # [N - 1] tokens, at the costs that were given
    kinds: dict[str, Kind]  # by category
    gains: torch.Tensor  # float32 [M, N - 1] predicted, each record's by the network that has not seen its kind


def leave_kinds_out(
    records: Records,
    config: RouterConfig,
    value: Value,
    points: int = 41,
    progress: Progress = lambda *told: None,
    correct: bool = True,
) -> Transfer:
    """Train a network without each kind, and find what is best for the one that fares worst.

    Raises ValueError: one category only, or one without records to judge by or to learn from.

    Args:
        config: how to train; ``patience`` and ``held_out`` are not needed, for a kind is what is held out.
        value: what the thresholds are to make most of.
        correct: whether predictions are corrected by a text's own rounds (``RouterConfig.correct`` of a server).
    """
    groups = groups_of(records)
    if len(groups) < 2:
        raise ValueError(
            f"to leave kinds of text out the records must be of two categories or more, and all are of "
            f"{records.categories[0]}; give the prompts of `crossspec collect` a category"
        )
    complete, targets = records.is_complete, gains_of(records)
    of_kind = {kind: rows_of(records, [records.texts[t] for t in texts]) for kind, texts in groups.items()}
    for kind, rows in of_kind.items():
        if not (rows & complete).any():
            raise ValueError(
                f"no record of {kind} is far enough from its text's end to judge by; collect longer answers"
            )
    by_epoch = torch.zeros(config.epochs, *targets.shape)  # [E, M, N - 1]
    for number, texts in enumerate(groups.values()):

        def note(done: int, total: int, error: float | None, number: int = number) -> None:
            progress(number * total + done, len(groups) * total, error)

        _learn_without(records, texts, config, by_epoch, note)
    errors = [
        max(1 - min(explained(gains[rows & complete], targets[rows & complete])) for rows in of_kind.values())
        for gains in by_epoch
    ]
    best = errors.index(min(errors))
    gains = by_epoch[best].clone()
    judge = _Judge(records, gains, value, points, correct)
    thresholds = judge.best_for(groups)
    kinds = {
        kind: judge.kind(kind, thresholds, explained(gains[rows & complete], targets[rows & complete]))
        for kind, rows in of_kind.items()
    }
    margins = tuple(threshold - zero for threshold, zero in zip(thresholds, judge.even, strict=True))
    return Transfer(Carried(best + 1, margins), thresholds, kinds, gains)


class _Judge:
    """What thresholds are worth to kinds that the router has not seen.

    ``gains``: [M, N - 1] predicted. ``even``: [N - 1] tokens at which each drafter breaks even with the reference, from
    the costs alone.
    """

    def __init__(self, records: Records, gains: torch.Tensor, value: Value, points: int, correct: bool):
        self._value, self._groups, self._names = value, groups_of(records), records.facts.drafters
        self._paths = trajectories(records)
        alone = [simulate.walk(self._paths, simulate.always(drafter)) for drafter in range(len(self._names))]
        self._singles = {kind: [value(one.of(texts)) for one in alone] for kind, texts in self._groups.items()}
        self._oracle = simulate.walk(self._paths, simulate.oracle_token(self._paths, value))
        self._signal = Signal("neural", gains, _usual_elsewhere(alone, self._groups) if correct else None)
        self.even: tuple[float, ...] = (0.0,) * gains.shape[1]
        if value.costs is not None:
            seconds = value.costs.round_seconds(value.costs.row(value.batch_size))
            self.even = break_even(seconds, alone[-1].acceptance_length)
        self._grid = [sorted({*grid_of(column, points), zero}) for column, zero in zip(gains.T, self.even, strict=True)]
        self._known: dict[tuple[float, ...], dict[str, float]] = {}

    def worth(self, thresholds: tuple[float, ...]) -> dict[str, float]:
        """Of the router with these thresholds, by kind."""
        if thresholds not in self._known:
            outcome = simulate.walk(self._paths, self._signal.rule(self._paths, thresholds))
            self._known[thresholds] = {kind: self._value(outcome.of(texts)) for kind, texts in self._groups.items()}
        return self._known[thresholds]

    def best_for(self, kinds: Collection[str]) -> tuple[float, ...]:
        """The thresholds with which the worst of some kinds is best, over its best single drafter."""

        def worst(thresholds: tuple[float, ...]) -> float:
            return min(self.worth(thresholds)[kind] / max(self._singles[kind]) for kind in kinds)

        return search(worst, self._grid, falling=False).thresholds

    def kind(self, name: str, thresholds: tuple[float, ...], r2: tuple[float, ...]) -> Kind:
        """What is told of a kind."""
        texts, singles = self._groups[name], self._singles[name]
        return Kind(
            num_texts=len(texts),
            r2=r2,
            best=self._names[singles.index(max(singles))],
            single=max(singles),
            routed=self.worth(thresholds)[name],
            foreign=self.worth(self.best_for(self._groups.keys() - {name}))[name],
            oracle=self._value(self._oracle.of(texts)),
        )


def _learn_without(
    records: Records, texts: list[int], config: RouterConfig, by_epoch: torch.Tensor, progress: Progress
) -> None:
    """Write what a network predicts of some texts into ``by_epoch`` [E, M, N - 1]; it learns from all others."""
    chosen = set(texts)
    split = Split(*(tuple(t for i, t in enumerate(records.texts) if (i in chosen) == held) for held in (False, True)))
    lessons = lessons_of(records, split.train, config.weighting)
    rows, epoch = rows_of(records, split.held_out), iter(range(config.epochs))

    def note(net: RouterNet) -> None:
        by_epoch[next(epoch), rows] = predicted_gains(records, net, rows)

    fit(records, split, lessons, config, progress, epochs=config.epochs, on_epoch=note)


def _usual_elsewhere(alone: Sequence[Outcome], groups: Mapping[str, Sequence[int]]) -> torch.Tensor:
    """float32 [T, N] tokens of a round with each drafter in the kinds that a text is not of."""
    usual = torch.zeros(sum(map(len, groups.values())), len(alone))
    for kind, texts in groups.items():
        others = [text for other, own in groups.items() if other != kind for text in own]
        usual[list(texts)] = torch.tensor([one.of(others).acceptance_length for one in alone])
    return usual
