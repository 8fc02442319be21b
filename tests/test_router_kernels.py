"""The router's kernels against their naive twins, with poisoned outputs.

Tolerances: kernels sum in float32, the twins in float64. A row's entropy is a sum over 4096 logits and more, a gain one
over at most 256 products and 32 units: both stay within 1e-4. Inputs in bfloat16 are the same numbers to both.
"""

import math

import pytest
import torch
from hopper import compile_in_subprocess
from routers import DTYPES, POISON, TOLERANCE, expected_routes, floats, poisoned, random_batch
from steps import DEVICE, int32

from vllm_crossspec.routing import kernels, naive
from vllm_crossspec.routing.thresholds import ALWAYS


def random_rows(generator, num_rows, num_sources):
    """Rows of a batch, some of them padding: negative, or stale and out of bounds."""
    rows = torch.randint(0, num_sources, (num_rows,), generator=generator)
    kind = torch.randint(0, 8, (num_rows,), generator=generator)
    rows[kind == 0] = -1
    rows[kind == 1] = 2**40
    rows[kind == 2] = num_sources
    return rows.to(DEVICE), (kind > 2).to(DEVICE)


def forbid(logits, seed):
    """-inf as a grammar leaves it: scattered, over a whole part, for all tokens but one, for all."""
    generator = torch.Generator().manual_seed(seed)
    logits[0::5][torch.rand(logits[0::5].shape, generator=generator) < 0.3] = float("-inf")
    logits[1::5, : kernels.ENTROPY_BLOCK] = float("-inf")
    logits[2::5, 1:] = float("-inf")
    logits[3::15] = float("-inf")


def measured_entropy(logits, rows, **scaling):
    """Entropies [R] by the two kernels that make them."""
    num_rows = rows.shape[0]
    parts = poisoned(num_rows + 1, kernels.entropy_splits(logits.shape[1]), 3)
    scaling = {"idx_mapping": torch.arange(num_rows, dtype=torch.int32, device=DEVICE)} | scaling
    kernels.entropy_parts(logits=logits, rows=rows, parts=parts, **scaling)
    assert (parts[num_rows] == POISON).all()
    padding = (rows < 0) | (rows >= logits.shape[0])
    neutral = floats([float("-inf"), 0, 0]).expand_as(parts[:-1][padding])
    assert torch.equal(parts[:-1][padding], neutral)
    return decide(kernels.ENTROPY, entropy_parts=parts, num_rows=num_rows).entropy


def decide(policy, *, num_rows, num_drafters=2, num_blocks=1, mapping=None, **given):
    """``kernels.decide`` into poisoned outputs; what is not given says nothing."""
    mapping = torch.arange(num_rows, dtype=torch.int32, device=DEVICE) if mapping is None else mapping
    others = num_drafters - 1
    rule = kernels.Rule(
        policy,
        given.get("thresholds", floats([0] * others)).view(-1, others),
        given.get("costs", floats([[1] * num_drafters, [0] * num_drafters])),
        given.get("mean_lengths", floats([4] * num_drafters)),
        "own" in given,
    )
    out = kernels.Decision(
        poisoned(num_rows + 3, dtype=torch.int32), poisoned(num_rows + 3), poisoned(num_rows + 3, others)
    )
    slots = max(num_rows, int(mapping.max()) + 1)
    kernels.decide(
        rule=rule,
        entropy_parts=given.get("entropy_parts", poisoned(1, 1, 3)),
        gain_parts=given.get("gain_parts", poisoned(1)),
        num_blocks=num_blocks,
        b2=given.get("b2", floats([0] * others)),
        idx_mapping=mapping,
        num_sampled=given.get("num_sampled", int32([1] * num_rows)),
        previous=given.get("previous", int32([-1] * slots)),
        categories=given.get("categories", int32([0] * slots)),
        own=given.get("own", poisoned(1)),
        out=out,
    )
    assert all((part[num_rows:] == POISON).all() for part in out)
    return kernels.Decision(*(part[:num_rows] for part in out))


# -- entropy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 4096), (3, 37), (16, 4097), (33, 9001)])
def test_entropy_equals_naive(num_rows, vocab_size, dtype):
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(50, vocab_size, generator=generator) * 4
    forbid(logits, num_rows)
    # Rows need not lie beside each other, and what follows the last one belongs to somebody else.
    wide = torch.full((51, vocab_size + 7), 5.0)
    wide[:50, :vocab_size] = logits
    logits = wide.to(DEVICE, dtype)[:50, :vocab_size]
    rows, is_real = random_rows(generator, num_rows, 50)
    found = measured_entropy(logits, rows)
    expected = torch.where(is_real, naive.entropy(logits[rows.clamp(0, 49)]), 0.0)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_entropies_by_hand():
    logits = torch.full((6, 5000), float("-inf"), device=DEVICE)
    logits[0] = 3.0  # all alike
    logits[1, 17] = -40.0  # certain
    logits[2, [0, 4999]] = 60.0  # two alike, in different parts
    logits[4] = float("nan")
    logits[4, 7] = 1.0
    logits[5, 1], logits[5, 4998] = 0.0, math.log(3.0)
    found = measured_entropy(logits, torch.arange(6, device=DEVICE))
    quarter = math.log(4) - 0.75 * math.log(3)
    expected = floats([math.log(5000), 0, math.log(2), 0, 0, quarter])
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert (found >= 0).all()


def test_entropies_at_the_requests_temperatures():
    """Each row by its request's slot; a padded request's logits stay as they are."""
    logits = torch.randn(5, 4097, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 3
    logits[2, 7:] = float("-inf")
    scales = floats([1 / 0.3, 1.0, 1 / 2.0, 5.0, 1 / 0.7])
    slots, rows = [4, 0, 2, -1, 1], torch.tensor([3, 1, 2, 4, 0], device=DEVICE)
    found = measured_entropy(logits, rows, idx_mapping=int32(slots), scales=scales)
    factors = floats([float(scales[slot]) if slot >= 0 else 1.0 for slot in slots])
    torch.testing.assert_close(found, naive.entropy(logits[rows] * factors[:, None]), **TOLERANCE)
    assert (found - measured_entropy(logits, rows))[:3].abs().min() > 0.01


def test_a_wrong_entropy_is_found_out(monkeypatch):
    right = naive.entropy
    monkeypatch.setattr(naive, "entropy", lambda logits: -right(logits))
    with pytest.raises(AssertionError, match="not close"):
        test_entropy_equals_naive(16, 4097, torch.float32)


# -- gains --------------------------------------------------------------------------------------------------------

TILES = [None, kernels.GainTiles(1, 4, 128), kernels.GainTiles(16, 16, 64)]


def random_network(generator, hidden_size, middle, num_drafters, dtype):
    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    w1 = (draw(middle, hidden_size) / hidden_size**0.5).to(DEVICE, dtype)
    others = [draw(middle), draw(num_drafters - 1, middle) / middle**0.5, draw(num_drafters - 1)]
    return w1, *(t.to(DEVICE) for t in others)


def measured_gains(hidden, rows, network, tiles=None):
    """Gains [R, N - 1] by the two kernels that make them."""
    w1, b1, w2, b2 = network
    num_rows, others = rows.shape[0], w2.shape[0]
    parts = poisoned(num_rows * kernels.max_gain_blocks(w1.shape[0]) * others + 5)
    blocks = kernels.gain_parts(hidden_states=hidden, rows=rows, w1=w1, b1=b1, w2=w2, parts=parts, tiles=tiles)
    assert (parts[num_rows * blocks * others :] == POISON).all()
    assert (parts[: num_rows * blocks * others] != POISON).all()
    return decide(
        kernels.NEURAL, gain_parts=parts, num_blocks=blocks, b2=b2, num_rows=num_rows, num_drafters=others + 1
    ).gains


# A matrix-vector product is a program a request and four units: interpreted, few requests must do.
GAIN_CASES = [
    (num_rows, hidden_size, num_drafters, tiles)
    for num_rows, hidden_size, num_drafters in [(1, 256, 2), (5, 72, 4), (16, 256, 3), (33, 136, 2)]
    for tiles in TILES
    if tiles is None or tiles.rows > 1 or num_rows <= 5
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "hidden_size", "num_drafters", "tiles"), GAIN_CASES)
def test_gains_equal_naive(num_rows, hidden_size, num_drafters, tiles, dtype):
    generator = torch.Generator().manual_seed(hidden_size)
    hidden = torch.randn(41, hidden_size + 3, generator=generator).to(DEVICE, dtype)[:40, :hidden_size]
    network = random_network(generator, hidden_size, hidden_size // 8, num_drafters, dtype)
    rows, is_real = random_rows(generator, num_rows, 40)
    states = torch.where(is_real[:, None], hidden[rows.clamp(0, 39)], 0.0)
    torch.testing.assert_close(measured_gains(hidden, rows, network, tiles), naive.gains(states, *network), **TOLERANCE)


@pytest.mark.parametrize("tiles", TILES[1:])
def test_the_same_request_gets_the_same_numbers_every_time(tiles):
    """To the bit, twice over and whatever its neighbours: there are no atomics, and a tile's rows do not mix."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 256, generator=generator).to(DEVICE)
    network = random_network(generator, 256, 32, 3, torch.float32)
    rows = torch.tensor([3, 0, 1], device=DEVICE)
    found = [measured_gains(hidden, r, network, tiles) for r in (rows, rows, rows.flip(0), rows[:1])]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0].flip(0), found[2])
    assert torch.equal(found[0][:1], found[3])


def test_wrong_gains_are_found_out(monkeypatch):
    right = naive.gains
    monkeypatch.setattr(naive, "gains", lambda *arguments: -right(*arguments))
    with pytest.raises(AssertionError, match="not close"):
        test_gains_equal_naive(5, 72, 4, None, torch.float32)


# -- decisions ----------------------------------------------------------------------------------------------------


def coarse_choices(seed, num_rows, num_drafters):
    """Gains in halves of a token, thresholds and costs to match: many exact ties. Parts of three blocks."""
    draw, batch = random_batch(seed, num_rows, num_drafters)
    parts = draw(-4, 5, num_rows, 3, num_drafters - 1) / 4
    parts[:, 2] = parts[:, :2].sum(1).mul(2).round().div(2) - parts[:, :2].sum(1)
    thresholds = draw(-2, 3, num_drafters - 1) / 2
    costs = torch.stack([draw(1, 4, num_drafters) / 2, draw(0, 2, num_drafters) / 2])
    return batch, parts.to(DEVICE), thresholds.to(DEVICE), costs.to(DEVICE)


@pytest.mark.parametrize("policy", [kernels.ENTROPY, kernels.NEURAL, kernels.GOODPUT])
@pytest.mark.parametrize("num_drafters", [2, 3, 4])
def test_decisions_equal_naive(policy, num_drafters):
    ties = 0
    for seed, num_rows in enumerate([1, 2, 7, 16, 17, 33] * 2):
        batch, parts, thresholds, costs = coarse_choices(seed, num_rows, num_drafters)
        # Entropies of 0 to 3 halves of a nat by parts of one number: (M, Z, T) = (0, 1, -H).
        halves = torch.arange(num_rows, device=DEVICE) % 4 / 2
        entropy = torch.stack([halves * 0, halves * 0 + 1, -halves], dim=-1)[:, None].contiguous()
        if policy == kernels.ENTROPY:
            thresholds = thresholds.abs().sort(descending=True).values
        before = [t.clone() for t in batch]
        out = decide(
            policy,
            num_rows=num_rows,
            num_drafters=num_drafters,
            entropy_parts=entropy,
            gain_parts=parts.flatten(),
            num_blocks=3,
            thresholds=thresholds,
            costs=costs,
            mapping=batch[0],
            num_sampled=batch[1],
            previous=batch[2],
        )
        expected = expected_routes(policy, out, before, thresholds, costs, 4.0)
        assert out.routes.tolist() == expected
        assert torch.equal(batch[2], before[2])  # the twin noted its routes there
        decides = out.routes >= 0
        if policy == kernels.ENTROPY:
            assert torch.equal(out.entropy, torch.where(decides, halves, 0.0))
        else:
            assert torch.equal(out.gains, torch.where(decides[:, None], parts.sum(1), 0.0))
            ties += int((out.gains == thresholds).sum())
    assert policy != kernels.NEURAL or ties > 0


@pytest.mark.parametrize("policy", [kernels.ENTROPY, kernels.NEURAL])
def test_thresholds_are_those_of_a_requests_category(policy):
    """Each row decided alone, with its category's thresholds for all."""
    num_rows, num_drafters = 17, 3
    batch, parts, _, costs = coarse_choices(2, num_rows, num_drafters)
    halves = torch.arange(num_rows, device=DEVICE) % 4 / 2
    entropy = torch.stack([halves * 0, halves * 0 + 1, -halves], dim=-1)[:, None].contiguous()
    thresholds = floats([[1.0, 0.5], [9.0, 0.0], [0.0, 0.0]])
    categories = torch.arange(num_rows + 4, dtype=torch.int32, device=DEVICE) % 3
    given = {"num_rows": num_rows, "num_drafters": num_drafters, "entropy_parts": entropy, "costs": costs}
    given |= {"gain_parts": parts.flatten(), "num_blocks": 3, "mapping": batch[0], "num_sampled": batch[1]}
    out = decide(policy, thresholds=thresholds, categories=categories, previous=batch[2].clone(), **given)
    alone = [decide(policy, thresholds=row, previous=batch[2].clone(), **given).routes for row in thresholds]
    slots = batch[0].clamp(min=0).long()
    expected = torch.stack(alone)[categories[slots].long(), torch.arange(num_rows, device=DEVICE)]
    assert torch.equal(out.routes, expected)
    assert any((routes != expected).any() for routes in alone)


def test_a_wrong_decision_is_found_out(monkeypatch):
    right = naive.route_by_gain
    monkeypatch.setattr(naive, "route_by_gain", lambda row, tau: right([-gain for gain in row], tau))
    with pytest.raises(AssertionError):
        test_decisions_equal_naive(kernels.NEURAL, 2)


def gains_of(rows):
    """Gain parts of one block."""
    return {"gain_parts": floats(rows).flatten(), "num_blocks": 1, "num_rows": len(rows)}


def test_entropy_takes_the_first_threshold_that_is_exceeded():
    entropies = [0.0, 0.4, 0.5, 0.6, 1.0, 1.1, 9.0]
    parts = floats([[[0.0, 1.0, -value]] for value in entropies])
    out = decide(kernels.ENTROPY, num_rows=7, num_drafters=3, entropy_parts=parts, thresholds=floats([1.0, 0.5]))
    assert out.routes.tolist() == [2, 2, 2, 1, 1, 0, 0]
    always = decide(kernels.ENTROPY, num_rows=7, entropy_parts=parts, thresholds=floats([ALWAYS]))
    assert always.routes.tolist() == [0] * 7
    never = decide(kernels.ENTROPY, num_rows=7, entropy_parts=parts, thresholds=floats([math.inf]))
    assert never.routes.tolist() == [1] * 7


def test_goodput_stays_where_a_switch_costs_more_than_it_brings():
    # 5 tokens in 1.0 s against 4 in 1.0 s; coming to drafter 0 costs 0.5 s, leaving it 0.1 s.
    costs, previous = floats([[1.0, 1.0], [0.5, 0.1]]), int32([-1, 0, 1])
    out = decide(kernels.GOODPUT, **gains_of([[1.0]] * 3), costs=costs, previous=previous)
    assert out.routes.tolist() == [0, 0, 1] and previous.tolist() == [0, 0, 1]
    out = decide(kernels.GOODPUT, **gains_of([[3.0]] * 3), costs=costs, previous=previous)
    assert out.routes.tolist() == [0, 0, 0]
    # At a tie nobody moves, and who comes new gets the reference.
    costs, previous = floats([[1.0, 1.0], [0.0, 0.0]]), int32([-1, 0, 1])
    out = decide(kernels.GOODPUT, **gains_of([[0.0]] * 3), costs=costs, previous=previous)
    assert out.routes.tolist() == [1, 0, 1]
    three = floats([[1.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    out = decide(kernels.GOODPUT, **gains_of([[0.0, 0.0]] * 2), num_drafters=3, costs=three, previous=int32([-1, 1]))
    assert out.routes.tolist() == [0, 1]


def test_goodput_counts_the_targets_own_token():
    """A gain of less than all of the reference's tokens would make a dear round better than a cheap one."""
    costs = floats([[1.0, 9.0, 0.1], [0.0, 0.0, 0.0]])
    row = {**gains_of([[-9.0, -9.0]]), "num_drafters": 3, "mean_lengths": floats([1.0] * 3)}
    assert decide(kernels.GOODPUT, **row, costs=costs).routes.tolist() == [2]
    costs = floats([[1.0, 9.0, 50.0], [0.0, 0.0, 0.0]])
    assert decide(kernels.GOODPUT, **row, costs=costs).routes.tolist() == [0]


@pytest.mark.parametrize("policy", [kernels.NEURAL, kernels.GOODPUT])
@pytest.mark.parametrize("num_drafters", [2, 3])
def test_corrections_equal_naive_round_after_round(policy, num_drafters):
    """What requests' own rounds brought is kept by slot, whatever the batch: padding and prompts leave it alone."""
    _, (_, _, previous) = random_batch(0, 21, num_drafters)
    lengths, usual = floats([4.0, 2.5, 3.0][-num_drafters:]), [4.0, 2.5, 3.0][-num_drafters:]
    own, twin, seen = floats([[[0.0] * 2] * num_drafters] * 25), torch.zeros(25, num_drafters, 2), set()
    for seed in range(12):
        (mapping, sampled, _), parts, thresholds, costs = coarse_choices(seed, 21, num_drafters)
        before, expected, beyond = previous.clone(), [], []
        for row, slot in enumerate(mapping.tolist()):
            gains, more = [0.0] * (num_drafters - 1), 0.0
            if slot >= 0 and sampled[row] > 0:
                predicted, last = parts[row].sum(0).tolist(), int(before[slot])
                gains, more = naive.correct(predicted, twin[slot], usual, last, int(sampled[row]))
            expected.append(gains)
            beyond.append(usual[-1] + more)
        given = {"gain_parts": parts.flatten(), "num_blocks": 3, "thresholds": thresholds, "costs": costs}
        given |= {"mapping": mapping, "num_sampled": sampled, "previous": previous, "own": own, "mean_lengths": lengths}
        out = decide(policy, num_rows=21, num_drafters=num_drafters, **given)
        torch.testing.assert_close(out.gains, floats(expected), **TOLERANCE)
        torch.testing.assert_close(own.cpu(), twin, **TOLERANCE)
        assert out.routes.tolist() == expected_routes(
            policy, out, (mapping, sampled, before), thresholds, costs, beyond
        )
        assert torch.equal(previous, before)
        seen |= set(out.routes.tolist())
    assert seen == set(range(-1, num_drafters)) and (own[..., 1] > 2).any()


def test_a_wrong_correction_is_found_out(monkeypatch):
    right = naive.correct
    monkeypatch.setattr(naive, "correct", lambda row, own, usual, last, tokens: right(row, own, usual, -1, tokens))
    with pytest.raises(AssertionError):
        test_corrections_equal_naive_round_after_round(kernels.NEURAL, 2)


def test_a_request_whose_predictions_miss_goes_to_the_drafter_that_is_better_for_it():
    """The network says two tokens more of drafter 0, which brings this request one where the reference brings six."""
    own, previous, routes = floats([[[0.0, 0.0]] * 2] * 2), int32([-1, -1]), []
    for _ in range(40):
        tokens = int32([[1, 6][last] for last in previous.tolist()])
        out = decide(kernels.NEURAL, **gains_of([[2.0]] * 2), previous=previous, num_sampled=tokens, own=own)
        routes += out.routes[:1].tolist()
    assert routes[0] == 0 and routes[20:] == [1] * 20
    out = decide(kernels.NEURAL, **gains_of([[2.0]] * 2), previous=previous)
    assert out.routes.tolist() == [0, 0], "as predicted"


# -- the GPU's compiler -------------------------------------------------------------------------------------------

COMPILE_FOR_HOPPER = """
import hopper
compiled = hopper.compile_only()
import torch
import routers as cases

for dtype in (torch.float32, torch.bfloat16):
    for policy in cases.POLICIES:
        router = cases.Router(
            cases.RouterSettings(policy, cases.NAMES[-3:], checkpoint=cases.make_checkpoint(3, 4096)),
            hidden_size=4096, vocab_size=151936, max_num_reqs=256, dtype=dtype, device=torch.device("cpu"),
        )
        router.warm_up(torch.zeros(1, 151936, dtype=dtype), torch.zeros(1, 4096, dtype=dtype))
assert set(compiled) == {"_entropy_parts_kernel", "_gain_parts_kernel", "_decide_kernel"}, set(compiled)
gains = [code["ptx"] for code in compiled["_gain_parts_kernel"].values()]
assert any("wgmma" in ptx for ptx in gains) and any("mma.sync" in ptx for ptx in gains)
variants = {name: len(codes) for name, codes in compiled.items()}
before = dict(variants)
for num_reqs in (1, 3, 4, 5, 16, 33, 64, 65, 128, 255):
    for policy in ("entropy", "neural"):
        costs = cases.RoundCosts((1, 7, 64), *((((1.0,) * 3,) * 3,) * 3))
        router = cases.Router(
            cases.RouterSettings(policy, cases.NAMES[-3:], checkpoint=cases.make_checkpoint(3, 4096), costs=costs),
            hidden_size=4096, vocab_size=151936, max_num_reqs=256, dtype=dtype, device=torch.device("cpu"),
        )
        index = torch.zeros(num_reqs, dtype=torch.int32)
        router.observe_logits(torch.zeros(num_reqs, 151936, dtype=dtype), index.long(), index)
        router.decide(torch.zeros(9, 4096, dtype=dtype), index.long(), index, index, torch.zeros_like(index))
assert {name: len(codes) for name, codes in compiled.items()} == before, "compiled in the middle of serving"
"""


@pytest.mark.nightly
def test_kernels_compile_for_hopper_all_at_start_up(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)
