"""The continuity tree: kernels and batched operations against the plain twin, exhaustive search, and what counts."""

import math

import numpy as np
import pytest
import torch
from hopper import compile_in_subprocess
from launches import record_launches
from ngram_counts import random_tokens
from test_tree_builders import DEVICE, NEVER, VIEWS, candidates, check_trees, paths, poisoned, same

from crossspec_tools.ngram.build import build, make_plan
from crossspec_tools.ngram.lookup import look_up
from vllm_crossspec.kinds.scoring import Scoring, product_scoring
from vllm_crossspec.ngram_store.kernels import look_up_level
from vllm_crossspec.ngram_store.naive import look_up_level_naive
from vllm_crossspec.ngram_store.store import open_store, place
from vllm_crossspec.trees.builders import continuity, naive
from vllm_crossspec.trees.builders.best_first import best_first
from vllm_crossspec.trees.builders.continuity import ContinuityTree

VOCAB_SIZE = 40
PLAIN = Scoring(logit_decay=1.0, level_decay=0.0, renormalises=False)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Of orders 2 to 4 over the same text, in host memory."""
    folder = tmp_path_factory.mktemp("stores")
    np.save(folder / "ids.npy", random_tokens(5, 1200, VOCAB_SIZE))
    for order in (2, 3, 4):
        build(make_plan([folder / "ids.npy"], order=order, vocab_size=VOCAB_SIZE), folder / str(order))
    return {order: open_store(folder / str(order)) for order in (2, 3, 4)}


@pytest.fixture(scope="module", autouse=True)
def quick_lookups():
    """Interpreted, a lookup kernel takes 30 ms a beam node: most tests take the CPU's lookups in its place.

    Those with a mark of their own (and all on a GPU) take the kernel, which test_ngram.py tests by itself.
    """

    def look_up_level(store, contexts, candidates, log_probs, *, backoff):
        assert contexts.is_contiguous() and log_probs.is_contiguous()
        rows = candidates.reshape(-1, candidates.shape[2])
        log_probs.copy_(look_up(store, contexts.flatten(0, 1), rows, backoff=backoff).log_probs.view_as(log_probs))

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(continuity, "look_up_level", look_up_level)
        yield


@pytest.fixture
def lookup_kernel(monkeypatch):
    monkeypatch.setattr(continuity, "look_up_level", look_up_level)


def inputs(seed, reqs, levels, choices, impossible=0.0, width=3):
    """Candidates and contexts of a batch; contexts have gaps at their beginning and a token of no vocabulary."""
    log_probs, tokens = candidates(seed, reqs, levels, choices, impossible=impossible, vocab=VOCAB_SIZE)
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randint(0, 12, (reqs, width + 1), generator=generator, dtype=torch.int32)
    contexts[0, : 1 + seed % width] = -1
    contexts[-1, -2] = VOCAB_SIZE + 3
    return {"log_probs": log_probs, "tokens": tokens, "contexts": contexts.to(DEVICE)[:, 1:]}


def truth(given, width, *, num_nodes, depth, top_k, max_num_reqs, device, **settings):
    """The plain twin's tree, on the CPU."""
    out = type(poisoned(1, 1))(*(t.cpu() for t in poisoned(len(given["tokens"]) + 1, width)))
    given = {name: value.cpu() if value is not None else None for name, value in given.items()}
    naive.continuity(**given, num_nodes=num_nodes, **settings, out=out)
    return out


def agree(found, expected, num_reqs):
    """The same trees; the scores but for the last bit, in which ln p_ngram is rounded differently."""
    same([t[:num_reqs] for t in found[:2]], [t[:num_reqs] for t in expected[:2]])
    same([found.sizes[:num_reqs]], [expected.sizes[:num_reqs]])
    torch.testing.assert_close(found.log_probs[:num_reqs].cpu(), expected.log_probs[:num_reqs], rtol=2e-6, atol=1e-6)


def built(builder, given, width):
    out = poisoned(len(given["tokens"]) + 1, width)
    builder.build(**given, out=out)
    check_trees(out, len(given["tokens"]))
    return out


SHAPES = [
    # requests, levels, candidates, beam width, nodes, width, order, stop tokens, backoff
    (1, 1, 1, 1, 1, 1, 2, (), None),
    (1, 8, 25, 20, 60, 60, 3, (0,), None),
    (5, 3, 4, 3, 17, 20, 2, (1, 2), None),
    (2, 9, 3, 7, 33, 40, 4, (), None),
    (3, 4, 7, 1, 12, 12, 3, (3, 5, 7), None),
    (2, 3, 5, 20, 255, 255, 4, (0,), 0.4),
    (2, 2, 20, 13, 50, 64, 3, (), 1.0),
    (4, 6, 1, 2, 9, 10, 3, (4,), 0.4),
    (2, 5, 6, 5, 30, 31, None, (1,), None),
]


def check_builders(stores, reqs, levels, choices, beam, nodes, width, order, stops, backoff, impossible):
    """Kernels against the plain twin."""
    store = place(stores[order], "gpu", DEVICE) if order and DEVICE.type == "cuda" else stores.get(order)
    sizes = {"num_nodes": nodes, "depth": levels, "top_k": choices, "max_num_reqs": reqs + 1, "device": DEVICE}
    for scoring in (Scoring(), PLAIN):
        settings = sizes | {"beam_width": beam, "scoring": scoring, "stop_tokens": stops, "backoff": backoff}
        builder = ContinuityTree(**settings, store=store)
        builder._pool.order.fill_(-7777)
        # Twice: what one tree leaves in the buffers must not show in the next, which is smaller in every way.
        for seed, less in ((reqs + nodes, 0), (beam, 1)):
            shape = (max(reqs - less, 1), max(levels - less, 1), max(choices - less, 1))
            given = inputs(seed, *shape, impossible=impossible)
            if order is None:
                given["contexts"] = None
            expected = truth(given, width, **settings, store=stores.get(order))
            agree(built(builder, given, width), expected, shape[0])
            assert (builder._pool.order[shape[0] :] == -7777).all() or less


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("impossible", [0.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_naive(stores, shape, impossible):
    check_builders(stores, *shape, impossible)


def test_a_beam_wider_than_the_tree_loses_nothing_by_being_as_wide(stores):
    """Of three nodes alike any may have the fourth as its child: a beam of two would not find the third one's."""
    given = inputs(3, 40, 3, 3)
    given["log_probs"] *= 0.01
    store = place(stores[3], "host", DEVICE)
    settings = {"num_nodes": 4, "depth": 3, "top_k": 3, "max_num_reqs": 40, "device": DEVICE}
    settings |= {"scoring": product_scoring(1.0), "stop_tokens": (1,), "backoff": None}
    expected = truth(given, 5, **settings, beam_width=20, store=stores[3])
    agree(built(ContinuityTree(**settings, beam_width=20, store=store), given, 5), expected, 40)
    narrow = built(ContinuityTree(**settings, beam_width=2, store=store), given, 5)
    assert (narrow.tokens[:40].cpu() != expected.tokens[:40]).any()


@pytest.mark.parametrize(("order", "backoff"), [(2, None), (3, None), (4, 0.4)])
def test_equals_naive_with_the_lookup_kernel(stores, lookup_kernel, order, backoff):
    check_builders(stores, 2, 3, 5, 3, 12, 13, order, (1,), backoff, 0.2)


def test_impossible_candidates_and_values_above_zero(stores):
    """NaN and -inf are never drafted, a whole position of them ends the tree, and what is above 0 is certain."""
    nan = float("nan")
    log_probs = torch.tensor(
        [
            [[-0.5, -1.0, NEVER], [-0.1, NEVER, NEVER], [-2.0, -3.0, -4.0]],
            [[-0.5, -1.0, -1.5], [nan, NEVER, nan], [-2.0, -3.0, -4.0]],
            [[NEVER, nan, NEVER], [-0.1, -0.2, -0.3], [-2.0, -3.0, -4.0]],
            [[2.0, 1.0, nan], [1e30, 1.0, -1e30], [float("inf"), 3.0, 3.0]],
        ],
        device=DEVICE,
    )
    tokens = torch.arange(36, device=DEVICE).view(4, 3, 3)
    given = inputs(1, 4, 3, 3) | {"log_probs": log_probs, "tokens": tokens}
    for renormalises in (True, False):
        settings = {"num_nodes": 20, "depth": 3, "top_k": 3, "max_num_reqs": 4, "device": DEVICE, "beam_width": 4}
        settings |= {"scoring": Scoring(renormalises=renormalises)}
        expected = truth(given, 20, **settings, store=stores[3])
        found = built(ContinuityTree(**settings, store=place(stores[3], "host", DEVICE)), given, 20)
        agree(found, expected, 4)
        assert found.sizes.tolist()[:4] == [2 + 2 + 6, 3, 0, 20]


def test_ties_go_to_the_earlier_candidate():
    """All candidates are certain: the shallower come first, then those of the earlier beam node."""
    given = {"log_probs": torch.zeros(1, 3, 2, device=DEVICE), "tokens": torch.arange(6, device=DEVICE).view(1, 3, 2)}
    given["contexts"] = None
    settings = {"num_nodes": 9, "depth": 3, "top_k": 2, "max_num_reqs": 1, "device": DEVICE, "beam_width": 3}
    settings |= {"scoring": PLAIN, "store": None}
    expected = truth(given, 9, **settings)
    found = built(ContinuityTree(**settings), given, 9)
    same([t[:1] for t in found], [t[:1] for t in expected])
    assert found.parents[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]


# -- exactness ----------------------------------------------------------------------------------------------------


def every_prefix(given, row, store, weight, stops):
    """All prefixes of one request with their score by the definition, in float64: score by path."""
    found = {(): 0.0}
    log_probs, tokens = given["log_probs"][row].cpu().double(), given["tokens"][row].cpu()
    before = given["contexts"][row].tolist() if given["contexts"] is not None else []
    level_paths = [()]
    for level in range(len(tokens)):
        fresh = []
        for path in level_paths:
            if path and path[-1] in stops:
                continue
            terms = log_probs[level].clone()
            if level and store is not None:
                context = torch.tensor([*before, *path])[None, None]
                terms += weight * look_up_level_naive(store, context, tokens[level][None, None])[0][0, 0].double()
            for token, term in zip(tokens[level].tolist(), terms.tolist(), strict=True):
                found[*path, token] = found[path] + term
                fresh.append((*path, token))
        level_paths = fresh
    del found[()]
    return found


@pytest.mark.parametrize("num_nodes", [1, 5, 24, 60])
@pytest.mark.parametrize("stops", [(), (0, 3)])
def test_a_beam_as_wide_as_the_tree_is_exhaustive_search(stores, num_nodes, stops):
    store = place(stores[3], "host", DEVICE)
    sizes = {"num_nodes": num_nodes, "beam_width": num_nodes, "depth": 4, "top_k": 4, "max_num_reqs": 2}
    given = inputs(11, 2, 4, 4)
    tree = ContinuityTree(**sizes, device=DEVICE, scoring=product_scoring(0.3), store=store, stop_tokens=stops)
    out = built(tree, given, 60)
    for row in range(2):
        scores = every_prefix(given, row, stores[3], 0.3, stops)
        ordered = sorted(scores.values(), reverse=True)
        gaps = np.diff(ordered[: num_nodes + 1])
        assert (gaps < -1e-5).all(), "the seed gives ties: the tree would not be determined"
        assert paths(out, row) == sorted(scores, key=lambda path: -scores[path])[:num_nodes]
        np.testing.assert_allclose(out.log_probs[row, :num_nodes].tolist(), ordered[:num_nodes], rtol=1e-6)


def test_a_narrow_beam_is_not_exhaustive_search(stores):
    """The control of the test above: with a beam of 1 the same search misses nodes."""
    given = inputs(11, 2, 4, 4)
    settings = {"num_nodes": 24, "depth": 4, "top_k": 4, "max_num_reqs": 2, "device": DEVICE, "beam_width": 1}
    out = built(ContinuityTree(**settings, scoring=PLAIN, store=place(stores[3], "host", DEVICE)), given, 24)
    scores = every_prefix(given, 0, stores[3], PLAIN.ngram_weight, ())
    assert set(paths(out, 0)) != set(sorted(scores, key=lambda path: -scores[path])[:24])


@pytest.mark.parametrize("impossible", [0.0, 0.4])
def test_without_ngrams_it_is_best_first(impossible):
    given = inputs(7, 3, 6, 5, impossible=impossible)
    out = poisoned(4, 40)
    best_first(log_probs=given["log_probs"], tokens=given["tokens"], num_nodes=40, out=out)
    sizes = {"num_nodes": 40, "beam_width": 40, "depth": 6, "top_k": 5, "max_num_reqs": 3, "device": DEVICE}
    tree = ContinuityTree(**sizes, scoring=product_scoring(0.0), store=None)
    same([t[:3] for t in built(tree, given, 40)], [t[:3] for t in out])


# -- what must matter ---------------------------------------------------------------------------------------------


def tree_of(given, store, scoring=None, **changes):
    settings = {"num_nodes": 30, "depth": 5, "top_k": 10, "max_num_reqs": 3, "device": DEVICE, "beam_width": 8}
    builder = ContinuityTree(**settings | {"scoring": scoring or Scoring(), "store": store} | changes)
    out = built(builder, given, 30)
    return [set(paths(out, row)) for row in range(3)]


def test_every_part_of_the_score_changes_the_tree(stores):
    store, given = place(stores[3], "host", DEVICE), inputs(3, 3, 5, 10)
    right = tree_of(given, store)
    assert right == tree_of(given, store)
    shifted = torch.roll(given["contexts"], 1, dims=1).contiguous()
    wrong = {
        "another context": tree_of(given | {"contexts": shifted}, store),
        "no n-grams": tree_of(given, None),
        "order 2": tree_of(given, place(stores[2], "host", DEVICE)),
        "no level weights": tree_of(given, store, Scoring(level_decay=0.0)),
        "no decay of logits": tree_of(given, store, Scoring(logit_decay=1.0)),
        "another weight": tree_of(given, store, Scoring(ngram_weight=1.5)),
        "as given": tree_of(given, store, Scoring(renormalises=False)),
        "backoff": tree_of(given, store, backoff=0.2),
        "stop tokens": tree_of(given, store, stop_tokens=(0, 1, 2)),
        "a narrow beam": tree_of(given, store, beam_width=2),
    }
    for name, trees in wrong.items():
        assert trees != right, name
    assert tree_of(given, store, Scoring(ngram_weight=0.0)) == wrong["no n-grams"]


def test_the_first_level_has_no_ngram_term_and_a_wrong_context_no_other_effect(stores):
    """Level 0 is the same under any context; below it only the first tokens depend on it."""
    given = inputs(3, 3, 1, 10)
    other = given | {"contexts": given["contexts"].flip(1).contiguous()}
    store = place(stores[3], "host", DEVICE)
    assert tree_of(given, store) == tree_of(other, store) == tree_of(given, None)


def test_logits_serve_as_well_as_log_probabilities(stores):
    """A softmax over the candidates does not see what all of them have in common."""
    store, given = place(stores[3], "host", DEVICE), inputs(4, 3, 5, 10)
    logits = given["log_probs"] + torch.tensor([3.0, -2.0, 40.0, 0.5, 7.0], device=DEVICE)[:, None]
    assert tree_of(given | {"log_probs": logits}, store) == tree_of(given, store)


def test_nothing_is_drafted_after_a_stop_token(stores):
    store, given = place(stores[3], "host", DEVICE), inputs(3, 3, 5, 10)
    stops = {int(t) for t in given["tokens"][:, 0, 0]}
    trees = tree_of(given, store, stop_tokens=tuple(stops))
    inner = [token for paths_ in trees for path in paths_ for token in path[:-1]]
    assert not stops & set(inner)
    assert all(any(path[-1] in stops for path in paths_) for paths_ in trees), "stop tokens themselves are drafted"
    before = tree_of(given, store)
    assert stops & {token for paths_ in before for path in paths_ for token in path[:-1]}


def test_the_papers_weights():
    scoring = Scoring()
    assert scoring.logit_weight(0) == 1.0 and scoring.continuity_weight(0) == 0.0
    assert math.isclose(scoring.logit_weight(3), 4**-0.7 * 0.9**3)
    assert math.isclose(scoring.continuity_weight(3), 4**-0.7 * 0.5)


def test_a_backoff_that_is_none(stores):
    settings = {"num_nodes": 3, "depth": 2, "top_k": 2, "max_num_reqs": 1, "device": DEVICE, "beam_width": 2}
    with pytest.raises(ValueError, match="backoff 1.5: give a factor above 0"):
        ContinuityTree(**settings, scoring=Scoring(), store=stores[2], backoff=1.5)


# -- launches -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches that do not run")
@pytest.mark.parametrize("reqs", [1, 3])
def test_launches_and_nothing_else(stores, lookup_kernel, monkeypatch, reqs):
    """18 launches with n-grams and 11 without, whatever the batch; beside them nothing that allocates or waits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    launched, operations = record_launches(monkeypatch), []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            operations.append(str(function))
            return function(*args, **(kwargs or {}))

    sizes = {"num_nodes": 60, "depth": 8, "top_k": 25, "max_num_reqs": 3, "device": DEVICE, "beam_width": 20}
    given, out = inputs(1, reqs, 8, 25), poisoned(reqs, 60)
    levels = ["_look_up_kernel", "_extend_kernel"] * 7
    for store, between in ((stores[3], levels), (None, levels[1::2])):
        builder = ContinuityTree(**sizes, scoring=Scoring(), store=store)
        launched.clear()
        with Record():
            builder.build(**given, out=out)
        assert launched == ["_weigh_kernel", "_extend_kernel", *between, "_rank_kernel", "_gather_kernel"]
    assert set(operations) <= VIEWS | {"aten.expand.default"}


@pytest.mark.nightly
def test_kernels_compile_for_hopper(stores, tmp_path):
    """Every variant: levels, n-grams, stop tokens, the drafter's dtype and that of the contexts."""
    save = {name: getattr(stores[3], name) for name in ("offsets", "tokens", "codes")}
    torch.save((stores[3].header, save), tmp_path / "store")
    code = f"""
from hopper import compile_only
compiled = compile_only()
import torch
from vllm_crossspec.ngram_store.store import NgramStore
from vllm_crossspec.trees.builders.continuity import ContinuityTree
from vllm_crossspec.kinds.scoring import Scoring
from vllm_crossspec.types import TokenTree
header, tensors = torch.load({str(tmp_path / "store")!r}, weights_only=False)
sizes = dict(num_nodes=60, depth=8, top_k=25, beam_width=20, max_num_reqs=4, device=torch.device("cpu"))
for store, stops, dtype, scoring in (
    (NgramStore(header, 3, **tensors), (1, 2), torch.bfloat16, Scoring()),
    (NgramStore(header, 2, **tensors), (), torch.float32, Scoring(renormalises=False)),
    (None, (1,), torch.float32, Scoring()),
):
    for requests in (1, 4):
        out = TokenTree(*(torch.zeros(4, 60, dtype=t) for t in (torch.int64, torch.int32, torch.float32)),
                        torch.zeros(4, dtype=torch.int32))
        builder = ContinuityTree(**sizes, scoring=scoring, store=store, stop_tokens=stops)
        builder.build(log_probs=torch.zeros(requests, 8, 25, dtype=dtype), out=out,
                      tokens=torch.zeros(requests, 8, 25, dtype=torch.int64),
                      contexts=torch.zeros(requests, 2, dtype=torch.int32))
counts = {{name: len(found) for name, found in compiled.items()}}
# The first, a middle and the last level, of three settings: the batch's size makes no variant.
assert counts["_extend_kernel"] == 9 and counts["_weigh_kernel"] == 3, counts
# A fused sum would not be the twin's.
assert all("fma.rn.f32" not in code["ptx"] for code in compiled["_extend_kernel"].values())
"""
    compile_in_subprocess(code, tmp_path / "cache")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("placement", ["gpu", "host"])
def test_a_cuda_graph_holds_the_search(stores, placement):
    """A captured search, replayed on other candidates and contexts, gives the trees of those."""
    settings = {"num_nodes": 60, "depth": 8, "top_k": 25, "max_num_reqs": 4, "device": DEVICE, "beam_width": 20}
    settings |= {"scoring": Scoring(), "stop_tokens": (0,)}
    builder = ContinuityTree(**settings, store=place(stores[3], placement, DEVICE))
    given, out = inputs(0, 3, 8, 25), poisoned(4, 60)
    builder.build(**given, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        builder.build(**given, out=out)
    for seed in (20, 40):
        for name, fresh in inputs(seed, 3, 8, 25).items():
            given[name].copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        agree(out, truth(given, 60, **settings, store=stores[3]), 3)
