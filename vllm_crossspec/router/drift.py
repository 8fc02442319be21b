"""Costs that follow what rounds really take: a machine gets slower or faster, and a start-up measures a moment.

What is seen of a drafter corrects that drafter, at first strongly, and all of them a little: those that were not seen
for a while are on the same machine. Shape legend: B measured batch sizes, N drafters.
"""

import math

from vllm_crossspec.router.costs import RoundCosts

SHARED_STEP = 0.05
"""Part of what a round's seconds were off by that counts for all drafters."""
LEAST_OWN_STEP = 0.05
"""Likewise for the drafter that was seen, once it was seen often; half of it, a third and so on at first."""
MOST_OFF = math.log(2.0)
"""A round further off than this, in either direction, counts as this far; one twice as far off was no round of decoding
alone (requests were awaited, say) and does not count."""


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

    def observe(self, num_reqs: int, drafter: int, switched: bool, seconds: float) -> None:
        """Take in a round of decoding in which one drafter drafted for the whole batch.

        Args:
            num_reqs: of the batch.
            drafter: who drafted, and whose drafts were verified.
            switched: whether it had to catch up before.
            seconds: of its draft and of the target's pass over it.
        """
        row = self.costs.row(num_reqs)
        expected = self.costs.round_seconds(row)[drafter] + switched * self.costs.switch[row][drafter]
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
