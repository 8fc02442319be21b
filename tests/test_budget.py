"""The joint budget without an engine: kernels against their twins, and what is learned and admitted."""

import numpy as np
import pytest
import torch
from hopper import compile_in_subprocess

from vllm_crossspec.budget import naive
from vllm_crossspec.budget.feature import WorthOnHost
from vllm_crossspec.budget.kernels import Shares, Verified, admit, estimate, learn, make_estimates
from vllm_crossspec.budget.rows import Plan, best_rows
from vllm_crossspec.load.costs import Cost
from vllm_crossspec.load.rows import RowCosts
from vllm_crossspec.types import TokenTree

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [
    # slots, requests, nodes, depth
    (1, 1, 1, 1),
    (4, 3, 7, 3),
    (9, 5, 60, 8),
    (70, 67, 16, 4),
]


def trees(seed, reqs, nodes, depth):
    """Random trees in falling order, some with dead nodes."""
    rng = np.random.default_rng(seed)
    parents, log_probs = np.zeros((reqs, nodes), dtype=np.int32), np.full((reqs, nodes), -np.inf, dtype=np.float32)
    sizes = rng.integers(0, nodes + 1, reqs).astype(np.int32)
    sizes[0] = nodes
    for row in range(reqs):
        depths, paths = [0], [0.0]
        for node in range(sizes[row]):
            open_rows = [at for at, level in enumerate(depths) if level < depth]
            parent = int(rng.choice(open_rows))
            depths.append(depths[parent] + 1)
            paths.append(min(paths[parent] - rng.exponential(0.7), 0.0))
            parents[row, node], log_probs[row, node] = parent, paths[-1]
    tokens = rng.integers(0, 1000, (reqs, nodes))
    return TokenTree(*(torch.from_numpy(part).to(DEVICE) for part in (tokens, parents, log_probs, sizes)))


def slots_of(seed, slots, reqs):
    found = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:reqs]
    if reqs > 2:
        found[-1] = -1  # padding
    return found.to(DEVICE)


def estimated(seed, slots, reqs, nodes, depth):
    found = make_estimates(slots, nodes, depth, DEVICE)
    generator = torch.Generator().manual_seed(seed)
    found.logistics.copy_(torch.randn(depth, 2, generator=generator) * 0.3 + torch.tensor([0.0, 1.0]))
    return found


@pytest.mark.parametrize(("slots", "reqs", "nodes", "depth"), SHAPES)
def test_nodes_are_worth_their_corrected_chance(slots, reqs, nodes, depth):
    tree, idx_mapping = trees(slots, reqs, nodes, depth), slots_of(slots, slots, reqs)
    found, wanted = (estimated(1, slots, reqs, nodes, depth) for _ in range(2))
    found.worth.fill_(7.0)
    wanted.worth.fill_(7.0)
    estimate(tree, idx_mapping, found)
    naive.estimate(tree, idx_mapping, wanted)
    torch.testing.assert_close(found.worth, wanted.worth, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.odds, wanted.odds, rtol=1e-3, atol=1e-4)


def test_a_drafter_is_believed_at_first():
    tree = trees(3, 1, 12, 4)
    found = make_estimates(1, 12, 4, DEVICE)
    estimate(tree, torch.zeros(1, dtype=torch.int64, device=DEVICE), found)
    torch.testing.assert_close(found.worth[0], tree.log_probs[0].exp(), rtol=5e-3, atol=1e-3)


def verification(seed, tree, idx_mapping, slots, depth):
    """Paths that follow random children."""
    rng = np.random.default_rng(seed)
    reqs, nodes = tree.parents.shape
    parents = torch.zeros(slots, nodes, dtype=torch.int32, device=DEVICE)
    path = np.full((reqs, depth + 1), 99, dtype=np.int32)  # what lies past a path is of no account
    lengths = np.zeros(reqs, dtype=np.int32)
    for row, slot in enumerate(idx_mapping.tolist()):
        if slot < 0:
            continue
        parents[slot] = tree.parents[row]
        at, path[row, 0] = 0, 0
        for level in range(depth + 1):
            lengths[row] = level + 1
            children = [n + 1 for n in range(int(tree.sizes[row])) if int(tree.parents[row, n]) == at]
            if not children or rng.random() < 0.3 or level == depth:
                break
            at = path[row, level + 1] = int(rng.choice(children))
    live = torch.where(idx_mapping < 0, 0, tree.sizes)
    given = (torch.from_numpy(part).to(DEVICE) for part in (path, lengths))
    return Verified(idx_mapping, parents, live, *given, max_depth=depth)


@pytest.mark.parametrize(("slots", "reqs", "nodes", "depth"), SHAPES)
def test_logistics_take_a_newton_step(slots, reqs, nodes, depth):
    tree, idx_mapping = trees(slots, reqs, nodes, depth), slots_of(slots, slots, reqs)
    found, wanted = (estimated(2, slots, reqs, nodes, depth) for _ in range(2))
    for given in (found, wanted):
        naive.estimate(tree, idx_mapping, given)
        given.curvature.fill_(0.5)
    for step in range(3):
        verified = verification(step, tree, idx_mapping, slots, depth)
        learn(verified, found)
        naive.learn(verified, wanted)
    assert not torch.equal(found.logistics, estimated(2, slots, reqs, nodes, depth).logistics)
    torch.testing.assert_close(found.logistics, wanted.logistics, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.curvature, wanted.curvature, rtol=1e-3, atol=1e-4)
    assert not found.sums.any()


def test_what_a_drafter_overrates_is_learned():
    """Chains whose nodes are accepted half as often as their drafter says."""
    rng, depth, reqs = np.random.default_rng(0), 3, 32
    estimates = make_estimates(reqs, depth, depth, DEVICE)
    idx_mapping = torch.arange(reqs, device=DEVICE)
    parents = torch.arange(depth, dtype=torch.int32, device=DEVICE).repeat(reqs, 1)
    live = torch.full((reqs,), depth, dtype=torch.int32, device=DEVICE)
    for _ in range(60):
        said = rng.uniform(0.2, 0.95, (reqs, depth))
        log_probs = torch.from_numpy(np.log(said).cumsum(1).astype(np.float32)).to(DEVICE)
        tree = TokenTree(torch.zeros_like(parents).long(), parents, log_probs, live)
        estimate(tree, idx_mapping, estimates)
        accepted = (rng.random((reqs, depth)) < said / 2).cumprod(1).sum(1)
        path = torch.arange(depth + 1, dtype=torch.int32, device=DEVICE).repeat(reqs, 1)
        lengths = torch.from_numpy(accepted.astype(np.int32) + 1).to(DEVICE)
        learn(Verified(idx_mapping, parents, live, path, lengths, depth), estimates)
    seen = np.abs(estimates.worth[:, 0].cpu().numpy() - said[:, 0] / 2)
    assert seen.mean() < 0.06, seen.mean()


@pytest.mark.parametrize(("slots", "reqs", "nodes", "depth"), SHAPES)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_the_nodes_that_are_worth_most_are_admitted(slots, reqs, nodes, depth, ties):
    rng = np.random.default_rng(reqs)
    worth = rng.random((slots, nodes)).astype(np.float32)
    worth = np.round(worth, 1) if ties else worth
    worth = torch.from_numpy(-np.sort(-worth, axis=1)).to(DEVICE)
    planned = torch.from_numpy(rng.integers(0, nodes + 1, reqs).astype(np.int32)).to(DEVICE)
    planned[0] = nodes
    others = torch.from_numpy(rng.integers(1, 40, reqs).astype(np.int32)).to(DEVICE)
    idx_mapping = torch.randperm(slots, generator=torch.Generator().manual_seed(1))[:reqs].to(DEVICE)
    total = int(planned.sum())
    for budget in sorted({1, total // 3, total - 1, total} - {0}):
        found, wanted = (
            Shares(
                idx_mapping, planned, others, torch.full_like(planned, -7),
                *(torch.zeros(slots + 2, dtype=torch.int32, device=DEVICE) for _ in range(2)),
            )
            for _ in range(2)
        )  # fmt: skip
        admit(found, worth, budget)
        naive.admit(wanted, worth, budget)
        assert int(found.admitted.sum()) == budget
        chosen = [
            sum(
                float(worth[slot, :count].sum())
                for slot, count in zip(idx_mapping.tolist(), shares.admitted.tolist(), strict=True)
            )
            for shares in (found, wanted)
        ]
        assert chosen[0] == pytest.approx(chosen[1])  # at ties other requests may be given the same
        if not ties:
            assert torch.equal(found.admitted, wanted.admitted)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32, device=DEVICE), found.admitted + others]).cumsum(0)
        assert torch.equal(found.query_start_loc[: reqs + 1], starts.int())
        assert torch.equal(found.cu_num_logits[1 : reqs + 1], (found.admitted + 1).cumsum(0).int())


COMPILE_FOR_HOPPER = """
from hopper import compile_only
compiled = compile_only()
import torch
import test_budget as cases

for slots, reqs, nodes, depth in cases.SHAPES[1:3]:
    tree, idx_mapping = cases.trees(slots, reqs, nodes, depth), cases.slots_of(slots, slots, reqs)
    estimates = cases.make_estimates(slots, nodes, depth, cases.DEVICE)
    cases.estimate(tree, idx_mapping, estimates)
    cases.learn(cases.verification(0, tree, idx_mapping, slots, depth), estimates)
    counts = [torch.ones(reqs, dtype=torch.int32) for _ in range(3)]
    starts = [torch.zeros(slots + 2, dtype=torch.int32) for _ in range(2)]
    cases.admit(cases.Shares(idx_mapping, *counts, *starts), estimates.worth, 1)
assert set(compiled) == {"_estimate_kernel", "_observe_kernel", "_learn_kernel", "_admit_kernel"}, set(compiled)
"""


def test_kernels_compile_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)


KNEE = {
    width: {n: Cost(1.0 + max(0.0, n * (width + 1) - 32) * 0.05, 0.2 * bool(width)) for n in (1, 2, 4, 8)}
    for width in (0, 3, 7, 15)
}
"""A machine that waits for memory up to 32 rows, and computes from there on."""


def drafts(worth, planned):
    scheduled = {f"{i}": planned + 1 for i in range(len(worth))}
    return Plan(scheduled, {name: [0] * planned for name in scheduled})


@pytest.mark.parametrize("reqs", [1, 4, 8])
def test_as_many_rows_are_verified_as_pay(reqs):
    worth = -np.sort(-np.random.default_rng(reqs).random((reqs, 15)), axis=1)
    found = best_rows(drafts(worth, 15), worth, RowCosts(KNEE), most=15 * reqs)
    chances = -np.sort(-worth.ravel())
    rates = [(reqs + chances[:k].sum()) / (1.2 + max(0, reqs + k - 32) * 0.05) for k in range(15 * reqs + 1)]
    assert found == int(np.argmax(rates))
    assert best_rows(drafts(worth, 15), worth, RowCosts(KNEE), most=2) == 2


def test_beside_a_prompt_fewer_rows_pay():
    worth = np.full((4, 15), 0.2)
    alone = drafts(worth, 15)
    prompt = Plan({**{f"{i}": 16 for i in range(4)}, "prompt": 100}, {f"{i}": [0] * 15 for i in range(4)})
    assert prompt.num_others == 104 and prompt.num_planned == 60
    costs = RowCosts(KNEE)
    rows = [best_rows(alone, worth, costs, 60), best_rows(prompt, np.vstack([worth, np.zeros(15)]), costs, 60)]
    assert rows[0] == 28, "up to the knee a row costs nothing"
    assert rows[1] == 0, "behind it a row of a fifth of a token costs more than it brings"


def test_costs_rise_with_rows_and_past_the_measured_ones():
    disturbed = {0: {1: Cost(3.0, 0.0), 4: Cost(1.0, 0.0)}, 3: {1: Cost(1.0, 0.1), 4: Cost(2.0, 0.1)}}
    costs = RowCosts(disturbed)
    assert costs.step(1, np.array([1, 2, 4])).tolist() == [1.0, 1.0, 1.0], "a disturbed start-up"
    assert costs.step(4, np.array([4, 10, 16, 28])) == pytest.approx([1.0, 1.5, 2.0, 3.0])
    assert costs.draft(1, 3) == 0.1


def test_two_neighbouring_steps_do_not_say_how_costs_go_on():
    """The largest steps took alike; from half as many rows on they rose by a quarter of a second a row."""
    costs = RowCosts({0: {1: Cost(2.0, 0.0)}, 15: {1: Cost(4.0, 1.0), 2: Cost(8.0, 3.0)}, 30: {1: Cost(8.0, 1.0)}})
    assert costs.step(1, np.array([31, 32, 64])) == pytest.approx([8.0, 8.0, 16.0])
    assert costs.draft(4, 15) == pytest.approx(7.0), "drafting for more requests takes longer, too"


def test_drafts_that_the_host_does_not_know_count_as_the_others_do():
    worth = torch.zeros(3, 2)
    host = WorthOnHost(worth)
    assert host.of([0, 1]).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    worth[0] = torch.tensor([0.5, 0.25])
    host.send(np.array([0]))
    assert host.of([0, 1]).tolist() == [[0.5, 0.25]] * 2
    host.forget(0)
    assert host.of([0]).tolist() == [[0.5, 0.25]], "what was usual"
