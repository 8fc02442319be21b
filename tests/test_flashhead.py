"""FlashHead's head: its kernels against their twins, and its token against the dense head's.

Tolerances: kernels and twins add at most 200 float32 products of about 1 in different orders, which stays within 1e-4.
Token ids compare exactly: random scores lie further apart than that.
"""

import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hopper import compile_in_subprocess
from steps import DEVICE, POISON, poisoned

from vllm_crossspec.drafting.flashhead import kernels, naive
from vllm_crossspec.drafting.flashhead.assets import Assets
from vllm_crossspec.drafting.flashhead.head import FlashHead, Noise, Shard
from vllm_crossspec.drafting.heads import DenseHead, RetrievalHead
from vllm_crossspec.drafting.noise import NoiseKeys, add_candidate_noise

TOLERANCE = {"rtol": 1e-5, "atol": 1e-4}
SHAPES = [
    # rows, hidden size, clusters, tokens of a cluster, probes, special tokens
    (1, 16, 8, 4, 2, ()),
    (1, 33, 17, 16, 17, (0, 5)),
    (3, 130, 40, 7, 5, (279, 3, 100)),
    (2, 64, 1, 12, 1, ()),
    (17, 48, 33, 1, 9, (32,)),
    (2, 140, 20, 33, 3, tuple(range(0, 200, 5))),
]
FORMS = [False, True]
"""Whether the rows of a cluster lie together."""


def make(shape, seed=0, dtype=torch.float32):
    """Hidden states, an output embedding and random clusters of it, on the device."""
    rows, hidden_size, num_clusters, size, num_probes, special = shape
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, hidden_size, generator=generator)
    weight = torch.randn(num_clusters * size, hidden_size, generator=generator)
    members = torch.randperm(len(weight), generator=generator).view(num_clusters, size).sort(dim=1).values
    centroids = weight[members].mean(dim=1)
    assets = Assets(centroids, members, tuple(sorted(special)), num_probes, {})
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), assets


def heads(weight, assets, **settings):
    """The head in both layouts, every buffer poisoned."""
    for grouped in FORMS:
        head = FlashHead(weight, assets, grouped=grouped, **settings)
        for buffer in (*head._buffers, head._best, head._top, head._log_probs):
            buffer.fill_(POISON)
        yield head


def probed_clusters(hidden, assets, num_probes):
    centroids = F.normalize(assets.centroids.to(DEVICE), dim=1)
    scores = naive.score_centroids(hidden.float(), centroids)
    return naive.select_clusters(scores, num_probes)


# -- kernels against twins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_centroid_scores(shape):
    hidden, _, assets = make(shape)
    wide = torch.cat((hidden, hidden), dim=1)[:, : hidden.shape[1]]  # rows further apart than they are wide
    centroids = assets.centroids.to(DEVICE)
    scores = poisoned(len(hidden) + 2, len(centroids), dtype=torch.float32)
    kernels.score_centroids(hidden=wide, centroids=centroids, scores=scores)
    torch.testing.assert_close(scores[: len(hidden)], naive.score_centroids(hidden, centroids), **TOLERANCE)
    assert (scores[len(hidden) :] == POISON).all()


def test_centroids_in_half_precision_are_read_as_such():
    hidden, _, assets = make(SHAPES[2])
    centroids = F.normalize(assets.centroids, dim=1).to(DEVICE, torch.bfloat16)
    for rows in (1, 3):
        scores = poisoned(rows, len(centroids), dtype=torch.float32)
        kernels.score_centroids(hidden=hidden[:rows], centroids=centroids, scores=scores)
        # A single row is not rounded to the centroids' precision: 8 bits of each of 130 terms.
        expected = naive.score_centroids(hidden[:rows], centroids)
        torch.testing.assert_close(scores, expected, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("num_clusters", [1, 7, 64, 300])
def test_selected_clusters(num_clusters):
    generator = torch.Generator().manual_seed(num_clusters)
    for num_probes in sorted({1, min(5, num_clusters), num_clusters}):
        scores = torch.randn(9, num_clusters, generator=generator)
        scores[1] = torch.randint(-2, 3, (num_clusters,), generator=generator)  # ties, zeros of both signs
        scores[1][scores[1] == 0] *= -1
        scores[2] = -scores[2].abs()
        scores[3] = 1.0
        scores[4, ::2] = float("-inf")
        scores[5, ::3] = float("nan")
        scores[6] *= 1e30
        clusters = poisoned(11, num_probes)
        kernels.select_clusters(scores=scores.to(DEVICE), clusters=clusters)
        assert torch.equal(clusters[:9].cpu(), naive.select_clusters(scores, num_probes))
        assert (clusters[9:] == POISON).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_best_and_best_few_are_the_twins(shape):
    hidden, weight, assets = make(shape)
    num_probes, k = assets.num_probes, 6
    clusters = probed_clusters(hidden, assets, num_probes)
    expected = naive.top_tokens(hidden.cpu(), weight.cpu(), assets, clusters, k)
    for head in heads(weight, assets, max_rows=len(hidden) + 3, top_k=k):
        assert torch.equal(head.best_token(hidden).cpu(), expected[0][:, 0])
        found = head.top_tokens(hidden)
        assert torch.equal(found.tokens.cpu(), expected[0])
        torch.testing.assert_close(found.log_probs.cpu(), expected[1], **TOLERANCE)


def test_many_rows_together_are_the_dense_heads():
    """Up to the row from which the head would read more vectors than the output layer has."""
    hidden, weight, assets = make((40, 16, 20, 10, 2, ()))
    head = FlashHead(weight, assets, max_rows=40, top_k=3)
    most = max(n for n in range(1, 41) if 20 * -(-n // 16) + n * 2 * 10 < 200)
    assert most == 8 and head.reads_less(most) and not head.reads_less(most + 1)
    dense = mock.Mock(spec=DenseHead)
    for both in (RetrievalHead(head, None, dense), RetrievalHead(head, None)):
        for rows in (most, most + 1):
            both.choose(hidden[:rows], None)
            both.candidates(hidden[:rows], None, 3)
    assert [len(call.args[0]) for call in (*dense.choose.call_args_list, *dense.candidates.call_args_list)] == [9, 9]


def test_candidates_of_several_chunks():
    """More candidates than one program looks through, and the best few in different ones."""
    shape = (2, 8, 50, 100, 45, (7, 4900))
    hidden, weight, assets = make(shape)
    assert assets.num_probes * 100 > 2 * kernels.CHUNK
    clusters = probed_clusters(hidden, assets, assets.num_probes)
    expected = naive.top_tokens(hidden.cpu(), weight.cpu(), assets, clusters, 12)
    for head in heads(weight, assets, max_rows=2, top_k=12):
        found = head.top_tokens(hidden)
        assert torch.equal(found.tokens.cpu(), expected[0])
        torch.testing.assert_close(found.log_probs.cpu(), expected[1], **TOLERANCE)


# -- ranks ---------------------------------------------------------------------------------------------------------


def ranks(weight, assets, bounds, **settings):
    """Heads of as many ranks as lie between ``bounds``, and what each finds by a call, told by all the others."""
    said = {}

    def gather_of(rank):
        def gather(own):
            said[rank] = own.clone()
            return torch.cat([said.get(other, own) for other in range(len(bounds) - 1)], dim=1)

        return gather

    made = [
        FlashHead(weight[first:last], assets, shard=Shard(first, gather_of(rank)), **settings)
        for rank, (first, last) in enumerate(itertools.pairwise(bounds))
    ]

    def call(name, *arguments):
        said.clear()
        for head in made:  # what each says does not depend on what it is told
            getattr(head, name)(*arguments)
        return [getattr(head, name)(*arguments) for head in made]

    return call


@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_parallel_ranks_find_what_one_head_finds(shape):
    hidden, weight, assets = make(shape)
    size, k = len(weight), min(6, len(weight))
    slots = torch.arange(len(hidden), device=DEVICE)
    temperature = torch.linspace(0.0, 1.5, len(hidden), device=DEVICE)  # the first is greedy, has no noise
    keys = NoiseKeys(slots, slots + 40, temperature, slots + 7)
    coupled = Noise(functools.partial(add_candidate_noise, keys), lambda *_: None)
    settings = {"max_rows": len(hidden) + 2, "top_k": k, "is_coupled": True}
    whole = FlashHead(weight, assets, **settings)
    for bounds in ((0, size), (0, size // 2, size), (0, 1, size // 3, size)):
        call = ranks(weight, assets, bounds, **settings)
        for noise in (None, coupled):
            best = whole.best_token(hidden, noise)
            for found in call("best_token", hidden, noise):
                assert torch.equal(found, best)
            few = whole.top_tokens(hidden, noise)
            for found in call("top_tokens", hidden, noise):
                assert torch.equal(found.tokens, few.tokens)
                torch.testing.assert_close(found.log_probs, few.log_probs, **TOLERANCE)


def test_a_tensor_parallel_rank_alone_finds_its_own():
    """What the others say counts: without it the best of a rank's own tokens is found."""
    hidden, weight, assets = make(SHAPES[4])
    alone = FlashHead(weight[:11], assets, shard=Shard(0, lambda own: own), max_rows=len(hidden))
    whole = FlashHead(weight, assets, max_rows=len(hidden))
    assert (alone.best_token(hidden) < 11).all() and not torch.equal(alone.best_token(hidden), whole.best_token(hidden))


# -- the head against the dense one -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_with_all_clusters_probed_it_is_the_dense_head(shape):
    hidden, weight, assets = make(shape, seed=1)
    logits = (hidden @ weight.t()).cpu()
    k = min(4, logits.shape[1])
    best = logits.log_softmax(dim=1).topk(k, dim=1)
    for head in heads(weight, assets, num_probes=len(assets.members), max_rows=len(hidden), top_k=k):
        assert torch.equal(head.best_token(hidden).cpu(), logits.argmax(dim=1))
        found = head.top_tokens(hidden)
        assert torch.equal(found.tokens.cpu(), best.indices)
        torch.testing.assert_close(found.log_probs.cpu(), best.values, **TOLERANCE)


def test_wherever_the_right_cluster_is_probed_it_is_the_dense_token():
    shape = (24, 24, 30, 9, 6, (11, 12))
    hidden, weight, assets = make(shape, seed=2)
    dense = (hidden @ weight.t()).argmax(dim=1).cpu()
    clusters = probed_clusters(hidden, assets, assets.num_probes)
    is_found = (clusters == assets.assignments[dense][:, None]).any(dim=1)
    is_found |= torch.isin(dense, torch.tensor(assets.special_token_ids))
    assert 0.2 < is_found.float().mean() < 0.95  # both cases are there
    for head in heads(weight, assets, max_rows=24):
        found = head.best_token(hidden).cpu()
        assert torch.equal(found == dense, is_found)


def test_equal_scores_go_to_the_smallest_token():
    hidden, weight, assets = make((4, 10, 12, 5, 12, ()), seed=3)
    weight[7::9] = weight[59]
    weight[:, :] = weight.round()
    hidden = hidden.round()
    dense = (hidden @ weight.t()).cpu()
    for head in heads(weight, assets, max_rows=4, top_k=9):
        assert torch.equal(head.best_token(hidden).cpu(), dense.argmax(dim=1))
        expected = dense.sort(dim=1, descending=True, stable=True).indices[:, :9]
        assert torch.equal(head.top_tokens(hidden).tokens.cpu(), expected)


def test_special_tokens_are_always_candidates():
    hidden, weight, assets = make((3, 20, 25, 4, 1, (13, 77)), seed=4)
    for token in assets.special_token_ids:
        weight[token] = 0.0
    furthest = (hidden @ F.normalize(assets.centroids, dim=1).to(DEVICE).t()).argmin(dim=1)
    special = assets.members[furthest[0].cpu(), 0].item()
    weight[special] = 50 * hidden[0]
    dense = (hidden @ weight.t()).argmax(dim=1)
    assert dense[0] == special
    for head in heads(weight, assets, max_rows=3):
        assert head.best_token(hidden)[0] != special
    for head in heads(weight, assets._replace(special_token_ids=(special,)), max_rows=3):
        assert head.best_token(hidden)[0] == special


def test_values_that_are_no_numbers_are_never_chosen():
    hidden, weight, assets = make((2, 12, 6, 4, 6, (1,)), seed=5)
    weight[3], weight[1] = float("nan"), float("nan")
    expected = (hidden @ weight.t()).nan_to_num(nan=float("-inf")).argmax(dim=1)
    for head in heads(weight, assets, max_rows=2, top_k=3):
        assert torch.equal(head.best_token(hidden), expected)
        assert head.top_tokens(hidden).log_probs.isfinite().all()
        lost = torch.full_like(hidden, float("nan"))
        assert head.best_token(lost).tolist() == [0, 0]
        assert head.top_tokens(lost).log_probs.tolist() == [[float("-inf")] * 3] * 2


def test_fewer_candidates_than_asked_for():
    hidden, weight, assets = make((2, 12, 6, 2, 1, ()), seed=6)
    for head in heads(weight, assets, max_rows=2, top_k=5):
        found = head.top_tokens(hidden)
        assert (found.log_probs[:, 2:] == float("-inf")).all() and (found.tokens[:, 2:] == 0).all()
        torch.testing.assert_close(found.log_probs[:, :2].exp().sum(dim=1), torch.ones(2, device=DEVICE))


def test_half_precision():
    """Kernels sum in float32, so that what is found is all but the best of exact products."""
    hidden, weight, assets = make((6, 64, 32, 8, 32, (2,)), seed=8, dtype=torch.bfloat16)
    exact = hidden.float() @ weight.float().t()
    for head in heads(weight, assets, max_rows=6):
        found = head.best_token(hidden)
        lost = exact.amax(dim=1) - exact.gather(1, found[:, None])[:, 0]
        assert (lost <= 1e-4).all()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_probes": 0}, "num_probes 0: give 1 to 8, the number of clusters"),
        ({"num_probes": 9}, "num_probes 9: give 1 to 8"),
        ({"top_k": 65}, "top_k 65: the head gives at most 64"),
    ],
)
def test_numbers_out_of_bounds_are_refused(settings, sentence):
    _, weight, assets = make(SHAPES[0])
    with pytest.raises(ValueError, match=sentence):
        FlashHead(weight, assets, **settings)


def test_another_models_clusters_are_refused():
    _, weight, assets = make(SHAPES[0])
    with pytest.raises(ValueError, match=r"the clusters are for an output embedding of \[32, 16\] and this one has"):
        FlashHead(weight[:-4], assets)


# -- compiled for a GPU -------------------------------------------------------------------------------------------

COMPILE_FOR_HOPPER = """
from hopper import compile_only
compiled = compile_only()
import torch
from vllm_crossspec.drafting.flashhead import kernels
from vllm_crossspec.drafting.flashhead.assets import Assets
from vllm_crossspec.drafting.flashhead.head import FlashHead, Noise, Shard

def check(dtype, rows, size, num_clusters, special, grouped, top_k, centroids=None):
    members = torch.arange(num_clusters * size).view(num_clusters, size)
    weight = torch.zeros(members.numel(), 64, dtype=dtype)
    assets = Assets(torch.ones(num_clusters, 64), members, special, num_clusters // 16, {})
    head = FlashHead(weight, assets, max_rows=rows, top_k=top_k, grouped=grouped, centroid_dtype=centroids)
    hidden = torch.zeros(rows, 64, dtype=dtype)
    head.best_token(hidden)
    if top_k:
        head.top_tokens(hidden)

check(torch.bfloat16, 1, 16, 9496, (3, 5), False, 10)
check(torch.bfloat16, 8, 16, 9496, (), True, 10)
check(torch.float16, 1, 16, 8016, (1,), False, 0)
check(torch.float32, 32, 8, 300, (1,), True, 3, centroids=torch.bfloat16)
wanted = {"_score_centroids_kernel", "_select_clusters_kernel", "_score_tokens_kernel", "_best_token_kernel",
          "_chunk_best_kernel", "_top_tokens_kernel"}
assert wanted <= set(compiled), sorted(compiled)
"""


@pytest.mark.nightly
def test_kernels_compile_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)
