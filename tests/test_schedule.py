"""How many tokens are drafted for each number of running requests, chosen from what steps cost."""

import itertools
import random
import re
from types import SimpleNamespace
from unittest import mock

import engines
import pytest

from vllm_crossspec.config.parse import parse
from vllm_crossspec.config.schema import carried
from vllm_crossspec.load.costs import Cost
from vllm_crossspec.load.schedule import (
    LiveSchedule,
    SharedRows,
    candidate_widths,
    choose_schedule,
    expected_tokens,
    to_ranges,
    why_none,
)

WIDTHS = candidate_widths(60, 8)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST = 256


def costs(seconds, max_rows=1 << 20):
    """Step costs by width and batch from a function of the step's rows."""
    return {w: {n: seconds(n * (w + 1)) for n in BATCHES if n * (w + 1) <= max_rows or n == 1} for w in WIDTHS}


def chosen(step, draft=lambda rows: 0.0, steps=None, **options):
    seconds = {
        w: {n: s + (draft(n * (w + 1)) if w else 0.0) for n, s in row.items()}
        for w, row in (steps or costs(step)).items()
    }
    return choose_schedule(seconds, MOST, **options)[1:]


def waits_then_computes(rows):
    """4 ms to read the weights, or 22 us a row, whichever takes longer."""
    return max(4e-3, 22e-6 * rows)


# -- the choice -------------------------------------------------------------------------------------------------------


def test_a_router_that_may_choose_not_to_draft_takes_the_schedules_place():
    from vllm_crossspec.frontend.resolve import resolve_schedules

    drafters = {"eagle3": {"model": "m", "tree": {"num_nodes": 9}}, "plain": {"type": "nothing"}}
    for policy, more, expected in (
        ({"policy": "goodput"}, {}, None),
        ({"policy": "goodput"}, {"by_batch_size": "auto"}, "auto"),
        ({"policy": "entropy"}, {}, "auto"),
    ):
        own = {**drafters, "eagle3": {**drafters["eagle3"], "tree": {"num_nodes": 9, **more}}}
        config = parse({"method": "whiflash", "drafters": own, "router": policy}, ())
        assert resolve_schedules(config, True).drafters["eagle3"].tree.by_batch_size == expected


def test_what_drafts_nothing_has_one_row_a_request():
    from vllm_crossspec.frontend.resolve import resolve_schedules

    drafters = {"eagle3": {"model": "m", "tree": {"num_nodes": 9}}, "plain": {"type": "nothing"}}
    config = parse({"method": "whiflash", "drafters": drafters, "router": {"drafter": "plain"}}, ()).without_idle()
    for can_measure in (True, False):
        assert resolve_schedules(config, can_measure).drafters["plain"].tree.by_batch_size == {1: 0}


def test_query_lens_are_the_tree_its_parts_a_chain_and_nothing():
    assert WIDTHS == (60, 30, 15, 8, 5, 3, 0)
    assert candidate_widths(4, 8) == (4, 3, 2, 1, 0) and candidate_widths(2, 1) == (2, 1, 0)


def test_steps_that_cost_the_same_keep_the_whole_tree():
    assert chosen(lambda rows: 4e-3) == [60] * MOST


def test_steps_that_only_compute_get_no_drafts():
    assert chosen(lambda rows: 1e-3 * rows) == [0] * MOST


def test_trees_narrow_to_nothing_as_steps_come_to_compute():
    table = chosen(waits_then_computes, draft=lambda rows: 1e-3)
    assert table[0] == 60 and table[-1] == 0 and len(set(table)) > 2
    assert table == sorted(table, reverse=True)


def test_dear_drafts_are_not_made():
    assert chosen(waits_then_computes, draft=lambda rows: 1.0) == [0] * MOST


def test_a_width_is_not_chosen_where_it_was_not_measured():
    table = chosen(waits_then_computes, steps=costs(lambda rows: 4e-3, max_rows=300))
    assert all(width == 0 or batch * (width + 1) <= 300 for batch, width in enumerate(table, start=1))
    assert table[-1] == 0


def test_noise_makes_no_schedule_rise_or_fall_for_good():
    for seed in range(20):
        noise = random.Random(seed)
        table = chosen(lambda rows: waits_then_computes(rows) * noise.uniform(0.9, 1.1))  # noqa: B023
        assert table == sorted(table, reverse=True)
    once = costs(lambda rows: 4e-3)
    once[60][1] = 5.2e-3  # something else ran on the machine for a moment; a greedy choice would now stay below 60
    assert chosen(waits_then_computes, steps=once) == [60] * MOST


def test_it_is_the_best_of_all_schedules_that_never_rise():
    """Against a search of everything, on a small case with random costs."""
    widths, sizes = (3, 1, 0), range(1, 5)
    for seed in range(30):
        dice = random.Random(seed)
        step = {w: {n: dice.uniform(1.0, 3.0) for n in sizes} for w in widths}
        draft = {w: {n: dice.uniform(0.0, 0.5) for n in sizes} for w in widths}

        def value(table, step=step, draft=draft):
            rates = [expected_tokens(w) / (step[w][n] + (draft[w][n] if w else 0.0)) for n, w in zip(sizes, table)]  # noqa: B905
            product = 1.0
            for n, rate in zip(sizes, rates, strict=True):
                product *= rate ** (1 / n)
            return product

        every = [t for t in itertools.product(widths, repeat=4) if list(t) == sorted(t, reverse=True)]
        table = choose_schedule({w: {n: step[w][n] + (draft[w][n] if w else 0.0) for n in sizes} for w in widths}, 4)
        assert value(table[1:]) == pytest.approx(max(map(value, every)))


def test_another_expectation_gives_another_schedule():
    assert chosen(waits_then_computes, expected=lambda width: 1.0) == [0] * MOST


def test_ranges_cover_the_table():
    assert to_ranges([0, 60, 60, 8, 0, 0]) == [(1, 2, 60), (3, 3, 8), (4, 5, 0)]


# -- while requests are served ----------------------------------------------------------------------------------------


def served(schedule, rounds, batch, seconds, tokens, seed=0):
    """Seconds per token of each request over so many rounds, and the width of the last one.

    ``seconds`` of a round by width, with noise of 20 %; ``tokens`` of a request and round by width, on average.
    """
    noise, spent, got, width, last = random.Random(seed), 0.0, 0, 0, 0
    for _ in range(rounds):
        last, width = width, schedule[batch]
        # What was drafted one round ago is verified in this one, with as many drafts made for the next.
        took = (seconds(last) + seconds(width)) / 2 * noise.uniform(0.9, 1.1)
        spent += took
        if last == width:
            schedule.saw_round(width, batch, took)
        for _ in range(batch):
            mean = tokens(last)
            accepted = int(mean) + (noise.random() < mean % 1)
            got += accepted
            if last:
                schedule.saw_tokens(last, accepted)
    return batch * spent / got, width


def live(measured, table=None):
    seconds = {w: {n: measured(w) for n in (1, 2, 4)} for w in WIDTHS}
    return LiveSchedule(seconds, table or choose_schedule(seconds, 4))


def waits(width):
    return 0.1 * (1 + width / 60)


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_drafts_that_are_never_accepted_cost_little(batch):
    schedule = live(waits)
    assert schedule[batch] > 0  # it cannot be known before
    per_token, width = served(schedule, 1000, batch, waits, lambda width: 1.0)
    assert width == 0 and per_token < 1.03 * waits(0)


def test_what_is_accepted_more_than_was_expected_gets_wider_trees():
    def computes(width):
        return 0.1 * (1 + width / 12)

    schedule = live(computes)
    assert schedule[1] < 60
    _, width = served(schedule, 2000, 1, computes, lambda width: 1.0 + 0.3 * width)
    assert width >= 30


@pytest.mark.parametrize("seed", range(5))
def test_a_start_up_that_was_disturbed_is_made_good(seed):
    """Every width was measured at up to three times its cost; the best one is found, within a few hundredths."""
    dice = random.Random(seed)
    schedule = live(lambda width: waits(width) * dice.uniform(1.0, 3.0))
    best = min(waits(w) / expected_tokens(w) for w in WIDTHS)
    served(schedule, 3000, 2, waits, expected_tokens, seed)
    per_token, _ = served(schedule, 3000, 2, waits, expected_tokens, seed)
    assert per_token < 1.05 * best


def test_a_load_that_changes_is_followed():
    schedule = live(waits)
    served(schedule, 500, 1, waits, expected_tokens)
    assert schedule[1] in (15, 30)
    per_token, _ = served(schedule, 4000, 1, waits, lambda width: 1.0)
    assert per_token < 1.03 * waits(0)
    _, width = served(schedule, 4000, 1, waits, expected_tokens)
    assert width in (8, 15, 30)


def test_without_looking_elsewhere_a_disturbed_start_up_would_stay(monkeypatch):
    """The control of the two tests above."""
    monkeypatch.setattr("vllm_crossspec.load.schedule.FIRST_INTERVAL", 1 << 30)
    schedule = live(lambda width: waits(width) * (4.0 if width else 1.0))
    assert served(schedule, 2000, 1, waits, expected_tokens)[1] == 0


def test_other_batch_sizes_have_costs_of_their_own():
    schedule = live(waits)
    served(schedule, 1000, 1, waits, expected_tokens)
    served(schedule, 1000, 4, lambda width: 0.1 + width, expected_tokens)
    assert schedule[1] in (8, 15, 30) and schedule[4] == 0


# -- what users write -------------------------------------------------------------------------------------------------


def settings(**tree):
    raw = {"method": "eagle3", "model": "m", "tree": {"num_nodes": 60, "depth": 8, **tree}}
    parsed = parse(raw, {"method", "model", "num_speculative_tokens"})
    drafter = parsed.drafters["eagle3"].model_copy(update={"num_speculative_tokens": 8})
    return parsed.model_copy(update={"num_speculative_tokens": 60, "drafters": {"eagle3": drafter}})


def resolved(can_measure, **tree):
    from vllm_crossspec.frontend.resolve import resolve_schedules

    return resolve_schedules(settings(**tree), can_measure)


@pytest.mark.parametrize("tree", [{}, {"by_batch_size": "auto"}])
def test_a_tree_is_measured_where_that_is_possible(tree):
    from vllm_crossspec.vllm_api.speculative import draft_schedule

    measured = resolved(True, **tree)
    assert measured.measures_load
    assert [width for _, _, width in draft_schedule(measured)] == list(WIDTHS)
    unmeasured = resolved(False, **tree)
    assert not unmeasured.measures_load and draft_schedule(unmeasured) is None


def test_a_schedule_of_the_users_own_wins():
    from vllm_crossspec.vllm_api.speculative import draft_schedule

    own = resolved(True, by_batch_size={"1": 60, "8": 0})
    assert not own.measures_load
    assert [(first, width) for first, _, width in draft_schedule(own)] == [(1, 60), (8, 0)]


def test_a_chain_is_measured_only_where_asked_for():
    from vllm_crossspec.frontend.resolve import resolve_schedules

    for tree, expected in (({"type": "chain"}, None), ({"type": "chain", "by_batch_size": "auto"}, "auto")):
        chain = parse({"method": "eagle3", "model": "m", "tree": tree}, {"method", "model"})
        assert resolve_schedules(chain, True).drafters["eagle3"].tree.by_batch_size == expected


@pytest.mark.parametrize("value", ["atuo", 60, [60, 0], True])
def test_anything_else_gets_one_sentence(value):
    with pytest.raises(ValueError, match="tree.by_batch_size: should be 'auto' or draft tokens by running") as caught:
        settings(by_batch_size=value)
    assert "\n" not in str(caught.value)


def test_the_rejection_sampler_is_not_measured():
    raw = {"method": "eagle3", "model": "m", "tree": {"by_batch_size": "auto"}, "verification": "rejection"}
    with pytest.raises(ValueError, match="tree.by_batch_size 'auto' needs verification 'match'"):
        parse(raw, {"method", "model"})


# -- on its way to the scheduler --------------------------------------------------------------------------------------


def vllm_config(own, schedule=((1, 1, 60),)):
    speculative = SimpleNamespace(num_speculative_tokens_per_batch_size=schedule and list(schedule))
    speculative.uses_dynamic_speculative_decoding = lambda: (
        speculative.num_speculative_tokens_per_batch_size is not None
    )
    return SimpleNamespace(
        additional_config=carried(own),
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(max_num_seqs=MOST),
    )


def test_the_schedule_is_in_vllms_config_before_the_scheduler_is_made():
    from vllm_crossspec.load.measure import Cost, use_measured_schedule

    config = vllm_config(resolved(True))
    table = {w: {n: Cost(s, 1e-3) for n, s in row.items()} for w, row in costs(waits_then_computes).items()}
    use_measured_schedule({"crossspec_step_costs": [table, None]}.__getitem__, config)
    ranges = config.speculative_config.num_speculative_tokens_per_batch_size
    assert ranges == to_ranges([0, *chosen(waits_then_computes, draft=lambda rows: 1e-3)])
    assert ranges[0][2] == 60 and ranges[-1] == (ranges[-1][0], MOST, 0)


def said_at_start(monkeypatch, own, step, draft):
    """What an engine with these settings logs of made-up costs."""
    from vllm_crossspec.load import measure

    said = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            measure.logger, level, lambda text, *values, level=level: said.append((level, text % values))
        )
    costs_of = {w: {n: measure.Cost(step(n * (w + 1)), draft) for n in BATCHES} for w in WIDTHS}
    measure.use_measured_schedule({"crossspec_step_costs": [costs_of]}.__getitem__, vllm_config(own))
    return said


def test_a_tree_that_never_drafts_is_a_warning_with_the_reason_and_the_way_out(monkeypatch):
    said = said_at_start(monkeypatch, resolved(True), lambda rows: 1e-3 * rows, draft=2e-3)
    assert said == [
        (
            "warning",
            "crossspec: drafting does not pay here at any load, so requests begin without drafts, and few rounds try "
            "them: for one request a round takes 1.0 ms without drafts and 6.0 ms with 3 of them, which would have to "
            'bring 6.0 tokens, and 2.2 are expected. To draft all the same: "by_batch_size": {"1": 60} in '
            "speculative_config.tree; see docs/methods/trees.md#load",
        )
    ]
    forced = resolved(True, by_batch_size={"1": 60})
    assert not forced.measures_load, "what the warning says to write is followed, whatever steps cost"


def test_a_tree_that_drafts_at_some_loads_is_no_warning(monkeypatch):
    ((level, sentence),) = said_at_start(monkeypatch, resolved(True), waits_then_computes, draft=1e-3)
    assert level == "info" and re.search(r": 60 with 1 to \d+ running requests, .*, none with \d+ or more$", sentence)
    ((level, sentence),) = said_at_start(monkeypatch, resolved(True), lambda rows: 4e-3, draft=0.0)
    assert level == "info" and sentence.endswith(": 60 with any number of running requests")


def test_where_no_step_has_room_the_warning_says_so():
    assert "max_num_batched_tokens" in why_none({0: {1: 1e-3}, 8: {}}, expected_tokens)


@pytest.mark.parametrize(
    "config",
    [vllm_config(resolved(False)), vllm_config(resolved(True), schedule=None)],
    ids=["none wanted", "vLLM has dropped it"],
)
def test_without_a_schedule_nobody_is_asked(config):
    from vllm_crossspec.load.measure import use_measured_schedule

    use_measured_schedule(mock.Mock(side_effect=AssertionError), config)


@pytest.mark.e2e
def test_an_engine_measures_its_steps_and_follows_the_outcome(monkeypatch):
    """Dummy steps of every width run for real; their times, which mean nothing on a CPU, are replaced."""
    from vllm_crossspec.load import measure as load

    timed, time_step = {}, load.time_step

    def pretend(runner, num_reqs, width, context):
        timed[width, num_reqs] = time_step(runner, num_reqs, width, context)
        return load.Cost(step=1.0 if num_reqs * (width + 1) <= 9 else 10.0, draft=0.1)

    monkeypatch.delenv("CROSSSPEC_FIXED_WIDTHS")
    monkeypatch.setattr(load, "time_step", pretend)
    monkeypatch.setattr(load, "REPEATS_ON_CPU", 1)
    said = []
    monkeypatch.setattr(load.logger, "info", lambda text, *values: said.append(text % values))
    spec = engines.tree("dflash", engines.DFLASH, num_nodes=8)
    plain = engines.plain(3, 8)
    with engines.engine(spec, max_num_seqs=4, enable_prefix_caching=False) as llm:
        assert {width for width, _ in timed} == {8, 7, 5, 4, 3, 2, 0} and (8, 4) in timed
        assert all(cost.step > 0 and cost.draft > 0 for cost in timed.values())
        assert said[-1].endswith(": 8 with 1 running requests, 3 with 2, none with 3 or more")
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert [scheduler.dynamic_sd_lookup[n] for n in (1, 2, 3, 4)] == [8, 3, 0, 0]
        assert engines.generate(llm, engines.prompts(3), max_tokens=8) == plain
        assert scheduler.dynamic_sd_lookup.rounds[0] >= 2 + 7  # three requests at a time, and it counts every round


def test_plain_generation_is_tried_where_it_was_measured_too_slow():
    """By the start-up's figures no drafts were 1.9 times worse than the best; they are the best, but for a hair."""

    def real(width):
        return 0.1 * (1 + 0.3 * width)

    schedule = live(lambda width: real(width) * (1.0 if width else 1.9))
    assert schedule[1] > 0
    _, width = served(schedule, 6000, 1, real, lambda width: 1 + 0.28 * width)
    assert width == 0


def test_drafts_must_be_worth_what_is_not_timed():
    """A gain of 5 % by rounds of decoding alone is none."""
    schedule = live(lambda width: 0.1)
    _, width = served(schedule, 2000, 1, lambda width: 0.1, lambda width: 1.05 if width else 1.0)
    assert width == 0
    _, width = served(schedule, 2000, 1, lambda width: 0.1, lambda width: 1.3 if width else 1.0)
    assert width > 0


def test_of_a_shared_plan_as_much_counts_as_verified_as_pays():
    """With a joint budget a wide plan costs what its best rows do, and learns by what was verified of it."""
    table = {w: {n: Cost(1.0 + 0.05 * n * (w + 1), 0.1) for n in (1, 8)} for w in (15, 3, 0)}
    shared = SharedRows(table, expected_tokens)
    assert [shared.verified(w, 8) for w in (0, 3, 15)] == [0, 3, 3] and shared.verified(15, 1) == 15
    assert shared.seconds[15][8] == pytest.approx(table[3][8].step + 0.1) and shared.seconds[0][8] == table[0][8].step
    assert shared.verified(15, 2) == 15, "as at the nearest measured batch size"

    schedule = LiveSchedule(shared.seconds, [0, *[15] * 8], expected_tokens, shared.verified)
    before = schedule.tokens(15, 1)
    for _ in range(50):
        schedule.saw_tokens(15, 1, batch=8)  # nothing accepted
    assert schedule.tokens(15, 8) < 1.1 < schedule.tokens(15, 1) < before, "one request has more rows"
