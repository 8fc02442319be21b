"""Routing by experience: the kernels against plain numbers, and what the policy does with drafters of known worth."""

import math
import random

import numpy as np
import pytest
import torch

from vllm_crossspec.load.costs import Drift, RoundCosts, RoundTimer, TimedRound
from vllm_crossspec.routing.base import Router, RouterSettings
from vllm_crossspec.routing.experience import (
    EARLY_EVERY,
    EARLY_TURNS,
    PROBE_EVERY,
    Experience,
    arrivals,
    drafter_sets,
    probe_of,
)
from vllm_crossspec.routing.naive import Learned, Round, route_by_experience

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 200


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def parts_of(entropy):
    """What ``kernels.entropy_parts`` would have left of rows of these entropies, nats."""
    return torch.tensor([[[0.0, 1.0, -nats], [float("-inf"), 0.0, 0.0]] for nats in entropy], device=DEVICE)


@pytest.mark.parametrize("num_reqs", [1, 3, 150])
@pytest.mark.parametrize("num_drafters", [2, 5])
def test_kernels_against_plain_numbers(num_reqs, num_drafters):
    """Rounds of random worth: the same choice in every one, as far as two choices are not as good as equal."""
    generator = random.Random(num_reqs + num_drafters)
    owners = [0, 1, 0, 3, 4][:num_drafters]
    priors = [generator.uniform(1, 4) for _ in owners]
    costs = [
        [generator.uniform(0, 0.3) for _ in owners],
        [generator.uniform(0.7, 1) for _ in owners],
        [0.1] * num_drafters,
    ]
    experience = Experience(tuple(owners), tuple(priors), tuple(range(num_drafters)), SLOTS, DEVICE)
    learned, previous = Learned(priors), torch.full((SLOTS,), -1, dtype=torch.int32, device=DEVICE)
    routes = torch.zeros(num_reqs + 1, dtype=torch.int32, device=DEVICE)
    last: dict[int, tuple[float, ...]] = {}
    differing = total = 0
    for turn in range(1, 30):
        slots = generator.sample(range(SLOTS if turn % 5 else num_reqs + 5), num_reqs)
        tokens = [generator.choice([0, 1, 2, 5]) for _ in slots]
        forecasts = [
            [generator.choice([-1.0, 0.0, 2.5]) if d == num_drafters - 1 else -1.0 for d in range(num_drafters)]
            for _ in slots
        ]
        entropy = [generator.choice([0.1, 1.0, 2.0, 4.0]) for _ in range(num_reqs)]
        arrive = [[generator.choice([0.0, 1.0, 7.0]) for _ in owners] for _ in slots]
        experience.known.forecasts[:num_reqs] = torch.tensor(forecasts, device=DEVICE)
        experience.known.arrivals[:num_reqs] = torch.tensor(arrive, device=DEVICE)
        before = previous.tolist()
        assert experience.num_rounds == turn - 1
        probe, hope = probe_of(turn, range(num_drafters))
        batch = (ints([*slots, -1]), ints([*tokens, 3]), previous, routes)
        experience.decide(torch.tensor(costs, device=DEVICE), parts_of([*entropy, 9.0]), *batch)

        learned.learn(
            [Round(s, before[s], n, *last[s]) for s, n in zip(slots, tokens, strict=True) if n and before[s] >= 0]
        )
        deciding = [row for row, n in enumerate(tokens) if n]
        found = routes.tolist()
        assert found[-1] == -1 and all((found[row] >= 0) == (row in deciding) for row in range(num_reqs))
        if not deciding:
            continue
        expected = [learned.expected(slots[row], forecasts[row], entropy[row]) for row in deciding]
        torch.testing.assert_close(
            experience.known.expected[deciding, :, 0].cpu(), torch.tensor(expected), rtol=1e-5, atol=1e-5
        )
        # The kernel shares a step among all rows of the batch, those without a decision and padding among them.
        wanted = route_by_experience(
            expected,
            costs,
            owners,
            [before[slots[row]] for row in deciding],
            drafter_sets(num_drafters),
            probe,
            learned.hope(max(probe, 0), hope),
            num_reqs + 1,
            [arrive[row] for row in deciding],
        )
        total += 1
        differing += wanted != [found[row] for row in deciding]
        for row in deciding:
            assert previous[slots[row]] == found[row]
            awaited = learned.of_all(found[row], forecasts[row][found[row]], entropy[row])
            last[slots[row]] = entropy[row], *awaited
    own = experience.known.per_request.cpu()
    for slot, known in learned.per_request.items():
        torch.testing.assert_close(own[slot], torch.tensor(known), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        experience.known.all_requests.cpu(), torch.tensor(learned.all_requests), rtol=1e-5, atol=1e-4
    )
    assert differing <= total / 10, "float32 decides near ties otherwise"


def logits_of(nats):
    """[1, 128] logits of a distribution of about this entropy: some tokens are as likely as each other."""
    logits = torch.full((1, 128), float("-inf"), device=DEVICE)
    logits[0, : round(math.exp(nats))] = 0.0
    return logits


def run(worth, seconds, num_rounds=300, num_reqs=4, explores=True, forecasts=None, entropy=None, seed=0):
    """Route requests whose rounds bring what ``worth(request, drafter, round)`` says; the routes of each round."""
    num_drafters = len(seconds[0])
    explored = None if explores else ()
    priors = (3.0,) * num_drafters
    settings = RouterSettings("goodput", tuple("abcdef"[:num_drafters]), priors=priors, explored=explored)
    router = Router(settings, hidden_size=8, vocab_size=128, max_num_reqs=SLOTS, dtype=torch.float32, device=DEVICE)
    router.set_costs(RoundCosts((num_reqs,), (tuple(seconds[0]),), (tuple(seconds[1]),), ((0.0,) * num_drafters,)))
    generator, routes = random.Random(seed), torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    sampled, taken, states = [1] * num_reqs, [], torch.zeros(num_reqs, 8, device=DEVICE)
    for number in range(num_rounds):
        if forecasts is not None:
            router.experience.known.forecasts[:num_reqs] = torch.tensor(forecasts(number), device=DEVICE)
        if entropy is not None:
            rows = ints(range(num_reqs))
            router.observe_logits(logits_of(entropy(number)).expand(num_reqs, -1), rows.long(), rows)
        router.decide(states, ints(range(num_reqs)).long(), ints(range(num_reqs)), ints(sampled), routes)
        taken.append(routes[:num_reqs].tolist())
        means = [worth(row, drafter, number) for row, drafter in enumerate(taken[-1])]
        sampled = [1 + sum(generator.random() < (mean - 1) / 8 for _ in range(8)) for mean in means]
    return taken


def share(taken, drafter, start=150):
    routes = [route for batch in taken[start:] for route in batch]
    return routes.count(drafter) / len(routes)


def test_a_long_prompt_is_not_taken_in_for_a_short_answer():
    """Tokens a second of a chain are twice a lookup's, but a chain has to take in the prompt."""
    missed = np.array([[30, 0], [800, 0], [800, 0]])
    weights = arrivals(missed, np.array([2, 2, 400]))
    assert weights.dtype == np.float32 and (weights[:, 1] == 0).all()
    costs = [[0.2, 0.0], [1.0, 1.0], [0.9, 0.0]]
    routes = [
        route_by_experience([[4.0, 2.0]], costs, [0, 1], [-1], [1, 2], -1, 2.0, 1, [own]) for own in weights.tolist()
    ]
    assert routes == [[0], [1], [0]]


def test_the_most_tokens_a_second_win_not_the_most_tokens():
    taken = run(lambda row, drafter, number: (5.0, 3.0)[drafter], [[1.0, 0.1], [1.0, 1.0]])
    assert share(taken, 1) > 0.95  # 3 / 1.1 > 5 / 2
    taken = run(lambda row, drafter, number: (5.0, 3.0)[drafter], [[0.3, 0.1], [1.0, 1.0]])
    assert share(taken, 0) > 0.95


def test_requests_get_the_drafters_that_suit_them_where_both_are_worth_their_cost():
    worth = lambda row, drafter, number: 6.0 if drafter == row % 2 else 2.0  # noqa: E731
    taken = run(worth, [[0.2, 0.2], [1.0, 1.0]], num_rounds=840)
    assert all(batch == [0, 1, 0, 1] for batch in taken[-20:])
    # A second drafter that costs as much as the target itself is not worth it.
    taken = run(worth, [[3.0, 3.0], [1.0, 1.0]], num_rounds=840)
    assert all(len(set(batch)) == 1 for batch in taken[-20:])


def test_a_drafter_that_becomes_better_is_found_out_and_only_by_exploring():
    worth = lambda row, drafter, number: (3.0, 1.2 if number < 200 else 7.0)[drafter]  # noqa: E731
    assert share(run(worth, [[0.2, 0.2], [1.0, 1.0]], num_rounds=1500), 1, start=1300) > 0.9
    assert share(run(worth, [[0.2, 0.2], [1.0, 1.0]], num_rounds=1500, explores=False), 1, start=1300) < 0.1


def test_who_could_not_win_is_not_tried():
    """At the cost of one of its rounds the other has six: three times as many drafts would not make it the best."""
    worth = lambda row, drafter, number: (3.5, 4.0)[drafter]  # noqa: E731
    early = EARLY_TURNS * EARLY_EVERY * 2
    taken = run(worth, [[0.1, 3.0], [0.9, 3.0]], num_rounds=1200)
    tried = [number for number, batch in enumerate(taken, start=1) if 1 in batch]
    assert len(tried) == EARLY_TURNS and tried[-1] <= early
    # At twice the cost of the other, it may.
    assert share(run(worth, [[0.1, 1.0], [0.9, 1.0]], num_rounds=1200), 1) > 0


def test_the_same_drafter_is_worth_less_where_the_target_is_uncertain():
    """Drafter 0 brings 6 tokens where the target is certain and 1.5 where it is not, drafter 1 always 3."""
    entropy = lambda number: 0.1 if number % 2 else 4.0  # noqa: E731
    worth = lambda row, drafter, number: (6.0 if number % 2 else 1.5, 3.0)[drafter]  # noqa: E731
    taken = run(worth, [[0.1, 0.1], [1.0, 1.0]], entropy=entropy)
    assert share(taken[1::2], 0, start=75) > 0.95 and share(taken[0::2], 1, start=75) > 0.95
    blind = run(worth, [[0.1, 0.1], [1.0, 1.0]])
    assert share(blind[0::2], 1, start=75) < 0.5


def test_exploring_is_bounded():
    taken = run(lambda row, drafter, number: (5.0, 3.5, 1.1)[drafter], [[0.2] * 3, [1.0] * 3], num_rounds=1100)
    assert share(taken, 0, start=200) > 1 - 2 / PROBE_EVERY


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_costs_follow_what_rounds_take(factor):
    """One drafter is seen in every round, one now and then, one never; all rounds come to take more, or less."""
    costs = RoundCosts((1, 4), ((1.0,) * 3,) * 2, ((1.0,) * 3,) * 2, ((0.5,) * 3,) * 2)
    drift = Drift(costs)
    for number in range(800):
        now = factor if number >= 100 else 1.0
        drift.observe(TimedRound(4, 0, switches=0.0, seconds=2.0 * now))
        if number % 64 == 0:
            drift.observe(TimedRound(4, 1, switches=1.0, seconds=2.5 * now))
    (_, _, elsewhere), (often, seldom, never) = drift.factors()
    assert often == pytest.approx(factor, rel=0.01) and seldom == pytest.approx(factor, rel=0.05)
    assert never == elsewhere and abs(math.log(never)) > 0.4 * abs(math.log(factor))


def test_a_drafter_measured_wrong_is_mended_by_few_rounds_and_pauses_do_not_count():
    drift = Drift(RoundCosts((1,), ((1.0, 1.0),), ((1.0, 1.0),), ((0.0, 0.0),)))
    for _ in range(200):
        drift.observe(TimedRound(1, 0, switches=0.0, seconds=2.0))
    drift.observe(TimedRound(1, 0, switches=0.0, seconds=20.0))  # nobody asked for anything
    for _ in range(3):
        drift.observe(TimedRound(1, 1, switches=0.0, seconds=3.0))
    right, wrong = drift.factors()[0]
    assert right == pytest.approx(1.0, abs=0.1) and wrong > 1.3


def test_rounds_of_decoding_alone_say_what_a_drafter_costs():
    """Drafters 0 and 1 share a cache. A prompt's pass, its catch-up, mixed rounds and other requests' do not count."""
    timer = RoundTimer(num_slots=3, owners=np.array([0, 0, 2]))
    seen, now = [], 0.0

    def ended(slots, routes, seconds):
        nonlocal now
        now += seconds
        seen.append(timer.ended(np.array(slots), np.array(routes), now))

    def request(slots, *rounds):
        timer.forget(slots)
        for routes, seconds in rounds:
            ended(slots, routes, seconds)

    request([1], ([-1], 5.0), ([0], 5.0), ([0], 4.0), ([1], 1.0), ([2], 2.0), ([2], 3.0), ([-1], 1.0), ([2], 7.0))
    assert seen[:3] == [None] * 3, "its prompt in two parts, and the round in which drafter 0 takes it in"
    assert seen[3:6] == [(1, 0, False, 1.0), (1, 1, False, 2.0), (1, 2, True, 3.0)]
    assert seen[6:] == [None, None], "somebody does not draft"
    seen.clear()
    request([1], ([2], 5.0), ([2], 4.0), ([2], 1.5))
    assert seen == [None, None, (1, 2, False, 1.5)], "another request in the same slot"
    seen.clear()
    request([0], ([2], 9.0), ([0], 9.0))
    for routes in ([0, 0], [0, 2], [0, 0], [0, 0], [0, 0]):
        ended([0, 1], routes, 2.0)
    assert seen[2:] == [None, None, None, None, (2, 0, False, 2.0)]


@pytest.mark.parametrize(("missed", "switches"), [(None, 1.0), ([0, 0], 0.0), ([30, 240], 1.5)])
def test_a_switch_counts_by_what_was_taken_in(missed, switches):
    timer, slots = RoundTimer(num_slots=2, owners=np.array([0, 1])), np.array([0, 1])
    for routes in ([0, 0], [0, 0], [0, 0], [1, 1]):
        timer.ended(slots, np.array(routes), 1.0, None if missed is None else np.array(missed))
    assert timer.ended(slots, np.array([1, 1]), 3.0) == (2, 1, switches, 2.0)


def test_a_router_goes_by_costs_as_they_have_become():
    """Drafter 1 turns out to take six times as long as was measured: drafter 0 takes its place."""
    settings = RouterSettings("goodput", ("a", "b"), priors=(3.0, 3.0), explored=())
    router = Router(settings, hidden_size=8, vocab_size=8, max_num_reqs=4, dtype=torch.float32, device=DEVICE)
    router.set_costs(RoundCosts((1,), ((0.2, 0.1),), ((0.2, 0.1),), ((0.0, 0.0),)))
    routes, states = ints([0]), torch.zeros(1, 8, device=DEVICE)

    def choice():
        router.decide(states, ints([0]).long(), ints([0]), ints([3]), routes)
        return routes.item()

    assert choice() == 1
    for _ in range(20):
        router.drift.observe(TimedRound(1, 1, switches=0.0, seconds=1.2))
    assert choice() == 1, "nothing has followed yet"
    for _ in range(20):
        router.drift.observe(TimedRound(1, 1, switches=0.0, seconds=0.6))
    router.follow_drift()
    assert choice() == 0
    given = RouterSettings("goodput", ("a", "b"), costs=router.costs)
    fixed = Router(given, hidden_size=8, vocab_size=8, max_num_reqs=4, dtype=torch.float32, device=DEVICE)
    assert fixed.drift is None, "costs that were given stay"


def test_costs_on_their_way_to_the_device_are_not_written_over(monkeypatch):
    """The host goes on while a copy is under way."""
    settings = RouterSettings("goodput", ("a", "b"), priors=(3.0, 3.0), explored=())
    router = Router(settings, hidden_size=8, vocab_size=8, max_num_reqs=4, dtype=torch.float32, device=DEVICE)
    router.set_costs(RoundCosts((1,), ((0.2, 0.1),), ((0.2, 0.1),), ((0.0, 0.0),)))
    sources, copy = [], torch.Tensor.copy_

    def seen(self, source, **options):
        sources.append(source)
        return copy(self, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", seen)
    router.follow_drift()
    before = sources[0].clone()
    router.drift.observe(TimedRound(1, 1, switches=0.0, seconds=0.6))
    router.follow_drift()
    assert torch.equal(sources[0], before) and not torch.equal(sources[1], before)


def test_a_forecast_counts_when_it_is_made_and_as_far_as_it_came_true():
    """A lookup that has found something is taken in that very round, and one whose word is worth nothing is not."""
    told = lambda number: [[-1.0, 5.0 if number % 4 == 0 else 0.0]] * 4  # noqa: E731
    honest = lambda row, drafter, number: (3.0, 6.0 if number % 4 == 0 else 1.0)[drafter]  # noqa: E731
    taken = run(honest, [[0.3, 0.0], [1.0, 1.0]], forecasts=told)
    assert all(
        batch == [number % 4 == 0] * 4
        for number, batch in enumerate(taken)
        if number > 200 and (number + 1) % PROBE_EVERY
    )
    liar = lambda row, drafter, number: (3.0, 1.0)[drafter]  # noqa: E731
    assert share(run(liar, [[0.3, 0.0], [1.0, 1.0]], forecasts=told), 0) > 0.95


def test_a_request_whose_forecasts_come_true_keeps_them_beside_one_whose_do_not():
    """All are told the same in every round; what it was worth to them is another matter."""
    worth = lambda row, drafter, number: (4.0, 6.0 if row % 2 else 1.2)[drafter]  # noqa: E731
    taken = run(worth, [[0.05, 0.0], [1.0, 1.0]], forecasts=lambda number: [[-1.0, 5.0]] * 4)
    assert all(
        batch == [0, 1, 0, 1] for n, batch in enumerate(taken, start=1) if n > 200 and probe_of(n, (0, 1))[0] < 0
    )


@pytest.mark.parametrize("is_late", [False, True])
def test_a_round_is_credited_to_the_drafter_whose_drafts_it_verified(is_late):
    """Of two decisions the second one is not carried out yet."""
    experience = Experience((0, 1), (2.0, 2.0), (), SLOTS, DEVICE, is_late)
    known = (torch.tensor([[0.1, 0.1], [1.0, 1.0], [0.0, 0.0]], device=DEVICE), parts_of([1.0]))
    previous, routes = torch.full((SLOTS,), 0, dtype=torch.int32, device=DEVICE), ints([0])
    experience.decide(*known, ints([0]), ints([1]), previous, routes, carries_out=not is_late)
    previous[0] = 1
    experience.decide(*known, ints([0]), ints([6]), previous, routes, carries_out=not is_late)
    credited = experience.known.all_requests[:, :, 0].sum(1).cpu() > 4
    assert credited.tolist() == ([True, False] if is_late else [False, True])


def test_rounds_that_do_not_wait_are_timed_between_two_of_the_same_drafter():
    slots, found = np.array([0, 1]), {}
    for is_late in (False, True):
        timer = RoundTimer(num_slots=2, owners=np.array([0, 1]), is_late=is_late)
        routes = [0] * 8 + [1, 0, 0, 0]
        timed = [timer.ended(slots, np.array([one, one]), float(n)) for n, one in enumerate(routes)]
        found[is_late] = [one.drafter for one in timed[8:] if one is not None]
        timer.interrupt()
        assert timer.ended(slots, np.array([0, 0]), 99.0) is None
    assert found == {False: [0, 1, 0, 0], True: [0]}


def test_a_new_request_starts_from_what_all_have_shown():
    experience = Experience((0, 1), (2.0, 2.0), (), SLOTS, DEVICE)
    known = (torch.tensor([[0.1, 0.1], [1.0, 1.0], [0.0, 0.0]], device=DEVICE), parts_of([1.0]))
    previous, routes = torch.full((SLOTS,), -1, dtype=torch.int32, device=DEVICE), ints([0])
    experience.decide(*known, ints([0]), ints([1]), previous, routes)
    previous[0] = 1
    for _ in range(12):
        experience.decide(*known, ints([0]), ints([6]), previous, routes)
    experience.release(torch.tensor([0], device=DEVICE))
    previous[0] = -1
    experience.decide(*known, ints([0]), ints([1]), previous, routes)
    assert routes.tolist() == [1] and not experience.known.per_request[0].any()
