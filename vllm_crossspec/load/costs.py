"""What rounds cost, and how that changes while requests are served.

Start-up measures two tables. A :data:`StepTable` goes by draft tokens (the width) and batch size: ``by_batch_size``
uses it. :class:`RoundCosts` goes by drafter and batch size: routers use it. Rounds that are served correct both tables
through a :class:`Mean` of log(seconds taken / seconds measured).

The two uses keep numbers of their own, since decisions rest on them. Widths interpolate between batch sizes, forget
after ``MEMORY_ROUNDS`` and are drawn to the table by ``PRIOR_ROUNDS``. Drafters take the nearest batch size, forget
after ``DRIFT_MEMORY``, share a part of each correction, and skip rounds that were disturbed.

Shape legend: R requests of the batch, B measured batch sizes, N drafters in routing order.
"""

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_crossspec.arrays import Array

PRIOR_ROUNDS = 4
"""Rounds that count as much as what was expected before any was seen."""
MEMORY_ROUNDS = 64
"""Rounds that the mean of a width weighs at most."""
DRIFT_MEMORY = 20
"""Rounds that the mean of a drafter weighs at most, the measurement at start-up included, which counts as one."""
SHARED_STEP = 0.05
"""Share of a round's timing error that is attributed to all drafters."""
MOST_OFF = math.log(2.0)
"""A round further off than this counts as this far. A router skips one twice as far off, which was disturbed."""
SETTLED_ROUNDS = 2
"""First rounds of a request that are not timed: its prompt's pass, and the one in which its drafter takes it in."""
MISSED_TOKENS = 90
"""Tokens of a request that a drafter takes in at a measured switch: 80 to 90 on average (WhiFlash, section 6)."""


class Cost(NamedTuple):
    """Seconds of a step."""

    step: float  # the target's forward pass and its verification
    draft: float  # the drafting after it


StepTable = Mapping[int, Mapping[int, Cost]]
"""Costs by draft tokens of a request, then by running requests."""
RoundSeconds = Mapping[int, Mapping[int, float]]
"""Seconds of whole rounds, likewise."""
Table = tuple[tuple[float, ...], ...]


def round_seconds(table: StepTable) -> RoundSeconds:
    """Seconds of whole rounds; one without draft tokens drafts nothing."""
    return {width: {n: cost.step + cost.draft * bool(width) for n, cost in row.items()} for width, row in table.items()}


def seconds_at(measured: Mapping[int, float], batch: int, extend: bool = False) -> float:
    """Seconds at ``batch``, linear between the measured ones; past the largest infinite, or ``extend``: as there."""
    points = sorted(measured)
    if not points or (batch > points[-1] and not extend):
        return math.inf
    upper = bisect.bisect_left(points, batch)
    if upper in (0, len(points)):
        return measured[points[min(upper, len(points) - 1)]]
    low, high = points[upper - 1], points[upper]
    return measured[low] + (batch - low) / (high - low) * (measured[high] - measured[low])


class Mean:
    """A running mean that weighs at most ``memory`` values; it begins at 0, which counts as ``weight`` values."""

    def __init__(self, weight: float = 0, memory: int = MEMORY_ROUNDS):
        self.value, self.weight, self._memory = 0.0, weight, memory

    def add(self, value: float, bound: float = math.inf) -> float:
        """Take in a value, and return its distance from the mean, which is at most ``bound`` except for the first."""
        off = value - self.value
        self.weight = min(self.weight + 1, self._memory)
        if self.weight > 1:
            off = min(max(off, -bound), bound)
        self.value += off / self.weight
        return off

    def towards(self, prior: float, rounds: int = PRIOR_ROUNDS) -> float:
        """The mean, drawn to ``prior``, which weighs as much as so many rounds, while there are few values."""
        return (self.weight * self.value + rounds * prior) / (self.weight + rounds)


# -- rounds by drafter ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundCosts:
    """Seconds that the parts of a round take, by batch size."""

    batch_sizes: tuple[int, ...]  # [B] requests, ascending
    draft: Table  # [B][N] one draft of every request with this drafter
    verify: Table  # [B][N] the target's pass over this drafter's drafts
    switch: Table  # [B][N] a switch of every request to this drafter, which takes in MISSED_TOKENS of each
    owners: tuple[int, ...] = ()  # [N] whose cache each uses: a switch within one costs nothing. Empty: each its own

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        assert sizes and sizes[0] > 0 and all(a < b for a, b in pairwise(sizes)), sizes
        assert len(self.owners) in (0, self.num_drafters), self.owners
        for table in (self.draft, self.verify, self.switch):
            assert len(table) == len(sizes) and all(len(row) == self.num_drafters for row in table)
            assert all(0 <= seconds < math.inf for row in table for seconds in row)
        assert all(seconds > 0 for row in range(len(sizes)) for seconds in self.round_seconds(row))

    @property
    def num_drafters(self) -> int:
        """N."""
        return len(self.draft[0])

    def row(self, num_reqs: int) -> int:
        """Index of the measured batch size nearest to ``num_reqs``; of two equally near ones, the smaller."""
        return min(range(len(self.batch_sizes)), key=lambda row: abs(self.batch_sizes[row] - num_reqs))

    def round_seconds(self, row: int) -> tuple[float, ...]:
        """[N] seconds of a whole round with each drafter: its draft and the target's pass over it."""
        return tuple(a + b for a, b in zip(self.draft[row], self.verify[row], strict=True))


def as_json(costs: RoundCosts, drafters: Sequence[str]) -> dict[str, Any]:
    """``drafters`` [N], ``owners`` [N] (names, too), ``batch_sizes`` [B], and [B][N] seconds of each table."""
    return {
        "drafters": list(drafters),
        "owners": [drafters[owner] for owner in costs.owners or range(len(drafters))],
        "batch_sizes": list(costs.batch_sizes),
        **{key: [list(row) for row in getattr(costs, key)] for key in ("draft", "verify", "switch")},
    }


def parse_costs(found: Any, drafters: Sequence[str], where: str) -> RoundCosts:
    """The costs of some drafters, from what :func:`as_json` made or someone wrote by hand.

    Raises ValueError: a drafter is missing, or they are not tables of seconds.

    Args:
        found: the parsed JSON. Its ``drafters`` may be more, in any order, or left out if columns are in routing order;
            its ``owners`` may be left out if each drafter has its own cache.
        drafters: [N] names in routing order.
        where: names the file in messages.
    """
    names = found.get("drafters", drafters) if isinstance(found, Mapping) else drafters
    names = list(names) if isinstance(names, Sequence) and not isinstance(names, str) else []
    if unknown := [name for name in drafters if name not in names]:
        others = ", ".join(map(str, names))
        raise ValueError(f"{where} has no costs of drafter {unknown[0]!r}; its drafters are {others}")
    columns = [names.index(name) for name in drafters]
    try:
        sizes = tuple(int(size) for size in found["batch_sizes"])
        tables: dict[str, Table] = {}
        for key in ("draft", "verify", "switch"):
            assert all(len(row) == len(names) for row in found[key])
            tables[key] = tuple(tuple(float(row[column]) for column in columns) for row in found[key])
        owners = [found.get("owners", names)[column] for column in columns]
        return RoundCosts(sizes, **tables, owners=tuple(map(owners.index, owners)))
    except (KeyError, IndexError, TypeError, ValueError, AssertionError) as problem:
        raise ValueError(
            f"{where} must give positive seconds: `batch_sizes` [B] rising, and `draft`, `verify` and `switch`, each "
            f"[B][{len(names)}] for {', '.join(map(str, names))}"
        ) from problem


def read_costs(file: str | Path, drafters: Sequence[str], key: str) -> RoundCosts:
    """As :func:`parse_costs`, from a file; messages begin with ``key``."""
    where = f"{key} {file}"
    try:
        found = json.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"{where} is no file of costs that `crossspec costs` writes: {problem}") from problem
    return parse_costs(found, drafters, where)


class TimedRound(NamedTuple):
    """A round of decoding in which one drafter drafted for the whole batch."""

    num_reqs: int
    drafter: int
    switches: float  # what the drafter took in before, in units of one measured switch
    seconds: float  # of its draft and of the target's pass over it


class RoundTimer:
    """Picks the rounds that say what a drafter's round costs.

    Args:
        owners: int64 [N] as of :class:`RoundCosts`.
        is_late: whether rounds do not wait, so that the times between them may be those of rounds before: only a round
            between two of the same drafter says something.
    """

    def __init__(self, num_slots: int, owners: Array, is_late: bool = False):
        self._owners, self._is_late = owners, is_late
        self._num_rounds = np.zeros(num_slots, dtype=np.int64)  # of each request
        self._last: tuple[float, Array, Array, Array | None] | None = None
        self._drafter_before = -1

    def forget(self, slots: list[int]) -> None:
        """Other requests are in these slots from now on."""
        self._num_rounds[slots] = 0

    def interrupt(self) -> None:
        """The round under way is not timed."""
        self._last, self._drafter_before = None, -1

    def ended(self, slots: Array, routes: Array, now: float, missed: Array | None = None) -> TimedRound | None:
        """The round that ends here, in seconds since the one before ended; None where it says nothing.

        Args:
            slots: int64 [R] of the batch.
            routes: int64 [R] each request's drafter in the round that begins; negative for none.
            now: seconds.
            missed: int64 [R] tokens that these drafters take in first; None: a switch counts as one measured switch.
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
        if self._is_late and not (before == drafter and (routes == drafter).all()):
            return None
        switches = float(self._owners[before] != self._owners[drafter])
        if taken_in is not None:
            switches *= float(taken_in.mean()) / MISSED_TOKENS
        return TimedRound(len(slots), drafter, switches, now - started)


class Drift:
    """How much longer rounds take than when ``costs`` were measured: the machine gets slower or faster.

    A round corrects its own drafter, at first strongly, and a little all drafters: they run on the same machine.
    """

    def __init__(self, costs: RoundCosts):
        self.costs = costs
        self._shared = 0.0
        self._own = [[Mean(weight=1, memory=DRIFT_MEMORY) for _ in row] for row in costs.draft]

    def observe(self, timed: TimedRound) -> None:
        """Take in the seconds of a round."""
        num_reqs, drafter, switches, seconds = timed
        row = self.costs.row(num_reqs)
        expected = self.costs.round_seconds(row)[drafter] + switches * self.costs.switch[row][drafter]
        off, own = math.log(seconds / expected) - self._shared, self._own[row][drafter]
        if abs(off - own.value) <= 2 * MOST_OFF:
            self._shared += SHARED_STEP * own.add(off, bound=MOST_OFF)

    def factors(self) -> list[list[float]]:
        """[B][N] factors of the costs."""
        return [[math.exp(self._shared + own.value) for own in row] for row in self._own]
