"""How many tokens to draft for each number of running requests, from what steps cost.

A step of the target costs little more for many tokens than for one while it waits for memory, and as much more as it
has tokens once it computes. The first is so with few requests, where trees pay; the second with many, where they only
take time from others.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

StepCosts = Mapping[int, Mapping[int, float]]
"""Seconds by draft tokens of a request, then by running requests (the measured ones)."""

TOKENS_PER_DOUBLING = 0.6
"""What each doubling of 1 + draft tokens is expected to add to the tokens of a step.

A prior, not a measurement: nobody has decoded anything at start-up. That the gain is about logarithmic is Sequoia's
finding (Chen et al. 2024, section 3). 0.6 makes 2.8 tokens a step of 7 drafted ones, the low end of what is published
for a public EAGLE-3 checkpoint of Llama-3.1-8B with chains of 7 at temperature 1 (2.8 to 3.5), and 4.6 of a tree of
60, below the EAGLE-3 paper's. Too low a guess drops drafts too early under load, and never makes serving slower.
"""


PRIOR_ROUNDS = 4
"""Rounds that count as much as what was expected before any was seen."""

MEMORY_ROUNDS = 64
"""Rounds after which what was seen is half forgotten, or more."""

PROBE_ROUNDS = 4
"""Rounds in a row of another width, of which the first costs what the two widths cost together."""

FIRST_INTERVAL, LAST_INTERVAL = 64, 256
"""Rounds between two such; the interval doubles from the first to the last."""

PROBE_SLACK, PLAIN_SLACK = 0.5, 1.0
"""By how much a width may look worse than the best one to be tried; and none, by which all others are judged."""

PLAIN_MARGIN = 1.1
"""By how much less a token must cost with drafts than without: what is timed are rounds of decoding alone, and prompts,
which drafters read as well, are not among them."""


def candidate_widths(num_nodes: int, depth: int) -> tuple[int, ...]:
    """The draft lengths among which is chosen, falling: the whole tree, its half and quarter, a chain's length, none.

    Args:
        num_nodes: draft tokens of a whole tree.
        depth: its deepest level, tokens.
    """
    return tuple(sorted({num_nodes, num_nodes // 2, num_nodes // 4, min(depth, num_nodes), 0}, reverse=True))


def expected_tokens(width: int) -> float:
    """Tokens that a request is expected to gain in a step with ``width`` draft tokens, the bonus token included."""
    return 1.0 + TOKENS_PER_DOUBLING * math.log2(1 + width)


def choose_schedule(
    *,
    step_seconds: StepCosts,
    draft_seconds: StepCosts,
    widths: Sequence[int],
    max_batch_size: int,
    expected: Callable[[int], float] = expected_tokens,
) -> list[int]:
    """The schedule, never rising with the batch, under which the expected tokens per second are most.

    Batch sizes count by their logarithm, so that 1 to 2 weigh as much as 64 to 128; one noisy measurement cannot pull
    the schedule down for all larger batches, which a greedy choice from the smallest batch on would let it do.

    Args:
        step_seconds: of the target's forward pass and the verification. A width is chosen only up to the largest
            batch that it was measured for; width 0 stands for its largest batch in all larger ones, too.
        draft_seconds: of drafting after such a step; not looked at for width 0, which drafts nothing.
        widths: draft tokens of a request to choose from; 0 is one of them.
        max_batch_size: most running requests.
        expected: tokens of a request and step by width.

    Returns:
        Draft tokens by running requests; entry 0 is not used, as in vLLM's own table.
    """
    assert 0 in widths and max_batch_size >= 1
    falling = sorted(widths, reverse=True)
    # best[i]: highest sum so far of a schedule that is at width i or a wider one; came[n][i]: the width it is at.
    best = [0.0] * len(falling)
    came: list[list[int]] = []
    for batch in range(1, max_batch_size + 1):
        sums: list[float] = []
        at: list[int] = []
        for i, width in enumerate(falling):
            seconds = _seconds(step_seconds[width], batch, extend=width == 0)
            if width:
                seconds += _seconds(draft_seconds[width], batch)
            gain = math.log(batch * expected(width) / seconds) / batch if seconds < math.inf else -math.inf
            here = best[i] + gain
            wider_is_better = i > 0 and sums[-1] > here
            sums.append(sums[-1] if wider_is_better else here)
            at.append(at[-1] if wider_is_better else i)
        best = sums
        came.append(at)
    table, i = [], len(falling) - 1
    for at in reversed(came):
        i = at[i]
        table.append(falling[i])
    return [0, *reversed(table)]


class LiveSchedule:
    """Draft tokens by running requests, chosen anew in every round from what rounds have cost and brought so far.

    It starts from what was measured at start-up and from :func:`expected_tokens`, and corrects both: a round's
    seconds by width and batch size (powers of two), its tokens by width, old ones forgotten. Every so often a few
    rounds are of another width that may be better, none among them, so that a start-up that was disturbed and a load
    that changes are found out; what this can cost is bounded by :data:`PROBE_ROUNDS` of every interval, and
    :data:`PROBE_SLACK` (of none: :data:`PLAIN_SLACK`) of their time.

    Indexed by running requests, as vLLM's own table is, and asked once a round.

    Args:
        seconds: of a whole round by width and batch size, as measured at start-up.
        table: draft tokens by running requests to start with, as :func:`choose_schedule` returns them.
        expected: tokens of a request and round by width, before any has been seen.
    """

    def __init__(self, seconds: StepCosts, table: Sequence[int], expected: Callable[[int], float] = expected_tokens):
        self._seconds, self._expected = seconds, expected
        self._widths = sorted(seconds)
        self._current = {_bucket(batch): width for batch, width in reversed(list(enumerate(table))) if batch}
        self._drift: defaultdict[tuple[int, int], _Mean] = defaultdict(_Mean)
        self._gain: defaultdict[int, _Mean] = defaultdict(_Mean)
        self._all_gains = _Mean(1.0)
        self._rounds, self._interval, self._next_probe = 0, FIRST_INTERVAL, FIRST_INTERVAL
        self._probe, self._turn = 0, -1  # none comes first
        self.rounds: dict[int, int] = dict.fromkeys(self._widths, 0)
        """Rounds by width so far."""

    def __getitem__(self, batch: int) -> int:
        bucket = _bucket(batch)
        self._rounds += 1
        if self._rounds >= self._next_probe + PROBE_ROUNDS:
            self._interval = min(2 * self._interval, LAST_INTERVAL)
            self._next_probe = self._rounds + self._interval
        if self._rounds < self._next_probe:
            width = self._current[bucket] = self._best(batch, bucket)
        else:
            if self._rounds == self._next_probe:
                self._probe = self._to_probe(batch, bucket)
            width = self._probe
        self.rounds[width] += 1
        return width

    def saw_round(self, width: int, batch: int, seconds: float) -> None:
        """A round of ``batch`` requests took so long in which ``width`` tokens of each were verified, and drafted."""
        measured = _seconds(self._seconds[width], batch, extend=True)
        self._drift[width, _bucket(batch)].add(math.log(seconds / measured), bound=math.log(2))

    def saw_tokens(self, width: int, tokens: int) -> None:
        """A request got so many tokens of a round with ``width`` draft tokens, the bonus token included."""
        gain = (tokens - 1) / (self._expected(width) - 1)
        self._gain[width].add(gain)
        self._all_gains.add(gain)

    def tokens(self, width: int) -> float:
        """Tokens that a request is expected to get of a round with ``width`` draft tokens."""
        gain = self._gain[width].towards(self._all_gains.towards(1.0))
        return 1.0 + gain * (self._expected(width) - 1.0)

    def seconds_per_token(self, width: int, batch: int) -> float:
        """What a token of each of ``batch`` requests is expected to cost; infinite where the width was not measured."""
        measured = _seconds(self._seconds[width], batch, extend=width == 0)
        return measured * math.exp(self._drift[width, _bucket(batch)].towards(0.0)) / self.tokens(width)

    def _best(self, batch: int, bucket: int) -> int:
        """The cheapest width; another than the last one only where it is better by a margin.

        The margin is wide for one that was not seen with as many requests: its tokens are a guess. None has no guess.
        """
        current = self._current.get(bucket, 0)
        costs = {width: self.seconds_per_token(width, batch) for width in self._widths}
        for width in costs:
            if width:
                costs[width] *= PLAIN_MARGIN
            if width != current:
                costs[width] *= 1.1 if width and not self._drift[width, bucket].weight else 1.02
        return min(costs, key=costs.__getitem__)

    def _to_probe(self, batch: int, bucket: int) -> int:
        """The next width, in turn, that may be better than the last one; that one where none may be."""
        current = self._current.get(bucket, 0)
        cost = self.seconds_per_token(current, batch)
        for _ in self._widths:
            self._turn = (self._turn + 1) % len(self._widths)
            width = self._widths[self._turn]
            slack = PROBE_SLACK if width else PLAIN_SLACK
            if width != current and self.seconds_per_token(width, batch) <= (1 + slack) * cost:
                return width
        return current


class _Mean:
    """A mean that forgets all but the last :data:`MEMORY_ROUNDS` or so. A prior counts as some of them."""

    def __init__(self, value: float = 0.0):
        self._value, self.weight = value, 0

    def add(self, value: float, bound: float = math.inf) -> None:
        """Another value; one that is further than ``bound`` from the mean counts as if it were as far."""
        self.weight = min(self.weight + 1, MEMORY_ROUNDS)
        if self.weight > 1:
            value = min(max(value, self._value - bound), self._value + bound)
        self._value += (value - self._value) / self.weight

    def towards(self, prior: float) -> float:
        """The mean, drawn to ``prior`` while there are few values."""
        return (self.weight * self._value + PRIOR_ROUNDS * prior) / (self.weight + PRIOR_ROUNDS)


def _bucket(batch: int) -> int:
    """The power of two that a batch size counts as."""
    return 1 << max(batch - 1, 0).bit_length()


def _seconds(measured: Mapping[int, float], batch: int, extend: bool = False) -> float:
    """Cost at ``batch``, linear between the measured ones; past the largest infinite, or as the largest."""
    points = sorted(measured)
    if not points or (batch > points[-1] and not extend):
        return math.inf
    if batch >= points[-1] or batch <= points[0]:
        return measured[points[-1] if batch >= points[-1] else points[0]]
    upper = bisect.bisect_left(points, batch)
    low, high = points[upper - 1], points[upper]
    part = (batch - low) / (high - low)
    return measured[low] + part * (measured[high] - measured[low])


def to_ranges(table: Sequence[int]) -> list[tuple[int, int, int]]:
    """A table by running requests as ranges: (first batch size, last batch size, draft tokens)."""
    ranges: list[tuple[int, int, int]] = []
    for batch, width in enumerate(table[1:], start=1):
        if ranges and ranges[-1][2] == width:
            ranges[-1] = (ranges[-1][0], batch, width)
        else:
            ranges.append((batch, batch, width))
    return ranges
