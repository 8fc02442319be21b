"""Routers from records: the walk, oracles, training, thresholds and the commands, without an engine."""

import itertools
import json
import os
import random
import signal
import sys
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.optimize import isotonic_regression
from test_config import NATIVE_KEYS

from crossspec_tools.records import simulate
from crossspec_tools.records.cli_router import show_oracles
from crossspec_tools.records.shards import shard_path
from crossspec_tools.records.simulate import (
    Signal,
    Trajectories,
    Value,
    always,
    by_corrected_gain,
    by_entropy,
    by_gain,
    walk,
)
from crossspec_tools.train import calibration, records
from crossspec_tools.train.records import Answer, Facts
from crossspec_tools.train.router import (
    Carried,
    RouterConfig,
    RouterNet,
    Split,
    checkpoint_gains,
    fit,
    fit_entropy_gain,
    gains_of,
    lessons_of,
    predicted_gains,
    rising,
    rows_of,
    split_texts,
    train_router,
)
from crossspec_tools.train.transfer import leave_kinds_out
from vllm_crossspec.cli import app
from vllm_crossspec.config.parse import parse
from vllm_crossspec.load.costs import RoundCosts, as_json
from vllm_crossspec.routing import naive
from vllm_crossspec.routing.checkpoint import read_router, save_router
from vllm_crossspec.routing.thresholds import auto_thresholds

NAMES = ("eagle3", "dflash")
COSTS = RoundCosts(
    (1, 8), ((0.02, 0.01, 0.01), (0.03, 0.02, 0.01)), ((0.1,) * 3, (0.2,) * 3), ((0.01,) * 3, (0.05,) * 3)
)


def random_paths(seed: int, num_drafters: int = 3, consistent: bool = False) -> Trajectories:
    """Texts of random lengths; consistent ones never reach less far from a later token."""
    rng = random.Random(seed)
    lengths, known, starts, ends = [], [], [], []
    for _ in range(rng.randrange(1, 9)):
        count = rng.randrange(0, 30)
        starts.append(len(lengths))
        reached = [0] * num_drafters
        for place in range(count):
            left = count - place
            row = [min(rng.randrange(1, 8), left + 1) for _ in range(num_drafters)]
            if consistent:
                row = [max(length, far - place) for length, far in zip(row, reached, strict=True)]
                reached = [place + length for length in row]
            lengths.append(row)
            known.append(left)
        ends.append(len(lengths))
    shape = (len(lengths), num_drafters)
    return Trajectories(
        torch.tensor(lengths, dtype=torch.int64).reshape(shape),
        torch.tensor(known, dtype=torch.int64),
        torch.tensor(starts),
        torch.tensor(ends),
    )


def walk_slowly(paths: Trajectories, choose) -> list[list[tuple[int, int]]]:
    """(record, drafter) of every round of every text; ``choose`` is asked for one record at a time."""
    taken = []
    for start, end in zip(paths.starts.tolist(), paths.ends.tolist(), strict=True):
        at, before, rounds = start, -1, []
        while at < end:
            before = choose(at, before)
            rounds.append((at, before))
            at += min(int(paths.lengths[at, before]), int(paths.known[at]))
        taken.append(rounds)
    return taken


def outcome_of(taken: list[list[tuple[int, int]]], num_drafters: int) -> tuple[list[Any], list[Any]]:
    every = range(num_drafters)
    rounds = [[sum(d == drafter for _, d in text) for drafter in every] for text in taken]
    moves = [[(a, b) for (_, a), (_, b) in itertools.pairwise(text) if a != b] for text in taken]
    return rounds, [[[own.count((a, b)) for b in every] for a in every] for own in moves]


@pytest.mark.parametrize("seed", range(15))
def test_rules_walk_as_a_plain_loop_does(seed):
    paths, generator = random_paths(seed), torch.Generator().manual_seed(seed)
    num_rows = len(paths.known)
    entropy, gains = torch.rand(num_rows, generator=generator) * 3, torch.randn(num_rows, 2, generator=generator)
    thresholds = (1.7, 0.6)

    def entropy_choice(at, before):
        return next((i for i, threshold in enumerate(thresholds) if entropy[at] > threshold), 2)

    def gain_choice(at, before):
        above = [float(gains[at, i]) - (0.1, -0.2)[i] for i in range(2)]
        return above.index(max(above)) if max(above) > 1e-7 else 2

    own, usual = torch.zeros(len(paths.starts), 3, 2), [2.0, 3.0, 2.5]
    text_of = torch.zeros(num_rows, dtype=torch.int64)
    for text, (start, end) in enumerate(zip(paths.starts.tolist(), paths.ends.tolist(), strict=True)):
        text_of[start:end] = text
    rounds_before: dict[int, tuple[int, int]] = {}

    def corrected_choice(at, before):
        """As the kernel's twin decides, which is told at every round what the one before brought."""
        text = int(text_of[at])
        start, drafter = rounds_before.get(text, (at, -1))
        row, _ = naive.correct(gains[at].tolist(), own[text], usual, drafter, at - start)
        route = naive.route_by_gain(row, [0.1, -0.2])
        rounds_before[text] = (at, route)
        return route

    for rule, choose in (
        (by_corrected_gain(paths, gains, (0.1, -0.2), torch.tensor(usual)), corrected_choice),
        (always(1), lambda at, before: 1),
        (by_entropy(entropy, thresholds), entropy_choice),
        (by_gain(gains, (0.1, -0.2)), gain_choice),
    ):
        taken = walk_slowly(paths, choose)
        rounds, switches = outcome_of(taken, 3)
        outcome = walk(paths, rule)
        assert outcome.rounds.tolist() == rounds and outcome.switches.tolist() == switches
        assert outcome.tokens.tolist() == (paths.ends - paths.starts).tolist()


def test_worth_counts_tokens_rounds_and_switches():
    switches = torch.zeros(2, 3, 3, dtype=torch.int64)
    switches[0, 1, 0], switches[0, 0, 1], switches[1, 0, 2] = 1, 2, 1
    outcome = simulate.Outcome(torch.tensor([30, 10]), torch.tensor([[5, 3, 0], [2, 0, 2]]), switches)
    assert outcome.acceptance_length == 40 / 12 and outcome.num_switches == 4
    assert outcome.shares == pytest.approx([7 / 12, 3 / 12, 2 / 12])
    seconds = 7 * 0.12 + 3 * 0.11 + 2 * 0.11 + 4 * 0.01
    assert Value(COSTS, 2)(outcome) == pytest.approx(40 / seconds)
    assert Value(COSTS, 2)(outcome.of([1])) == pytest.approx(10 / (2 * 0.12 + 2 * 0.11 + 0.01))
    assert outcome.tokens_per_second(COSTS, 8) == pytest.approx(40 / (7 * 0.23 + 3 * 0.22 + 2 * 0.21 + 4 * 0.05))


def test_forms_of_one_drafter_switch_for_nothing():
    switches = torch.zeros(1, 3, 3, dtype=torch.int64)
    switches[0, 0, 1], switches[0, 1, 2] = 2, 1
    outcome = simulate.Outcome(torch.tensor([30]), torch.tensor([[5, 3, 1]]), switches)
    costs = RoundCosts((1,), ((1.0, 1.0, 1.0),), ((0.0,) * 3,), ((0.5,) * 3,), owners=(0, 0, 2))
    assert outcome.tokens_per_second(costs) == 30 / 9.5


@pytest.mark.parametrize("costs", [((1.0, 1.0, 1.0), 1), ((1.0, 4.0, 1.0), 0)], ids=["even", "dear"])
def test_goodput_in_simulation_takes_what_brings_most_a_second(costs):
    """Drafter 1 yields two thirds more than drafter 0, drafter 2 next to nothing; nobody tells the rule."""
    num_texts, length = 100, 60
    known = torch.arange(length, 0, -1).repeat(num_texts)
    lengths = torch.tensor([3, 5, 1]).repeat(num_texts * length, 1)
    starts = torch.arange(0, num_texts * length, length)
    paths = Trajectories(lengths, known, starts, starts + length)
    table = RoundCosts((1,), (costs[0],), ((1.0,) * 3,), ((0.0,) * 3,))
    shares = walk(
        paths,
        simulate.by_experience(
            paths, torch.full((len(known), 3), -1.0), torch.zeros(len(known)), (2.5, 2.5, 1.0), (0, 1), table
        ),
    ).shares
    assert shares[costs[1]] > 0.9 and shares[2] == 0
    # Every 64th round tries one of those that draft, by turns.
    assert shares[1 - costs[1]] > 0


def test_a_forecast_is_worth_more_than_a_mean_in_simulation():
    """Drafter 1 is right with eight drafts or with none and says which; drafter 0 always has three."""
    count = 2000
    good = torch.rand(count, generator=torch.Generator().manual_seed(0)) < 0.3
    lengths = torch.stack([torch.full((count,), 4), 1 + 8 * good], dim=1)
    paths = Trajectories(lengths, torch.arange(count, 0, -1), torch.tensor([0]), torch.tensor([count]))
    costs = RoundCosts((1,), ((0.0, 0.0),), ((1.0, 1.0),), ((0.0, 0.0),))
    said = torch.stack([torch.full((count,), -1.0), 8.0 * good], dim=1)
    worth = [
        walk(
            paths, simulate.by_experience(paths, forecasts, torch.zeros(count), (2.0, 2.0), (0,), costs)
        ).acceptance_length
        for forecasts in (said, torch.full((count, 2), -1.0))
    ]
    best = walk(paths, simulate.oracle_token(paths, Value())).acceptance_length
    assert worth[0] > 0.98 * best > 1.2 * worth[1]


@pytest.mark.parametrize("seed", range(12))
def test_finer_oracles_are_never_worse(seed):
    paths = random_paths(seed, consistent=True)
    texts = list(range(len(paths.starts)))
    groups = [texts[0::2], texts[1::2]]

    def rounds(rule):
        return int(walk(paths, rule).rounds.sum())

    singles = [rounds(always(d)) for d in range(3)]
    task = rounds(simulate.oracle_by_group(paths, groups, Value()))
    prompt = rounds(simulate.oracle_by_group(paths, [[t] for t in texts], Value()))
    token = rounds(simulate.oracle_token(paths, Value()))
    assert token <= prompt <= task <= min(singles)
    best_of_group = [min(int(walk(paths, always(d)).of(g).rounds.sum()) for d in range(3)) for g in groups]
    assert task == sum(best_of_group)


def test_oracle_token_weighs_costs_and_prefers_the_reference():
    paths = Trajectories(
        torch.tensor([[3, 2, 2], [4, 4, 4], [1, 1, 1]]), torch.tensor([3, 2, 1]), torch.tensor([0]), torch.tensor([3])
    )
    rule = simulate.oracle_token(paths, Value())
    assert rule(torch.arange(3), torch.full((3,), -1)).tolist() == [0, 2, 2]
    dear = RoundCosts((1,), ((9.0, 1.0, 2.0),), ((0.0,) * 3,), ((0.0,) * 3,))
    assert simulate.oracle_token(paths, Value(dear))(torch.arange(3), torch.full((3,), -1)).tolist() == [1, 1, 1]


def test_visits_are_the_odds_of_a_round():
    paths = random_paths(3, num_drafters=2)
    rng, counted = random.Random(0), torch.zeros(len(paths.known))
    draws = 4000
    for _ in range(draws):
        for text in walk_slowly(paths, lambda at, before: rng.randrange(2)):
            for at, _ in text:
                counted[at] += 1
    # 4 standard deviations of a share of 4000 draws.
    assert (simulate.visits(paths) - counted / draws).abs().max() < 4 * 0.5 / draws**0.5


@pytest.mark.parametrize("seed", range(5))
def test_rising_is_isotonic_regression(seed):
    rng = random.Random(seed)
    values, masses = [rng.gauss(0, 1) for _ in range(12)], [rng.uniform(0.1, 3) for _ in range(12)]
    assert rising(values, masses) == pytest.approx(isotonic_regression(values, weights=masses).x.tolist())


def test_gain_by_entropy_rises_and_is_the_mean_of_its_bin():
    entropy = torch.linspace(0, 2, 4800)
    gains = torch.stack([entropy.floor(), -entropy], dim=1)
    fit = fit_entropy_gain(entropy, gains, torch.ones(4800))
    assert fit.entropy[0] == 0.0 and len(fit.gain) == 2 and len(fit.gain[0]) == len(fit.entropy)
    assert fit.gain[0][0] == 0.0 and fit.gain[0][-1] == pytest.approx(1.0, abs=0.01)
    assert fit.gain[1] == pytest.approx([-1.0] * len(fit.entropy))  # falling, so that the best rising fit is flat


# -- training -----------------------------------------------------------------------------------------------------

HIDDEN = 32


def made_up_records(folder, num_texts: int = 60, shards: int = 3, num_drafters: int = 2, seed: int = 0):
    """Records on disk whose drafters' lengths follow from two directions of the state: a rule that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    names = ("eagle3", "middle", "dflash")[:: 1 if num_drafters == 3 else 2]
    facts = Facts("a target", HIDDEN, names, (4,) * num_drafters)
    folder.mkdir(parents=True, exist_ok=True)
    records.claim(folder, {"seed": seed})
    number = 0
    for shard in range(shards):
        answers, parts = {}, []
        for _ in range(num_texts // shards):
            count = int(torch.randint(20, 60, (1,), generator=generator))
            answers[number] = Answer(("chat", "math")[number % 2], 5, [0] * (count + 1), "length")
            hidden = 3 + 5 * torch.randn(count, HIDDEN, generator=generator)
            known = torch.arange(count, 0, -1)
            lengths = torch.full((count, num_drafters), 3)
            lengths[:, 0] = torch.where(hidden[:, 0] > 3, 5, 1)
            if num_drafters == 3:
                lengths[:, 1] = torch.where(hidden[:, 1] > 6, 5, 2)
            parts.append(
                {
                    "hidden": hidden,
                    "entropy": (hidden[:, 0] > 3) * 0.5 + torch.rand(count, generator=generator),
                    "lengths": torch.minimum(lengths, 1 + known[:, None]).to(torch.int8),
                    "known": known.to(torch.int16),
                    "forecasts": torch.full((count, num_drafters), records.NO_FORECAST),
                    "position": torch.arange(count, dtype=torch.int32),
                    "text": torch.full((count,), number, dtype=torch.int32),
                }
            )
            number += 1
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        records.write_shard(shard_path(folder, shard), tensors, answers, facts)
    return records.read_records(folder)


QUICK = RouterConfig(epochs=40, batch_tokens=128, lr=1e-2, dropout=0.0, held_out=0.2)


@pytest.mark.parametrize("num_drafters", [2, 3])
def test_training_learns_the_rule(tmp_path, num_drafters):
    data = made_up_records(tmp_path, num_drafters=num_drafters)
    checkpoint, report = train_router(data, QUICK)
    assert min(report.r2) > 0.6 and report.num_texts == 12
    best = max(report.lengths[name] for name in data.facts.drafters)
    assert report.lengths["neural, auto, as predicted"] > best + 0.5
    assert report.lengths["neural, auto, as predicted"] <= report.lengths["oracle-token"] + 1e-9
    assert checkpoint.facts.drafters == data.facts.drafters and len(checkpoint.facts.mean_lengths) == num_drafters
    assert checkpoint.facts.train["num_texts"] == 48


def test_training_is_deterministic_and_follows_its_seed(tmp_path):
    data = made_up_records(tmp_path, num_texts=12)
    config = RouterConfig(epochs=2, batch_tokens=64)
    torch.manual_seed(7)
    first, _ = train_router(data, config)
    torch.manual_seed(8)  # nobody else's draws matter
    again, _ = train_router(data, config)
    other, _ = train_router(data, RouterConfig(epochs=2, batch_tokens=64, seed=1))
    assert all(map(torch.equal, first[1:], again[1:])) and first.facts == again.facts
    assert not torch.equal(first.hidden_weight, other.hidden_weight)


def test_what_is_saved_predicts_as_what_was_trained(tmp_path):
    data = made_up_records(tmp_path / "records", num_texts=12, num_drafters=3)
    net = RouterNet(HIDDEN, 2, 0.1).eval()
    with torch.no_grad():
        net.mean.copy_(torch.randn(HIDDEN))
        net.scale.copy_(torch.rand(HIDDEN) + 0.1)
    checkpoint, _ = train_router(data, RouterConfig(epochs=1))
    checkpoint = checkpoint._replace(**dict(zip(checkpoint._fields[1:], net.folded(), strict=True)))
    save_router(tmp_path / "router", checkpoint)
    read = read_router(tmp_path / "router", hidden_size=HIDDEN, drafters=data.facts.drafters, key="router.model")
    # float32 sums in another order.
    assert torch.allclose(checkpoint_gains(data, read), predicted_gains(data, net), atol=1e-4)


def test_uncertain_records_and_held_out_texts_teach_nothing(tmp_path):
    data = made_up_records(tmp_path, num_texts=12)
    config = RouterConfig(epochs=2, batch_tokens=64, held_out=0.25)
    expected, _ = train_router(data, config)
    held_out = rows_of(data, split_texts(data, 0.25, 0).held_out)
    spoiled = data.lengths.clone()
    spoiled[~data.is_complete | held_out] = 1
    found, _ = train_router(data._replace(lengths=spoiled), config)
    assert all(map(torch.equal, expected[1:], found[1:]))
    spoiled = data.lengths.clone()
    spoiled[data.is_complete & ~held_out] += torch.arange(2)
    found, _ = train_router(data._replace(lengths=spoiled), config)
    assert not torch.equal(expected.gain_weight, found.gain_weight)


def test_records_of_several_folders_are_learned_from_as_one(tmp_path):
    parts = [made_up_records(tmp_path / str(seed), num_texts=12, seed=seed) for seed in range(2)]
    data = records.read_all_records([tmp_path / "0", tmp_path / "1"])
    assert len(data.texts) == 24 and data.texts[12].start == parts[1].texts[0].start + len(parts[0].entropy)
    whole = torch.cat([hidden for part in parts for _, hidden in records.hidden_states(part.shards)])
    for shard, hidden in records.hidden_states(data.shards):
        assert torch.equal(hidden, whole[shard.start : shard.end])
    for text, own in zip(data.texts[12:], parts[1].texts, strict=True):
        assert torch.equal(data.lengths[text.start : text.end], parts[1].lengths[own.start : own.end])
    # Both answers of a prompt are held out, or none; one folder's split is what it was alone.
    held = [text.number for text in split_texts(data, 0.25, 0).held_out]
    assert sorted(held) == sorted(2 * [text.number for text in split_texts(parts[0], 0.25, 0).held_out])
    train_router(data, RouterConfig(epochs=2, batch_tokens=64, held_out=0.25))
    made_up_records(tmp_path / "2", num_texts=12, num_drafters=3)
    with pytest.raises(ValueError, match="--records: .*2 and .*0 are of different models or trees"):
        records.read_all_records([tmp_path / "0", tmp_path / "2"])


def test_patience_keeps_the_best_epoch(tmp_path):
    data = made_up_records(tmp_path, num_texts=12)
    errors = []

    def listen(done, total, error):
        if error is not None:
            errors.append(error)

    config = RouterConfig(epochs=40, batch_tokens=32, lr=0.03, dropout=0.0, held_out=0.25, patience=2)
    checkpoint, _ = train_router(data, config, listen)
    best = errors.index(min(errors))
    assert len(errors) < 40 and len(errors) == best + 3
    held = rows_of(data, split_texts(data, 0.25, 0).held_out) & data.is_complete
    gains = checkpoint_gains(data, checkpoint)
    assert float((gains - gains_of(data))[held].square().mean()) == pytest.approx(min(errors), rel=1e-4)


@pytest.mark.parametrize("num_drafters", [2, 3])
def test_a_kind_that_is_left_out_teaches_nothing_of_itself(tmp_path, num_drafters):
    """What is predicted of a kind is what a network says that never saw it, and its own lengths change none of it."""
    data = made_up_records(tmp_path, num_drafters=num_drafters)
    config = RouterConfig(epochs=3, batch_tokens=128, lr=1e-2, dropout=0.0)
    found = leave_kinds_out(data, config, Value())
    math = rows_of(data, [text for text in data.texts if text.category == "math"])
    texts = tuple(text for text in data.texts if text.category == "chat")

    def learned(records):
        return fit(
            records, Split(texts, ()), lessons_of(records, texts, "uniform"), config, epochs=found.carried.epochs
        )

    predicted = predicted_gains(data, learned(data))
    torch.testing.assert_close(
        predicted[math], found.gains[math]
    )  # not bit for bit: some CPUs sum other batches otherwise
    spoiled = data.lengths.clone()
    spoiled[math] = 1
    again = learned(data._replace(lengths=spoiled))
    assert torch.equal(predicted_gains(data, again)[math], predicted[math])
    assert not torch.allclose(predicted[~math], found.gains[~math])  # which it has seen


@pytest.mark.parametrize("correct", [False, True])
def test_thresholds_are_best_for_the_kind_that_fares_worst(tmp_path, correct):
    data = made_up_records(tmp_path)
    found = leave_kinds_out(data, QUICK, Value(), points=9, correct=correct)
    paths, groups = calibration.trajectories(data), calibration.groups_of(data)
    alone = [walk(paths, always(d)) for d in (0, 1)]
    usual = torch.zeros(len(data.texts), 2)
    for own, other in itertools.permutations(groups.values()):  # what is usual is what it is elsewhere
        usual[own] = torch.tensor([outcome.of(other).acceptance_length for outcome in alone])

    def ratios(threshold):
        rule = (
            by_corrected_gain(paths, found.gains, [threshold], usual) if correct else by_gain(found.gains, [threshold])
        )
        outcome = walk(paths, rule)
        single = [[one.of(texts).acceptance_length for one in alone] for texts in groups.values()]
        worth = [outcome.of(texts).acceptance_length for texts in groups.values()]
        return [own / max(alone) for own, alone in zip(worth, single, strict=True)]

    grid = {*calibration.grid_of(found.gains[:, 0], 9), 0.0}
    assert found.thresholds[0] == max(t for t in grid if min(ratios(t)) == max(min(ratios(u)) for u in grid))
    assert found.carried.margins == found.thresholds
    assert [kind.routed / kind.single for kind in found.kinds.values()] == pytest.approx(ratios(found.thresholds[0]))
    for own, (name, kind) in enumerate(found.kinds.items()):
        theirs = max(t for t in grid if ratios(t)[1 - own] == max(ratios(u)[1 - own] for u in grid))
        assert kind.foreign / kind.single == pytest.approx(ratios(theirs)[own]), name
    assert all(kind.routed <= kind.oracle + 1e-9 and min(kind.r2) > 0.5 for kind in found.kinds.values())


def test_a_kind_that_cannot_be_judged_is_named(tmp_path):
    data = made_up_records(tmp_path)
    with pytest.raises(ValueError, match="two categories or more, and all are of math"):
        leave_kinds_out(data._replace(texts=data.texts[1::2]), QUICK, Value())
    math = rows_of(data, [text for text in data.texts if text.category == "math"])
    with pytest.raises(ValueError, match="no record of math is far enough"):
        leave_kinds_out(data._replace(known=data.known.masked_fill(math, 1)), QUICK, Value())


def test_what_carries_over_is_what_the_router_keeps(tmp_path):
    """Epochs and margins; at costs a threshold is the margin above break-even, and so is what "auto" makes of it."""
    data = made_up_records(tmp_path)
    costs = RoundCosts((1,), ((0.3, 0.0),), ((1.0, 1.0),), ((0.0, 0.0),))
    config = RouterConfig(epochs=6, batch_tokens=128, lr=1e-2, dropout=0.0, held_out=0.2)
    found = leave_kinds_out(data, config, Value(costs))
    paths = calibration.trajectories(data)
    even = 0.3 * walk(paths, always(1)).acceptance_length
    assert found.thresholds[0] == pytest.approx(found.carried.margins[0] + even)
    checkpoint, report = train_router(data, config, value=Value(costs), carried=found.carried)
    short, _ = train_router(data, config, carried=Carried(1, found.carried.margins))
    assert checkpoint.facts.margins == found.carried.margins
    assert checkpoint.facts.train["epochs_kept"] == found.carried.epochs
    assert torch.equal(short.hidden_weight, checkpoint.hidden_weight) == (found.carried.epochs == 1)
    save_router(tmp_path / "router", checkpoint)
    read = read_router(tmp_path / "router", hidden_size=HIDDEN, drafters=data.facts.drafters, key="router.model")
    assert read.facts == checkpoint.facts
    ((threshold,),) = auto_thresholds("neural", costs, read.facts, 2)
    assert threshold == pytest.approx(0.3 * read.facts.mean_lengths[1] + found.carried.margins[0])
    assert report.speeds["dflash"] == pytest.approx(report.lengths["dflash"])
    assert report.speeds["eagle3"] == pytest.approx(report.lengths["eagle3"] / 1.3)


# -- thresholds ---------------------------------------------------------------------------------------------------


def test_one_threshold_is_searched_over_the_whole_grid(tmp_path):
    data = made_up_records(tmp_path)
    found = calibration.calibrate(data, Signal("entropy", data.entropy), Value(), points=15)
    paths, groups = calibration.trajectories(data), calibration.groups_of(data)
    for category, texts in groups.items():
        worth = [walk(paths, by_entropy(data.entropy, [t])).of(texts).acceptance_length for t in found.grid[0]]
        assert found.by_category[category].value == max(worth) and found.curves[category] == [worth]
        assert found.by_category[category].thresholds == (
            max(t for t, w in zip(found.grid[0], worth, strict=True) if w == max(worth)),
        )
    means = [sum(column) / len(groups) for column in zip(*(found.curves[c][0] for c in groups), strict=True)]
    assert found.overall.value == pytest.approx(max(means)) and found.curves["all"][0] == pytest.approx(means)


def test_thresholds_of_three_drafters_fall_and_help(tmp_path):
    data = made_up_records(tmp_path, num_drafters=3)
    found = calibration.calibrate(data, Signal("entropy", data.entropy), Value(), points=9)
    assert len(found.overall.thresholds) == 2
    assert list(found.overall.thresholds) == sorted(found.overall.thresholds, reverse=True)
    gains = gains_of(data)
    neural = calibration.calibrate(data, Signal("neural", gains), Value(), points=9)
    rows = {row.method: row for row in calibration.table(data, calibration.oracle_rules(data, Value()), Value())}
    assert neural.overall.value == pytest.approx(rows["oracle-token"].values["mean"], rel=0.05)
    assert max(rows[name].values["mean"] for name in data.facts.drafters) < neural.overall.value


def test_a_collection_ends_with_what_drafters_bring_alone(tmp_path, capsys):
    data = made_up_records(tmp_path)
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(as_json(RoundCosts((1,), ((0.4, 0.0),), ((1.0, 1.0),), ((0.0, 0.0),)), NAMES)))
    show_oracles(tmp_path, file)
    by_seconds = capsys.readouterr().out
    show_oracles(tmp_path, None)
    by_rounds = capsys.readouterr().out
    paths = calibration.trajectories(data)
    for index, name in enumerate(NAMES):
        one = walk(paths, always(index))
        parts = [one.of(texts) for texts in calibration.groups_of(data).values()]
        lengths = [part.acceptance_length for part in parts]
        shown = [f"{value:.2f}" for value in (*lengths, sum(lengths) / 2)]
        row = next(line.split() for line in by_rounds.splitlines() if line.split()[1:2] == [name])
        assert [cell for cell in row if cell in shown] == shown
        faster = next(line.split() for line in by_seconds.splitlines() if line.split()[1:2] == [name])
        assert f"{sum(lengths) / 2 / (1.4, 1.0)[index]:.2f}" in faster and shown[-1] in faster
    assert "oracle-token" in by_rounds and "tokens/s" in by_seconds and "tokens/s" not in by_rounds


# -- commands -----------------------------------------------------------------------------------------------------


def run(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["crossspec", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code in (0, None)


def test_from_records_to_a_router_a_table_and_pictures(tmp_path, monkeypatch, capsys):
    made_up_records(tmp_path / "records")
    folder, router = tmp_path / "records", tmp_path / "router"
    training = ("--epochs", 30, "--batch-tokens", 128, "--lr", 1e-2, "--dropout", 0, "--weighting", "visits")
    run(monkeypatch, "train", "router", "--records", folder, "--out", router, *training)
    assert "R^2 of the gains +0." in capsys.readouterr().out
    unseen = ("--transfer", "--seconds", "0.2,0.1")
    run(monkeypatch, "train", "router", "--records", folder, "--out", tmp_path / "other", *training, *unseen)
    said = capsys.readouterr().out
    assert "categories that the router has not seen" in said and "tokens/s" in said and "epochs" in said
    assert (tmp_path / "other" / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "other" / "router.json").read_text())["margins"]) == 1
    for policy in ("entropy", "neural"):
        files = {"json": tmp_path / f"{policy}.json", "picture": tmp_path / f"{policy}.png"}
        options = ("--records", folder, "--router", router, "--policy", policy, "--json", files["json"])
        run(monkeypatch, "calibrate", *options, "--picture", files["picture"], "--points", 9)
        found = json.loads(files["json"].read_text())
        (threshold,) = found["overall"]["thresholds"]
        assert set(found["by_category"]) == {"chat", "math"} and found["meta"]["num_texts"] == 60
        settings = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["router"]
        each = {category: one["thresholds"][0] for category, one in found["by_category"].items()}
        model = {"model": str(router)} if policy == "neural" else {}
        assert settings == {"policy": policy, "threshold": threshold, "by_category": each, **model}
        drafters = {"eagle3": {"model": "a"}, "dflash": {"model": "b", "num_speculative_tokens": 7}}
        pasted = {"method": "whiflash", "drafters": drafters, "router": settings}
        assert parse(pasted, ()).router.by_category.keys() == each.keys()
        of_each = {row["method"]: row["values"] for row in found["rows"]}[f"{policy}, by category"]
        assert {c: of_each[c] for c in each} == {c: one["value"] for c, one in found["by_category"].items()}
        assert files["picture"].read_bytes().startswith(b"\x89PNG")
    document = tmp_path / "oracle.json"
    run(monkeypatch, "oracle", "--records", folder, "--router", router, "--seconds", "0.2,0.1", "--json", document)
    found = json.loads(document.read_text())
    assert found["value"] == "tokens/s" and [row["method"] for row in found["rows"]][2:6] == [
        "oracle-task", "oracle-prompt", "oracle-token", "goodput",
    ]  # fmt: skip
    for row in found["rows"][:2]:  # a drafter alone: both counts are one, but for what its rounds cost
        seconds = (0.2, 0.1)[row["shares"].index(1.0)]
        assert row["lengths"].keys() == row["values"].keys() >= {"chat", "math", "mean"}
        assert row["values"] == pytest.approx({key: value / seconds for key, value in row["lengths"].items()})
    shown = capsys.readouterr().out
    assert "neural" in shown and "entropy" in shown
    picture = tmp_path / "trace.svg"
    options = ("--category", "math", "--policy", "neural", "--router", router, "--picture", picture)
    run(monkeypatch, "trace", "--records", folder, *options, "--json", document)
    found = json.loads(document.read_text())
    assert found["text"] == 1 and "<svg" in picture.read_text()
    places = [one["token"] for one in found["rounds"]]
    steps = [found["lengths"][one["token"]][found["drafters"].index(one["drafter"])] for one in found["rounds"]]
    assert places[0] == 0 and all(b - a == s for a, b, s in zip(places, places[1:], steps, strict=False))


@pytest.mark.parametrize("spoiled", ["states", "lengths"])
def test_a_router_that_has_learned_nothing_says_so(tmp_path, spoiled, monkeypatch, capsys):
    """Of states that tell nothing, or of drafters that are alike, nothing can be learned."""
    training = ("--epochs", 60, "--batch-tokens", 128, "--lr", 1e-2, "--dropout", 0)
    made_up_records(tmp_path / "records")
    for file in (tmp_path / "records").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            metadata = opened.metadata()
        if spoiled == "states":
            tensors["hidden"] = torch.randn(tensors["hidden"].shape, generator=torch.Generator().manual_seed(1))
        else:
            tensors["lengths"] = torch.ones_like(tensors["lengths"])
        save_file({name: x.to(tensors[name].dtype) for name, x in tensors.items()}, file, metadata)
    run(monkeypatch, "train", "router", "--records", tmp_path / "records", "--out", tmp_path / "r", *training)
    said = capsys.readouterr().out
    assert said.endswith("this router has learned nothing; collect more records\n") and "serve it" not in said


def test_a_router_says_how_to_serve_it(tmp_path, monkeypatch, capsys):
    made_up_records(tmp_path / "records", num_drafters=3)
    training = ("--epochs", 30, "--batch-tokens", 128, "--lr", 1e-2, "--dropout", 0, "--out", tmp_path / "router")

    def served(*options):
        run(monkeypatch, "train", "router", "--records", tmp_path / "records", *training, *options)
        return json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("serve it with "))

    router = {"policy": "neural", "model": str(tmp_path / "router")}
    assert served() == {"router": router}  # records of which nobody noted the drafters
    index = tmp_path / "records" / "records.json"
    drafters = {name: {"model": "m"} for name in ("eagle3", "dflash")}
    known = {**drafters, "middle": {"of": "dflash", "num_speculative_tokens": 2}}
    spec = {"method": "whiflash", "drafters": known}
    index.write_text(json.dumps(json.loads(index.read_text()) | {"speculative_config": spec}))
    assert list(parse(served(), NATIVE_KEYS).drafters) == ["eagle3", "middle", "dflash"]
    assert parse(served("--drafters", "eagle3,dflash"), NATIVE_KEYS).router.model == router["model"]
    assert served("--drafters", "eagle3,middle") == {"router": router}  # whose weights are of a drafter left out


def test_a_signal_ends_the_training_of_a_router(tmp_path, monkeypatch, capsys):
    made_up_records(tmp_path / "records", num_texts=6)
    monkeypatch.setattr("crossspec_tools.train.router.fit", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    command = ["crossspec", "train", "router", "--records", str(tmp_path / "records"), "--out", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "crossspec: stopped by SIGINT; run the same command to begin anew\n"


def test_commands_refuse_in_a_sentence(tmp_path, monkeypatch, capsys):
    made_up_records(tmp_path / "records", num_texts=6)
    folder, here = tmp_path / "records", tmp_path
    (here / "costs.json").write_text(
        '{"batch_sizes": [1], "draft": [[1, 2, 3]], "verify": [[0, 0]], "switch": [[0, 0]]}'
    )
    (here / "broken.json").write_text("{")
    for arguments, sentence in (
        (["oracle", "--records", here], "holds no records.json"),
        (["oracle", "--records", folder, "--router", here], "it is not a trained router"),
        (["oracle", "--records", folder, "--drafters", "eagle3"], "name at least two"),
        (["oracle", "--records", folder, "--neural-threshold", "1"], "needs --router"),
        (["oracle", "--records", folder, "--entropy-threshold", "1,2"], "give 1 number, with"),
        (["oracle", "--records", folder, "--costs", here / "costs.json"], "must give positive seconds"),
        (
            ["oracle", "--records", folder, "--costs", here / "broken.json"],
            "is no file of costs that `crossspec costs` writes",
        ),
        (["oracle", "--records", folder, "--seconds", "1,nan"], "--seconds 1,nan: give 2 numbers"),
        (["oracle", "--records", folder, "--seconds", "1,1", "--costs", here / "costs.json"], "exclude each other"),
        (["oracle", "--records", folder, "--switch-seconds", "1,1"], "needs --seconds"),
        (["collect", "--out", here / "new", "--costs", here / "broken.json"], "is no file of costs"),
        (["calibrate", "--records", folder, "--policy", "goodput"], "choose entropy or neural"),
        (["calibrate", "--records", folder, "--policy", "neural"], "needs --router"),
        (["calibrate", "--records", folder, "--picture", here / "a.txt"], "name a .png or .svg file"),
        (["calibrate", "--records", folder, "--json", here / "none" / "a.json"], "in a folder that exists"),
        (
            ["trace", "--records", folder, "--picture", here / "a.png", "--category", "code"],
            "the records are of chat, math",
        ),
        (["trace", "--records", folder, "--picture", here / "a.png", "--text", 99], "no such text"),
        (["train", "router", "--records", folder, "--out", here / "costs.json"], "is a file; name a folder"),
        (
            ["train", "router", "--records", folder, "--out", here / "r", "--weighting", "even"],
            "choose uniform or visits",
        ),
    ):
        monkeypatch.setattr(sys, "argv", ["crossspec", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            app.main()
        shown = capsys.readouterr().err
        assert end.value.code == app.USAGE_ERROR, arguments
        assert sentence in shown and shown.count("\n") == 1, (arguments, shown)
