"""``tree.by_batch_size`` "auto": what steps cost is measured at start-up, before the first request.

The engine starts with a schedule that only lists the widths to choose from, so that vLLM captures CUDA graphs for all
of them. The runner times dummy steps of each once they are captured; the engine core asks for the outcome and hands
vLLM's scheduler the schedule chosen from it. Ranks run the same steps in the same order, and rank 0's clock decides.
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_crossspec.config import settings_of
from vllm_crossspec.contemplate.layout import verified_nodes
from vllm_crossspec.engine.startup.clock import StepClock
from vllm_crossspec.engine.vllm_api.speculative import draft_widths
from vllm_crossspec.tree.schedule import LiveSchedule, choose_schedule, expected_tokens, to_ranges

logger = init_logger("vllm.crossspec")

CONTEXT_TOKENS, CONTEXT_TOKENS_ON_CPU = 2048, 256
"""Tokens before the measured ones, of every request; less where the model's length does not allow as many."""

MAX_ROWS, MAX_ROWS_ON_CPU = 1024, 128
"""Most target tokens of a measured step. A dense model computes, and drafts have stopped to pay, from a few hundred
on, on a CPU from a few dozen; the bound keeps start-up short and the measured logits (V entries a row) within
memory."""

REPEATS, REPEATS_ON_CPU = 5, 3


class Cost(NamedTuple):
    """Median seconds of a dummy step: the target's forward pass and its verification, and the drafting after it."""

    step: float
    draft: float


_COSTS_KEY = "crossspec_step_costs"  # in vLLM's additional_config: from the engine core's start-up to its scheduler

StepTable = dict[int, dict[int, Cost]]
"""Costs by draft tokens of a request, then by running requests."""


@contextlib.contextmanager
def _dummy_steps(runner: Any, clock: StepClock, width: int) -> Iterator[None]:
    """Let the runner's dummy runs be verifications of ``width`` draft tokens, timed by ``clock``."""
    kept = runner.step_timing, runner.decode_query_len
    runner.step_timing, runner.decode_query_len = clock, width + 1
    try:
        yield
    finally:
        runner.step_timing, runner.decode_query_len = kept


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
    """Time a dummy step of ``num_reqs`` requests with ``width`` draft tokens each.

    Every drafter drafts in a dummy step, for a round of requests one of them does: their mean, which rounds correct.
    Every request has ``context`` tokens before the measured ones, :data:`CONTEXT_TOKENS` if nothing is said, and fewer
    where the model's length does not allow it.

    What it leaves out: the trees' rows and the compaction (a few launches), and the trees' own share of the attention
    where no CUDA graph holds the step.
    """
    clock = StepClock(runner.device)
    if context is None:
        context = CONTEXT_TOKENS_ON_CPU if runner.device.type == "cpu" else CONTEXT_TOKENS
    with _dummy_steps(runner, clock, width):
        hidden, _ = runner._dummy_run(num_reqs * (width + 1), uniform_decode=True, skip_eplb=True, context_len=context)
        batch = verification_batch(runner, num_reqs, width)
        clock.mark()
        runner.sample(hidden, batch, None)
        clock.mark()
    forward, draft, verify = clock.spans()
    return Cost(forward + verify, draft / runner.speculator.num_drafting)


def by_turns(steps: Sequence[Callable[[], Cost]], repeats: int) -> list[Cost]:
    """Median costs of steps, each timed once in every turn, so that a disturbance hits all alike.

    A first turn is not counted: kernels are compiled in it.
    """
    turns = [[step() for step in steps] for _ in range(1 + repeats)][1:]
    return [Cost(*map(statistics.median, zip(*costs, strict=True))) for costs in zip(*turns, strict=True)]


def num_repeats(runner: Any) -> int:
    """Turns that count."""
    return REPEATS_ON_CPU if runner.device.type == "cpu" else REPEATS


def time_steps(
    runner: Any, points: Sequence[tuple[int, int]], context: int | None = None
) -> dict[tuple[int, int], Cost]:
    """Median costs by (running requests, draft tokens), measured in turns."""
    steps = [functools.partial(time_step, runner, *point, context) for point in points]
    return dict(zip(points, by_turns(steps, num_repeats(runner)), strict=True))


def batch_sizes(runner: Any, width: int) -> list[int]:
    """Numbers of running requests to measure ``width`` at: powers of two, and both sides of the largest CUDA graph."""
    rows, most_rows = width + 1, MAX_ROWS_ON_CPU if runner.device.type == "cpu" else MAX_ROWS
    most = min(runner.max_num_reqs, max(min(most_rows, runner.max_num_tokens) // rows, 1))
    # A block drafter's own pass may be wider than what is verified of it.
    most = min(most, max(runner.max_num_tokens // runner.speculator.num_query_per_req, 1))
    if rows > runner.max_num_tokens:
        return []
    in_graph = (runner.compilation_config.max_cudagraph_capture_size or 0) // rows
    sizes = {1 << i for i in range(most.bit_length())} | {in_graph, in_graph + 1, most}
    return sorted(size for size in sizes if 1 <= size <= most)


@torch.inference_mode()
def measure(runner: Any) -> StepTable:
    """The costs of all widths; the largest steps come first, so that memory grows once."""
    settings = settings_of(runner.vllm_config)
    assert settings is not None
    start = time.perf_counter()
    widths = [settings.planned(width) for width in draft_widths(settings)]
    points = [(size, width) for width in widths for size in reversed(batch_sizes(runner, width))]
    costs = time_steps(runner, points)
    table = {width: {size: costs[size, width] for size, at in points if at == width} for width in widths}
    logger.info("crossspec: steps of %s draft tokens timed in %.1f s", widths, time.perf_counter() - start)
    return table


def is_wanted(vllm_config: Any) -> bool:
    """Whether this engine's schedule is to be chosen from a measurement."""
    settings, speculative = settings_of(vllm_config), vllm_config.speculative_config
    if settings is None or speculative is None or not settings.measures_load:
        return False
    return bool(speculative.uses_dynamic_speculative_decoding())


def use_measured_schedule(collective_rpc: Callable[..., list[Any]], vllm_config: Any) -> None:
    """Have the workers' costs fetched and the schedule chosen, before vLLM's scheduler reads it from its config."""
    if not is_wanted(vllm_config):
        return
    costs: StepTable = collective_rpc("crossspec_step_costs")[0]
    ranges = schedule_of(costs, vllm_config)
    vllm_config.speculative_config.num_speculative_tokens_per_batch_size = ranges
    vllm_config.additional_config[_COSTS_KEY] = costs
    logger.info(
        "crossspec: draft tokens by running requests, from measured steps: %s",
        ", ".join(f"{first} to {last}: {width}" for first, last, width in ranges),
    )


def schedule_of(costs: StepTable, vllm_config: Any) -> list[tuple[int, int, int]]:
    """The schedule that these costs ask for, in vLLM's own form: (from, to, draft tokens)."""
    return to_ranges(_table_of(costs, vllm_config))


def live_schedule(vllm_config: Any) -> LiveSchedule | None:
    """What the scheduler asks for each round's draft length; None where it does not follow a measurement."""
    costs: StepTable | None = vllm_config.additional_config.get(_COSTS_KEY) if is_wanted(vllm_config) else None
    if costs is None:
        return None
    seconds = {
        width: {n: cost.step + cost.draft * bool(width) for n, cost in row.items()} for width, row in costs.items()
    }
    return LiveSchedule(seconds, _table_of(costs, vllm_config), _expected(vllm_config))


def _table_of(costs: StepTable, vllm_config: Any) -> list[int]:
    return choose_schedule(
        step_seconds={width: {n: cost.step for n, cost in by_size.items()} for width, by_size in costs.items()},
        draft_seconds={width: {n: cost.draft for n, cost in by_size.items()} for width, by_size in costs.items()},
        widths=list(costs),
        max_batch_size=vllm_config.scheduler_config.max_num_seqs,
        expected=_expected(vllm_config),
    )


def _expected(vllm_config: Any) -> Callable[[int], float]:
    """Tokens of a request and step by planned draft tokens, before any has been decoded."""
    settings = settings_of(vllm_config)
    contemplates = settings is not None and settings.contemplates
    return lambda width: expected_tokens(verified_nodes(width, contemplates))
