"""Routers: a round from logits to routes, the thresholds that costs give, checkpoints on disk."""

import json
import math
import subprocess
import sys

import pytest
import torch
from routers import (
    COSTS,
    DTYPES,
    NAMES,
    POISON,
    POLICIES,
    TOLERANCE,
    expected_routes,
    floats,
    make_checkpoint,
    make_facts,
    make_router,
    poisoned,
    random_batch,
)
from safetensors.torch import load_file, save_file
from steps import DEVICE, int32

from vllm_crossspec.kinds.policy import policy_kind
from vllm_crossspec.load.costs import RoundCosts, as_json, read_costs
from vllm_crossspec.routing import kernels, naive
from vllm_crossspec.routing.checkpoint import EntropyGain, check_router, read_router, save_router
from vllm_crossspec.routing.thresholds import ALWAYS, auto_thresholds


class Launches:
    """Counts the launches of the router's kernels."""

    def __init__(self, monkeypatch):
        self.names = []
        for name in ("_entropy_parts_kernel", "_gain_parts_kernel", "_decide_kernel"):
            monkeypatch.setattr(kernels, name, Counted(name, getattr(kernels, name), self.names))


class Counted:
    def __init__(self, name, kernel, names):
        self.name, self.kernel, self.names = name, kernel, names

    def __getitem__(self, grid):
        self.names.append(self.name)
        return self.kernel[grid]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_round_from_logits_and_states_to_routes(policy, dtype, monkeypatch):
    router = make_router(policy, dtype=dtype, costs=COSTS, thresholds=(7.5,) if policy == "entropy" else None)
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(30, 5000, generator=generator) * torch.rand(30, 1, generator=generator) * 4).to(DEVICE, dtype)
    hidden = torch.randn(30, 256, generator=generator).to(DEVICE, dtype)
    launches = Launches(monkeypatch)
    weights = [t.to(DEVICE) for t in make_checkpoint()[1:]]
    weights[0] = weights[0].to(dtype)
    own, lengths = torch.zeros(12, 2, 2), list(make_facts(2).mean_lengths)
    seen, means = set(), 4.0
    for num_reqs in (1, 9, 12):
        _, (mapping, sampled, previous) = random_batch(num_reqs, 8, 2)
        mapping, sampled = mapping[:num_reqs], sampled[:num_reqs]
        num_reqs = mapping.shape[0]
        router.previous[:] = previous
        rows = torch.randint(0, 30, (num_reqs,), generator=generator).to(DEVICE)
        routes = poisoned(12, dtype=torch.int32)
        launches.names.clear()
        router.observe_logits(logits, rows, mapping)
        router.decide(hidden, rows, mapping, sampled, routes)
        assert len(launches.names) == 1 + router.needs_logits + router.needs_hidden <= 3
        decides = (mapping >= 0) & (sampled > 0)
        true_entropy, true_gains = naive.entropy(logits[rows]), naive.gains(hidden[rows], *weights)
        found = kernels.Decision(routes, router.entropy, router.gains)
        if router.needs_logits:
            torch.testing.assert_close(found.entropy[:num_reqs], true_entropy * decides, **TOLERANCE)
        if router.needs_hidden:
            corrected = [
                naive.correct(g, own[s], lengths, int(previous[s]), int(n)) if d else ([0.0], 0.0)
                for g, s, n, d in zip(
                    true_gains.tolist(), mapping.tolist(), sampled.tolist(), decides.tolist(), strict=True
                )
            ]
            torch.testing.assert_close(found.gains[:num_reqs], floats([gains for gains, _ in corrected]), **TOLERANCE)
            torch.testing.assert_close(router.own.cpu(), own, **TOLERANCE)
            means = [lengths[-1] + more for _, more in corrected]
        row = 0 if num_reqs == 1 else 1
        costs = floats([COSTS.round_seconds(row), COSTS.switch[row]])
        thresholds = floats(router.thresholds[row])
        number = {"entropy": kernels.ENTROPY, "neural": kernels.NEURAL, "goodput": kernels.GOODPUT}[policy]
        batch = (mapping, sampled, previous)
        assert routes[:num_reqs].tolist() == expected_routes(number, found, batch, thresholds, costs, means)
        assert torch.equal(router.previous, previous) and (routes[num_reqs:] == POISON).all()
        seen |= set(routes[:num_reqs].tolist())
    assert {0, 1} <= seen


def test_policies_say_what_they_read():
    needs = {name: (make_router(name).needs_logits, make_router(name).needs_hidden) for name in POLICIES}
    assert needs == {"entropy": (True, False), "neural": (False, True), "goodput": (False, True)}
    assert all(policy_kind(name, "policy").description for name in POLICIES)
    with pytest.raises(
        ValueError, match=r"^router\.policy: no routing policy is called 'entropie'; did you mean 'entrop"
    ):
        policy_kind("entropie", "router.policy")


def test_the_registry_needs_neither_torch_nor_triton():
    code = "import sys, vllm_crossspec.kinds.policy; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_what_requests_are_decides_with_their_logits():
    """One row of 1.2 nats at temperature 1: thresholds of 1 nat and none by category, and temperatures 1, 0 and 0.1."""
    router = make_router("entropy", thresholds=(1.0,), by_category=((0.0,), (9.0,)), uses_temperature=True)
    assert router.asks_requests and not make_router("entropy").asks_requests
    logits = torch.full((1, 5000), float("-inf"), device=DEVICE)
    logits[0, :5] = floats([2.0, 1.5, 0.5, 0.0, 0.0])
    slots, rows = int32([7, 3, 5, 0, 9]), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    router.admit(slots.long(), int32([0, 0, 0, 1, 2]), floats([1.0, 0.0, 0.1, 0.1, 1.0]))
    router.observe_logits(logits, rows, slots)
    routes = poisoned(12, dtype=torch.int32)
    router.decide(None, rows, slots, int32([1] * 5), routes)
    tempered = naive.entropy(torch.cat([logits, logits, 10 * logits, 10 * logits, logits]))
    torch.testing.assert_close(router.entropy[:5], tempered, **TOLERANCE)
    assert routes[:5].tolist() == [0, 0, 1, 0, 1]


def test_slots_are_forgotten():
    router = make_router("entropy", thresholds=(1.0,))
    routes, rows = poisoned(12, dtype=torch.int32), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    router.observe_logits(torch.zeros(1, 5000, device=DEVICE), rows, int32([5, 2, 6]))
    router.decide(None, rows, int32([5, 2, 6]), int32([1, 1, 1]), routes)
    assert routes[:3].tolist() == [0, 0, 0]
    assert router.previous[[5, 2, 6]].tolist() == [0, 0, 0]
    router.release(torch.tensor([5, 6], device=DEVICE))
    assert (router.previous == int32([-1, -1, 0] + [-1] * 9)).all()


def test_what_a_request_was_brought_is_forgotten_with_it():
    router = make_router("neural")
    router.own[:] = 1.0
    router.release(torch.tensor([5, 6], device=DEVICE))
    assert router.own[[5, 6]].eq(0).all() and router.own.sum() == 10 * 4
    assert make_router("neural", correct=False).own.shape[0] == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_warming_up_changes_nothing(policy):
    router = make_router(policy)
    router.previous[:4] = 1
    router.warm_up(torch.zeros(1, 5000, device=DEVICE), torch.zeros(1, 256, device=DEVICE))
    assert router.previous.tolist() == [1] * 4 + [-1] * 8


def test_memory_is_what_the_policy_needs():
    entropy, neural = (
        sum(value.nbytes for value in vars(make_router(name)).values() if isinstance(value, torch.Tensor))
        for name in ("entropy", "neural")
    )
    own, parts = 2 * 2 * 11, 12 * 2 * 3 - 3
    assert neural - entropy == 4 * (256 * 32 + 32 + 32 + 12 * 8 - 1 + own - parts)


# -- costs and thresholds -----------------------------------------------------------------------------------------


def test_the_nearest_measured_batch_size_counts():
    costs = RoundCosts((1, 4, 16), *(((1.0, 1.0),) * 3,) * 3)
    assert [costs.row(n) for n in (1, 2, 3, 4, 10, 11, 16, 500)] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert costs.round_seconds(1) == (2.0, 2.0)


def test_costs_in_a_file_are_found_by_name(tmp_path):
    costs = RoundCosts(
        (1, 4), *([(i, i + 1, i + 2), (i + 3, i + 4, i + 5)] for i in (1.0, 10.0, 20.0)), owners=(0, 0, 2)
    )
    file, names = tmp_path / "costs.json", ("tree", "chain", "suffix")
    file.write_text(json.dumps(as_json(costs, names)))
    assert as_json(read_costs(file, names, "costs"), names) == as_json(costs, names)
    some = read_costs(file, ("suffix", "chain"), "costs")
    assert some.draft == ((3.0, 2.0), (6.0, 5.0)) and some.owners == (0, 1)  # whose owner is not among them
    for content, sentence in (
        ("{", "costs .*costs.json is no file of costs that `crossspec costs` writes"),
        (json.dumps(as_json(costs, ("a", "chain", "suffix"))), "no costs of drafter 'tree'; its drafters are a, chain"),
        (json.dumps({**as_json(costs, names), "draft": [[1, 2]]}), "must give positive seconds"),
        (json.dumps({**as_json(costs, names), "draft": [[-1, 2, 3], [4, 5, 6]]}), "must give positive seconds"),
        ("[]", "must give positive seconds"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=sentence):
            read_costs(file, names, "costs")


def test_neural_thresholds_break_even():
    facts = make_facts(2)
    rows = auto_thresholds("neural", COSTS, facts, 2)
    for row, (tau,) in enumerate(rows):
        ours, reference = COSTS.round_seconds(row)
        assert math.isclose((4.0 + tau) / ours, 4.0 / reference)
    assert rows == ((-2.0,), (3.0,))
    same = RoundCosts((1,), ((1.0, 2.0, 1.5),), ((2.0, 1.0, 1.5),), ((0.1, 0.1, 0.1),))
    assert auto_thresholds("neural", same, make_facts(3), 3) == ((0.0, 0.0),)
    assert auto_thresholds("neural", None, facts, 2) == ((0.0,),)
    assert auto_thresholds("goodput", COSTS, facts, 2) == ((0.0,), (0.0,))


def test_entropy_thresholds_come_from_the_fit():
    fit = EntropyGain((0.0, 0.5, 1.5, 3.0), ((-1.0, 0.5, 2.0, 3.5),))
    facts = make_facts(2, fit=fit)
    # Without costs: where the gain passes 0; else where it passes what a longer round must bring.
    assert auto_thresholds("entropy", None, facts, 2) == ((0.5,),)
    assert auto_thresholds("entropy", COSTS, facts, 2) == ((ALWAYS,), (3.0,))
    even = make_facts(2, fit=EntropyGain((0.0, 1.0, 2.0), ((-1.0, 0.0, 1.0),)))
    assert auto_thresholds("entropy", None, even, 2) == ((2.0,),)  # what gains nothing stays with the reference
    dear = RoundCosts((1,), ((9.0, 1.0),), ((1.0, 1.0),), ((0.0, 0.0),))
    assert auto_thresholds("entropy", dear, facts, 2) == ((math.inf,),)


def test_entropy_thresholds_of_three_drafters_are_against_each_other():
    fit = EntropyGain((0.0, 1.0, 2.0), ((-2.0, 0.5, 3.0), (-1.0, 1.0, 1.5)))
    assert auto_thresholds("entropy", None, make_facts(3, fit=fit), 3) == ((2.0, 1.0),)
    # A drafter that is never the best is never chosen.
    fit = EntropyGain((0.0, 1.0), ((-2.0, 0.5), (-1.0, 1.0)))
    assert auto_thresholds("entropy", None, make_facts(3, fit=fit), 3) == ((math.inf, 1.0),)


def test_entropy_thresholds_without_a_fit_are_a_prior():
    assert auto_thresholds("entropy", None, None, 2) == ((1.0,),)
    assert auto_thresholds("entropy", COSTS, make_facts(2), 2) == ((1.0,), (1.0,))
    assert auto_thresholds("entropy", None, None, 4) == ((1.5, 1.0, 0.5),)


def test_thresholds_follow_costs_that_come_later():
    router = make_router("neural")
    routes, rows = poisoned(12, dtype=torch.int32), torch.zeros(8, dtype=torch.int64, device=DEVICE)
    hidden = torch.zeros(1, 256, device=DEVICE)
    arguments = (rows, torch.arange(8, dtype=torch.int32, device=DEVICE), int32([1] * 8), routes)
    router.decide(hidden, *arguments)
    gain, (before,) = float(router.gains[0, 0]), set(routes[:8].tolist())
    # A round of our drafter so dear, or so cheap, that the other one is right.
    factor = 1 + (2 * gain if gain > 0 else gain / 2) / 4
    router.set_costs(RoundCosts((8,), ((factor, 1.0),), ((0.0, 0.0),), ((0.0, 0.0),)))
    router.decide(hidden, *arguments)
    assert math.isclose(router.thresholds[0][0], 4 * (factor - 1))
    assert before == (0 if gain > 0 else 1) and set(routes[:8].tolist()) == {0 if gain > 4 * (factor - 1) else 1}
    assert set(routes[:8].tolist()) != {before}


# -- checkpoints --------------------------------------------------------------------------------------------------

FIT = EntropyGain((0.0, 1.0), ((-0.5, 0.75),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fit", [None, FIT])
def test_checkpoints_come_back(tmp_path, dtype, fit):
    saved = make_checkpoint(dtype=dtype, fit=fit)
    save_router(tmp_path / "router", saved)
    read = read_router(tmp_path / "router", hidden_size=256, drafters=NAMES[-2:], key="k")
    file = tmp_path / "router" / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))  # over it, in place: safetensors maps files
    assert read.facts == saved.facts
    for a, b in zip(read[1:], saved[1:], strict=True):
        assert a.dtype == dtype and torch.equal(a, b)


def edit(**changes):
    def write(folder):
        content = json.loads((folder / "router.json").read_text()) | changes
        (folder / "router.json").write_text(json.dumps({k: v for k, v in content.items() if v != "gone"}))

    return write


def retensor(**changes):
    def write(folder):
        tensors = load_file(folder / "model.safetensors") | {k.replace("_", "."): v for k, v in changes.items()}
        save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")

    return write


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = [
    (lambda f: (f / "router.json").unlink(), "has no router.json; it is not a trained router"),
    (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors; it is not a trained router"),
    (lambda f: (f / "router.json").write_text("{"), "is not valid JSON"),
    (lambda f: (f / "router.json").write_bytes(b"\xff\xfe\x00"), "is not valid JSON"),
    (lambda f: (f / "router.json").write_text("[]"), "has format_version None, this version reads 1"),
    (edit(format_version=2), "has format_version 2, this version reads 1"),
    (edit(target="gone"), "has no 'target'"),
    (edit(mean_lengths="abc"), "holds something of another kind"),
    (edit(entropy_gain=[1]), "holds something of another kind"),
    (edit(mean_lengths=[3.0]), "mean_lengths must be 2 lengths of 1 or more"),
    (edit(mean_lengths=[0.5, 3.0]), "mean_lengths must be 2 lengths of 1 or more"),
    (edit(drafters=["dflash"]), "drafters must be two or more different names"),
    (edit(entropy_gain={"entropy": [0.5, 1.0], "gain": [[1, 2]]}), "entropy_gain.entropy must ascend from 0"),
    (edit(entropy_gain={"entropy": [0.0, 1.0], "gain": [[1]]}), "entropy_gain.gain must be 1 row of 2 numbers"),
    (edit(margins=[0.5, 1.0]), "margins must be 1 number"),
    (edit(hidden_size=128), "reads states of width 128 (of pocket), but the target has hidden size 256"),
    (edit(drafters=["dflash", "ngram"]), "trained for the drafters dflash, ngram (in this order), not for ngram, df"),
    (edit(drafters=["a", "b", "c"], mean_lengths=[2, 2, 2]), "trained for the drafters a, b, c (in this order)"),
    (cut_short, "is damaged or cut short"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), "is damaged or cut short"),
    (retensor(hidden_weight=torch.zeros(16, 256)), "hidden.weight of"),
    (retensor(gain_bias=None), "gain.bias of"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_checkpoints_that_do_not_fit_are_refused_by_their_headers(tmp_path, damage, message):
    save_router(tmp_path, make_checkpoint())
    damage(tmp_path)
    with pytest.raises(ValueError) as refusal:
        check_router(tmp_path, hidden_size=256, drafters=NAMES[-2:], key="router.model")
    text = str(refusal.value)
    assert text.startswith("router.model: ") and message in text and "\n" not in text
    assert "crossspec train router" in text or "copy it again" in text


def test_missing_folders_and_broken_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^router\.model: there is no folder '.*nowhere'; train one with"):
        check_router(tmp_path / "nowhere", hidden_size=256, drafters=NAMES[-2:], key="router.model")
    checkpoint = make_checkpoint()
    checkpoint.gain_bias[0] = float("nan")
    save_router(tmp_path, checkpoint)
    assert check_router(tmp_path, hidden_size=256, drafters=NAMES[-2:], key="router.model") == checkpoint.facts
    with pytest.raises(ValueError, match=r"^router\.model: gain\.bias of .* holds values that are no numbers"):
        read_router(tmp_path, hidden_size=256, drafters=NAMES[-2:], key="router.model")
