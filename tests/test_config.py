"""What users may write in --speculative-config, and the one sentence that they get for anything else."""

import json
from pathlib import Path

import pytest

from vllm_crossspec.config import CrossSpecConfig
from vllm_crossspec.config_parsing import is_ours, parse

NATIVE_METHODS = {"eagle", "eagle3", "dflash", "ngram", "draft_model"}
NATIVE_KEYS = {
    "method",
    "model",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "attention_backend",
    "rejection_sample_method",
}
CHAIN = {"type": "chain"}
TWO = {"method": "whiflash", "drafters": {"eagle3": {"model": "m"}, "dflash": {"model": "m"}}}
CONFIGS = Path(__file__).parents[1] / "configs"


def parsed(**raw):
    return parse(raw, NATIVE_KEYS)


@pytest.mark.parametrize(
    ("raw", "ours"),
    [
        ({"method": "eagle3", "model": "m", "num_speculative_tokens": 3}, False),
        ({"method": "eagle3", "model": "m", "tree": CHAIN}, True),
        ({"method": "dflash", "model": "m", "verification": "rejection"}, True),
        ({"method": "ngram", "num_speculative_tokens": 3}, False),
        ({"model": "m", "num_speculative_tokens": 3}, False),
        ({"method": "whiflash", "drafters": {}}, True),
        ({"method": "dart", "model": "m"}, True),
        ({"method": "dflash", "model": "m", "ngram": "s"}, True),
        ({"method": "flashhead", "model": "m"}, True),
        ({"method": "draft_model", "model": "m", "head": "a"}, True),
        ({"method": "draft_model", "model": "m", "num_speculative_tokens": 3}, False),
    ],
)
def test_only_our_dictionaries_are_ours(raw, ours):
    assert is_ours(raw, NATIVE_METHODS, NATIVE_KEYS) is ours


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


def test_dart_drafts_trees_unless_told_otherwise():
    assert parsed(method="dart", model="m").drafters["dart"].tree.type == "continuity"
    assert parsed(method="dart", model="m", tree={"num_nodes": 20}).drafters["dart"].tree.type == "continuity"
    assert parsed(method="dart", model="m", tree={"type": "best_first"}).drafters["dart"].tree.type == "best_first"
    assert parsed(method="dart", model="m", tree=CHAIN).drafters["dart"].tree.is_chain


def test_an_ngram_store_is_a_path_or_its_settings():
    drafter = parsed(method="dart", model="m", ngram="store").drafters["dart"]
    assert drafter.ngram.model == "store" and drafter.ngram.placement == "gpu" and drafter.ngram.order is None
    settings = {"model": "store", "placement": "host", "order": 2, "backoff": 0.4}
    drafter = parsed(method="dflash", model="m", tree={"type": "continuity"}, ngram=settings).drafters["dflash"]
    assert (drafter.ngram.placement, drafter.ngram.order, drafter.ngram.backoff) == ("host", 2, 0.4)
    assert parsed(method="dflash", model="m", tree={"num_nodes": 9}, ngram="s").drafters["dflash"].tree.type == (
        "best_first"
    )


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"ngram": {"modle": "s"}}, "unknown key 'ngram.modle'; did you mean 'model'"),
        ({"ngram": {"model": "s", "placement": "disk"}}, "ngram.placement: input should be 'host' or 'gpu'"),
        ({"ngram": {"model": "s", "order": 7}}, "ngram.order: input should be less than or equal to 5"),
        ({"ngram": "s", "tree": CHAIN}, "ngram helps 'best_first' and 'continuity' trees, and this drafter drafts"),
        ({"tree": {"ngram_weight": 0.5}}, "tree.ngram_weight needs n-grams; name a store in speculative_config.ngram"),
        ({"tree": {"type": "dynamic"}}, "tree.type 'dynamic' does not suit a dart drafter; use 'continuity' or"),
        ({"tree": {"depth": 4}}, "tree.depth: a continuity tree is as deep as num_speculative_tokens; use that key"),
        ({"tree": {"type": "best_first", "beam_width": 4}}, "tree.beam_width is for continuity trees, not for"),
        ({"tree": {"top_k": 100, "beam_width": 100}}, "10000 prefixes a level; use at most 4096"),
        ({"verification": "rejection"}, "verifies chains only; leave out verification, or use"),
        (
            {"tree": CHAIN, "verification": "rejection", "draft_sample_method": "probabilistic"},
            "'probabilistic' is not for a dart drafter; use 'greedy'",
        ),
        ({"draft_lenght": 4}, "unknown key 'draft_lenght'"),
    ],
)
def test_bad_dart_settings_get_one_sentence(raw, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        parsed(method="dart", model="m", **raw)
    assert "\n" not in str(caught.value)


def test_a_head_is_a_path_or_its_settings_and_flashhead_always_has_one():
    assert parsed(method="eagle3", model="m", head="a").drafters["eagle3"].head.model == "a"
    head = parsed(method="flashhead", model="m", head={"num_probes": 9}).drafters["flashhead"].head
    assert (head.type, head.model, head.num_probes) == ("flashhead", None, 9)
    assert parsed(method="flashhead", model="m").drafters["flashhead"].head.model is None
    assert parsed(method="draft_model", model="m", tree=CHAIN).drafters["draft_model"].head is None


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"method": "eagle3", "head": {"probes": 4}}, "unknown key 'head.probes'"),
        (
            {"method": "eagle3", "head": {"num_probes": 0}},
            "head.num_probes: input should be greater than or equal to 1",
        ),
        ({"method": "flashhead", "head": {"type": "dense"}}, "head.type: input should be 'flashhead'"),
        (
            {
                "method": "eagle3",
                "head": "a",
                "tree": CHAIN,
                "verification": "rejection",
                "draft_sample_method": "probabilistic",
            },
            "'probabilistic' needs every token's probability, which speculative_config.head does not compute; use",
        ),
        (
            {"method": "draft_model", "tree": {"type": "chain", "num_nodes": 9}},
            "type 'chain' takes no depth, top_k or num_nodes",
        ),
        (
            {"method": "flashhead", "tree": {"type": "best_first"}},
            "'best_first' does not suit a flashhead drafter; use 'dynamic' or 'chain'",
        ),
        (
            {"method": "eagle3", "tree": CHAIN, "adaptive": "f"},
            "adaptive sizes 'dynamic' trees, and this drafter drafts",
        ),
        ({"method": "dart", "adaptive": "f"}, "adaptive sizes 'dynamic' trees, and this drafter drafts 'continuity'"),
        ({"method": "eagle3", "tree": {"num_nodes": 9}, "adaptive": {"modle": "f"}}, "'adaptive.modle'; did you mean"),
        (
            {"method": "eagle3", "tree": {"num_nodes": 9}, "adaptive": {"model": "f", "max_extension": -1}},
            "adaptive.max_extension: input should be greater than or equal to 0",
        ),
    ],
)
def test_bad_heads_and_adaptive_trees_get_one_sentence(raw, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        parsed(model="m", **raw)
    assert "\n" not in str(caught.value)


def test_sizes_of_a_draft_models_tree_make_it_dynamic():
    """As an EAGLE-3 drafter's; where nothing is said it drafts chains."""
    assert parsed(method="draft_model", model="m", tree={"num_nodes": 9}).drafters["draft_model"].tree.type == "dynamic"
    assert parsed(method="flashhead", model="m").drafters["flashhead"].tree.is_chain
    assert parsed(method="flashhead", model="m", tree={"by_batch_size": {"1": 3}}).drafters["flashhead"].tree.is_chain


def test_a_standalone_draft_model_drafts_alone():
    drafters = {"draft_model": {"model": "a"}, "eagle3": {"model": "b"}}
    with pytest.raises(ValueError, match="drafters.draft_model: a draft_model drafter reads no states of the target"):
        parsed(method="whiflash", drafters=drafters)


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
    ("method", "tree", "kind"),
    [
        ("eagle3", {}, "chain"),
        ("eagle3", {"num_nodes": 30}, "dynamic"),
        ("dflash", {"num_nodes": 30}, "best_first"),
        ("dflash", {"type": "chain"}, "chain"),
    ],
)
def test_a_size_asks_for_the_drafters_own_kind_of_tree(method, tree, kind):
    config = parsed(method=method, model="m", tree=tree)
    assert config.drafters[method].tree.type == kind
    assert config.has_trees == (kind != "chain")


def test_settings_survive_the_way_to_the_workers():
    config = parsed(method="dflash", model="m", tree=CHAIN)
    assert CrossSpecConfig(**config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (
            {"method": "eagle3", "model": "m", "tre": CHAIN, "tree": CHAIN},
            "unknown key 'tre'; did you mean 'tree'?",
        ),
        (
            {"method": "eagle3", "model": "m", "tree": {"type": "chian"}},
            r"tree.type: input should be 'chain', 'dynamic', 'best_first', 'continuity' or 'matches' \(got 'chian'\)",
        ),
        (
            {"method": "eagle3", "model": "m", "tree": {"typ": "chain"}},
            "unknown key 'tree.typ'; did you mean 'type'?",
        ),
        ({"method": "eagle3", "tree": CHAIN}, "speculative_config.model is missing"),
        (
            {"method": "eagle3", "model": "m", "tree": CHAIN, "num_speculative_tokens": 0},
            "num_speculative_tokens: .*greater than",
        ),
        (
            {"method": "eagle3", "model": "m", "drafters": {}},
            "speculative_config.drafters belongs to method 'whiflash'",
        ),
        (
            {"method": "dflash", "model": "m", "verification": "macth"},
            "verification: input should be 'match' or 'rejection'",
        ),
        ({"method": "whiflash"}, "speculative_config.drafters must name at least one drafter"),
        ({"method": "whiflash", "drafters": {}}, "speculative_config.drafters must name at least one drafter"),
        (
            {"method": "whiflash", "drafters": [{"type": "eagle3", "model": "m"}]},
            'drafters must be an object that names each drafter, as in {"eagle3": {"model": "FOLDER"}}',
        ),
        (
            {"method": "whiflash", "drafters": {"eagle": {"model": "m"}}},
            "no drafter is called 'eagle'; did you mean 'eagle3'",
        ),
        (
            {"method": "whiflash", "drafters": {"eagle3": {}}},
            "speculative_config.drafters.eagle3.model is missing",
        ),
        (
            {"method": "whiflash", "drafters": {"eagle3": "m"}},
            "drafters.eagle3 must be an object with a `model`",
        ),
        (
            {"method": "whiflash", "drafters": {"eagle3": {"model": "m"}}, "router": {"drafter": "dflash"}},
            "router.drafter is 'dflash', which is none of drafters",
        ),
        (TWO | {"router": {"policy": "entropi"}}, "router.policy: input should be 'fixed', 'entropy'"),
        (TWO | {"router": {"policy": "neural"}}, "router.model is missing: policy 'neural' needs a router trained by"),
        (TWO | {"router": {"policy": "entropy", "threshold": -1}}, "router.threshold must be nats of 0 or more"),
        (TWO | {"router": {"policy": "entropy", "threshold": [1, 2]}}, "threshold has 2 numbers; 2 drafters need 1"),
        (TWO | {"router": {"policy": "neural", "model": "m", "threshold": 999}}, "threshold must be tokens between"),
        (
            TWO | {"router": {"policy": "fixed", "threshold": 1}},
            "'fixed' takes neither model, thresholds nor costs",
        ),
        (
            TWO | {"router": {"policy": "fixed", "by_category": {"math": 1}}},
            "'fixed' takes neither model, thresholds nor costs",
        ),
        (
            TWO | {"router": {"policy": "entropy", "by_category": {"math": [1, 2]}}},
            "router.by_category.math has 2 numbers; 2 drafters need 1",
        ),
        (TWO | {"router": {"policy": "entropy", "by_category": {"math": -1}}}, "by_category.math must be nats of 0"),
        (TWO | {"router": {"by_category": {"math": 1}}}, "by_category.math: policy 'goodput' takes no thresholds"),
        (TWO | {"router": {"by_category": 1}}, r'router.by_category: should be a number, .* as in {"math": 0.5}'),
        (TWO | {"router": {"by_category": {"": 1}}}, "router.by_category: should be a number"),
        (
            TWO | {"router": {"policy": "neural", "model": "m", "entropy_of": "sampling"}},
            "router.entropy_of is for policy 'entropy', or 'goodput' without a model",
        ),
        (TWO | {"router": {"policy": "entropy", "drafter": "a"}}, "router.drafter belongs to policy 'fixed'"),
        (TWO | {"router": {"policy": "entropy", "max_backlog": 0}}, "router.max_backlog: input should be greater"),
        (TWO | {"verification": "rejection", "router": {"policy": "entropy"}}, "needs verification 'match'"),
        (
            {"method": "whiflash", "drafters": {"eagle3": {"model": "m"}}, "router": {"policy": "entropy"}},
            "router.policy 'entropy' chooses between drafters, and there is one",
        ),
        (
            {"method": "dflash", "model": "m", "tree": {"type": "dynamic"}},
            "tree.type 'dynamic' does not suit a dflash drafter; use 'best_first' or 'chain'",
        ),
        (
            {"method": "eagle3", "model": "m", "tree": {"num_nodes": 60}, "verification": "rejection"},
            "tree: vLLM's rejection sampler verifies chains only",
        ),
        ({"method": "eagle3", "model": "m", "tree": {"num_nodes": 256}}, "tree.num_nodes: .*less than or equal to 255"),
        ({"method": "eagle3", "model": "m", "tree": CHAIN | {"depth": 3}}, "tree.type 'chain' takes no depth"),
        ({"method": "eagle3", "model": "m", "tree": {"top_k": 33}}, "a dynamic tree takes at most 32"),
        (
            {"method": "eagle3", "model": "m", "tree": CHAIN, "rejection_sample_method": "synthetic"},
            'rejection_sample_method is about vLLM\'s rejection sampler; add "verification": "rejection"',
        ),
        ({"method": "dflash", "model": "m", "tree": {"depth": 3}}, "tree.depth: a best_first tree is as deep as"),
        (
            {"method": "eagle3", "model": "m", "tree": {"by_batch_size": {"2": 60}}},
            "tree.by_batch_size must say from 1 running request on",
        ),
        (
            {"method": "eagle3", "model": "m", "tree": {"by_batch_size": {"8": 60, "1": "x"}}},
            r'tree.by_batch_size: should be whole draft tokens by running requests as in {"1": 60}; "1": "x" is not',
        ),
        (
            {"method": "eagle3", "model": "m", "tree": {"by_batch_size": {"many": 60}}},
            r'tree.by_batch_size: should be whole .*; "many": 60 is not',
        ),
        (TWO | {"router": {"threshold": "2"}}, "router.threshold: should be 'auto', a number, or a list of numbers"),
        (TWO | {"router": {"threshold": [True]}}, "router.threshold: should be 'auto', a number, or a list of numbers"),
        (TWO | {"router": {"lazy": "no"}}, r"router.lazy: input should be a valid boolean \(got 'no'\)"),
        ({"method": "eagle3", "model": "m", "tree": 60}, r"speculative_config.tree: should be an object \(got 60\)"),
        ({"method": "dart", "model": "m", "ngram": 3}, r"ngram: should be a path or an object \(got 3\)"),
        ({"method": "dart", "model": "m", "num_nodes": 9}, "'num_nodes'; it belongs into 'tree', as in \"tree\": {"),
        (TWO | {"num_nodes": 9}, "'num_nodes'; it belongs into 'drafters.NAME.tree', as in \"tree\": {\"num_nodes\""),
        (TWO | {"threshold": 1}, "'threshold'; it belongs into 'router', as in \"router\": {\"threshold\""),
        (
            {"method": "eagle3", "model": "m", "tree": CHAIN, "draft_sample_method": "probabilistic"},
            "draft_sample_method 'probabilistic' needs verification 'rejection', which is 'match'",
        ),
        (
            {"method": "eagle3", "model": "m", "verification": "rejection", "draft_sample_method": "coupled"},
            "draft_sample_method 'coupled' needs verification 'match', which is 'rejection'",
        ),
    ],
)
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


@pytest.mark.parametrize(
    "tree",
    [{"num_nodes": "12"}, {"num_nodes": True}, {"depth": "4"}, {"top_k": 2.5}, {"by_batch_size": {"1": True}}],
)
def test_sizes_of_trees_are_whole_numbers(tree):
    with pytest.raises(ValueError, match=rf"speculative_config.tree.{next(iter(tree))}: "):
        parsed(method="eagle3", model="m", tree=tree)


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
        (
            {"method": "eagle3", "num_nodes": 60},
            "unknown key 'num_nodes'; it belongs into 'tree', as in \"tree\": {\"num_nodes\": ...}",
        ),
        ({"method": "draft_model", "num_probes": 60}, "unknown key 'num_probes'; it belongs into 'head'"),
        ({"tree": {"num_nodes": 60}}, 'speculative_config.tree is for the methods .*eagle3.*; the "method" is missing'),
        ({"method": "eagle", "tree": {}}, "speculative_config.tree is for the methods .*; method 'eagle' has none"),
    ],
)
def test_keys_that_vllm_would_not_expect_get_our_hint(raw, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        is_ours({"model": "m", **raw}, NATIVE_METHODS, NATIVE_KEYS)
    assert "\n" not in str(caught.value)


def test_keys_of_neither_are_vllms_to_refuse():
    assert is_ours({"method": "eagle", "prompt_lookup": 3}, NATIVE_METHODS, NATIVE_KEYS) is False


def test_unknown_method_names_the_nearest():
    with pytest.raises(ValueError, match="unknown method 'eagel3'; did you mean 'eagle3'"):
        is_ours({"method": "eagel3", "model": "m"}, NATIVE_METHODS, NATIVE_KEYS)


def test_method_that_is_no_name():
    with pytest.raises(ValueError, match=r"speculative_config.method is \['eagle3'\]; give the name of a method"):
        is_ours({"method": ["eagle3"], "model": "m"}, NATIVE_METHODS, NATIVE_KEYS)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_configurations_parse(file):
    raw = json.loads(file.read_text())
    assert is_ours(raw, NATIVE_METHODS, NATIVE_KEYS)
    for name, drafter in parse(raw, NATIVE_KEYS).drafters.items():
        assert name in (drafter.kind, "chain", "plain")
