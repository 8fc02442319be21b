"""FlashHead as the output layer of drafters in the engine: plain's text, the dense head's acceptance, broken heads."""

import contextlib
from typing import NamedTuple

import engines
import pytest
import sabotage
import torch

from crossspec_tools.flashhead.build import cluster
from crossspec_tools.flashhead.files import read_output_embedding, save_assets
from vllm_crossspec.drafting.flashhead.assets import Assets, group

pytestmark = pytest.mark.e2e

SHIPPED = engines.POCKET / "flashhead-eagle3"
"""Made by the command that docs/results/flashhead.md states, with as many probes as it found."""
SEEDED = {"temperature": 0.8, "seed": 7}
SPECS = {
    "eagle3": engines.ours("eagle3", engines.EAGLE3) | {"head": str(SHIPPED)},
    "eagle3-tree": engines.tree("eagle3", engines.EAGLE3) | {"head": str(SHIPPED)},
    "dflash": engines.ours("dflash", engines.DFLASH),
    "dflash-tree": engines.tree("dflash", engines.DFLASH, num_nodes=24),
    "dart-tree": engines.tree("dart", engines.DART, num_nodes=24),
    "confu-tree": engines.tree("confu", engines.CONFU, num_nodes=24),
}
SHARED = {
    "dflash": engines.TARGET,
    "dflash-tree": engines.TARGET,
    "dart-tree": engines.DART,
    "confu-tree": engines.CONFU,
}
"""Whose output embedding a drafter's head is made of where nothing is shipped: DFlash has none of its own."""


class Run(NamedTuple):
    """What an engine said, and accepted tokens a round of the greedy requests and of the seeded ones."""

    greedy: list[list[int]]
    seeded: list[list[int]]
    accepted: tuple[float, float]


def run(llm, how=sabotage.mend, count=8, max_tokens=16):
    """Both scenarios, the seeded one with half the requests, with one part of the worker replaced."""
    llm.collective_rpc(how)
    try:
        before = engines.counts(llm)
        greedy = engines.generate(llm, engines.prompts(count), max_tokens=max_tokens)
        between = engines.counts(llm)
        seeded = engines.generate(llm, engines.prompts(count // 2), max_tokens=max_tokens, **SEEDED)
        after = engines.counts(llm)
    finally:
        llm.collective_rpc(sabotage.mend)
    pairs = ((before, between), (between, after))
    return Run(greedy, seeded, tuple((b.accepted - a.accepted) / max(b.drafts - a.drafts, 1) for a, b in pairs))


@pytest.fixture(scope="module")
def plain():
    """The target alone: greedy text of all 24 prompts, seeded text of half of them."""
    return engines.plain(24), engines.plain(12, **SEEDED)


def expected(plain, count=8, max_tokens=16):
    """What :func:`run` must give: the first tokens of plain's longer texts."""
    return [[tokens[:max_tokens] for tokens in part] for part in (plain[0][:count], plain[1][: count // 2])]


class QuickClusters(dict):
    """Folders of quick clusters of the other output embeddings, by model. Each is made when it is first asked for."""

    def __init__(self, tmp_path_factory):
        self.tmp_path_factory = tmp_path_factory

    def __missing__(self, model):
        weight = read_output_embedding(model)
        found = cluster(weight, cluster_size=8, iterations=3)
        members = group(found.assignments, len(weight) // 8)
        self[model] = folder = self.tmp_path_factory.mktemp("flashhead") / model.name
        save_assets(folder, Assets(found.centroids, members, (0, 1, 2, 3), len(members) // 4, {}))
        return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return QuickClusters(tmp_path_factory)


@contextlib.contextmanager
def started(name, made, **head):
    spec = dict(SPECS[name])
    if name in SHARED:
        spec["head"] = {"model": str(made[SHARED[name]])}
    if head:
        spec["head"] = {"model": spec["head"] if isinstance(spec["head"], str) else spec["head"]["model"], **head}
    with engines.engine(spec, **engines.LARGE_STEPS) as llm:
        yield llm


BY_DAY = ("eagle3-tree", "dart-tree")
"""What `make test` starts; `make nightly` starts all."""


def by_tier(names):
    return [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in names]


@pytest.fixture(scope="module", params=by_tier(SPECS))
def named(request, plain, made):
    """(name, engine) of every drafter with a head."""
    with started(request.param, made) as llm:
        yield request.param, llm


def test_text_is_plains(named, plain):
    _, llm = named
    found = run(llm)
    assert [found.greedy, found.seeded] == expected(plain)
    assert min(found.accepted) > 0.4


def test_with_all_clusters_probed_drafts_are_the_dense_heads(named, plain):
    """On the very states: first choices and candidates, with the target's noise and without.

    Sums of 256 float32 products in another order may exchange two candidates of a tree that all but tie.
    """
    name, llm = named
    found = run(llm, sabotage.probe_everything, count=4, max_tokens=16)
    assert [found.greedy, found.seeded] == expected(plain, 4, 16)
    compared = llm.collective_rpc(read_comparison)[0]
    assert compared["rows"] > 100 and compared["furthest"] < 1e-3
    assert compared["different"] <= (compared["tokens"] // 10_000 if "tree" in name else 0), compared


def test_shuffled_clusters_are_slow_and_never_wrong(named, plain):
    _, llm = named
    whole, broken = run(llm, count=4), run(llm, sabotage.shuffle_clusters, count=4)
    assert [broken.greedy, broken.seeded] == expected(plain, 4)
    assert broken.accepted[0] < 0.7 * whole.accepted[0] and broken.accepted[1] < 0.7 * whole.accepted[1]


@pytest.mark.nightly
def test_noise_of_another_position_costs_sampled_drafts_only(named, plain):
    """What couples a head's candidates is the target's own noise."""
    _, llm = named
    whole, broken = run(llm), run(llm, sabotage.foresee_other_noise)
    assert [broken.greedy, broken.seeded] == expected(plain)
    assert broken.accepted[0] == whole.accepted[0] and broken.accepted[1] < 0.9 * whole.accepted[1]


@pytest.mark.nightly
@pytest.mark.parametrize("named", [name for name in SPECS if name not in SHARED], indirect=True)
def test_acceptance_is_the_dense_heads(named, plain):
    """With the shipped clusters at their own number of probes: at most 2 % fewer tokens a round, over 24 prompts.

    That is for greedy text, as the clusters' recall is. The winner of a sampled round lies outside the probed clusters
    as often as the drafter's own distribution has mass there, so that seeded text may lose more.
    """
    name, llm = named
    sizes = {"count": 24, "max_tokens": 40}
    mine, dense = run(llm, **sizes), run(llm, sabotage.use_dense_head, **sizes)
    assert [mine.greedy, mine.seeded] == [dense.greedy, dense.seeded] == expected(plain, 24, 40)
    print(name, "accepted tokens a round:", mine.accepted, "dense", dense.accepted)
    for own, whole, least in zip(mine.accepted, dense.accepted, (0.98, 0.9), strict=True):
        assert 1 + own >= least * (1 + whole)


def test_the_targets_head_is_its_own(named):
    _, llm = named
    assert llm.collective_rpc(describe_target) == [[]]


@pytest.mark.parametrize("name", by_tier(["eagle3", "eagle3-tree"]))
def test_every_setting_gives_plains_text(name, plain, made):
    """Few probes, drawn clusters, a second copy, narrow centroids."""
    head = {"num_probes": 12, "clusters": "drawn", "grouped": True, "centroid_dtype": "float8_e4m3fn"}
    with started(name, made, **head) as llm:
        found = run(llm)
    assert [found.greedy, found.seeded] == expected(plain)
    assert found.accepted[0] > 0.3


@pytest.mark.parametrize(
    ("extra", "options", "sentence"),
    [
        ({"head": "nowhere"}, {}, "speculative_config.head.model: there is no folder 'nowhere'"),
        ({"head": {"model": str(SHIPPED), "num_probes": 400}}, {}, "speculative_config.head.num_probes 400: give 1 to"),
        (
            {"head": {"model": str(SHIPPED), "grouped": True}},
            {"tensor_parallel_size": 2},
            "tensor parallelism with a FlashHead's copy by clusters",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(extra, options, sentence):
    from vllm import EngineArgs

    if options and torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("vLLM refuses two ranks on one GPU before we do")
    spec = engines.ours("eagle3", engines.EAGLE3) | extra
    arguments = EngineArgs(
        str(engines.TARGET), dtype="float32", max_model_len=512, speculative_config=spec, enforce_eager=True, **options
    )
    with pytest.raises(ValueError, match=sentence):
        arguments.create_engine_config()


# -- sent into workers ----------------------------------------------------------------------------------------------


def read_comparison(worker):
    return worker.compared


def describe_target(worker):
    """What of a FlashHead hangs on the target; and the head must be over the drafter's embedding, not a changed one."""
    from vllm_crossspec.drafting.flashhead.head import FlashHead
    from vllm_crossspec.drafting.heads import DraftHead

    runner = worker.model_runner
    target, proposers = runner.model, runner.speculator.proposers
    found = [
        (type(module).__name__, name)
        for module in target.modules()
        for name, value in vars(module).items()
        if isinstance(value, DraftHead | FlashHead)
    ]
    if "compute_logits" in vars(target) or not type(target).compute_logits.__module__.startswith("vllm."):
        found.append("compute_logits")
    for proposer in proposers.values():
        weight, tokens = proposer.model.lm_head.weight, proposer.head.head._tokens
        if not torch.equal(tokens.weight, weight[: len(tokens.weight)]):
            found.append("weight")
    return found
