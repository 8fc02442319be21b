"""Measures at start-up what steps cost by width, which ``tree.by_batch_size`` "auto" follows, and rounds by drafter.

The engine starts with a schedule that only lists the widths to choose from, so that vLLM captures CUDA graphs for all
of them. Then the runner times dummy steps of each. The engine core fetches the costs and hands vLLM's scheduler the
schedule chosen from them. For a router that weighs costs (WhiFlash, section 3.3.2), rounds of each drafter are timed.
Ranks run the same steps in the same order, and rank 0's clock decides.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.kinds.contemplate_layout import verified_nodes
from vllm_crossspec.kinds.policy import policy_kind
from vllm_crossspec.load.clock import StepClock
from vllm_crossspec.load.costs import MISSED_TOKENS, Cost, RoundCosts, RoundSeconds, StepTable, round_seconds
from vllm_crossspec.load.rows import RowCosts
from vllm_crossspec.load.schedule import (
    LOAD_PAGE,
    LiveSchedule,
    SharedRows,
    as_planned,
    can_measure,
    choose_schedule,
    draft_widths,
    expected_tokens,
    in_words,
    to_ranges,
    why_none,
)

logger = init_logger("vllm.crossspec")

CONTEXT_TOKENS, CONTEXT_TOKENS_ON_CPU = 2048, 256
"""Tokens of every request before the measured ones; fewer where the model's length does not allow as many."""

MAX_ROWS, MAX_ROWS_ON_CPU = 1024, 128
"""Most target tokens of a measured step. From a few hundred on (a few dozen on a CPU) a dense model computes, and
drafts have stopped to pay. The bound keeps start-up short and the measured logits (V entries a row) within memory."""

REPEATS, REPEATS_ON_CPU = 5, 3

_COSTS_KEY = "crossspec_step_costs"  # in vLLM's additional_config: from the engine core's start-up to its scheduler


def _amounts(runner: Any) -> tuple[int, int, int]:
    """Context tokens, most rows and repeats of a measurement on this device."""
    if runner.device.type == "cpu":
        return CONTEXT_TOKENS_ON_CPU, MAX_ROWS_ON_CPU, REPEATS_ON_CPU
    return CONTEXT_TOKENS, MAX_ROWS, REPEATS


def verification_batch(runner: Any, num_reqs: int, width: int) -> InputBatch:
    """A dummy batch in which every request brings ``width`` draft tokens."""
    settings, rows = settings_of(runner.vllm_config), width + 1
    batch = InputBatch.make_dummy(num_reqs, num_reqs * rows, runner.input_buffers)
    if not width:
        return batch
    device = runner.device
    verified = verified_nodes(width, settings is not None and settings.contemplates) + 1
    first = torch.arange(num_reqs, device=device)[:, None] * rows
    return dataclasses.replace(
        batch,
        num_draft_tokens=num_reqs * width,
        num_draft_tokens_per_req=np.full(num_reqs, width, dtype=np.int32),
        expanded_idx_mapping=batch.idx_mapping.repeat_interleave(verified),
        expanded_local_pos=torch.arange(verified, dtype=torch.int32, device=device).repeat(num_reqs),
        logits_indices=(first + torch.arange(verified, device=device)).flatten(),
        cu_num_logits=torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * verified,
        cu_num_logits_np=np.arange(num_reqs + 1, dtype=np.int32) * verified,
    )


def time_step(runner: Any, num_reqs: int, width: int, context: int | None = None) -> Cost:
    """Time a dummy step of ``num_reqs`` requests with ``width`` draft tokens and ``context`` earlier tokens each.

    A dummy step runs all drafters, but a real round runs one. We use the mean; real rounds correct it later. It leaves
    out the trees' rows and the compaction, and the trees' share of the attention if no CUDA graph holds the step.
    """
    clock = StepClock(runner.device)
    context = _amounts(runner)[0] if context is None else context
    kept = runner.step_timing, runner.decode_query_len
    runner.step_timing, runner.decode_query_len = clock, width + 1  # dummy runs verify so many rows a request
    try:
        hidden, _ = runner._dummy_run(num_reqs * (width + 1), uniform_decode=True, skip_eplb=True, context_len=context)
        batch = verification_batch(runner, num_reqs, width)
        clock.mark()
        runner.sample(hidden, batch, None)
        clock.mark()
    finally:
        runner.step_timing, runner.decode_query_len = kept
    forward, draft, verify = clock.spans()
    return Cost(forward + verify, draft / runner.speculator.num_drafting)


def by_turns(runner: Any, steps: Sequence[Callable[[], Cost]]) -> list[Cost]:
    """Median costs of steps, timed in turns, so that a disturbance hits all alike; the first turn compiles kernels."""
    turns = [[step() for step in steps] for _ in range(1 + _amounts(runner)[2])][1:]
    return [Cost(*map(statistics.median, zip(*costs, strict=True))) for costs in zip(*turns, strict=True)]


def time_steps(
    runner: Any, points: Sequence[tuple[int, int]], context: int | None = None
) -> dict[tuple[int, int], Cost]:
    """Median costs by (running requests, draft tokens), measured in turns."""
    steps = [functools.partial(time_step, runner, *point, context) for point in points]
    return dict(zip(points, by_turns(runner, steps), strict=True))


# -- steps by width ---------------------------------------------------------------------------------------------------


def step_sizes(runner: Any, width: int) -> list[int]:
    """Numbers of running requests to measure ``width`` at: powers of two, and both sides of the largest CUDA graph."""
    rows, most_rows = width + 1, _amounts(runner)[1]
    most = min(runner.max_num_reqs, max(min(most_rows, runner.max_num_tokens) // rows, 1))
    # A block drafter's own pass may be wider than what is verified of it.
    most = min(most, max(runner.max_num_tokens // runner.speculator.num_query_per_req, 1))
    if rows > runner.max_num_tokens:
        return []
    in_graph = (runner.compilation_config.max_cudagraph_capture_size or 0) // rows
    sizes = {1 << i for i in range(most.bit_length())} | {in_graph, in_graph + 1, most}
    return sorted(size for size in sizes if 1 <= size <= most)


@torch.inference_mode()
def measure_steps(runner: Any) -> StepTable:
    """The costs of all widths; the largest steps come first, so that memory grows once."""
    settings = settings_of(runner.vllm_config)
    assert settings is not None
    start = time.perf_counter()
    widths = [settings.planned(width) for width in draft_widths(settings)]
    points = [(size, width) for width in widths for size in reversed(step_sizes(runner, width))]
    costs = time_steps(runner, points)
    table = {width: {size: costs[size, width] for size, at in points if at == width} for width in widths}
    logger.info("crossspec: steps of %s draft tokens timed in %.1f s", widths, time.perf_counter() - start)
    return table


def steps_wanted(vllm_config: Any) -> bool:
    """Whether this engine's schedule is chosen from a measurement."""
    settings, speculative = settings_of(vllm_config), vllm_config.speculative_config
    if settings is None or speculative is None or not settings.measures_load:
        return False
    return bool(speculative.uses_dynamic_speculative_decoding())


def use_measured_schedule(collective_rpc: Callable[..., list[Any]], vllm_config: Any) -> None:
    """Fetch the workers' costs and choose the schedule, before vLLM's scheduler reads it from its config."""
    if not steps_wanted(vllm_config):
        return
    costs: StepTable = collective_rpc("crossspec_step_costs")[0]
    ranges = schedule_of(costs, vllm_config)
    vllm_config.speculative_config.num_speculative_tokens_per_batch_size = ranges
    vllm_config.additional_config[_COSTS_KEY] = costs
    _say_what_is_drafted(costs, ranges, vllm_config)


def _say_what_is_drafted(costs: StepTable, ranges: list[tuple[int, int, int]], vllm_config: Any) -> None:
    """Log the outcome; as a warning if nothing is drafted, which otherwise looks like a fault."""
    settings = settings_of(vllm_config)
    assert settings is not None
    if any(width for _, _, width in ranges):
        nodes = [(first, last, verified_nodes(width, settings.contemplates)) for first, last, width in ranges]
        logger.info("crossspec: most draft tokens of a request, as the steps timed now suggest: %s", in_words(nodes))
        return
    name = next(name for name, drafter in settings.drafters.items() if drafter.tree.by_batch_size == "auto")
    logger.warning(
        "crossspec: drafting does not pay here at any load, so requests begin without drafts, and few rounds try them: "
        '%s. To draft all the same: "by_batch_size": {"1": %d} in %stree; see %s',
        why_none(round_seconds(costs), _expected(vllm_config)),
        settings.width_of(name),
        settings.path_of(name),
        LOAD_PAGE,
    )


def schedule_of(costs: StepTable, vllm_config: Any) -> list[tuple[int, int, int]]:
    """The schedule that these costs ask for, in vLLM's own form: (from, to, draft tokens)."""
    return to_ranges(_table_of(costs, vllm_config))


def live_schedule(vllm_config: Any) -> LiveSchedule | None:
    """What the scheduler asks for each round's draft length; None where it does not follow a measurement."""
    costs: StepTable | None = vllm_config.additional_config.get(_COSTS_KEY) if steps_wanted(vllm_config) else None
    if costs is None:
        return None
    settings = settings_of(vllm_config)
    seconds, expected, verified = _rounds(costs, vllm_config)
    rows = None if settings is None or settings.shares_rows else RowCosts(costs)  # a joint budget decides by itself
    return LiveSchedule(seconds, _table_of(costs, vllm_config), expected, verified, rows)


def _table_of(costs: StepTable, vllm_config: Any) -> list[int]:
    seconds, expected, verified = _rounds(costs, vllm_config)
    return choose_schedule(seconds, vllm_config.scheduler_config.max_num_seqs, expected, verified)


def _rounds(
    costs: StepTable, vllm_config: Any
) -> tuple[RoundSeconds, Callable[[int], float], Callable[[int, int], int]]:
    """Seconds of whole rounds, tokens by verified draft tokens, and how many of the planned ones these are."""
    settings, expected = settings_of(vllm_config), _expected(vllm_config)
    if settings is None or not settings.shares_rows:
        return round_seconds(costs), expected, as_planned
    shared = SharedRows(costs, expected)
    return shared.seconds, expected, shared.verified


def _expected(vllm_config: Any) -> Callable[[int], float]:
    """Tokens of a request and step by planned draft tokens, before any has been decoded."""
    settings = settings_of(vllm_config)
    contemplates = settings is not None and settings.contemplates
    return lambda width: expected_tokens(verified_nodes(width, contemplates))


# -- rounds by drafter ------------------------------------------------------------------------------------------------


def rounds_wanted(speculator: Any) -> bool:
    """Whether this router uses costs, and they can be measured."""
    settings = speculator.router.settings
    kind = policy_kind(settings.policy, "router.policy")
    # Without a trained router, costs do not move "auto".
    is_auto = kind.takes_threshold and settings.thresholds is None and settings.checkpoint is not None
    can = settings.costs is None and can_measure(speculator.vllm_config.parallel_config)
    return can and (kind.uses_costs or is_auto)


def round_sizes(runner: Any, step_costs: StepTable | None) -> dict[int, int]:
    """Numbers of running requests to measure, powers of two, and the planned draft tokens of each, if any."""
    speculative = runner.vllm_config.speculative_config
    ranges = speculative.num_speculative_tokens_per_batch_size
    if step_costs is not None:  # the engine core will choose the same
        ranges = schedule_of(step_costs, runner.vllm_config)
    ranges = ranges or [(1, runner.max_num_reqs, speculative.num_speculative_tokens)]
    found: dict[int, int] = {}
    for size in (1 << i for i in range(runner.max_num_reqs.bit_length())):
        width = next(width for first, last, width in ranges if first <= size <= last)
        rows = size * max(width + 1, runner.speculator.num_query_per_req)
        if not width or rows > runner.max_num_tokens or (found and rows > _amounts(runner)[1]):
            break
        found[size] = width
    return found


def time_switch(speculator: Any, name: str, num_reqs: int) -> float:
    """Seconds in which ``num_reqs`` requests catch up with :data:`MISSED_TOKENS` each."""
    clock = StepClock(speculator.device)
    for _ in range(1 + REPEATS):
        clock.mark()
        speculator.backlogs.catch_up_on_nothing(name, num_reqs * MISSED_TOKENS)
        clock.mark()
    return statistics.median(clock.spans()[1:])


@torch.inference_mode()
def measure_rounds(runner: Any) -> RoundCosts | None:
    """The costs of this engine's drafters, the same on every rank; None if it never drafts."""
    start, speculator, settings = time.perf_counter(), runner.speculator, runner.settings

    def time_alone(name: str, num_reqs: int, width: int) -> Cost:
        with speculator.drafting_alone(name):
            return time_step(runner, num_reqs, width)

    widths = round_sizes(runner, runner.measured_step_costs())
    rows: dict[int, tuple[tuple[float, ...], ...]] = {}
    for size in sorted(widths, reverse=True):  # the largest first, so that memory grows once
        own = {name: min(settings.planned(settings.width_of(name)), widths[size]) for name in speculator.order}
        steps = by_turns(runner, [functools.partial(time_alone, name, size, width) for name, width in own.items()])
        verify = (
            statistics.median(step.step for other, step in zip(own, steps, strict=True) if own[other] == own[name])
            for name in own
        )
        switch = (time_switch(speculator, name, size) for name in own)
        rows[size] = tuple(step.draft for step in steps), tuple(verify), tuple(switch)
    costs = None
    if sizes := tuple(sorted(rows)):
        draft, verification, switches = (tuple(rows[size][part] for size in sizes) for part in range(3))
        costs = RoundCosts(sizes, draft, verification, switches, speculator.router.settings.owners or ())
    costs = get_tp_group().broadcast_object(costs, src=0)
    if costs is not None:
        logger.info(
            "crossspec: rounds timed in %.1f s; milliseconds by drafter %s, by running requests: %s",
            time.perf_counter() - start,
            list(speculator.order),
            _in_line(costs),
        )
    return costs


def _in_line(costs: RoundCosts) -> str:
    tables = {"draft": costs.draft, "verification": costs.verify, "switch": costs.switch}
    return "; ".join(
        f"{size}: " + ", ".join(f"{key} {'/'.join(f'{1e3 * s:.2f}' for s in tables[key][row])}" for key in tables)
        for row, size in enumerate(costs.batch_sizes)
    )
