"""A kind of draft tree that another package brings: its settings are checked, and DFlash drafts it in an engine."""

import json
import pickle
from types import SimpleNamespace

import engines
import pytest
from other_packages import package

from vllm_crossspec.config.parse import parse
from vllm_crossspec.config.schema import carried, settings_of
from vllm_crossspec.frontend.resolve import resolve_tree
from vllm_crossspec.kinds.tree import REGISTRY, tree_kinds

STAR = '''
from types import MappingProxyType
from pydantic import Field, StrictInt
from vllm_crossspec.api import TreeConfig, TreeKind


class StarConfig(TreeConfig):
    arms: StrictInt | None = Field(None, ge=1, le=8)

    def check(self, key, has_ngrams):
        if self.arms and self.num_nodes and self.arms > self.num_nodes:
            raise ValueError(f"{key}.arms is {self.arms}, and num_nodes {self.num_nodes}; use fewer arms")

    def options(self, has_ngrams):
        return {"arms": self.arms}


class StarTree:
    """The likeliest tokens of the next position, and nothing behind them."""

    def __init__(self, *, arms, **sizes):
        self.arms = arms

    def build(self, *, log_probs, tokens, contexts, out):
        num_reqs = len(tokens)
        for kept, given in ((out.tokens, tokens), (out.log_probs, log_probs)):
            kept[:num_reqs].zero_()
            kept[:num_reqs, : self.arms] = given[:, 0, : self.arms]
        out.parents[:num_reqs].zero_()
        out.sizes[:num_reqs].fill_(self.arms)


KIND = TreeKind(
    name="star",
    builder="stars:StarTree",
    needs="marginals",
    defaults=MappingProxyType({"num_nodes": 4, "arms": 3}),
    settings=StarConfig,
    instead=MappingProxyType({"depth": "{key}.depth: a {type} has one level; leave it out"}),
)
'''
DFLASH = {"method": "dflash", "model": str(engines.DFLASH)}


@pytest.fixture(scope="module")
def star(tmp_path_factory):
    with package(tmp_path_factory.mktemp("site") / "stars", STAR, registry=REGISTRY, star="stars:KIND"):
        yield


def drafter_of(**tree):
    return parse({**DFLASH, "tree": {"type": "star", **tree}}, ["model"]).drafters["dflash"]


def test_its_settings_are_its_own_and_ride_to_the_workers(star):
    assert tree_kinds()[-1] == "star"
    drafter = drafter_of(num_nodes=6, by_batch_size={"1": 6})
    tree = resolve_tree(drafter)
    assert (tree.type, tree.num_nodes, tree.arms, tree.top_k) == ("star", 6, 3, 6)
    settings = parse({**DFLASH, "tree": {"type": "star"}}, ["model"]).model_copy(update={"drafters": {"a": drafter}})
    found = settings_of(SimpleNamespace(additional_config=pickle.loads(pickle.dumps(carried(settings)))))
    assert found == settings and type(found.drafters["a"].tree) is type(tree)
    assert "arms=" in json.dumps(carried(settings)), "what vLLM hashes"


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"arms": 9}, r"tree.arms: input should be less than or equal to 8 \(got 9\)"),
        ({"arms": 5, "num_nodes": 4}, "tree.arms is 5, and num_nodes 4; use fewer arms"),
        ({"amrs": 2}, "unknown key 'tree.amrs'; did you mean 'arms'?"),
        ({"depth": 2}, "tree.depth: a star has one level; leave it out"),
        ({"beam_width": 2}, "tree.beam_width is for continuity trees, not for 'star'; leave it out"),
        ({"type": "dynamic", "arms": 2}, "tree.type 'dynamic' does not suit a dflash drafter"),
        ({"type": "best_first", "arms": 2}, "unknown key 'tree.arms'"),
        ({"type": "ster"}, "input should be 'chain', .* 'matches' or 'star' "),
    ],
)
def test_its_settings_are_checked(star, tree, sentence):
    with pytest.raises(ValueError, match=f"speculative_config[.:].*{sentence}"):
        drafter_of(**tree)


def test_a_broken_package_is_named(tmp_path):
    with package(tmp_path / "comets", "KIND = 3", registry=REGISTRY, comet="comets:KIND"):
        with pytest.raises(ValueError, match="tree.type: the tree 'comet' of package comets is a int; .* a TreeKind"):
            drafter_of(type="comet")
        assert resolve_tree(drafter_of(type="best_first")).num_nodes == 60


@pytest.mark.e2e
def test_text_is_plains(star):
    plain = engines.plain(3, 16)
    with engines.engine({**DFLASH, "tree": {"type": "star", "arms": 4}}) as llm:
        assert engines.generate(llm, engines.prompts(3), max_tokens=16) == plain
        (counted,) = llm.collective_rpc("crossspec_stats")[0].values()
    assert 0 < counted["accepted_tokens"] <= counted["drafts"], "a draft is one level deep"
