"""How many draft rows of a step pay: the host's part of the joint budget.

The host knows what rows cost, and what the drafts of the round before were worth. It decides how many rows the step
has; which ones, the device decides by what the drafts are worth now. So no step waits.
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from vllm_crossspec.arrays import Array
from vllm_crossspec.load.costs import StepTable, seconds_at


class RowCosts:
    """Seconds of steps by rows, from those that start-up timed; drafting costs the same whatever is verified.

    Args:
        table: by draft tokens of a request and running requests. Whatever disturbs a measurement makes it longer, so
            that no step counts as longer than one of more rows.
    """

    def __init__(self, table: StepTable):
        self._step = {width: {n: cost.step for n, cost in row.items()} for width, row in table.items()}
        self._draft = {width: {n: cost.draft for n, cost in row.items()} for width, row in table.items()}
        self._lines: dict[int, tuple[Array, Array]] = {}

    def step(self, num_reqs: int, rows: Array) -> Array:
        """Seconds of steps of so many rows in all; past the measured ones, as the last of these rise."""
        at, seconds = self._line(num_reqs)
        slope = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]) if len(at) > 1 else seconds[-1] / at[-1]
        return np.interp(rows, at, seconds) + slope * np.maximum(rows - at[-1], 0)

    def draft(self, num_reqs: int, width: int) -> float:
        """Seconds of drafting for a plan of ``width`` tokens of each request."""
        known = min(self._draft, key=lambda other: (abs(other - width), other))
        return seconds_at(self._draft[known], num_reqs, extend=True)

    def _line(self, num_reqs: int) -> tuple[Array, Array]:
        """Measured rows, rising, and their seconds, for a number of requests."""
        if num_reqs not in self._lines:
            widths = sorted(self._step)
            seconds = np.array([seconds_at(self._step[w], num_reqs, extend=not w) for w in widths])
            is_known = np.isfinite(seconds)
            seconds = np.minimum.accumulate(seconds[is_known][::-1])[::-1]
            self._lines[num_reqs] = (np.array(widths)[is_known] + 1) * num_reqs, seconds
        return self._lines[num_reqs]


class Plan:
    """A step as the scheduler planned it, in the scheduler's order. R requests, N draft nodes.

    Attributes:
        planned: int32 [R] draft rows.
        others: int32 [R] other rows.
    """

    def __init__(self, scheduled: Mapping[str, int], drafts: Mapping[str, list[int]]):
        count = len(scheduled)
        self.planned = np.fromiter((len(drafts.get(req_id, ())) for req_id in scheduled), np.int32, count)
        self.others = np.fromiter(scheduled.values(), np.int32, count) - self.planned

    @cached_property
    def num_others(self) -> int:
        """Rows that are no drafts."""
        return int(self.others.sum())

    @cached_property
    def num_planned(self) -> int:
        """Draft rows."""
        return int(self.planned.sum())


def best_rows(plan: Plan, worth: Array, costs: RowCosts, most: int) -> int:
    """Draft rows of the step with which the most tokens a second are expected.

    A row pays if the chance of its token exceeds what the row takes from all requests: its seconds, times the tokens a
    second that decoding alone would have. In a step with prompts, whose rows come on top, it must exceed more: there a
    row costs more, and the prompts' time is not the drafts' to share.

    Args:
        plan: of the step.
        worth: float [R, N] chances of the nodes, as they were known last.
        costs: of rows.
        most: rows that the step can have.
    """
    is_planned = np.arange(worth.shape[1]) < plan.planned[:, None]
    chances = np.sort(worth[is_planned])[::-1][:most]
    decoding = int((plan.planned > 0).sum())
    tokens = decoding + np.concatenate([[0.0], chances.cumsum()])
    rows = np.arange(len(tokens))
    alone = costs.step(decoding, decoding + rows) + costs.draft(decoding, int(plan.planned.max()))
    rate = (tokens / alone).max()
    return int((tokens - rate * costs.step(decoding, plan.num_others + rows)).argmax())
