"""What a step costs by its rows, and how many draft tokens pay in a step that reads prompts."""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from vllm_crossspec.arrays import Array
from vllm_crossspec.load.costs import MOST_OFF, Mean, StepTable, seconds_at


class RowCosts:
    """Seconds of steps by rows, from those that start-up timed; drafting costs the same whatever is verified.

    Steps that are served correct them, by powers of two of the rows; a number of rows between two of these is corrected
    by both.

    Args:
        table: by draft tokens of a request and running requests. No step counts as longer than one of more rows.
    """

    def __init__(self, table: StepTable):
        self._step = {width: {n: cost.step for n, cost in row.items()} for width, row in table.items()}
        self._draft = {width: {n: cost.draft for n, cost in row.items()} for width, row in table.items()}
        self._lines: dict[int, tuple[Array, Array]] = {}
        self._drift: defaultdict[int, Mean] = defaultdict(Mean)
        self._all_drifts = Mean()

    def step(self, num_reqs: int, rows: Array) -> Array:
        """Seconds of steps of so many rows in all; past the measured ones, as their upper half rises.

        None of fewer rows is longer than one of more.
        """
        seconds = self._as_measured(num_reqs, rows)
        if not self._drift:
            return seconds
        at = np.array(sorted(self._drift))
        off = np.array([self._drift[power].towards(self._all_drifts.value) for power in at])
        seconds = seconds * np.exp(np.interp(np.log2(rows), at, off))
        return np.minimum.accumulate(seconds[::-1])[::-1]

    def draft(self, num_reqs: int, width: int) -> float:
        """Seconds of drafting for a plan of ``width`` tokens of each request."""
        known = min(self._draft, key=lambda other: (abs(other - width), other))
        at = np.array(sorted(self._draft[known]))
        return float(_extended(np.array([num_reqs]), at, np.array([self._draft[known][n] for n in at]))[0])

    def saw_step(self, num_reqs: int, rows: int, width: int, seconds: float) -> None:
        """Take in the seconds of a step of so many rows, and of the drafting of ``width`` tokens after it."""
        measured = float(self._as_measured(num_reqs, np.array([rows]))[0]) + self.draft(num_reqs, width) * bool(width)
        off = math.log(seconds / measured)
        self._drift[round(math.log2(rows))].add(off, bound=MOST_OFF)
        self._all_drifts.add(off, bound=MOST_OFF)

    def _as_measured(self, num_reqs: int, rows: Array) -> Array:
        return _extended(rows, *self._line(num_reqs))

    def _line(self, num_reqs: int) -> tuple[Array, Array]:
        """Measured rows, rising, and their seconds, for a number of requests.

        Past the rows that were measured of as many requests it rises as steps of any number of requests do.
        """
        if num_reqs not in self._lines:
            widths = sorted(self._step)
            own = {(w + 1) * num_reqs: seconds_at(self._step[w], num_reqs, extend=not w) for w in widths}
            at, seconds = _rising({rows: s for rows, s in own.items() if math.isfinite(s)})
            all_rows, all_seconds = self._of_any
            further = all_rows > at[-1]
            more = all_seconds[further] - np.interp(at[-1], all_rows, all_seconds)
            self._lines[num_reqs] = np.append(at, all_rows[further]), np.append(seconds, seconds[-1] + more)
        return self._lines[num_reqs]

    @cached_property
    def _of_any(self) -> tuple[Array, Array]:
        """Rows, rising, and seconds of all measured steps."""
        found: dict[int, float] = {}
        for width, row in self._step.items():
            for num_reqs, seconds in row.items():
                rows = (width + 1) * num_reqs
                found[rows] = min(seconds, found.get(rows, math.inf))
        return _rising(found)


def _extended(x: Array, at: Array, seconds: Array) -> Array:
    """Seconds at ``x``, linear between measured points; past the last they rise as from half of it up to it.

    Two neighbouring points say little about how they rise: they may be apart by noise alone.
    """
    slope = max(seconds[-1] - np.interp(at[-1] / 2, at, seconds), 0.0) / (at[-1] / 2)
    return np.interp(x, at, seconds) + slope * np.maximum(x - at[-1], 0)


def _rising(seconds: Mapping[int, float]) -> tuple[Array, Array]:
    """Rows, rising, and their seconds; whatever disturbs a measurement makes it longer."""
    rows = np.array(sorted(seconds))
    return rows, np.minimum.accumulate(np.array([seconds[n] for n in rows])[::-1])[::-1]


def beside_prompts(
    widths: Array, tokens: Array, costs: RowCosts, num_reqs: int, num_others: int
) -> tuple[Array, Array]:
    """How many of so many planned draft tokens pay in a step that reads prompts, too, and what decoding then takes.

    A draft token pays if it brings more tokens than decoding alone would bring in the seconds that its row takes. Where
    the target waits for memory a row takes almost none; beside a prompt, where it computes, each takes as long as one
    of the prompt's.

    Args:
        widths: int [W] planned draft tokens of each request, rising from 0; of more planned ones any can be verified.
        tokens: float [W] that a request is expected to get where so many are verified.
        costs: of rows.
        num_reqs: decoding requests.
        num_others: rows of the step that are no drafts.

    Returns:
        int [W] places in ``widths``; seconds [W] that the step takes longer than one of the prompts alone, drafting
        included.
    """
    draft = np.array([costs.draft(num_reqs, int(width)) * bool(width) for width in widths])
    rate = (num_reqs * tokens / (costs.step(num_reqs, num_reqs * (1 + widths)) + draft)).max()
    beside = costs.step(num_reqs, num_others + num_reqs * widths)
    gain = num_reqs * tokens - rate * beside
    best = np.where(gain == np.maximum.accumulate(gain), np.arange(len(widths)), 0)
    places = np.maximum.accumulate(best)
    prompts = costs.step(num_reqs, np.array([num_others - num_reqs]))[0] if num_others > num_reqs else 0.0
    return places, beside[places] - prompts + draft
