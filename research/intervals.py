"""Tokens a round over texts, and the 95 % interval that drawing other texts would give (bootstrap)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SAMPLES = 1000
"""Of the bootstrap."""


class Interval(NamedTuple):
    """What was seen, and where 95 % of the draws lie."""

    seen: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """As ``5.10 (4.95 to 5.24)``, each number by ``spec``."""
        seen, low, high = (format(number, spec) for number in self)
        return f"{seen} ({low} to {high})"

    def times(self, factor: float) -> "Interval":
        """In another unit, such as 100 for percent."""
        return Interval(*(factor * number for number in self))

    @property
    def is_none(self) -> bool:
        """Whether this interval shows no gain: it holds 0."""
        return self.low <= 0.0 <= self.high


class Walk(NamedTuple):
    """Decoding of B texts: tokens emitted and rounds taken, int64 [B] each."""

    tokens: np.ndarray
    rounds: np.ndarray

    def of(self, texts: Sequence[int] | np.ndarray) -> "Walk":
        """The same of some texts: their numbers, or bool [B]."""
        return Walk(self.tokens[np.asarray(texts)], self.rounds[np.asarray(texts)])


def rate(result: Walk, seed: int = 0) -> Interval:
    """Tokens a round over texts."""
    return rate_of_groups([result], seed)


def gain(result: Walk, base: Walk, seed: int = 0) -> Interval:
    """By how many percent tokens a round are above another method's, the texts of both drawn together."""
    return gain_of_groups([result], [base], seed)


def rate_of_groups(results: Sequence[Walk], seed: int = 0) -> Interval:
    """Tokens a round as the mean of groups of texts, other texts drawn within each group."""
    return _interval(_mean_rates(results, seed))


def gain_of_groups(results: Sequence[Walk], bases: Sequence[Walk], seed: int = 0) -> Interval:
    """As :func:`gain`, of the means of groups."""
    return _interval(100 * (_mean_rates(results, seed) / _mean_rates(bases, seed) - 1))


def _mean_rates(results: Sequence[Walk], seed: int) -> np.ndarray:
    """[1 + S] of all texts, then of each draw; the draws are the same for the same numbers of texts."""
    rng, rates = np.random.default_rng(seed), np.zeros(1 + SAMPLES)
    for result in results:
        count = len(result.rounds)
        picks = np.concatenate([np.arange(count)[None], rng.integers(0, count, (SAMPLES, count))])
        rates += result.tokens[picks].sum(1) / result.rounds[picks].sum(1) / len(results)
    return rates


def _interval(numbers: np.ndarray) -> Interval:
    """Of what was seen and of the draws."""
    low, high = np.quantile(numbers[1:], [0.025, 0.975])
    return Interval(float(numbers[0]), float(low), float(high))
