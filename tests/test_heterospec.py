"""HeteroSpec's rule without an engine: Phi and bins against their twin and the paper's formula, and deeper trees."""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_crossspec.config.schema import AdaptivePolicy
from vllm_crossspec.heterospec import naive
from vllm_crossspec.heterospec.heterospec import Reading, default_alpha, make_policy
from vllm_crossspec.heterospec.kernels import assess
from vllm_crossspec.heterospec.sizer import TreeSizer
from vllm_crossspec.metrics.adaptive import TreeSizeCounters
from vllm_crossspec.metrics.export import Publisher
from vllm_crossspec.trees.builders.dynamic import DynamicTree
from vllm_crossspec.types import Sizing, TokenTree

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEVER, NAN = float("-inf"), float("nan")
SHAPES = [
    # requests, base depth, top_k, nodes
    (1, 1, 1, 1),
    (3, 2, 3, 9),
    (5, 4, 5, 20),
    (2, 8, 10, 60),
    (4, 3, 4, 64),
]


def children(seed, *shape, impossible=0.0):
    """Falling log-probabilities of a large vocabulary's best tokens, some sharper than others, and token ids."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(*shape[:-1], 1, generator=generator) * 5
    logits = torch.randn(*shape[:-1], 200, generator=generator) * spread
    log_probs = logits.log_softmax(dim=-1).topk(shape[-1]).values
    log_probs[torch.rand(shape, generator=generator) < impossible] = NEVER
    log_probs = log_probs.sort(dim=-1, descending=True).values
    tokens = torch.rand(*shape[:-1], 500, generator=generator).argsort(dim=-1)[..., : shape[-1]]
    return log_probs.to(DEVICE), tokens.to(DEVICE)


def levels_of(seed, reqs, depth, k, impossible=0.0):
    first = children(seed, reqs, k, impossible=impossible)
    return [first, *(children(seed + i, reqs, k, k, impossible=impossible) for i in range(1, depth))]


def poisoned(rows, width):
    return TokenTree(
        torch.full((rows, width), -7777, device=DEVICE),
        torch.full((rows, width), -7777, dtype=torch.int32, device=DEVICE),
        torch.full((rows, width), NAN, device=DEVICE),
        torch.full((rows,), -7777, dtype=torch.int32, device=DEVICE),
    )


def builder(reqs, depth, k, nodes):
    return DynamicTree(num_nodes=nodes, depth=depth, top_k=k, max_num_reqs=reqs + 2, device=DEVICE)


def grow(tree, levels, first=1):
    """Grow ``tree`` by these levels; the first of them is number ``first``."""
    for level, (log_probs, tokens) in enumerate(levels, start=first):
        if level == 1:
            tree.start(log_probs, tokens)
        else:
            tree.expand(level, log_probs, tokens)


class Outputs:
    """What ``assess`` writes, poisoned first; two rows more than there are requests."""

    def __init__(self, reqs):
        self.phi = torch.full((reqs + 2,), -7777.0, device=DEVICE)
        self.bins, self.limits, self.caps = (
            torch.full((reqs + 2,), -7777, dtype=torch.int32, device=DEVICE) for _ in range(3)
        )


def on_device(policy):
    return {
        "thresholds": torch.tensor(policy.thresholds, dtype=torch.float32, device=DEVICE),
        "extensions": torch.tensor(policy.extensions, dtype=torch.int32, device=DEVICE),
        "widths": torch.tensor(policy.widths, dtype=torch.int32, device=DEVICE),
    }


def run(function, tree, levels, policy, reqs):
    out = Outputs(reqs)
    function(grown=tree.grown(), levels=levels, **on_device(policy), **vars(out))
    for part in vars(out).values():
        assert (part[reqs:] == -7777).all(), "rows of no request were written"
    return out


def spread_policy(depth, nodes, phi):
    """Three thresholds between the values of ``phi``, so that its requests fall into different bins."""
    known = phi[phi.isfinite()].double().cpu()
    cuts = sorted({float(q) for q in known.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))})
    cuts = [math.nextafter(cut, -1) - 1e-3 * i for i, cut in enumerate(reversed(cuts))][::-1]
    return make_policy(thresholds=sorted(cuts), num_nodes=nodes, alpha=default_alpha(depth))


@pytest.mark.parametrize("impossible", [0.0, 0.4])
@pytest.mark.parametrize(("reqs", "depth", "k", "nodes"), SHAPES)
def test_kernel_equals_naive(reqs, depth, k, nodes, impossible):
    tree = builder(reqs, depth, k, nodes)
    grow(tree, levels_of(reqs + depth, reqs, depth, k, impossible))
    flat = AdaptivePolicy((), (0,), (nodes,))
    first = run(naive.assess, tree, depth, flat, reqs)
    assert (first.bins[:reqs] == 0).all()
    policy = spread_policy(depth, nodes, first.phi[:reqs]) if first.phi[:reqs].isfinite().any() else flat
    expected = run(naive.assess, tree, depth, policy, reqs)
    out = run(assess, tree, depth, policy, reqs)
    # Sums of a few dozen float32 terms, in another order.
    torch.testing.assert_close(out.phi, expected.phi, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(out.bins, expected.bins)
    assert torch.equal(out.limits, expected.limits) and torch.equal(out.caps, expected.caps)


@pytest.mark.parametrize("seed", range(4))
def test_phi_is_the_papers_sum_over_the_best_path(seed):
    """Equation 1 by hand: every path of the beam, the one whose last step is surest, -sum p ln p at each step."""
    reqs, depth, k = 3, 4, 3
    tree, levels = builder(reqs, depth, k, 12), levels_of(100 * seed, reqs, depth, k)
    grow(tree, levels)
    grown = tree.grown()
    out = run(assess, tree, depth, AdaptivePolicy((), (0,), (12,)), reqs)
    for request in range(reqs):
        # Paths to the beam nodes of the last level but one, each as the beam positions that it goes through.
        paths = [[j] for j in range(k)]
        for level in range(1, depth - 1):
            parents = grown.beam_parents[level, request].tolist()
            paths = [[*paths[parents[j]], j] for j in range(k)]
        surest = max(range(k), key=lambda j: (float(levels[-1][0][request, j, 0]), -j))
        steps = [levels[0][0][request]]
        steps += [levels[i + 1][0][request, node] for i, node in enumerate(paths[surest])]
        phi = 0.0
        for log_probs in steps:
            p = log_probs.double().exp()
            p = p / p.sum()
            phi -= float((p * p.log()).sum())
        assert float(out.phi[request]) == pytest.approx(phi, rel=1e-4)


def test_bins():
    policy = AdaptivePolicy((1.0, 2.0), (3, 1, 0), (5, 7, 20))
    assert [policy.bin_of(x) for x in (0.0, 1.0, 1.5, 2.0, 2.5, NAN, math.inf)] == [0, 0, 1, 1, 2, 2, 2]
    # Two equal children: ln 2 nats whatever they are worth.
    tree = builder(1, 1, 2, 2)
    for value, expected in ((math.log(2) - 0.01, 1), (math.log(2) + 0.01, 0)):
        tree.start(torch.full((1, 2), -3.0, device=DEVICE), torch.zeros(1, 2, dtype=torch.int64, device=DEVICE))
        out = run(assess, tree, 1, policy._replace(thresholds=(value, 5.0)), 1)
        assert int(out.bins[0]) == expected
        assert int(out.limits[0]) == 1 + policy.extensions[expected] and int(out.caps[0]) == policy.widths[expected]


def test_a_tree_without_a_path_is_in_the_last_bin():
    levels = levels_of(3, 2, 3, 2)
    levels[2][0][0] = NEVER
    tree = builder(2, 3, 2, 6)
    grow(tree, levels)
    for function in (assess, naive.assess):
        out = run(function, tree, 3, AdaptivePolicy((1e9,), (2, 0), (3, 6)), 2)
        assert out.phi[:2].isnan().tolist() == [True, False]
        assert out.bins[:2].tolist() == [1, 0] and out.limits[:2].tolist() == [3, 5]


def brute_force(levels, request, k, limit, cap):
    """The same tree built the slow way: lists of (score, path), best first, one level after another."""
    every, beam = [], [(0.0, ())]
    for log_probs, tokens in levels[:limit]:
        scores, ids = log_probs[request].view(-1, k), tokens[request].view(-1, k)
        found = []
        for place, (score, path) in enumerate(beam):
            for child in range(k):
                # float32 sums, as everywhere.
                total = float(torch.tensor(score) + scores[place, child].cpu())
                found.append((total, (*path, int(ids[place, child]))))
        found = [item for item in found if item[0] > NEVER]
        every += found
        beam = sorted(found, key=lambda item: -item[0])[:k]
    return sorted(every, key=lambda item: -item[0])[:cap]


def paths(tree, row):
    found = [()]
    for i in range(int(tree.sizes[row])):
        found.append((*found[int(tree.parents[row, i])], int(tree.tokens[row, i])))
    return found[1:]


@pytest.mark.parametrize("shape", [(4, 2, 3, 3, 20), (3, 8, 4, 10, 60), (2, 1, 1, 2, 5)])
def test_depth_and_width_by_request(shape):
    """Grown on after an interruption, each request to its own depth and width, against brute force."""
    reqs, base, extra, k, nodes = shape
    levels = levels_of(7 * reqs, reqs, base + extra, k)
    tree, out = builder(reqs, base + extra, k, nodes), poisoned(reqs + 1, nodes + 2)
    grow(tree, levels[:base])
    beam = tree.resume(reqs, base)
    assert beam.tokens.shape == (reqs, k) and (beam.log_probs > NEVER).all()
    limits = [base + request % (extra + 1) for request in range(reqs)]
    caps = [max(1, nodes // (request + 1)) for request in range(reqs)]
    tree.limits[:reqs] = torch.tensor(limits, dtype=torch.int32, device=DEVICE)
    tree.caps[:reqs] = torch.tensor(caps, dtype=torch.int32, device=DEVICE)
    grow(tree, levels[base:], base + 1)
    tree.finish(out)
    deepest = []
    for request in range(reqs):
        expected = brute_force(levels, request, k, limits[request], caps[request])
        assert paths(out, request) == [path for _, path in expected]
        size = len(expected)
        torch.testing.assert_close(
            out.log_probs[request, :size].cpu(), torch.tensor([score for score, _ in expected]), rtol=1e-5, atol=1e-5
        )
        assert (out.tokens[request, size:] == 0).all() and (out.parents[request, size:] == 0).all()
        assert (out.log_probs[request, size:] == NEVER).all()
        deepest.append(max(len(path) for _, path in expected))
    assert all(depth <= limit for depth, limit in zip(deepest, limits, strict=True))
    assert (out.sizes[reqs:] == -7777).all()


def test_without_limits_the_last_level_would_be_drafted():
    """The control of the test above: a request whose limit is not written gets nodes of the deeper levels."""
    levels = levels_of(5, 1, 4, 2)
    for log_probs, _ in levels:
        log_probs[..., 0], log_probs[..., 1:] = -0.01, -9.0
    deepest = {}
    for limit in (2, 4):
        tree, out = builder(1, 4, 2, 6), poisoned(1, 6)
        tree.limits.fill_(limit)
        grow(tree, levels)
        tree.finish(out)
        deepest[limit] = max(map(len, paths(out, 0)))
    assert deepest == {2: 2, 4: 4}


def test_policy_of_the_paper():
    """Section 4.3 with EAGLE-3's tree of depth 8 and 60 nodes: alpha 4, three low bins of eight."""
    assert [default_alpha(depth) for depth in (1, 5, 7, 8)] == [1, 3, 4, 4]
    policy = make_policy(thresholds=[1, 2, 3, 4, 5, 6, 7], num_nodes=60, alpha=4)
    assert policy.extensions == (4, 3, 2, 0, 0, 0, 0, 0)
    assert policy.widths == (22, 39, 60, 60, 60, 60, 60, 60)
    assert policy.max_extension == 4
    bounded = make_policy(thresholds=[1, 2, 3], num_nodes=60, alpha=4, max_extension=3)
    assert bounded.extensions == (3, 3, 2, 0) and bounded.widths == (21, 39, 60, 60)
    pruned = make_policy(thresholds=[1, 2, 3], num_nodes=60, alpha=4, max_extension=0)
    assert pruned.extensions == (0, 0, 0, 0) and pruned.widths == (18, 36, 60, 60)
    assert make_policy(thresholds=[], num_nodes=60, alpha=4) == AdaptivePolicy((), (0,), (60,))
    assert make_policy(thresholds=[1], num_nodes=1, alpha=1).widths == (1, 1)
    with pytest.raises(ValueError, match="must rise"):
        make_policy(thresholds=[1, 1], num_nodes=60, alpha=4)


def test_the_paper_read_in_other_ways():
    """Delta = alpha - i from i = 1, and N' = gamma N + Delta as it is written, so that the third bin has 61 nodes."""
    seven = [1, 2, 3, 4, 5, 6, 7]
    policy = make_policy(thresholds=seven, num_nodes=60, alpha=4, reading=Reading(first_bin=1, is_capped=False))
    assert policy.extensions == (3, 2, 1, 0, 0, 0, 0, 0)
    assert policy.widths == (21, 38, 61, 60, 60, 60, 60, 60)
    capped = make_policy(thresholds=seven, num_nodes=60, alpha=4, reading=Reading(first_bin=1))
    assert capped.extensions == policy.extensions and capped.widths == (21, 38, 60, 60, 60, 60, 60, 60)
    uncapped = make_policy(thresholds=seven, num_nodes=60, alpha=4, reading=Reading(is_capped=False))
    assert uncapped.extensions == (4, 3, 2, 0, 0, 0, 0, 0) and uncapped.widths[:4] == (22, 39, 62, 60)
    assert make_policy(thresholds=seven, num_nodes=60, alpha=1, reading=Reading(first_bin=1)).extensions == (0,) * 8
    with pytest.raises(ValueError, match="would be given 257, and a request has at most 255.*--cap"):
        make_policy(thresholds=seven, num_nodes=255, alpha=4, reading=Reading(is_capped=False))


class Recorded:
    """A Prometheus counter that remembers."""

    def __init__(self):
        self.values = {}

    def labels(self, *names):
        def inc(amount):
            self.values[names] = self.values.get(names, 0) + amount

        return SimpleNamespace(inc=inc)


def test_counters_and_their_export():
    policy = make_policy(thresholds=[1, 2, 3], num_nodes=20, alpha=2)
    counters = TreeSizeCounters(len(policy.widths))

    def count(*bins):
        chosen = np.array(bins)
        nothing = torch.zeros(0)
        widths, extensions = np.array(policy.widths)[chosen], np.array(policy.extensions)[chosen]
        counters.count(Sizing(nothing, nothing, chosen, widths, extensions))

    metrics = defaultdict(Recorded)
    publisher = Publisher(metrics, engine=1)
    count(0, 3, 1)
    publisher.add_sizes({"eagle3": counters.snapshot()})
    count(3, 3)
    expected = {
        "rounds": 2,
        "extra_passes": 2,
        "trees": [1, 1, 0, 3],
        "extra_levels": [2, 1, 0, 0],
        "nodes": [8, 13, 0, 60],
    }
    assert counters.snapshot() == expected
    publisher.add_sizes({"eagle3": counters.snapshot()})
    for name in ("trees", "extra_levels", "nodes"):
        values = metrics[f"crossspec:heterospec_{name}"].values
        assert [values["1", "eagle3", number] for number in range(4)] == expected[name]
    assert metrics["crossspec:heterospec_extra_passes"].values == {("1", "eagle3"): 2}
    counters.reset()
    assert counters.snapshot()["trees"] == [0, 0, 0, 0] and counters.snapshot()["rounds"] == 0


def test_the_sizer_says_what_the_kernel_wrote():
    tree = builder(2, 2, 3, 9)
    grow(tree, levels_of(4, 2, 2, 3))
    phi = run(naive.assess, tree, 2, AdaptivePolicy((), (0,), (9,)), 2).phi[:2]
    policy = AdaptivePolicy((float(phi.mean()),), (2, 0), (4, 9))
    sizer = TreeSizer(policy, 2, 4, DEVICE)
    sizer.assess(tree.grown(), tree.limits, tree.caps)
    bins = sizer.fetch(2)
    assert bins.tolist() == [policy.bin_of(float(x)) for x in phi] and set(bins.tolist()) == {0, 1}
    assert sizer.copied.num_waits == 1
    sizing = sizer.sizing(bins, tree.limits)
    assert sizing.widths.tolist() == tree.caps[:2].tolist() == [policy.widths[i] for i in bins]
    assert sizing.depths.tolist() == [2 + policy.extensions[i] for i in bins]
    assert sizing.extensions.tolist() == [policy.extensions[i] for i in bins]
    torch.testing.assert_close(sizing.phi, phi, rtol=1e-5, atol=1e-5)
