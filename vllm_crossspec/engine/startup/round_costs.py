"""What a round costs with each drafter, measured at start-up, for routers that weigh it (WhiFlash, section 3.3.2).

A request brings as many draft rows to the target's pass as its drafter drafts, and no more than the engine plans for
its batch. So the pass is measured at each drafter's width, once for all that have the same. Ranks measure the same
steps in the same order, and rank 0's clock decides for all: they must route alike.
"""

import functools
import statistics
import time
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_crossspec.engine.frontend.schedule import can_measure
from vllm_crossspec.engine.startup import step_costs as load
from vllm_crossspec.engine.startup.clock import StepClock
from vllm_crossspec.router.costs import MISSED_TOKENS, RoundCosts
from vllm_crossspec.router.policies import policy_kind

logger = init_logger("vllm.crossspec")


def is_wanted(speculator: Any) -> bool:
    """Whether this router goes by costs, and they can be measured."""
    settings = speculator.router.settings
    kind = policy_kind(settings.policy, "router.policy")
    # Without a trained router no cost moves "auto": see auto_thresholds.
    is_auto = kind.takes_threshold and settings.thresholds is None and settings.checkpoint is not None
    return (
        settings.costs is None and can_measure(speculator.vllm_config.parallel_config) and (kind.uses_costs or is_auto)
    )


def scheduled_width(vllm_config: Any, step_costs: load.StepTable | None, num_reqs: int) -> int:
    """Draft tokens that each of ``num_reqs`` running requests is going to bring to the target's pass."""
    speculative = vllm_config.speculative_config
    ranges = speculative.num_speculative_tokens_per_batch_size
    if step_costs is not None:  # the engine core is going to choose the very same
        ranges = load.schedule_of(step_costs, vllm_config)
    if not ranges:
        return int(speculative.num_speculative_tokens)
    return int(next(width for first, last, width in ranges if first <= num_reqs <= last))


def batch_sizes(runner: Any, step_costs: load.StepTable | None) -> dict[int, int]:
    """Numbers of running requests to measure, powers of two, and the draft tokens of each; none where none are drafted.

    They end where a step has more rows than ``load`` measures, but for the smallest.
    """
    found: dict[int, int] = {}
    most = load.MAX_ROWS_ON_CPU if runner.device.type == "cpu" else load.MAX_ROWS
    for size in (1 << i for i in range(runner.max_num_reqs.bit_length())):
        width = scheduled_width(runner.vllm_config, step_costs, size)
        rows = size * max(width + 1, runner.speculator.num_query_per_req)
        if not width or rows > runner.max_num_tokens or (found and rows > most):
            break
        found[size] = width
    return found


def time_alone(runner: Any, name: str, num_reqs: int, width: int) -> load.Cost:
    """Time a dummy step in which one drafter drafts; see ``load.time_step``."""
    with runner.speculator.drafting_alone(name):
        return load.time_step(runner, num_reqs, width)


def time_switch(speculator: Any, name: str, num_reqs: int) -> float:
    """Seconds in which every one of ``num_reqs`` requests catches up with what the drafter has missed of it."""
    clock = StepClock(speculator.device)
    for _ in range(1 + load.REPEATS):
        clock.mark()
        speculator.catch_up_on_nothing(name, num_reqs * MISSED_TOKENS)
        clock.mark()
    return statistics.median(clock.spans()[1:])


@torch.inference_mode()
def measure(runner: Any) -> RoundCosts | None:
    """The costs of this engine's drafters, the same on every rank; None where it never drafts.

    Args:
        runner: whose speculator is the routed one, its CUDA graphs captured.
    """
    start, speculator, settings = time.perf_counter(), runner.speculator, runner.settings
    step_costs = runner.measured_step_costs()
    widths = batch_sizes(runner, step_costs)
    draft, verify, switch = {}, {}, {}
    for size in sorted(widths, reverse=True):  # the largest first, so that memory grows once
        own = {name: min(settings.planned(settings.width_of(name)), widths[size]) for name in speculator.order}
        rounds = [functools.partial(time_alone, runner, name, size, own[name]) for name in speculator.order]
        steps = load.by_turns(rounds, load.num_repeats(runner))
        draft[size] = tuple(step.draft for step in steps)
        verify[size] = tuple(
            statistics.median(step.step for other, step in zip(own, steps, strict=True) if own[other] == own[name])
            for name in own
        )
        switch[size] = tuple(time_switch(speculator, name, size) for name in speculator.order)
    costs = None
    if sizes := tuple(sorted(widths)):
        tables = [tuple(table[size] for size in sizes) for table in (draft, verify, switch)]
        costs = RoundCosts(sizes, tables[0], tables[1], tables[2], speculator.router.settings.owners or ())
    costs = get_tp_group().broadcast_object(costs, src=0)
    if costs is not None:
        logger.info(
            "crossspec: rounds timed in %.1f s; milliseconds by drafter %s, by running requests: %s",
            time.perf_counter() - start,
            list(speculator.order),
            _table(costs),
        )
    return costs


def _table(costs: RoundCosts) -> str:
    """The costs as one line."""

    def milliseconds(row: tuple[float, ...]) -> str:
        return "/".join(f"{1e3 * seconds:.2f}" for seconds in row)

    return "; ".join(
        f"{size}: draft {milliseconds(costs.draft[row])}, verification {milliseconds(costs.verify[row])}, "
        f"switch {milliseconds(costs.switch[row])}"
        for row, size in enumerate(costs.batch_sizes)
    )
