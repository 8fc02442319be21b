"""Steps that read prompts verify fewer drafts: plain's text whatever is cut, and as many as pay."""

import itertools
from types import SimpleNamespace
from unittest import mock

import engines
import numpy as np
import pytest
import sabotage
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_crossspec.hooks.scheduler import OptOutScheduler, _as_scheduled, _take_in
from vllm_crossspec.load.costs import Cost
from vllm_crossspec.load.rows import RowCosts, beside_prompts
from vllm_crossspec.load.schedule import LiveSchedule, choose_schedule

WIDTHS, BATCHES = (0, 3, 5, 15), (1, 2, 4, 8)
KNEE = 64


def seconds_of(rows, knee=KNEE, row=1 / KNEE):
    """A machine that waits for memory up to ``knee`` rows, and computes for ``row`` seconds of each further one."""
    return 1.0 + row * np.maximum(rows - knee, 0)


def table(draft=0.1, **machine):
    return {w: {n: Cost(float(seconds_of(n * (w + 1), **machine)), draft * bool(w)) for n in BATCHES} for w in WIDTHS}


def live(**options):
    costs = table(**options)
    rounds = {w: {n: cost.step + cost.draft for n, cost in row.items()} for w, row in costs.items()}
    return LiveSchedule(rounds, choose_schedule(rounds, 8), rows=RowCosts(costs))


# -- what pays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_reqs", [1, 4, 8])
@pytest.mark.parametrize("prompt", [0, 20, 500])
def test_as_many_drafts_as_pay(num_reqs, prompt):
    """Against every choice, weighed one by one."""
    tokens, widths = np.array([1.0, 2.1, 2.5, 3.4]), np.array(WIDTHS)
    costs, others = RowCosts(table()), num_reqs + prompt
    places, seconds = beside_prompts(widths, tokens, costs, num_reqs, others)

    def step(rows):
        return float(costs.step(num_reqs, np.array([rows]))[0])

    alone = [num_reqs * tokens[i] / (step(num_reqs * (1 + WIDTHS[i])) + 0.1 * bool(i)) for i in range(4)]
    for planned, place in enumerate(places):
        worth = [num_reqs * tokens[i] - max(alone) * step(others + num_reqs * WIDTHS[i]) for i in range(4)]
        assert place == int(np.argmax(worth[: planned + 1]))
        own = step(others + num_reqs * WIDTHS[place]) - (step(prompt) if prompt else 0.0)
        assert seconds[planned] == pytest.approx(own + 0.1 * bool(planned))


def test_past_the_rows_of_few_requests_steps_rise_as_those_of_many():
    costs = RowCosts(table())
    assert costs.step(1, np.array([10, 64, 128, 200])) == pytest.approx(seconds_of(np.array([10, 64, 128, 200])))


def test_only_where_the_target_computes_are_drafts_dear():
    schedule = live()
    assert schedule.to_verify(15, 1, 1) == 15, "no prompt"
    assert schedule.to_verify(15, 1, 20) == 15, "a short one, below the knee"
    assert schedule.to_verify(15, 4, 500) < 15
    assert schedule.to_verify(5, 4, 500) <= 5
    assert schedule.to_verify(0, 4, 500) == 0
    without = LiveSchedule({w: dict.fromkeys(BATCHES, 1.0) for w in WIDTHS}, [0] + [15] * 8)
    assert without.to_verify(15, 4, 500) == 15, "rows that a joint budget shares out"


def test_steps_that_were_served_correct_what_rows_cost():
    """It was measured while something else ran, and the knee was not found."""
    costs = RowCosts(table(knee=1 << 20))
    rows = np.array([16, 64, 128, 256])
    assert costs.step(4, rows) == pytest.approx(1.0)
    for _ in range(60):
        for n in (16, 64, 128, 256):
            costs.saw_step(4, n, 3, float(seconds_of(n)) + 0.1)
    assert costs.step(4, rows) == pytest.approx(seconds_of(rows), rel=0.12)
    assert np.all(np.diff(costs.step(4, np.arange(1, 300))) >= 0)


def test_if_all_steps_read_prompts_and_drafts_never_pay_there_none_are_made():
    def schedule_of(has_prompts):
        schedule = live(draft=0.4, knee=32, row=0.25)
        for _ in range(300):
            schedule[8]
            schedule.to_verify(3, 8, 508 if has_prompts else 8)
            schedule.saw_tokens(3, 2, 8)
        return schedule[8]

    assert schedule_of(False) > 0
    assert schedule_of(True) == 0


def test_a_width_that_was_not_measured_is_not_chosen_beside_prompts_either():
    costs = table()
    costs[15] = {1: costs[15][1]}
    rounds = {w: {n: cost.step + cost.draft for n, cost in row.items()} for w, row in costs.items()}
    schedule = LiveSchedule(rounds, choose_schedule(rounds, 8), rows=RowCosts(costs))
    for _ in range(3000):  # until the share of steps with prompts is as near to 1 as it comes
        schedule.to_verify(5, 8, 80)
    assert {schedule[8] for _ in range(300)} <= {0, 3, 5}


# -- what the scheduler does with it ----------------------------------------------------------------------------------


def step(drafts, prompts=(), width=4):
    """A step of requests with so many drafts, and prompts of so many tokens."""
    scheduled = {f"{i}": 1 + n for i, n in enumerate(drafts)} | {f"p{i}": n for i, n in enumerate(prompts)}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens={f"{i}": list(range(n)) for i, n in enumerate(drafts) if n},
        total_num_scheduled_tokens=sum(scheduled.values()),
        num_spec_tokens_to_schedule=width,
    )


class Played(Scheduler):
    def __init__(self, to_verify, connector=None):
        self._live = mock.Mock(spec=LiveSchedule, to_verify=to_verify)
        self._is_ours, self.connector = False, connector

    def _update_after_schedule(self, scheduler_output):
        pass


class Cut(OptOutScheduler, Played):
    __init__ = Played.__init__


@pytest.mark.parametrize(("width", "left"), [(0, {}), (2, {"1": [0], "2": [0, 1]}), (9, None)])
def test_a_plan_that_is_cut(width, left):
    output = step([0, 1, 4], prompts=[50])
    asked = mock.Mock(return_value=width)
    Cut(asked)._update_after_schedule(output)
    asked.assert_called_once_with(4, 3, 53)
    left = {"1": [0], "2": [0, 1, 2, 3]} if left is None else left
    assert output.scheduled_spec_decode_tokens == left
    sizes = {"0": 1} | {name: 1 + len(left.get(name, ())) for name in ("1", "2")} | {"p0": 50}
    assert output.num_scheduled_tokens == sizes
    assert output.total_num_scheduled_tokens == sum(sizes.values())


def test_a_connector_was_told_the_plan():
    output = step([4], prompts=[50])
    Cut(lambda *counts: 0, connector=object())._update_after_schedule(output)
    assert output.num_scheduled_tokens == {"0": 5, "p0": 50}


def test_which_steps_are_timed():
    """Two alike in a row; those of decoding alone also correct the widths."""
    steps = {
        "pure": step([4, 4]),
        "opted out": step([4, 0]),
        "cut": step([2, 2]),
        "mixed": step([4, 4], [30]),
        "like mixed": step([4, 4], [34]),
        "long": step([4, 4], [300]),
    }
    seen = set()
    for one, other in itertools.product(steps, repeat=2):
        schedule = mock.Mock(spec=LiveSchedule)
        _take_in(schedule, _as_scheduled(steps[one]), _as_scheduled(steps[other]))
        seen |= {(one, other, "round")} if schedule.saw_round.called else set()
        seen |= {(one, other, "step")} if schedule.saw_step.called else set()
    assert {pair[:2] for pair in seen if pair[2] == "round"} == {("pure", "pure"), ("opted out", "opted out")}
    assert ("mixed", "like mixed", "step") in seen and ("mixed", "long", "step") not in seen
    assert _as_scheduled(step([], [30])) is None, "nothing decodes"
    skipped = step([4])
    skipped.skip_drafts = True
    assert _as_scheduled(skipped) is None


# -- engines ----------------------------------------------------------------------------------------------------------


def drawn_cuts(cuts, seed):
    """Any number of the planned drafts beside prompts, in the place of those that pay; every round drafts."""
    rng = np.random.default_rng(seed)

    def to_verify(schedule, planned, num_reqs, num_others):
        if num_others == num_reqs:
            return planned
        width = int(rng.choice([0, rng.integers(0, planned + 1), planned]))
        cuts.append((planned, width))
        return width

    return mock.patch.multiple(
        LiveSchedule, to_verify=to_verify, __getitem__=lambda schedule, batch: max(schedule.rounds)
    )


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("spec", "is_async"),
    [
        (engines.tree("eagle3", engines.EAGLE3, num_nodes=12), True),
        (engines.tree("eagle3", engines.EAGLE3, num_nodes=12), False),
        (engines.tree("confu", engines.CONFU, num_nodes=12), True),
        (engines.ours("dflash", engines.DFLASH) | {"tree": {"type": "chain", "by_batch_size": "auto"}}, True),
    ],
    ids=["tree async", "tree sync", "contemplate rows", "chain"],
)
def test_texts_are_plains_whatever_is_cut(spec, is_async, monkeypatch):
    """Prompts arrive, in chunks, while others decode; grammars, penalties and sampled requests among them."""
    monkeypatch.delenv("CROSSSPEC_FIXED_WIDTHS")
    plain, cuts, seen = [engines.plain(16), engines.plain(16, temperature=0.8, seed=7)], [], []
    cut = OptOutScheduler._cut_beside_prompts

    def watched(scheduler, step, output):
        found = cut(scheduler, step, output)
        if step.num_others != step.num_reqs:
            seen.append((step.widest, max(map(len, output.scheduled_spec_decode_tokens.values()), default=0)))
        return found

    monkeypatch.setattr(OptOutScheduler, "_cut_beside_prompts", watched)
    mixed, _ = engines.plain_mixed_answers()
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 96, "enable_prefix_caching": False}
    with drawn_cuts(cuts, 5), engines.engine(spec, async_scheduling=is_async, **settings) as llm:
        assert engines.generate(llm, engines.prompts(16)) == plain[0]
        assert engines.generate(llm, engines.prompts(16), temperature=0.8, seed=7) == plain[1]
        assert engines.mixed_answers(llm)[0] == mixed
        assert engines.counts(llm).accepted > 0
        llm.collective_rpc(sabotage.shift_positions)
        assert engines.generate(llm, engines.prompts(16)) != plain[0], "the control found nothing"
    lost = sum(0 < width < planned for planned, width in cuts)
    assert lost > 5 and sum(not width < planned for planned, width in cuts) > 5, cuts
    assert seen == cuts, "what was verified"
