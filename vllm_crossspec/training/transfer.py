"""What a router's training may count on where it meets kinds of text that it has not seen.

Every kind (a category of the records) is left out once: a network learns from the others and is judged on it. Of the
epochs the one is kept, and of the thresholds those, that are best for the kind that fares worst; a router that is then
trained on all kinds takes both over. The paper splits its texts at random (WhiFlash, section 3.3.2), where every kind
stands on both sides.

Shape legend: M records, N drafters in routing order (the last is the reference), E epochs.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from vllm_crossspec.router import simulate
from vllm_crossspec.router.costs import break_even
from vllm_crossspec.router.simulate import Outcome, Value
from vllm_crossspec.training.calibration import grid_of, groups_of, search
from vllm_crossspec.training.records import Records
from vllm_crossspec.training.router import (
    Carried,
    Progress,
    RouterConfig,
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


class Kind(NamedTuple):
    """A kind of text, by routers that have not seen it.

    Attributes:
        num_texts: of it.
        r2: [N - 1] share of the variance of its gains that is explained.
        best: name of its best single drafter.
        single: what that is worth there, as the value counts.
        routed: what the router is worth with the thresholds that were found.
        foreign: what it is worth with those that are best for the worst of the other kinds: this one chose nothing.
        oracle: what the best drafter of every round is worth.
    """

    num_texts: int
    r2: tuple[float, ...]
    best: str
    single: float
    routed: float
    foreign: float
    oracle: float


class Transfer(NamedTuple):
    """What leaving every kind out has taught.

    Attributes:
        carried: what a router of all kinds takes over.
        thresholds: [N - 1] tokens, at the costs that were given.
        kinds: by category.
        gains: float32 [M, N - 1] predicted, each record's by the network that has not seen its kind.
    """

    carried: Carried
    thresholds: tuple[float, ...]
    kinds: dict[str, Kind]
    gains: torch.Tensor


def leave_kinds_out(
    records: Records,
    config: RouterConfig,
    value: Value,
    points: int = 41,
    progress: Progress | None = None,
    correct: bool = True,
) -> Transfer:
    """Train a network without each kind, and find what is best for the one that fares worst.

    Args:
        records: of at least two categories.
        config: how to train; ``patience`` and ``held_out`` are not needed, for a kind is what is held out.
        value: what the thresholds are to make most of.
        points: thresholds of the grid, at most, for each drafter.
        progress: called after every step, of all networks together.
        correct: whether predictions are corrected by a text's own rounds (``RouterConfig.correct`` of a server).

    Raises:
        ValueError: one category only, or one without records to judge by or to learn from.
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
        _learn_without(records, texts, config, by_epoch, _shared(progress, number, len(groups)))
    errors = [
        max(1 - min(explained(gains[rows & complete], targets[rows & complete])) for rows in of_kind.values())
        for gains in by_epoch
    ]
    best = errors.index(min(errors))
    gains = by_epoch[best].clone()

    paths, names = trajectories(records, records.texts), records.facts.drafters
    alone = [simulate.walk(paths, simulate.always(drafter)) for drafter in range(len(names))]
    singles = {kind: [value(one.of(texts)) for one in alone] for kind, texts in groups.items()}

    usual = _usual_elsewhere(alone, groups)
    known: dict[tuple[float, ...], dict[str, float]] = {}

    def worth(thresholds: tuple[float, ...]) -> dict[str, float]:
        """By kind."""
        if thresholds not in known:
            rule = simulate.by_gain(gains, thresholds)
            if correct:
                rule = simulate.by_corrected_gain(paths, gains, thresholds, usual)
            outcome = simulate.walk(paths, rule)
            known[thresholds] = {kind: value(outcome.of(texts)) for kind, texts in groups.items()}
        return known[thresholds]

    def best_for(judges: Collection[str]) -> tuple[float, ...]:
        """The thresholds with which the worst of these kinds is best."""

        def worst(thresholds: tuple[float, ...]) -> float:
            return min(worth(thresholds)[kind] / max(singles[kind]) for kind in judges)

        return search(worst, grid, falling=False).thresholds

    even = _even(records, value)
    grid = [sorted({*grid_of(column, points), zero}) for column, zero in zip(gains.T, even, strict=True)]
    thresholds = best_for(groups)
    oracle = simulate.walk(paths, simulate.oracle_token(paths, value))
    kinds = {
        kind: Kind(
            num_texts=len(texts),
            r2=explained(gains[of_kind[kind] & complete], targets[of_kind[kind] & complete]),
            best=names[singles[kind].index(max(singles[kind]))],
            single=max(singles[kind]),
            routed=worth(thresholds)[kind],
            foreign=worth(best_for(groups.keys() - {kind}))[kind],
            oracle=value(oracle.of(texts)),
        )
        for kind, texts in groups.items()
    }
    margins = tuple(threshold - zero for threshold, zero in zip(thresholds, even, strict=True))
    return Transfer(Carried(best + 1, margins), thresholds, kinds, gains)


def _learn_without(
    records: Records, texts: list[int], config: RouterConfig, by_epoch: torch.Tensor, progress: Progress | None
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


def _even(records: Records, value: Value) -> tuple[float, ...]:
    """[N - 1] tokens at which each drafter breaks even with the reference, from the costs alone."""
    others = len(records.facts.drafters) - 1
    if value.costs is None:
        return (0.0,) * others
    paths = trajectories(records, records.texts)
    length = simulate.walk(paths, simulate.always(others)).acceptance_length
    return break_even(value.costs.round_seconds(value.costs.row(value.batch_size)), length)


def _shared(progress: Progress | None, number: int, count: int) -> Progress | None:
    """Steps of one of several equal runs as steps of all."""
    if progress is None:
        return None
    return lambda done, total, error: progress(number * total + done, count * total, error)
