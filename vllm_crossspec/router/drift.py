"""Costs that follow what rounds really take: a machine gets slower or faster, and a start-up measures a moment.

What is seen of a drafter corrects that drafter, at first strongly, and all of them a little: those that were not seen
for a while are on the same machine. Shape legend: B measured batch sizes, N drafters.
"""

import math
from typing import NamedTuple

import numpy as np

from vllm_crossspec.arrays import Array
from vllm_crossspec.router.costs import MISSED_TOKENS, RoundCosts

SETTLED_ROUNDS = 2
"""Rounds of a request that are not timed: its prompt's pass, and the one in which its drafter takes in the prompt."""

SHARED_STEP = 0.05
"""Part of what a round's seconds were off by that counts for all drafters."""
LEAST_OWN_STEP = 0.05
"""Likewise for the drafter that was seen, once it was seen often; half of it, a third and so on at first."""
MOST_OFF = math.log(2.0)
"""A round further off than this, in either direction, counts as this far; one twice as far off was disturbed and counts
not at all."""


class TimedRound(NamedTuple):
    """A round of decoding in which one drafter drafted for the whole batch.

    Attributes:
        num_reqs: of the batch.
        drafter: who drafted, and whose drafts were verified.
        switches: as how many switches of measured length what it took in before counts.
        seconds: of its draft and of the target's pass over it.
    """

    num_reqs: int
    drafter: int
    switches: float
    seconds: float


class RoundTimer:
    """Tells, where rounds end, which of them say what a drafter's round costs.

    Args:
        num_slots: of requests.
        owners: int64 [N] whose cache each drafter uses, as any numbers.
    """

    def __init__(self, num_slots: int, owners: Array):
        self._owners = owners
        self._num_rounds = np.zeros(num_slots, dtype=np.int64)  # of each request
        self._last: tuple[float, Array, Array, Array | None] | None = None
        self._drafter_before = -1

    def forget(self, slots: list[int]) -> None:
        """Other requests are in these slots from now on."""
        self._num_rounds[slots] = 0

    def ended(self, slots: Array, routes: Array, now: float, missed: Array | None = None) -> TimedRound | None:
        """The round that ends here, in seconds since the one before ended; None where it says nothing.

        Args:
            slots: int64 [R] of the batch.
            routes: int64 [R] who drafts for each request now, for the round that begins; negative for nobody.
            now: seconds.
            missed: int64 [R] tokens that these drafters take in first; None: a switch counts as one of measured length.
        """
        last, self._last = self._last, (now, slots, routes, missed)
        is_settled = bool((self._num_rounds[slots] >= SETTLED_ROUNDS).all())
        self._num_rounds[slots] += routes >= 0
        if last is None or not np.array_equal(last[1], slots):
            self._drafter_before = -1
            return None
        started, _, drafters, taken_in = last
        drafter, before = int(drafters[0]), self._drafter_before
        is_one = drafter >= 0 and bool((drafters == drafter).all())
        self._drafter_before = drafter if is_one else -1
        if not is_one or not is_settled or before < 0 or (routes < 0).any():
            return None
        switches = float(self._owners[before] != self._owners[drafter])
        if taken_in is not None:
            switches *= float(taken_in.mean()) / MISSED_TOKENS
        return TimedRound(len(slots), drafter, switches, now - started)


class Drift:
    """By how much rounds take longer than they did when costs were measured.

    Args:
        costs: as measured.
    """

    def __init__(self, costs: RoundCosts):
        self.costs = costs
        self._shared = 0.0
        self._own = [[0.0] * costs.num_drafters for _ in costs.batch_sizes]
        self._seen = [[0] * costs.num_drafters for _ in costs.batch_sizes]

    def observe(self, timed: TimedRound) -> None:
        """Take in what a round took."""
        num_reqs, drafter, switches, seconds = timed
        row = self.costs.row(num_reqs)
        expected = self.costs.round_seconds(row)[drafter] + switches * self.costs.switch[row][drafter]
        off = math.log(seconds / expected) - self._shared - self._own[row][drafter]
        if abs(off) > 2 * MOST_OFF:
            return
        off = max(-MOST_OFF, min(MOST_OFF, off))
        seen = self._seen[row]
        self._own[row][drafter] += max(LEAST_OWN_STEP, 1 / (2 + seen[drafter])) * off
        self._shared += SHARED_STEP * off
        seen[drafter] += 1

    def factors(self) -> list[list[float]]:
        """[B][N] what costs are to be multiplied with."""
        return [[math.exp(self._shared + own) for own in row] for row in self._own]
