"""FlashHead's candidates with the target's noise, narrow centroids, and how many launches a call takes.

Tolerances: vLLM's series for log1p is good to 6e-7, and noise of 15 has a spacing of 1e-6; products as in
test_flashhead.py. Token ids compare exactly: random scores lie further apart than that.
"""

import pytest
import torch
import torch.nn.functional as F
from hopper import compile_in_subprocess
from steps import DEVICE, POISON
from test_flashhead import make, probed_clusters

from vllm_crossspec.drafting import noise
from vllm_crossspec.drafting.flashhead import kernels, naive
from vllm_crossspec.drafting.flashhead.head import NARROW, FlashHead
from vllm_crossspec.drafting.heads import DenseHead, RetrievalHead
from vllm_crossspec.drafting.noise import NoiseKeys

SHAPES = [
    # rows, hidden size, clusters, tokens of a cluster, probes, special tokens
    (5, 16, 8, 4, 2, ()),
    (10, 33, 17, 16, 17, (0, 5)),
    (15, 130, 40, 7, 5, (279, 3, 100)),
]
TOP_K = 6


def keys_for(rows, rows_per_entry=1, use_fp64=False):
    """Padding, a greedy request and three sampled ones."""
    generator = torch.Generator().manual_seed(rows)
    entries = torch.tensor([i % 5 - 1 for i in range(rows // rows_per_entry)])
    positions = torch.randint(0, 1 << 20, (rows,), generator=generator)
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5])
    seeds = torch.tensor([3, -(1 << 62) + 5, 1 << 40, 12345])
    return NoiseKeys(*(part.to(DEVICE) for part in (entries, positions, temperature, seeds)), use_fp64)


def heads(weight, assets, offsets, **settings):
    """The head, every buffer poisoned, and the dense one."""
    head = FlashHead(weight, assets, **{"max_rows": 20, "top_k": TOP_K, "is_coupled": True} | settings)
    for buffer in (*head._buffers, head._best, head._top, head._log_probs):
        buffer.fill_(POISON)
    return RetrievalHead(head, offsets), DenseHead(lambda hidden: hidden @ weight.t(), offsets)


def offsets_for(vocab_size, reduced):
    return 2 * torch.arange(vocab_size, device=DEVICE) if reduced else None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("use_fp64", [False, True])
def test_with_all_clusters_probed_it_is_the_dense_coupled_head(shape, reduced, use_fp64):
    hidden, weight, assets = make(shape)
    retrieval, dense = heads(weight, assets, offsets_for(len(weight), reduced), num_probes=len(assets.members))
    for rows_per_entry, sharpness in ((1, 1.0), (5, 1.0), (5, 2.0)):
        keys = keys_for(len(hidden), rows_per_entry, use_fp64)._replace(sharpness=sharpness)
        assert torch.equal(retrieval.choose(hidden, keys), dense.choose(hidden, keys))
        few, expected = retrieval.candidates(hidden, keys, TOP_K), dense.candidates(hidden, keys, TOP_K)
        for found, wanted in zip(few, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    plain = dense.choose(hidden, None)
    assert torch.equal(retrieval.choose(hidden, None), plain)
    assert not torch.equal(dense.choose(hidden, keys_for(len(hidden))), plain)  # the noise does decide


@pytest.mark.parametrize("reduced", [False, True])
def test_wherever_the_winner_is_a_candidate_it_wins(reduced):
    """The dense coupled token, or the best coupled candidate where it is none; packed numbers and scores agree."""
    shape = (20, 24, 30, 9, 6, (11, 12))
    hidden, weight, assets = make(shape, seed=2)
    offsets, keys = offsets_for(len(weight), reduced), keys_for(20)
    head, dense = heads(weight, assets, offsets)
    noisy = noise.add_target_noise(keys._replace(offsets=offsets), hidden @ weight.t())
    clusters = probed_clusters(hidden, assets, assets.num_probes)
    best = [
        max(naive.candidates(row, assets.members, assets.special_token_ids), key=lambda token: float(line[token]))
        for row, line in zip(clusters, noisy, strict=True)
    ]
    is_dense = torch.tensor(best, device=DEVICE) == noisy.argmax(dim=1)
    assert 0.2 < is_dense.float().mean() < 0.95  # both cases are there
    chosen = head.choose(hidden, keys)
    assert torch.equal(chosen, head.to_target(torch.tensor(best, device=DEVICE)))
    assert torch.equal(chosen == dense.choose(hidden, keys), is_dense)
    assert torch.equal(head.candidates(hidden, keys, TOP_K)[1][:, 0], chosen)


def test_greedy_and_padding_rows_stay_as_they_are():
    hidden, weight, assets = make((10, 16, 20, 4, 5, (1,)))
    keys = keys_for(10)
    untouched = (keys.idx_mapping < 1).nonzero().flatten()
    head = heads(weight, assets, None)[0]
    plain = head.choose(hidden, None).clone()
    assert torch.equal(head.choose(hidden, keys)[untouched], plain[untouched])


def test_other_positions_and_seeds_give_other_choices():
    hidden, weight, assets = make((20, 16, 40, 8, 20, ()))
    keys = keys_for(20)
    head = heads(weight, assets, None)[0]
    chosen = head.choose(hidden, keys).clone()
    for changed in (keys._replace(positions=keys.positions + 1), keys._replace(seeds=keys.seeds + 1)):
        assert not torch.equal(head.choose(hidden, changed), chosen)


# -- drawn clusters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("use_fp64", [False, True])
def test_noise_of_clusters_is_its_twins(shape, reduced, use_fp64):
    """Greedy rows and padding stay to the bit; padded members and clusters bring no noise of their own."""
    hidden, weight, assets = make(shape)
    rows, offsets = len(hidden), offsets_for(len(weight), reduced)
    members = assets.members.to(DEVICE, torch.int32)
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randn(rows + 1, len(members), generator=generator).to(DEVICE)
    lengths = torch.rand(len(members), generator=generator).to(DEVICE) + 0.5
    for rows_per_entry in (1, 5):
        keys = keys_for(rows, rows_per_entry, use_fp64)._replace(offsets=offsets)
        found, expected = scores.clone(), scores[:rows].clone()
        noise.add_cluster_noise(keys, found[:rows], lengths, members)
        noise.add_cluster_noise_naive(keys, expected, lengths, members)
        torch.testing.assert_close(found[:rows], expected, rtol=1e-5, atol=1e-5)
        untouched = (keys.idx_mapping < 1).repeat_interleave(rows_per_entry)
        assert torch.equal(found[:rows][untouched], scores[:rows][untouched]) and torch.equal(found[rows], scores[rows])
        assert not torch.isclose(found[:rows][~untouched], scores[:rows][~untouched]).any()


@pytest.mark.parametrize("reduced", [False, True])
def test_the_best_candidate_of_the_drawn_clusters_wins(reduced):
    """In sampled rows; others take the nearest clusters, whatever the length of their centroids."""
    hidden, weight, assets = make((20, 24, 30, 9, 6, (11, 12)), seed=2)
    assets = assets._replace(centroids=assets.centroids * torch.linspace(0.2, 3, 30)[:, None])
    offsets, keys = offsets_for(len(weight), reduced), keys_for(20)
    head, _ = heads(weight, assets, offsets, draws=True)
    noisy = noise.add_target_noise(keys._replace(offsets=offsets), hidden @ weight.t())
    ids = torch.arange(len(weight), device=DEVICE)
    keyed = noise.gumbel_noise_naive(
        keys.seeds[keys.idx_mapping], keys.positions, ids if offsets is None else ids + offsets
    )
    scores = naive.score_centroids(hidden, F.normalize(assets.centroids, dim=1).to(DEVICE))
    is_sampled = keys.idx_mapping >= 1
    stored = naive.score_centroids(hidden, assets.centroids.to(DEVICE))
    most = keyed[:, assets.members.to(DEVICE)].amax(dim=2)
    drawn = stored / keys.temperature[keys.idx_mapping, None] + most
    clusters = naive.select_clusters(torch.where(is_sampled[:, None], drawn, scores), assets.num_probes)
    nearest = naive.select_clusters(scores, assets.num_probes)
    assert (clusters[is_sampled.cpu()] != nearest[is_sampled.cpu()]).any(dim=1).all()
    best = [
        max(naive.candidates(row, assets.members, assets.special_token_ids), key=lambda token: float(line[token]))
        for row, line in zip(clusters, noisy, strict=True)
    ]
    assert torch.equal(head.choose(hidden, keys), head.to_target(torch.tensor(best, device=DEVICE)))
    assert torch.equal(head.candidates(hidden, keys, TOP_K)[1][:, 0], head.choose(hidden, keys))


def test_clusters_are_drawn_from_the_softmax_of_the_stored_centroids():
    """Pairs that are drawn without replacement, over 6,000 positions: chi-squared of 30 pairs, p above 1e-4."""
    rows, temperature = 6000, 0.7
    stored = torch.tensor([0.3, -0.5, 1.0, 0.0, 0.6, -1.0])
    lengths = torch.linspace(0.5, 2.0, 6)
    scores = (stored / lengths).repeat(rows, 1)
    members = torch.randperm(4096, generator=torch.Generator().manual_seed(0))[: 6 * 16].view(6, 16)
    slots, seeds = torch.zeros(rows, dtype=torch.int32), torch.tensor([11])
    keys = NoiseKeys(slots, torch.arange(rows), torch.tensor([temperature]), seeds)
    noise.add_cluster_noise_naive(keys, scores, lengths, members)
    first, second = scores.topk(2, dim=1).indices.unbind(dim=1)
    p = (stored / temperature).softmax(dim=0)
    pairs = p[:, None] * p[None, :] / (1 - p[:, None])
    off = ~torch.eye(6, dtype=torch.bool)
    seen = torch.bincount(first * 6 + second, minlength=36).view(6, 6)[off]
    expected = rows * pairs[off]
    assert expected.min() > 5 and ((seen - expected) ** 2 / expected).sum() < 67  # 29 degrees of freedom


# -- narrow centroids -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5])
def test_scaled_centroids_are_multiplied_by_their_scales(rows):
    hidden, _, assets = make((rows, 130, 40, 7, 5, ()))
    centroids = F.normalize(assets.centroids, dim=1).to(DEVICE)
    scales = torch.rand(40, device=DEVICE) + 0.5
    scores = torch.full((rows, 40), float(POISON), device=DEVICE)
    kernels.score_centroids(hidden=hidden, centroids=centroids, scores=scores, scales=scales)
    expected = naive.score_centroids(hidden, centroids) * scales
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-4)


def test_float8_centroids_probe_nearly_the_same_clusters(caplog):
    """Three bits of mantissa and a scale of its own leave each of 64 components within 1/16, the sum much closer."""
    hidden, weight, assets = make((24, 64, 60, 8, 12, ()), seed=3)
    exact = F.normalize(assets.centroids.to(DEVICE), dim=1)
    head = FlashHead(weight, assets, max_rows=24, centroid_dtype=NARROW)
    if DEVICE == "cpu":
        assert "has no float8_e4m3fn" in caplog.text and head._scales is None
        difference = (head._centroids - exact).abs()
        assert difference.max() > 0 and (difference <= exact.abs() / 16 + exact.abs().amax(dim=1)[:, None] / 400).all()
    plain = FlashHead(weight, assets, max_rows=24)
    assert (head.best_token(hidden) == plain.best_token(hidden)).float().mean() > 0.9


# -- launches -------------------------------------------------------------------------------------------------------


class Counting:
    """A kernel that notes its launches."""

    def __init__(self, kernel, launched):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        self.launched.append(self.kernel.__name__)
        return self.kernel[grid]


@pytest.mark.parametrize("rows", [1, 10])
def test_a_call_takes_four_launches_five_for_trees_and_one_more_a_noise(monkeypatch, rows):
    hidden, weight, assets = make((rows, 16, 8, 4, 2, (3,)))
    launched = []
    for module in (kernels, noise):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Counting(getattr(module, name), launched))
    for draws in (False, True):
        head = heads(weight, assets, None, draws=draws)[0]
        for keys, more in ((None, 0), (keys_for(rows), 1 + draws)):
            for call, arguments, usual in ((head.choose, (), 4), (head.candidates, (3,), 5)):
                launched.clear()
                call(hidden, keys, *arguments)
                assert len(launched) == usual + more, launched


COMPILE_FOR_HOPPER = """
from hopper import compile_only
compiled = compile_only()
import torch
from vllm_crossspec.drafting import noise
from vllm_crossspec.drafting.flashhead import kernels

def keys_of(rows, index, use_fp64, offsets):
    positions, seeds = torch.zeros(rows, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    slots = torch.zeros(rows, dtype=index)
    return noise.NoiseKeys(slots, positions, torch.ones(4), seeds, use_fp64, offsets=offsets)

def check(rows, candidates, *keys):
    packed = torch.zeros(rows, -(-candidates // kernels.SLOTS), dtype=torch.int64)
    tokens = torch.zeros(rows, candidates, dtype=torch.int32)
    noise.add_candidate_noise(keys_of(rows, *keys), torch.zeros(rows, candidates), tokens, packed)

def draw(rows, size, *keys):
    members = torch.zeros(300, size, dtype=torch.int32)
    noise.add_cluster_noise(keys_of(rows, *keys), torch.zeros(rows, 300), torch.ones(300), members)

check(1, 9488, torch.int32, False, None)
check(3, 4099, torch.int64, True, torch.zeros(32000, dtype=torch.int64))
draw(1, 16, torch.int32, False, None)
draw(3, 7, torch.int64, True, torch.zeros(32000, dtype=torch.int64))
for rows in (1, 8):
    kernels.score_centroids(
        hidden=torch.zeros(rows, 64, dtype=torch.bfloat16), centroids=torch.zeros(300, 64).to(torch.float8_e4m3fn),
        scores=torch.zeros(rows, 300), scales=torch.ones(300),
    )
wanted = {"_add_candidate_noise_kernel", "_add_cluster_noise_kernel", "_score_centroids_kernel"}
assert wanted <= set(compiled), sorted(compiled)
"""


@pytest.mark.nightly
def test_kernels_compile_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)
