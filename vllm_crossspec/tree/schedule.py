"""How many tokens to draft for each number of running requests, from what steps cost.

A step of the target costs little more for many tokens than for one while it waits for memory, and as much more as it
has tokens once it computes. The first is so with few requests, where trees pay; the second with many, where they only
take time from others.
"""

import bisect
import math
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
