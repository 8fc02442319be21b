"""The tree builders: kernels against their plain twins and against exhaustive search, and what every tree must be."""

import functools
from itertools import product

import pytest
import torch
from launches import record_launches

from vllm_crossspec.drafters.eagle3 import naive as levels_naive
from vllm_crossspec.drafters.lookup.trees import match_tree
from vllm_crossspec.drafting import levels as levels_kernel
from vllm_crossspec.kinds.tree import KINDS, tree_kind
from vllm_crossspec.trees.builders import naive
from vllm_crossspec.trees.builders.best_first import best_first
from vllm_crossspec.trees.builders.chain import chain, to_chain
from vllm_crossspec.trees.builders.continuity import ContinuityTree
from vllm_crossspec.trees.builders.dynamic import DynamicTree
from vllm_crossspec.types import TokenTree

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEVER = float("-inf")


def exhaustive(log_probs, num_nodes):
    """Every prefix of one request's candidates, the ``num_nodes`` likeliest by falling log-probability.

    Args:
        log_probs: float [K, M], in any order; all M + M^2 + ... + M^K prefixes are looked at.
        num_nodes: how many to keep; fewer come back where fewer are possible.

    Returns:
        (log-probability, ranks of the prefix) of each; of equal ones the shorter, then the smaller ranks first.
    """
    num_positions, num_candidates = log_probs.shape
    scores = naive._as_log_prob(log_probs)
    prefixes = []
    for depth in range(1, num_positions + 1):
        for ranks in product(range(num_candidates), repeat=depth):
            total = torch.tensor(0.0)
            for position, rank in enumerate(ranks):
                total = total + scores[position, rank]
            prefixes.append((float(total), ranks))
    possible = [prefix for prefix in prefixes if prefix[0] > NEVER]
    return sorted(possible, key=lambda prefix: (-prefix[0], len(prefix[1]), prefix[1]))[:num_nodes]


def poisoned(rows, width):
    return TokenTree(
        torch.full((rows, width), -7777, device=DEVICE),
        torch.full((rows, width), -7777, dtype=torch.int32, device=DEVICE),
        torch.full((rows, width), float("nan"), device=DEVICE),
        torch.full((rows,), -7777, dtype=torch.int32, device=DEVICE),
    )


def candidates(seed, *shape, impossible=0.0, vocab=5000):
    """Falling log-probabilities and different tokens along the last axis; views with odd strides."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape[:-1], 300, generator=generator) * 3
    log_probs = logits.log_softmax(dim=-1).topk(shape[-1]).values
    log_probs[torch.rand(shape, generator=generator) < impossible] = NEVER
    log_probs = log_probs.sort(dim=-1, descending=True).values
    tokens = torch.rand(*shape[:-1], vocab, generator=generator).argsort(dim=-1)[..., : shape[-1]]
    return strided(log_probs), strided(tokens)


def strided(tensor):
    holder = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype, device=DEVICE)
    holder[..., : tensor.shape[-1]] = tensor.to(DEVICE)
    return holder[..., : tensor.shape[-1]]


def same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())


def paths(tree, row):
    """Tokens from the root's child to each live node."""
    found = [()]
    for i in range(int(tree.sizes[row])):
        found.append((*found[int(tree.parents[row, i])], int(tree.tokens[row, i])))
    return found[1:]


def check_trees(tree, num_reqs):
    """What every builder promises, row by row; all other rows are untouched."""
    for row in range(num_reqs):
        size = int(tree.sizes[row])
        parents, log_probs = tree.parents[row], tree.log_probs[row]
        rows = torch.arange(size, device=DEVICE)
        # A parent's row is smaller than its child's (i + 1): every prefix of the list is a tree.
        assert (parents[:size] >= 0).all() and (parents[:size] <= rows).all()
        assert (log_probs[:size] > NEVER).all() and (log_probs[:size] <= 0).all()
        assert (log_probs[:size].diff() <= 0).all()
        assert len(set(paths(tree, row))) == size
        assert (tree.tokens[row, size:] == 0).all() and (parents[size:] == 0).all()
        assert (log_probs[size:] == NEVER).all()
    assert (tree.sizes[num_reqs:] == -7777).all() and (tree.tokens[num_reqs:] == -7777).all()
    assert (tree.parents[num_reqs:] == -7777).all() and tree.log_probs[num_reqs:].isnan().all()


BEST_FIRST_SHAPES = [
    # requests, positions, candidates, nodes, width
    (1, 1, 1, 1, 1),
    (3, 7, 5, 60, 60),
    (2, 15, 10, 60, 64),
    (5, 2, 3, 14, 20),
    (4, 2, 3, 12, 12),
    (1, 17, 1, 16, 17),
    (2, 1, 33, 31, 31),
    (1, 4, 255, 255, 255),
]


@pytest.mark.parametrize("impossible", [0.0, 0.4])
@pytest.mark.parametrize(("reqs", "positions", "choices", "nodes", "width"), BEST_FIRST_SHAPES)
def test_best_first_equals_naive(reqs, positions, choices, nodes, width, impossible):
    log_probs, tokens = candidates(reqs + nodes, reqs, positions, choices, impossible=impossible)
    results = []
    for implementation in (best_first, naive.best_first):
        out = poisoned(reqs + 1, width)
        implementation(log_probs=log_probs, tokens=tokens, num_nodes=nodes, out=out)
        check_trees(out, reqs)
        results.append(out)
    same([t[:reqs] for t in results[0]], [t[:reqs] for t in results[1]])
    if not impossible:
        prefixes = sum(choices**depth for depth in range(1, positions + 1))
        assert (results[0].sizes[:reqs] == min(nodes, prefixes)).all()


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 20, 84, 85, 255])
@pytest.mark.parametrize("seed", range(3))
def test_best_first_is_exhaustive_search(seed, num_nodes):
    log_probs, _ = candidates(seed, 1, 3, 4)
    tokens = torch.arange(12, device=DEVICE).view(1, 3, 4) % 4
    out = poisoned(1, 255)
    best_first(log_probs=log_probs, tokens=tokens, num_nodes=num_nodes, out=out)
    expected = exhaustive(log_probs[0].cpu(), num_nodes)
    scores = [score for score, _ in expected]
    assert len(set(scores)) == len(scores), "the seed gives ties: the order would not be determined"
    assert paths(out, 0) == [ranks for _, ranks in expected]
    assert out.log_probs[0, : len(scores)].tolist() == scores
    assert len(scores) == min(num_nodes, 4 + 16 + 64) == int(out.sizes[0])


@pytest.mark.parametrize("num_nodes", [3, 10, 39, 60])
def test_best_first_with_ties(num_nodes):
    """Sums of -1, -2 and -3 tie everywhere: any of the tied prefixes will do, in a tree all the same."""
    log_probs = torch.tensor([-1.0, -1.0, -2.0], device=DEVICE).expand(1, 3, 3)
    tokens = torch.arange(3, device=DEVICE).expand(1, 3, 3)
    out, twin = poisoned(1, 60), poisoned(1, 60)
    best_first(log_probs=log_probs, tokens=tokens, num_nodes=num_nodes, out=out)
    naive.best_first(log_probs=log_probs, tokens=tokens, num_nodes=num_nodes, out=twin)
    same(out, twin)
    check_trees(out, 1)
    expected = exhaustive(log_probs[0].cpu(), num_nodes)
    assert out.log_probs[0, : len(expected)].tolist() == [score for score, _ in expected]
    score = {ranks: score for score, ranks in exhaustive(log_probs[0].cpu(), 39)}
    assert [score[path] for path in paths(out, 0)] == [score for score, _ in expected]


@functools.cache
def largest_tree():
    tree = poisoned(1, 255)
    log_probs, tokens = candidates(9, 1, 8, 12)
    best_first(log_probs=log_probs, tokens=tokens, num_nodes=255, out=tree)
    check_trees(tree, 1)
    return tree


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 254])
def test_a_smaller_tree_is_the_beginning_of_a_larger(num_nodes):
    log_probs, tokens = candidates(9, 1, 8, 12)
    small = poisoned(1, num_nodes)
    best_first(log_probs=log_probs, tokens=tokens, num_nodes=num_nodes, out=small)
    same([t[:, :num_nodes] for t in largest_tree()[:3]], small[:3])
    assert small.sizes.tolist() == [num_nodes] and largest_tree().sizes.tolist() == [255]


def test_impossible_candidates_are_never_drafted():
    never, nan = NEVER, float("nan")
    log_probs = torch.tensor(
        [
            [[-0.5, -1.0, never], [-0.1, never, never], [-2.0, -3.0, -4.0]],
            [[-0.5, -1.0, -1.5], [never, never, never], [-2.0, -3.0, -4.0]],
            [[never, never, never], [-0.1, -0.2, -0.3], [-2.0, -3.0, -4.0]],
            [[-0.5, nan, nan], [nan, nan, nan], [nan, nan, nan]],
        ],
        device=DEVICE,
    )
    tokens = torch.arange(36, device=DEVICE).view(4, 3, 3)
    out, twin = poisoned(4, 20), poisoned(4, 20)
    best_first(log_probs=log_probs, tokens=tokens, num_nodes=20, out=out)
    naive.best_first(log_probs=log_probs, tokens=tokens, num_nodes=20, out=twin)
    same(out, twin)
    check_trees(out, 4)
    assert out.sizes.tolist() == [2 + 2 + 6, 3, 0, 1]


def one_tree(builder, seed, reqs, nodes, top_k, impossible, levels):
    """The beams on the way and the tree that is kept."""
    log_probs, tokens = candidates(seed, reqs, top_k, impossible=impossible)
    beams = [builder.start(log_probs, tokens)]
    for level in range(2, levels + 1):
        log_probs, tokens = candidates(seed + level, reqs, top_k, top_k, impossible=impossible)
        beams.append(builder.expand(level, log_probs, tokens))
    out = poisoned(reqs + 1, nodes + 3)
    builder.finish(out)
    return beams, out


DYNAMIC_SHAPES = [
    # requests, nodes, depth, top_k
    (1, 1, 1, 1),
    (2, 60, 8, 10),
    (3, 7, 5, 1),
    (2, 33, 4, 3),
    (1, 50, 2, 7),
    (5, 13, 3, 4),
    (1, 255, 3, 16),
    (2, 40, 12, 3),
]


@pytest.mark.parametrize(("impossible", "first_row"), [(0.0, 0), (0.6, 1), (0.3, 31)])
@pytest.mark.parametrize(("reqs", "nodes", "depth", "top_k"), DYNAMIC_SHAPES)
def test_dynamic_equals_naive(reqs, nodes, depth, top_k, impossible, first_row):
    sizes = {"num_nodes": nodes, "depth": depth, "top_k": top_k, "max_num_reqs": reqs + 2, "device": DEVICE}
    sizes["first_row"] = first_row
    ours, twin = DynamicTree(**sizes), naive.DynamicTree(**sizes)
    # Twice: what one tree leaves in the buffers must not show in the next, which has fewer requests and levels.
    for seed, num_reqs, levels in ((50, reqs, depth), (90, max(reqs - 1, 1), max(depth - 1, 1))):
        ours._pool.order.fill_(-7777)
        beams, out = one_tree(ours, seed, num_reqs, nodes, top_k, impossible, levels)
        expected_beams, expected = one_tree(twin, seed, num_reqs, nodes, top_k, impossible, levels)
        for beam, expected_beam in zip(beams, expected_beams, strict=True):
            same(beam, expected_beam)
        same([t[:num_reqs] for t in out], [t[:num_reqs] for t in expected])
        check_trees(out, num_reqs)
        assert (ours._pool.order[num_reqs:] == -7777).all(), "a request wrote into the row of the next"
        if not impossible:
            assert (out.sizes[:num_reqs] == min(nodes, top_k + (levels - 1) * top_k**2)).all()


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_the_best_nodes_are_no_deeper_than_they_are_many(levels):
    """So that trees of which so many nodes are verified need no further levels."""
    sizes = {"num_nodes": 30, "depth": 6, "top_k": 3, "max_num_reqs": 3, "device": DEVICE}
    _, whole = one_tree(DynamicTree(**sizes), 5, 3, 30, 3, 0.0, 6)
    _, less = one_tree(DynamicTree(**sizes), 5, 3, 30, 3, 0.0, levels)
    assert torch.equal(whole.tokens[:3, :levels], less.tokens[:3, :levels])
    assert torch.equal(whole.parents[:3, :levels], less.parents[:3, :levels])
    assert not torch.equal(whole.tokens[:3, :30], less.tokens[:3, :30])  # later ones are deeper


def test_dynamic_equals_best_first_where_both_see_all_prefixes():
    """Two levels, every node expanded: both rank the same 6 + 36 prefixes."""
    log_probs, tokens = candidates(3, 3, 2, 6)
    one, other = poisoned(3, 42), poisoned(3, 42)
    best_first(log_probs=log_probs, tokens=tokens, num_nodes=42, out=one)
    builder = DynamicTree(num_nodes=42, depth=2, top_k=6, max_num_reqs=3, device=DEVICE)
    builder.start(log_probs[:, 0], tokens[:, 0])
    # A beam node's children are the same wherever it stands.
    builder.expand(2, log_probs[:, 1:2].expand(3, 6, 6), tokens[:, 1:2].expand(3, 6, 6))
    builder.finish(other)
    same(one, other)


def test_dynamic_with_ties_prefers_earlier_candidates():
    """All children are certain, so all paths tie: the shallower come first, and a parent before its child."""
    builder = DynamicTree(num_nodes=9, depth=3, top_k=2, max_num_reqs=1, device=DEVICE)
    tokens = torch.arange(4, device=DEVICE).view(1, 2, 2)
    builder.start(torch.zeros(1, 2, device=DEVICE), tokens[:, 0])
    for level in (2, 3):
        beam = builder.expand(level, torch.zeros(1, 2, 2, device=DEVICE), tokens)
        assert beam.parents.tolist() == [[0, 0]] and beam.tokens.tolist() == [[0, 1]]
    out = poisoned(1, 9)
    builder.finish(out)
    check_trees(out, 1)
    assert out.parents[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_values_above_zero_count_as_certain():
    """A child that beat its parent would come before it."""
    log_probs, tokens = torch.full((1, 2, 2), 1.5, device=DEVICE), torch.arange(4, device=DEVICE).view(1, 2, 2)
    out = poisoned(2, 6)
    best_first(log_probs=log_probs, tokens=tokens, num_nodes=6, out=out)
    check_trees(out, 1)
    builder = DynamicTree(num_nodes=6, depth=2, top_k=2, max_num_reqs=1, device=DEVICE)
    builder.start(log_probs[:, 0], tokens[:, 0])
    builder.expand(2, log_probs, tokens)
    builder.finish(out)
    check_trees(out, 1)
    assert (out.log_probs[0] == 0).all()


@pytest.mark.parametrize(("reqs", "drafted", "width"), [(1, 1, 1), (3, 7, 7), (2, 5, 60), (4, 33, 40)])
@pytest.mark.parametrize("knows_log_probs", [False, True])
def test_chain_equals_naive(reqs, drafted, width, knows_log_probs):
    _, tokens = candidates(drafted, reqs, drafted)
    log_probs = -torch.rand(reqs, drafted, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for implementation in (chain, naive.chain):
        out = poisoned(reqs + 2, width)
        implementation(tokens=tokens, log_probs=log_probs if knows_log_probs else None, out=out)
        check_trees(out, reqs)
        results.append(out)
    for i in (0, 1, 3):
        assert torch.equal(results[0][i], results[1][i])
    # A scan adds in another order than a loop.
    torch.testing.assert_close(results[0].log_probs, results[1].log_probs, atol=1e-5, rtol=1e-6, equal_nan=True)


def random_trees(seed, reqs, positions, choices, nodes):
    log_probs, tokens = candidates(seed, reqs, positions, choices, impossible=0.2)
    trees = poisoned(reqs, nodes)
    naive.best_first(log_probs=log_probs, tokens=tokens, num_nodes=nodes, out=trees)
    return trees


TO_CHAIN_SHAPES = [(1, 1, 1, 1), (4, 5, 3, 17), (3, 8, 10, 60), (2, 3, 2, 33), (2, 12, 30, 255)]


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize(("reqs", "positions", "choices", "nodes"), TO_CHAIN_SHAPES)
def test_to_chain_equals_naive(reqs, positions, choices, nodes, by_slot):
    for seed in range(4):
        trees = random_trees(seed, reqs, positions, choices, nodes)
        generator = torch.Generator().manual_seed(seed)
        slots = torch.randperm(reqs + 5, generator=generator)[:reqs].to(torch.int32)
        slots[reqs // 2] = -1
        # What lies before the flags is set, too: a padding row must not read it.
        flags = torch.cat([torch.tensor([True]), torch.rand(reqs + 5, generator=generator) < 0.7]).to(DEVICE)[1:]
        where = {"chain_only": flags, "idx_mapping": slots.to(DEVICE) if by_slot else None}
        results = []
        for implementation in (to_chain, naive.to_chain):
            out = TokenTree(*(t.clone() for t in trees))
            implementation(out, **where, max_depth=positions)
            check_trees(out, reqs)
            results.append(out)
        same(*results)
        for row in range(reqs):
            slot = int(slots[row]) if by_slot else row
            if slot < 0 or not flags[slot]:
                same([t[row] for t in results[0]], [t[row] for t in trees])
            else:
                check_chain(results[0], trees, row)


def check_chain(chains, trees, row):
    """The row is a path of the tree, and no other path is worth more."""
    size = int(chains.sizes[row])
    assert chains.parents[row, :size].tolist() == list(range(size))
    worth, by_path = {}, {(): 0.0}
    for node, path in enumerate(paths(trees, row)):
        by_path[path] = by_path[path[:-1]] + float(trees.log_probs[row, node].exp())
        worth[path] = by_path[path]
    kept = tuple(chains.tokens[row, :size].tolist())
    assert worth.get(kept, 0.0) >= max(worth.values(), default=0.0) - 1e-5


def test_every_prefix_of_a_chain_made_of_an_empty_tree_is_empty():
    trees = TokenTree(*(torch.zeros_like(t) for t in poisoned(1, 5)))
    to_chain(trees, torch.ones(1, dtype=torch.bool, device=DEVICE), max_depth=3)
    assert trees.sizes.tolist() == [0] and trees.tokens.tolist() == [[0] * 5]


def test_registry_loads_every_builder():
    expected = dict(zip(KINDS, (chain, DynamicTree, best_first, ContinuityTree, match_tree), strict=True))
    assert {name: tree_kind(name, "tree.type").load_builder() for name in KINDS} == expected
    assert tree_kind("best_first", "tree.type").load_builder(has_ngrams=True) == expected["continuity"]


def test_registry_knows_every_kind():
    assert dict(tree_kind("dynamic", "").defaults) == {"depth": 8, "top_k": 10, "num_nodes": 60, "sharpness": 1.5}
    assert dict(tree_kind("best_first", "").defaults) == {"num_nodes": 60, "ngram_weight": 0.5, "sharpness": 1.3}
    assert {name: tree_kind(name, "").needs for name in KINDS} == {
        "chain": "tokens",
        "dynamic": "levels",
        "best_first": "marginals",
        "matches": "matches",
        "continuity": "marginals",
    }
    with pytest.raises(ValueError, match="speculative_config.tree.type: no tree is called 'dynamo'; did you mean"):
        tree_kind("dynamo", "speculative_config.tree.type")
    with pytest.raises(ValueError, match="known: best_first, chain, continuity, dynamic, matches"):
        tree_kind("star", "tree.type")


VIEWS = {"aten.select.int", "aten.slice.Tensor", "aten.unsqueeze.default", "aten.view.default", "aten.alias.default"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches that do not run")
def test_launches_and_nothing_else(monkeypatch):
    """One launch a level and two to finish; beside them no operation that allocates, copies or waits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    launched, operations = record_launches(monkeypatch), []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            operations.append(str(function))
            return function(*args, **(kwargs or {}))

    builder = DynamicTree(num_nodes=60, depth=8, top_k=10, max_num_reqs=4, device=DEVICE)
    first, later, out = candidates(1, 3, 10), candidates(2, 3, 10, 10), poisoned(3, 60)
    marginals, flags = candidates(3, 3, 15, 10), torch.ones(3, dtype=torch.bool, device=DEVICE)
    with Record():
        builder.start(*first)
        for level in range(2, 9):
            builder.expand(level, *later)
        builder.finish(out)
        assert launched == ["_expand_kernel"] * 8 + ["_rank_kernel", "_gather_kernel"]
        launched.clear()
        best_first(log_probs=marginals[0], tokens=marginals[1], num_nodes=60, out=out)
        to_chain(out, flags, max_depth=15)
        chain(tokens=first[1], out=out)
    assert launched == ["_best_first_kernel", "_to_chain_kernel", "_chain_kernel"]
    assert set(operations) <= VIEWS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_holds_all_builders():
    """A captured round, replayed on other candidates, gives the trees of those candidates."""
    sizes = {"num_nodes": 60, "depth": 4, "top_k": 10, "max_num_reqs": 4, "device": DEVICE}
    builder, twin = DynamicTree(**sizes), naive.DynamicTree(**sizes)
    inputs = [candidates(0, 3, 10), *(candidates(level, 3, 10, 10) for level in (2, 3, 4)), candidates(5, 3, 15, 10)]
    trees, firsts = poisoned(3, 60), poisoned(3, 60)

    def one_round(build, search):
        build.start(*inputs[0])
        for level in (2, 3, 4):
            build.expand(level, *inputs[level - 1])
        build.finish(trees)
        search(log_probs=inputs[4][0], tokens=inputs[4][1], num_nodes=60, out=firsts)

    one_round(builder, best_first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_round(builder, best_first)
    for seed in (20, 40):
        for i, pair in enumerate(inputs):
            fresh = candidates(seed + i, *pair[0].shape)
            pair[0].copy_(fresh[0])
            pair[1].copy_(fresh[1])
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in (*trees, *firsts)]
        one_round(twin, naive.best_first)
        same(replayed, (*trees, *firsts))


@pytest.mark.parametrize("has_future", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_a_levels_inputs_are_the_twins(level, has_future):
    num_reqs, k, width = 3, 4, 10
    rows_before = 1 if level == 1 else k
    given = {
        "parent_states": torch.randn(num_reqs * rows_before, width, device=DEVICE),
        "beam_parents": torch.randint(0, rows_before, (num_reqs, k), dtype=torch.int32, device=DEVICE),
        "root_positions": torch.tensor([5, 98, 0, 7], device=DEVICE),
        "level": level,
        "last_position": 99,
        "future_states": torch.randn(num_reqs + 1, width, device=DEVICE) if has_future else None,
    }
    made = []
    for module in (levels_kernel, levels_naive):
        states = torch.full((20, width), -77.0, device=DEVICE)
        positions = torch.full((20,), -77, device=DEVICE)
        module.prepare_level(**given, states=states, positions=positions)
        made.append((states, positions))
    assert all(map(torch.equal, *made))
    states, positions = made[0]
    if has_future:  # a request's last row, behind the level's nodes
        assert positions[:15].view(3, 5)[:, -1].tolist() == [5 + level + 1, 99, level + 1]
        assert torch.equal(states[:15].view(3, 5, width)[:, -1], given["future_states"][:num_reqs])
    assert (states[num_reqs * (k + has_future) :] == -77).all()
