"""Tokens a round over texts, and the 95 % interval that drawing other texts would give (bootstrap)."""

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

    @property
    def is_none(self) -> bool:
        """Whether a gain of this interval is none: it holds 0."""
        return self.low <= 0.0 <= self.high


class Walk(NamedTuple):
    """Decoding of B texts: tokens emitted and rounds taken, int64 [B] each."""

    tokens: np.ndarray
    rounds: np.ndarray


def rate(result: Walk, seed: int = 0) -> Interval:
    """Tokens a round over texts."""
    return _interval(_rates(result, _everything(result)), _rates(result, _draws(result, seed)))


def gain(result: Walk, base: Walk, seed: int = 0) -> Interval:
    """By how many percent tokens a round are above another method's, the texts of both drawn together."""
    everything, draws = _everything(result), _draws(result, seed)
    seen = 100 * (_rates(result, everything) / _rates(base, everything) - 1)
    return _interval(seen, 100 * (_rates(result, draws) / _rates(base, draws) - 1))


def _everything(result: Walk) -> np.ndarray:
    return np.arange(len(result.rounds))[None]


def _draws(result: Walk, seed: int) -> np.ndarray:
    """int64 [S, B] texts of each draw."""
    return np.random.default_rng(seed).integers(0, len(result.rounds), (SAMPLES, len(result.rounds)))


def _rates(result: Walk, picks: np.ndarray) -> np.ndarray:
    """[S] of picks [S, B]."""
    return result.tokens[picks].sum(1) / result.rounds[picks].sum(1)


def _interval(seen: np.ndarray, draws: np.ndarray) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(float(seen[0]), float(low), float(high))
