"""What users may write in --speculative-config, and the one sentence that they get for anything else."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_crossspec.config.parse import is_ours, parse
from vllm_crossspec.config.schema import carried, settings_of

NATIVE_METHODS = {"eagle", "eagle3", "dflash", "ngram", "draft_model"}
NATIVE_KEYS = {
    "method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "attention_backend",
    "rejection_sample_method",
}  # fmt: skip
CHAIN = {"type": "chain"}
TWO = {"method": "whiflash", "drafters": {"eagle3": {"model": "m"}, "dflash": {"model": "m"}}}
CONFIGS = Path(__file__).parents[1] / "configs"


def parsed(**raw):
    return parse(raw, NATIVE_KEYS)


def one(method, **keys):
    return {"method": method, "model": "m", **keys}


def routed(**router):
    return TWO | {"router": router}


# What is written, and what it is refused with.
# fmt: off
REFUSED = [
    (one("eagle3", tre=CHAIN, tree=CHAIN), "unknown key 'tre'; did you mean 'tree'?"),
    (one("eagle3", tree={"type": "chian"}),
     r"tree.type: input should be 'chain', 'dynamic', 'best_first', 'continuity' or 'matches' \(got 'chian'\)"),
    (one("eagle3", tree={"typ": "chain"}), "unknown key 'tree.typ'; did you mean 'type'?"),
    ({"method": "eagle3", "tree": CHAIN}, "speculative_config.model is missing"),
    (one("eagle3", tree=CHAIN, num_speculative_tokens=0), "num_speculative_tokens: .*greater than"),
    (one("eagle3", drafters={}), "speculative_config.drafters belongs to method 'whiflash'"),
    (one("dflash", verification="macth"), "verification: input should be 'match' or 'rejection'"),
    ({"method": "whiflash"}, "speculative_config.drafters must name at least one drafter"),
    ({"method": "whiflash", "drafters": {}}, "speculative_config.drafters must name at least one drafter"),
    ({"method": "whiflash", "drafters": [{"type": "eagle3", "model": "m"}]},
     'drafters must be an object that names each drafter, as in {"eagle3": {"model": "FOLDER"}}'),
    ({"method": "whiflash", "drafters": {"eagle": {"model": "m"}}},
     "no drafter is called 'eagle'; did you mean 'eagle3'"),
    ({"method": "whiflash", "drafters": {"eagle3": {}}}, "speculative_config.drafters.eagle3.model is missing"),
    ({"method": "whiflash", "drafters": {"eagle3": "m"}}, "drafters.eagle3 must be an object with a `model`"),
    ({"method": "whiflash", "drafters": {"eagle3": {"model": "m"}}, "router": {"drafter": "dflash"}},
     "router.drafter is 'dflash', which is none of drafters"),
    (routed(policy="entropi"), "router.policy: input should be 'fixed', 'entropy'"),
    (routed(policy="neural"), "router.model is missing: policy 'neural' needs a router trained by"),
    (routed(policy="entropy", threshold=-1), "router.threshold must be nats of 0 or more"),
    (routed(policy="entropy", threshold=[1, 2]), "threshold has 2 numbers; 2 drafters need 1"),
    (routed(policy="neural", model="m", threshold=999), "threshold must be tokens between"),
    (routed(policy="fixed", threshold=1), "'fixed' takes neither model, thresholds, costs nor wait"),
    (routed(policy="fixed", wait=False), "'fixed' takes neither model, thresholds, costs nor wait"),
    (routed(policy="entropy", wait=False), "router.wait: false is for policy 'goodput' without a model"),
    (routed(policy="fixed", by_category={"math": 1}), "'fixed' takes neither model, thresholds, costs nor wait"),
    (routed(policy="entropy", by_category={"math": [1, 2]}),
     "router.by_category.math has 2 numbers; 2 drafters need 1"),
    (routed(policy="entropy", by_category={"math": -1}), "by_category.math must be nats of 0"),
    (routed(by_category={"math": 1}), "by_category.math: policy 'goodput' takes no thresholds"),
    (routed(by_category=1), 'router.by_category: should be a number, .* as in {"math": 0.5}'),
    (routed(by_category={"": 1}), "router.by_category: should be a number"),
    (routed(policy="neural", model="m", entropy_of="sampling"),
     "router.entropy_of is for policy 'entropy', or 'goodput' without a model"),
    (routed(policy="entropy", drafter="a"), "router.drafter belongs to policy 'fixed'"),
    (routed(policy="entropy", max_backlog=0), "router.max_backlog: input should be greater"),
    (TWO | {"verification": "rejection", "router": {"policy": "entropy"}}, "needs verification 'match'"),
    ({"method": "whiflash", "drafters": {"eagle3": {"model": "m"}}, "router": {"policy": "entropy"}},
     "router.policy 'entropy' chooses between drafters, and there is one"),
    (one("dflash", tree={"type": "dynamic"}),
     "tree.type 'dynamic' does not suit a dflash drafter; use 'best_first' or 'chain'"),
    (one("eagle3", tree={"num_nodes": 60}, verification="rejection"),
     "tree: vLLM's rejection sampler verifies chains only"),
    (one("eagle3", tree={"num_nodes": 256}), "tree.num_nodes: .*less than or equal to 255"),
    (one("eagle3", tree={"type": "chain", "depth": 3}), "tree.type 'chain' takes no depth"),
    (one("eagle3", tree={"top_k": 33}), "a dynamic tree takes at most 32"),
    (one("eagle3", tree=CHAIN, rejection_sample_method="synthetic"),
     "rejection_sample_method: it is about vLLM's rejection sampler; add \"verification\": \"rejection\""),
    (one("dflash", tree={"depth": 3}), "tree.depth: a best_first tree is as deep as"),
    (one("eagle3", tree={"type": "chain", "budget": "batch"}), "tree.budget 'batch' is not for a chain"),
    (one("dart", tree={"budget": "batch", "by_batch_size": {"1": 60}}), 'chose; set by_batch_size to "auto"'),
    (one("eagle3", tree={"budget": "all"}), "tree.budget: input should be 'batch' or 'request'"),
    (one("confu", tree={"num_nodes": 60, "budget": "batch"}),
     "is not for a confu drafter, whose rows come in pairs; leave it out"),
    (one("eagle3", tree={"by_batch_size": {"2": 60}}), "tree.by_batch_size must say from 1 running request on"),
    (one("eagle3", tree={"by_batch_size": {"8": 60, "1": "x"}}),
     'tree.by_batch_size: should be whole draft tokens by running requests as in {"1": 60}; "1": "x" is not'),
    (one("eagle3", tree={"by_batch_size": {"many": 60}}), 'tree.by_batch_size: should be whole .*; "many": 60 is not'),
    (routed(threshold="2"), "router.threshold: should be 'auto', a number, or a list of numbers"),
    (routed(threshold=[True]), "router.threshold: should be 'auto', a number, or a list of numbers"),
    (routed(lazy="no"), r"router.lazy: input should be a valid boolean \(got 'no'\)"),
    (one("eagle3", tree=60), r"speculative_config.tree: should be an object \(got 60\)"),
    (one("dart", ngram=3), r"ngram: should be a path or an object \(got 3\)"),
    (one("dart", num_nodes=9), "'num_nodes'; it belongs into 'tree', as in \"tree\": {"),
    (TWO | {"num_nodes": 9}, "'num_nodes'; it belongs into 'drafters.NAME.tree', as in \"tree\": {\"num_nodes\""),
    (TWO | {"threshold": 1}, "'threshold'; it belongs into 'router', as in \"router\": {\"threshold\""),
    (one("eagle3", tree=CHAIN, draft_sample_method="probabilistic"),
     "draft_sample_method 'probabilistic' needs verification 'rejection', which is 'match'"),
    (one("eagle3", verification="rejection", draft_sample_method="coupled"),
     "draft_sample_method 'coupled' needs verification 'match', which is 'rejection'"),
    (one("dart", ngram={"modle": "s"}), "unknown key 'ngram.modle'; did you mean 'model'"),
    (one("dart", ngram={"model": "s", "placement": "disk"}), "ngram.placement: input should be 'host' or 'gpu'"),
    (one("dart", ngram={"model": "s", "order": 7}), "ngram.order: input should be less than or equal to 5"),
    (one("dart", ngram="s", tree=CHAIN), "ngram helps 'best_first' and 'continuity' trees, and this drafter drafts"),
    (one("dart", tree={"ngram_weight": 0.5}),
     "tree.ngram_weight needs n-grams; name a store in speculative_config.ngram"),
    (one("dart", tree={"type": "dynamic"}), "tree.type 'dynamic' does not suit a dart drafter; use 'continuity' or"),
    (one("dart", tree={"depth": 4}),
     "tree.depth: a continuity tree is as deep as num_speculative_tokens; use that key"),
    (one("dart", tree={"type": "best_first", "beam_width": 4}), "tree.beam_width is for continuity trees, not for"),
    (one("dart", tree={"top_k": 100, "beam_width": 100}), "10000 prefixes a level; use at most 4096"),
    (one("dart", verification="rejection"), "verifies chains only; leave out verification, or use"),
    (one("dart", tree=CHAIN, verification="rejection", draft_sample_method="probabilistic"),
     "'probabilistic' is not for a dart drafter; use 'greedy'"),
    (one("dart", draft_lenght=4), "unknown key 'draft_lenght'"),
    (one("eagle3", head={"probes": 4}), "unknown key 'head.probes'"),
    (one("eagle3", head={"num_probes": 0}), "head.num_probes: input should be greater than or equal to 1"),
    (one("flashhead", head={"type": "dense"}), "head.type: input should be 'flashhead'"),
    (one("eagle3", head="a", tree=CHAIN, verification="rejection", draft_sample_method="probabilistic"),
     "'probabilistic' needs every token's probability, which speculative_config.head does not compute; use"),
    (one("draft_model", tree={"type": "chain", "num_nodes": 9}), "type 'chain' takes no depth, top_k or num_nodes"),
    (one("flashhead", tree={"type": "best_first"}),
     "'best_first' does not suit a flashhead drafter; use 'dynamic' or 'chain'"),
    (one("eagle3", tree=CHAIN, adaptive="f"), "adaptive sizes 'dynamic' trees, and this drafter drafts"),
    (one("dart", adaptive="f"), "adaptive sizes 'dynamic' trees, and this drafter drafts 'continuity'"),
    (one("eagle3", tree={"num_nodes": 9}, adaptive={"modle": "f"}), "'adaptive.modle'; did you mean"),
    (one("eagle3", tree={"num_nodes": 9}, adaptive={"model": "f", "max_extension": -1}),
     "adaptive.max_extension: input should be greater than or equal to 0"),
    *((one("eagle3", tree=tree), f"speculative_config.tree.{next(iter(tree))}: ") for tree in (
        {"num_nodes": "12"}, {"num_nodes": True}, {"depth": "4"}, {"top_k": 2.5}, {"by_batch_size": {"1": True}},
    )),
    ({"method": "whiflash", "drafters": {"draft_model": {"model": "a"}, "eagle3": {"model": "b"}}},
     "drafters.draft_model: a draft_model drafter reads no states of the target"),
]
# fmt: on


@pytest.mark.parametrize("raw", [
    one("eagle3", tree=CHAIN), one("dflash", verification="rejection"), {"method": "whiflash", "drafters": {}},
    one("dart"), one("dflash", ngram="s"), one("flashhead"), one("draft_model", head="a"),
])  # fmt: skip
def test_our_dictionaries_are_ours(raw):
    assert is_ours(raw, NATIVE_METHODS, NATIVE_KEYS) is True


@pytest.mark.parametrize("raw", [
    one("eagle3", num_speculative_tokens=3), {"method": "ngram", "num_speculative_tokens": 3},
    {"model": "m", "num_speculative_tokens": 3}, one("draft_model", num_speculative_tokens=3),
    {"method": "eagle", "prompt_lookup": 3},  # a key of neither is vLLM's to refuse
])  # fmt: skip
def test_others_are_vllms(raw):
    assert is_ours(raw, NATIVE_METHODS, NATIVE_KEYS) is False


@pytest.mark.parametrize("installed", [True, False])
def test_a_name_that_vllm_cannot_run_here_is_ours(tmp_path, monkeypatch, installed):
    if installed:
        (tmp_path / "arctic_inference").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
    natives = {*NATIVE_METHODS, "suffix", "ngram"}
    raw = {"method": "suffix", "num_speculative_tokens": 6}
    assert is_ours(raw, natives, NATIVE_KEYS) is not installed
    assert is_ours(raw | {"tree": CHAIN}, natives, NATIVE_KEYS)
    assert not is_ours(raw | {"method": "ngram"}, natives, NATIVE_KEYS)
    if not installed:
        drafter = parsed(**raw).drafters["suffix"]
        assert (drafter.tree.type, drafter.num_speculative_tokens) == ("matches", 6)


def test_single_drafter_becomes_one_entry():
    config = parsed(method="eagle3", model="m", num_speculative_tokens=4, tree=CHAIN, attention_backend="X")
    assert list(config.drafters) == ["eagle3"] and config.active == "eagle3"
    drafter = config.drafters["eagle3"]
    assert (drafter.kind, drafter.model, drafter.num_speculative_tokens) == ("eagle3", "m", 4)
    assert drafter.native == {"attention_backend": "X"}


def test_several_drafters_and_the_one_that_drafts():
    drafters = {"fast": {"type": "dflash", "model": "a"}, "eagle3": {"model": "b"}}
    config = parsed(method="whiflash", drafters=drafters, router={"policy": "fixed", "drafter": "eagle3"})
    assert [d.kind for d in config.drafters.values()] == ["dflash", "eagle3"]
    assert config.active == "eagle3"


def test_an_ngram_store_is_a_path_or_its_settings():
    drafter = parsed(method="dart", model="m", ngram="store").drafters["dart"]
    assert drafter.ngram.model == "store" and drafter.ngram.placement == "gpu" and drafter.ngram.order is None
    settings = {"model": "store", "placement": "host", "order": 2, "backoff": 0.4}
    drafter = parsed(method="dflash", model="m", tree={"type": "continuity"}, ngram=settings).drafters["dflash"]
    assert (drafter.ngram.placement, drafter.ngram.order, drafter.ngram.backoff) == ("host", 2, 0.4)


def test_a_head_is_a_path_or_its_settings_and_flashhead_always_has_one():
    assert parsed(method="eagle3", model="m", head="a").drafters["eagle3"].head.model == "a"
    head = parsed(method="flashhead", model="m", head={"num_probes": 9}).drafters["flashhead"].head
    assert (head.type, head.model, head.num_probes) == ("flashhead", None, 9)
    assert parsed(method="flashhead", model="m").drafters["flashhead"].head.model is None
    assert parsed(method="draft_model", model="m", tree=CHAIN).drafters["draft_model"].head is None


def test_routers():
    config = parsed(**TWO)
    assert config.router.policy == "goodput" and config.is_routed
    # Autoregressive drafters come first in routing order, whatever the order they are written in.
    turned = TWO | {"drafters": dict(reversed(TWO["drafters"].items()))}
    assert parsed(**turned).routing_order == ("eagle3", "dflash")
    three = TWO["drafters"] | {"other": {"type": "eagle3", "model": "m"}}
    config = parsed(method="whiflash", drafters=three, router={"policy": "entropy", "threshold": [2, 1]})
    assert config.routing_order == ("eagle3", "other", "dflash") and config.router.threshold == (2, 1)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (one("eagle3", tree={}), "chain"),
        (one("eagle3", tree={"num_nodes": 30}), "dynamic"),
        (one("dflash", tree={"num_nodes": 30}), "best_first"),
        (one("dflash", tree={"num_nodes": 9}, ngram="s"), "best_first"),
        (one("dflash", tree=CHAIN), "chain"),
        (one("dart"), "continuity"),
        (one("dart", tree={"num_nodes": 20}), "continuity"),
        (one("dart", tree={"type": "best_first"}), "best_first"),
        (one("dart", tree=CHAIN), "chain"),
        (one("draft_model", tree={"num_nodes": 9}), "dynamic"),
        (one("flashhead"), "chain"),
        (one("flashhead", tree={"by_batch_size": {"1": 3}}), "chain"),
    ],
)
def test_a_size_asks_for_the_drafters_own_kind_of_tree(spec, kind):
    config = parsed(**spec)
    assert config.drafters[spec["method"]].tree.type == kind and config.has_trees == (kind != "chain")


def test_settings_survive_the_way_to_the_workers():
    config = parsed(method="dflash", model="m", tree=CHAIN)
    engine = SimpleNamespace(additional_config=pickle.loads(pickle.dumps(carried(config))))
    assert settings_of(engine) == config and json.dumps(carried(config)) == json.dumps(engine.additional_config)


@pytest.mark.parametrize(("raw", "sentence"), REFUSED)
def test_bad_settings_get_one_sentence(raw, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        parsed(**raw)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["eagle3", "dflash", "confu", "draft_model", "whiflash"])
@pytest.mark.parametrize("wrong", [5000, 256, "5", True, 5.5])
def test_draft_tokens_are_a_sensible_whole_number(method, wrong):
    rest = {"model": "m", "tree": CHAIN} if method != "whiflash" else {"drafters": TWO["drafters"]}
    with pytest.raises(
        ValueError, match=r"speculative_config.num_speculative_tokens: input should be .*\(got "
    ) as caught:
        parsed(method=method, num_speculative_tokens=wrong, **rest)
    assert "\n" not in str(caught.value)
    assert parsed(method=method, num_speculative_tokens=5, **rest)


def test_draft_tokens_that_are_levels_are_as_few_as_levels():
    sentence = "num_speculative_tokens is 65, and this drafter's drafts are at most 64 levels deep; use 64 or less"
    for raw in (
        {"method": "eagle3", "model": "m", "tree": {"num_nodes": 9}, "num_speculative_tokens": 65},
        {"method": "confu", "model": "m", "num_speculative_tokens": 65},
        TWO | {"drafters": {**TWO["drafters"], "confu": {"model": "m"}}, "num_speculative_tokens": 65},
    ):
        with pytest.raises(ValueError, match=sentence):
            parsed(**raw)
        assert parsed(**raw | {"num_speculative_tokens": 64})
    assert parsed(method="eagle3", model="m", tree={"num_nodes": 9, "depth": 8}, num_speculative_tokens=65)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"method": "eagle3", "three": {"num_nodes": 60}}, "unknown key 'three'; did you mean 'tree'?"),
        ({"method": "eagle3", "num_nodes": 60}, "it belongs into 'tree', as in \"tree\": {\"num_nodes\": ...}"),
        ({"method": "draft_model", "num_probes": 60}, "unknown key 'num_probes'; it belongs into 'head'"),
        ({"tree": {"num_nodes": 60}}, 'speculative_config.tree is for the methods .*eagle3.*; the "method" is missing'),
        ({"method": "eagle", "tree": {}}, "speculative_config.tree is for the methods .*; method 'eagle' has none"),
        ({"method": "eagel3"}, "unknown method 'eagel3'; did you mean 'eagle3'"),
        ({"method": ["eagle3"]}, r"speculative_config.method is \['eagle3'\]; give the name of a method"),
    ],
)  # fmt: skip
def test_keys_and_methods_of_nobody_are_refused_before_it_is_told_whose_they_are(raw, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        is_ours({"model": "m", **raw}, NATIVE_METHODS, NATIVE_KEYS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_configurations_parse(file):
    raw = json.loads(file.read_text())
    assert is_ours(raw, NATIVE_METHODS, NATIVE_KEYS)
    for name, drafter in parse(raw, NATIVE_KEYS).drafters.items():
        assert name in (drafter.kind, "chain", "plain")
