"""How many tokens to draft for each number of running requests, from what steps cost.

With few requests the target waits for memory: a step of many tokens costs little more than a step of one, and trees
pay. With many it computes: every token costs, and drafts take time from other requests.
"""

import bisect
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.load.costs import MOST_OFF, Mean, RoundSeconds, StepTable, seconds_at
from vllm_crossspec.load.rows import RowCosts, beside_prompts
from vllm_crossspec.ranks import step_together

TOKENS_PER_DOUBLING = 0.6
"""What each doubling of 1 + draft tokens is expected to add to the tokens of a step.

A prior. That the gain is about logarithmic is Sequoia's finding (Chen et al. 2024, section 3). 0.6 makes 2.8 tokens of
chains of 7, the low end of what is published for a public EAGLE-3 checkpoint of Llama-3.1-8B at temperature 1. It makes
4.6 of a tree of 60, below the EAGLE-3 paper's. Too low a guess drops drafts early under load; it never slows serving.
"""

NARROW_WIDTHS = (5, 3)
"""Draft tokens that pay where a step of many rows does not: with some requests on a GPU, and on a CPU."""
PROBE_ROUNDS = 4
"""Rounds in a row that try another width. The first costs what the two widths cost together."""
FIRST_INTERVAL, LAST_INTERVAL = 32, 256
"""Rounds between two tries; the interval doubles from the first to the last."""
PROBE_SLACK, FIRST_SLACK = 0.5, 1.0
"""By how much a width may look worse than the best one and still be tried. The second is for a width that was only
measured at start-up, and for width 0, by which all others are judged."""
AGEING = 0.9
"""What remains of earlier tries, and of earlier tokens of a width that is not used, at each new try."""
PLAIN_MARGIN = 1.1
"""By how much less a token must cost with drafts than without: drafters read prompts as well."""
MANY_PROMPTS = 0.5
"""Share of the steps that read prompts, above which what these verify counts for what is drafted."""
FEW_STEPS = 16
"""Steps without prompts that count as before the first one: requests often begin together."""
LOAD_PAGE = "docs/methods/trees.md#load"


def can_measure(parallel_config: Any) -> bool:
    """Whether start-up can time steps: not if ranks step together, which would choose differently."""
    return os.environ.get("CROSSSPEC_FIXED_WIDTHS") != "1" and not step_together(parallel_config)


def draft_widths(settings: CrossSpecConfig) -> tuple[int, ...]:
    """The draft lengths from which a measured schedule is chosen, falling to 0."""
    return candidate_widths(settings.num_nodes, settings.drafters[settings.active].num_speculative_tokens or 1)


def candidate_widths(num_nodes: int, depth: int) -> tuple[int, ...]:
    """Falling: a whole tree of ``num_nodes``, its half and quarter, ``depth`` tokens, narrow ones, nothing."""
    wanted = {num_nodes, num_nodes // 2, num_nodes // 4, min(depth, num_nodes), *NARROW_WIDTHS, 0}
    return tuple(sorted((width for width in wanted if width <= num_nodes), reverse=True))


def expected_tokens(width: int) -> float:
    """Tokens that a request is expected to gain in a step with ``width`` draft tokens, the bonus token included."""
    return 1.0 + TOKENS_PER_DOUBLING * math.log2(1 + width)


def as_planned(width: int, batch: int) -> int:
    """How many of ``width`` planned draft tokens of a request are verified where rows are not shared out: all."""
    return width


class SharedRows:
    """Rounds whose steps verify only those planned tokens that pay (``budget``): what they are expected to cost.

    Args:
        table: costs of steps that verify all planned tokens.
        expected: tokens of a request and round by verified draft tokens.

    Attributes:
        seconds: of whole rounds.
    """

    def __init__(self, table: StepTable, expected: Callable[[int], float]):
        steps = {width: {n: cost.step for n, cost in row.items()} for width, row in table.items()}
        self._verified: dict[int, dict[int, int]] = {}
        self.seconds: dict[int, dict[int, float]] = {}
        for width, row in table.items():
            self._verified[width], self.seconds[width] = {}, {}
            for n, cost in row.items():
                draft = cost.draft * bool(width)
                rounds = {v: seconds_at(steps[v], n) + draft for v in steps if min(width, 1) <= v <= width}
                rates = {v: expected(v) / rounds[v] for v in rounds}
                best = max(rates, key=rates.__getitem__)
                self._verified[width][n], self.seconds[width][n] = best, rounds[best]

    def verified(self, width: int, batch: int) -> int:
        """How many of ``width`` planned draft tokens of a request are expected to be verified."""
        row = self._verified[width]
        return row[min(row, key=lambda n: (abs(n - batch), n))] if row else width


def choose_schedule(
    seconds: RoundSeconds,
    max_batch_size: int,
    expected: Callable[[int], float] = expected_tokens,
    verified: Callable[[int, int], int] = as_planned,
) -> list[int]:
    """The schedule, never rising with the batch, under which the expected tokens per second are most.

    Returns draft tokens by running requests; entry 0 is not used, as in vLLM's own table. Batch sizes count by their
    logarithm: 1 to 2 weigh as much as 64 to 128. One noisy measurement cannot pull the schedule down for all larger
    batches, as it could in a greedy choice from the smallest batch on.

    Args:
        seconds: of whole rounds. A width is chosen only up to its largest measured batch; width 0 has no such bound.
        max_batch_size: most running requests.
        expected: tokens of a request and step by verified draft tokens.
        verified: how many these are, by width and batch.
    """
    assert 0 in seconds and max_batch_size >= 1
    falling = sorted(seconds, reverse=True)
    # best[i]: the highest sum of a schedule that ends at width i or a wider one, and that schedule.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * len(falling)
    for batch in range(1, max_batch_size + 1):
        longer: list[tuple[float, tuple[int, ...]]] = []
        for (total, schedule), width in zip(best, falling, strict=True):
            cost = seconds_at(seconds[width], batch, extend=not width)
            gain = math.log(batch * expected(verified(width, batch)) / cost) / batch if cost < math.inf else -math.inf
            longer.append(max([(total + gain, (*schedule, width)), *longer[-1:]], key=itemgetter(0)))
        best = longer
    return [0, *best[-1][1]]


class LiveSchedule:
    """Draft tokens by running requests, chosen anew in every round from what rounds have cost and brought so far.

    Rounds correct the measured seconds by width and batch size (powers of two), and the expected tokens by width; a
    width that has not been seen is corrected as the others on average. At intervals a few rounds try another width that
    may be better, no drafts included: this finds out a disturbed start-up and a load that changes.
    :data:`PROBE_ROUNDS` of every interval, and :data:`PROBE_SLACK` or :data:`FIRST_SLACK` of their time, bound what
    that can cost. It is indexed by running requests once a round, as vLLM's own table is.

    Args:
        seconds: of a whole round, as measured at start-up.
        table: from :func:`choose_schedule`, to start with.
        expected: tokens of a request and round by verified draft tokens, before any has been seen.
        verified: how many these are expected to be, by width and batch.
        rows: what steps cost by rows; without it, steps that read prompts verify as many drafts as others.

    Attributes:
        rounds: by width so far.
    """

    def __init__(
        self,
        seconds: RoundSeconds,
        table: Sequence[int],
        expected: Callable[[int], float] = expected_tokens,
        verified: Callable[[int, int], int] = as_planned,
        rows: RowCosts | None = None,
    ):
        self._seconds, self._expected, self._verified = _never_falling(seconds), expected, verified
        self._widths = sorted(seconds)
        self._current = {_bucket(batch): width for batch, width in reversed(list(enumerate(table))) if batch}
        self._drift: defaultdict[tuple[int, int], Mean] = defaultdict(Mean)
        self._all_drifts: defaultdict[int, Mean] = defaultdict(Mean)
        self._tries: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._gain: defaultdict[tuple[int, int], Mean] = defaultdict(Mean)  # by width, and what is verified of it
        self._all_gains = Mean()
        self._rounds, self._interval, self._next_probe = 0, FIRST_INTERVAL, FIRST_INTERVAL
        self._probe = 0
        self._rows, self._prompts, self._others = rows, Mean(weight=FEW_STEPS), Mean()
        self.rounds: dict[int, int] = dict.fromkeys(self._widths, 0)

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
        """Take in the seconds of a round of ``batch`` requests that verified and drafted ``width`` tokens of each."""
        measured = seconds_at(self._seconds[width], batch, extend=True)
        off, bucket = math.log(seconds / measured), _bucket(batch)
        self._drift[width, bucket].add(off, bound=MOST_OFF)
        self._all_drifts[bucket].add(off, bound=MOST_OFF)

    def saw_step(self, num_reqs: int, rows: int, width: int, seconds: float) -> None:
        """Take in the seconds of any step: its decoding requests and its rows, and what was drafted after it."""
        if self._rows is not None:
            self._rows.saw_step(num_reqs, rows, width, seconds)

    def to_verify(self, planned: int, num_reqs: int, num_others: int) -> int:
        """How many of the planned draft tokens of each decoding request the next step should verify.

        It must be asked about every step with such requests: how many of these read prompts counts for what is drafted.

        Args:
            planned: draft tokens of a request.
            num_reqs: decoding requests.
            num_others: rows of the step that are no drafts; as many as these requests in a step without prompts.
        """
        has_prompts = num_others > num_reqs
        self._prompts.add(float(has_prompts))
        if not has_prompts or self._rows is None:
            return planned
        self._others.add(num_others / num_reqs)
        place = bisect.bisect_right(self._widths, planned) - 1
        return self._widths[self._beside_prompts(num_reqs, num_others)[0][place]]

    def _beside_prompts(self, num_reqs: int, num_others: int) -> tuple[Any, Any]:
        """Places of the widths that are verified, and seconds of the step, by planned width."""
        assert self._rows is not None
        tokens = np.array([self.tokens(width, num_reqs) for width in self._widths])
        return beside_prompts(np.array(self._widths), tokens, self._rows, num_reqs, num_others)

    def saw_tokens(self, width: int, tokens: int, batch: int = 1) -> None:
        """Take in the tokens of a request in a round with ``width`` draft tokens, the bonus token included."""
        verified = self._verified(width, batch)
        gain = (tokens - 1) / (self._expected(verified) - 1) if verified else 0.0
        self._gain[width, verified].add(gain)
        self._all_gains.add(gain)

    def tokens(self, width: int, batch: int = 1) -> float:
        """Tokens that a request is expected to get of a round with ``width`` draft tokens."""
        verified = self._verified(width, batch)
        gain = self._gain[width, verified].towards(self._all_gains.towards(1.0))
        return 1.0 + gain * (self._expected(verified) - 1.0)

    def seconds_per_token(self, width: int, batch: int) -> float:
        """Expected seconds of a token of each of ``batch`` requests; infinite where the width was not measured."""
        measured, bucket = seconds_at(self._seconds[width], batch, extend=width == 0), _bucket(batch)
        drift = self._drift[width, bucket].towards(self._all_drifts[bucket].towards(0.0), rounds=1)
        return measured * math.exp(drift) / self.tokens(width, batch)

    def _best(self, batch: int, bucket: int) -> int:
        """The cheapest width; another than the last one only if it is better by a margin.

        It is wide for a width not seen at this batch size, whose tokens are only a prior. Width 0 needs no prior.
        """
        current = self._current.get(bucket, 0)
        costs = {width: self.seconds_per_token(width, batch) for width in self._widths}
        if self._rows is not None and (share := self._prompts.value) > MANY_PROMPTS:
            places, seconds = self._beside_prompts(batch, round(batch * self._others.value))
            for width, place, beside in zip(self._widths, places, seconds, strict=True):
                tokens = self.tokens(width, batch), self.tokens(self._widths[place], batch)
                mean = (1 - share) * tokens[0] + share * tokens[1]
                costs[width] = ((1 - share) * tokens[0] * costs[width] + share * float(beside)) / mean
        for width in costs:
            if width:
                costs[width] *= PLAIN_MARGIN
            if width != current:
                costs[width] *= 1.1 if width and not self._drift[width, bucket].weight else 1.02
        return min(costs, key=costs.__getitem__)

    def _to_probe(self, batch: int, bucket: int) -> int:
        """The width that may be better than the last one and has the most hope, which tries lessen; else that one."""
        current, hopes = self._current.get(bucket, 0), {}
        most = self.seconds_per_token(current, batch)
        for width in self._widths:
            self._tries[width, bucket] *= AGEING
            if width == current:
                continue
            self._gain[width, self._verified(width, batch)].weight *= AGEING
            is_known = width and self._drift[width, bucket].weight
            slack = PROBE_SLACK if is_known else FIRST_SLACK
            cost = self.seconds_per_token(width, batch)
            if cost <= (1 + slack) * most:
                hopes[width] = cost / (1 + slack / (1 + self._tries[width, bucket]))
        probe = min(hopes, key=hopes.__getitem__, default=current)
        self._tries[probe, bucket] += 1
        return probe


def _never_falling(seconds: RoundSeconds) -> RoundSeconds:
    """The seconds, but of no width more than of a wider one: whatever disturbs a measurement makes it longer."""
    least: dict[int, dict[int, float]] = {}
    bound: dict[int, float] = {}
    for width in sorted(seconds, reverse=True):
        least[width] = {n: min(s, bound.get(n, s)) for n, s in seconds[width].items()}
        bound |= least[width]
    return least


def _bucket(batch: int) -> int:
    """The power of two that a batch size counts as."""
    return 1 << max(batch - 1, 0).bit_length()


def to_ranges(table: Sequence[int]) -> list[tuple[int, int, int]]:
    """A table by running requests as ranges: (first batch size, last batch size, draft tokens)."""
    parts = ((width, list(batches)) for width, batches in groupby(range(1, len(table)), key=table.__getitem__))
    return [(batches[0], batches[-1], width) for width, batches in parts]


def in_words(ranges: Sequence[tuple[int, int, int]]) -> str:
    """A schedule for a log, as "8 with 1 to 4 running requests, none with 5 or more"."""
    if len(ranges) == 1:
        return f"{ranges[0][2] or 'none'} with any number of running requests"
    words: list[str] = []
    for first, last, width in ranges:
        number = f"{first} or more" if last == ranges[-1][1] else str(first) if first == last else f"{first} to {last}"
        words.append(f"{width or 'none'} with {number}{'' if words else ' running requests'}")
    return ", ".join(words)


def why_none(seconds: RoundSeconds, expected: Callable[[int], float]) -> str:
    """Why drafts do not pay even for one request: the width that comes closest, what it costs and may bring."""
    costs = {width: seconds_at(row, 1) for width, row in seconds.items() if width and row}
    if not costs:
        return "no step has room for the draft tokens of one request (max_num_batched_tokens)"
    plain = seconds_at(seconds[0], 1, extend=True)
    width = min(costs, key=lambda width: costs[width] / expected(width))
    took = f"{1e3 * plain:.1f} ms without drafts and {1e3 * costs[width]:.1f} ms with {width} of them"
    tokens = f"{costs[width] / plain:.1f} tokens, and {expected(width):.1f} are expected"
    return f"for one request a round takes {took}, which would have to bring {tokens}"
