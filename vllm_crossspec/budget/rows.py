"""How many draft rows of a step pay: the host's part of the joint budget.

The host knows what rows cost, and what the drafts of the round before were worth. It decides how many rows the step
has; which ones, the device decides by what the drafts are worth now. So no step waits.
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from vllm_crossspec.arrays import Array
from vllm_crossspec.load.rows import RowCosts


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
