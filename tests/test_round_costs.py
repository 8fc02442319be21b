"""What rounds cost: at which sizes they are measured, for whom, and that measuring leaves no trace."""

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import engines
import pytest
import torch
from test_whiflash import spec

from vllm_crossspec.load import measure as load
from vllm_crossspec.routing.base import RouterSettings


def runner(ranges=None, max_num_reqs=64, max_num_tokens=8192, drafter_rows=1):
    speculative = SimpleNamespace(num_speculative_tokens=60, num_speculative_tokens_per_batch_size=ranges)
    config = SimpleNamespace(
        speculative_config=speculative, scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs)
    )
    return SimpleNamespace(
        vllm_config=config,
        max_num_reqs=max_num_reqs,
        max_num_tokens=max_num_tokens,
        device=torch.device("cuda"),
        speculator=SimpleNamespace(num_query_per_req=drafter_rows),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=64),
    )


def test_sizes_are_powers_of_two_up_to_many_rows():
    assert load.round_sizes(runner(), None) == {1: 60, 2: 60, 4: 60, 8: 60, 16: 60}  # 17 * 61 > 1024
    assert load.round_sizes(runner(max_num_reqs=6), None) == {1: 60, 2: 60, 4: 60}
    assert load.round_sizes(runner(max_num_tokens=70), None) == {1: 60}
    assert load.round_sizes(runner(max_num_tokens=60), None) == {}


def test_no_step_is_measured_that_a_block_drafters_own_rows_do_not_fit():
    narrow = [(1, 1 << 20, 3)]
    assert max(load.round_sizes(runner(narrow, max_num_tokens=128), None)) == 32
    assert max(load.round_sizes(runner(narrow, max_num_tokens=128, drafter_rows=8), None)) == 16
    assert max(load.step_sizes(runner(max_num_tokens=128), 3)) == 32
    assert max(load.step_sizes(runner(max_num_tokens=128, drafter_rows=8), 3)) == 16
    assert max(load.step_sizes(runner(max_num_tokens=128, drafter_rows=8), 0)) == 16


def test_sizes_follow_the_schedule_and_end_where_nothing_is_drafted():
    ranges = [(1, 2, 60), (3, 9, 7), (10, 64, 0)]
    assert load.round_sizes(runner(ranges), None) == {1: 60, 2: 60, 4: 7, 8: 7}


def test_sizes_follow_the_schedule_that_measured_steps_ask_for():
    step, many = load.Cost(0.01, 0.001), load.Cost(10.0, 0.001)
    costs = {60: {1: step, 8: step, 64: many}, 7: {1: step, 64: step}, 0: {1: step, 64: step}}
    found = load.round_sizes(runner([(1, 64, 60)]), costs)
    ranges = load.schedule_of(costs, runner().vllm_config)
    assert found == {size: next(w for a, b, w in ranges if a <= size <= b) for size in (1, 2, 4, 8, 16, 32, 64)}
    assert found[1] == 60 and found[64] == 7


def test_a_machine_that_gets_slower_while_it_is_measured_gets_slower_for_all_drafters(monkeypatch):
    """Twice as slow from the middle on: what a round costs with one drafter beside another is as ever."""
    host = runner([(1, 1, 60)], max_num_reqs=1)
    host.measured_step_costs = lambda: None
    host.settings = SimpleNamespace(planned=lambda width: width, width_of={"tree": 60, "chain": 4, "plain": 0}.get)
    host.speculator.order = ("tree", "chain", "plain")
    host.speculator.router = SimpleNamespace(settings=SimpleNamespace(owners=(0, 0, 2)))
    host.speculator.drafting_alone = lambda name: contextlib.nullcontext()
    timed = []

    def time_step(_, num_reqs, width, context=None):
        timed.append(width)
        seconds = 1.0 if len(timed) <= 3 * (1 + load.REPEATS) / 2 else 2.0
        return load.Cost(seconds * (1 + width / 10), seconds * width / 20)

    group = SimpleNamespace(broadcast_object=lambda found, src: found)
    monkeypatch.setattr(load, "time_step", time_step)
    monkeypatch.setattr(load, "time_switch", lambda *arguments: 0.0)
    monkeypatch.setattr(load, "get_tp_group", lambda: group)
    found = load.measure_rounds(host)
    assert timed.count(60) == timed.count(4) == timed.count(0) == 1 + load.REPEATS
    tree, chain, plain = found.round_seconds(0)
    assert (tree / plain, chain / plain) == pytest.approx((10.0, 1.6))


@pytest.mark.parametrize(("num_drafting", "expected"), [(1, 0.04), (4, 0.01)])
def test_a_round_costs_what_one_drafter_of_those_of_a_dummy_step_drafts_in(num_drafting, expected, monkeypatch):
    host = runner()
    host.speculator.num_drafting = num_drafting
    host.step_timing, host.decode_query_len, host.sample = None, 1, lambda *arguments: None
    host._dummy_run = lambda *arguments, **options: (None, None)
    clock = SimpleNamespace(mark=lambda: None, spans=lambda: (0.02, 0.04, 0.01))
    monkeypatch.setattr(load, "StepClock", lambda device: clock)
    monkeypatch.setattr(load, "verification_batch", lambda *arguments: None)
    assert load.time_step(host, 4, 8) == pytest.approx((0.03, expected))


@pytest.mark.parametrize(
    ("policy", "thresholds", "checkpoint", "wanted"),
    [
        ("goodput", None, object(), True),
        ("neural", None, object(), True),
        ("neural", (0.5,), object(), False),
        ("entropy", None, object(), True),
        ("entropy", None, None, False),  # costs move no prior
    ],
)
def test_who_wants_costs(policy, thresholds, checkpoint, wanted, monkeypatch):
    settings = RouterSettings(policy, ("eagle3", "dflash"), thresholds, checkpoint)
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    host = SimpleNamespace(router=SimpleNamespace(settings=settings), vllm_config=config)
    assert not load.rounds_wanted(host), "nothing is timed where counts are to be the same from run to run"
    monkeypatch.delenv("CROSSSPEC_FIXED_WIDTHS")
    assert load.rounds_wanted(host) is wanted


def measured(worker):
    """Sent into a worker: the costs, and whether the drafters' caches stayed as they were."""
    host = worker.model_runner.speculator
    layers = worker.model_runner.compilation_config.static_forward_context
    names = [name for p in host.proposers.values() for name in p.draft_attn_layer_names]
    caches = [layers[name].kv_cache for name in names]
    before = [cache.clone() for cache in caches]
    assert all(cache.any() for cache in caches)
    costs = load.measure_rounds(worker.model_runner)
    same = all(torch.equal(*pair) for pair in zip(before, caches, strict=True))
    return costs, same, host.num_drafting, drafting(worker.model_runner)


def drafting(runner):
    """Drafters that draft in a timed step, and how many are said to: of all, and where one is timed alone."""
    host, drafted, found = runner.speculator, [], []
    for name, proposer in host.proposers.items():
        inner = proposer.propose_step
        proposer.propose_step = lambda step, name=name, inner=inner: drafted.append(name) or inner(step)
    for timed in (contextlib.nullcontext(), host.drafting_alone("dflash")):
        with timed:
            drafted.clear()
            load.time_step(runner, 1, 4)
            found.append((sorted(drafted), host.num_drafting))
    for proposer in host.proposers.values():
        del proposer.propose_step
    return found


@pytest.mark.e2e
def test_measuring_leaves_no_trace():
    settings = spec(policy="entropy", threshold=1.0)
    with (
        mock.patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        mock.patch.object(load, "REPEATS", 1),
        engines.engine(settings, max_num_seqs=2) as llm,
    ):
        prompts = engines.prompts(2)
        before = engines.generate(llm, prompts, max_tokens=12)
        (costs, same, num_drafting, drafted), *_ = llm.collective_rpc(measured)
        after = engines.generate(llm, prompts, max_tokens=12)
    assert costs.batch_sizes == (1, 2) and costs.num_drafters == 2
    assert all(seconds > 0 for table in (costs.draft, costs.verify, costs.switch) for row in table for seconds in row)
    assert costs.verify[0][0] != costs.verify[0][1], "chains of 4 and of 7"
    assert costs.draft[0][0] != costs.draft[0][1]
    assert drafted == [(["dflash", "eagle3"], 2), (["dflash"], 1)]
    assert (same, num_drafting, after) == (True, 2, before)
