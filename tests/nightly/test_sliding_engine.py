"""Engines whose targets and drafters have sliding windows, sinks and capped logits: plain's text, far past the window.

vLLM keeps the layers with a window in a KV cache group of their own, where one has both kinds, and frees the blocks
that lie behind it; blocks are small here, so that it does.
"""

import functools
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import checkpoints
import engines
import pytest
import sabotage
import target_kinds
import torch
import windowed_targets
from crossspec_cpu_lane.vllm import attention as cpu
from windowed_targets import WINDOW, prompts

from vllm_crossspec.trees.attention import base

pytestmark = pytest.mark.e2e

SETTINGS = {"skip_tokenizer_init": True, "block_size": 32, "max_num_seqs": 4}
TOKENS = 70
TREE = {"num_nodes": 24, "depth": 5, "top_k": 4, "by_batch_size": {"1": 24}}


@functools.cache
def folder(kind):
    return windowed_targets.write(Path(tempfile.mkdtemp()) / kind, kind)


@functools.cache
def noisy(kind):
    """A draft model that is often right: the target with other numbers added to its weights."""
    from safetensors.torch import load_file, save_file

    path = Path(tempfile.mkdtemp()) / "noisy"
    shutil.copytree(folder(kind), path)
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            tensor += 0.006 * torch.randn(tensor.shape, generator=generator)
        weights[name] = tensor
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def eagle3(target, window=None, source=None):
    """A drafter, random or another's, whose layer sees so many tokens."""
    path = Path(tempfile.mkdtemp()) / "drafter"
    if source is None:
        checkpoints.random_eagle3(path, target)
    else:
        shutil.copytree(source, path)
    if window:
        settings = json.loads((path / "config.json").read_text())
        settings |= {"layer_types": ["sliding_attention"], "sliding_window": window}
        (path / "config.json").write_text(json.dumps(settings))
    return path


def spec(kind, method):
    if method == "suffix":
        return {"method": "suffix", "tree": {"num_nodes": 24, "by_batch_size": {"1": 24}}}
    if method == "chain":
        return {"method": "draft_model", "model": str(noisy(kind)), "num_speculative_tokens": 4, "tree": engines.CHAIN}
    if method == "routed":
        near, far = ({"type": "eagle3", "model": str(eagle3(folder(kind), window))} for window in (9, 50))
        drafters = {"near": near, "far": far | {"tree": TREE}, "suffix": {"tree": {"num_nodes": 24}}}
        return {"method": "whiflash", "drafters": drafters, "router": {"policy": "entropy", "threshold": [3.0, 2.0]}}
    if method == "eagle3":
        model = eagle3(folder(kind), window=9)
    else:
        model = folder(kind) if method == "itself" else noisy(kind)
    return {"method": "eagle3" if method == "eagle3" else "draft_model", "model": str(model), "tree": TREE}


def run(speculation, model, texts=None, tokens=TOKENS, then=None, **sampling):
    """Texts and vLLM's counts of one engine; ``then`` breaks it first."""
    if speculation is None:
        base.unregister()  # plain decoding by vLLM's own attention, whatever ran before
    with engines.engine(speculation, model, **SETTINGS) as llm:
        if then is not None:
            llm.collective_rpc(then)
        found = engines.generate(llm, texts or prompts(), max_tokens=tokens, ignore_eos=True, **sampling)
        groups = len(llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups)
        return found, engines.counts(llm), groups


@functools.cache
def plain(kind, **sampling):
    return run(None, folder(kind), **sampling)[0]


CASES = [
    ("mistral", "eagle3"), ("mistral", "noisy"), ("mistral", "suffix"), ("mistral", "chain"),
    ("gemma3", "noisy"), ("gemma3", "suffix"), ("gemma3", "chain"),
    ("granite", "eagle3"), ("granite", "noisy"), ("granite", "chain"), ("granite", "routed"),
    ("gpt_oss", "noisy"), ("gpt_oss", "eagle3"), ("gpt_oss", "chain"),
    ("gemma2", "suffix"), ("gemma2", "chain"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_text_over_sliding_layers_is_plains(kind, method):
    """Mistral: all layers; the others: alternating ones. Granite and gpt-oss have sinks, Gemma-2 capped logits."""
    found, counts, groups = run(spec(kind, method), folder(kind))
    assert found == plain(kind)
    assert min(len(set(tokens)) for tokens in found) > 5
    assert counts.drafts > 20
    if method == "noisy":
        assert counts.accepted > counts.drafts / 2
    assert groups > 1 or kind == "mistral"


def test_a_target_that_hands_out_no_states_is_refused(tmp_path):
    """Before any weight is read, of which there are none here."""
    shutil.copy(folder("gemma2") / "config.json", tmp_path)
    sentence = "drafter eagle3 reads states of the target's layers, which vLLM's Gemma2ForCausalLM does not hand out"
    with pytest.raises(ValueError, match=sentence):
        run({"method": "eagle3", "model": str(eagle3(folder("gemma2"))), "tree": TREE}, tmp_path)


def test_seeded_text_over_sliding_layers_is_plains():
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
    assert run(spec("granite", "noisy"), folder("granite"), **sampling)[0] == plain("granite", **sampling)


@functools.cache
def pocket():
    """The pocket target, of which every layer sees the last 48 tokens: its drafters are often right."""
    path = Path(tempfile.mkdtemp()) / "pocket"
    shutil.copytree(engines.TARGET, path)
    config = json.loads((path / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 0}
    config["layer_types"] = ["sliding_attention"] * len(config["layer_types"])
    (path / "config.json").write_text(json.dumps(config))
    return path


@functools.cache
def pocket_run(name):
    with engines.engine(target_kinds.POCKET.get(name), model=pocket(), block_size=32) as llm:
        assert llm.llm_engine.model_config.get_sliding_window() == 48
        found = target_kinds.answers(llm, long_questions())
        return found, llm.collective_rpc("crossspec_stats")[0] if name else {}


def long_questions():
    """Questions of which most are longer than the window."""
    texts = [text.removeprefix("<|im_start|>user\n") for text in engines.prompts(8)]
    return [engines.chat(first + "\n" + second) for first, second in itertools.pairwise(texts)]


@pytest.mark.parametrize("name", target_kinds.POCKET)
def test_sliding_pocket_text_is_plains(name):
    plain, _ = pocket_run(None)
    found, drafters = pocket_run(name)
    assert found.texts == plain.texts
    assert found.counts.accepted > found.counts.drafts / 2
    assert len(drafters) == (2 if name == "whiflash" else 1)
    assert all(own["drafts"] > 20 for own in drafters.values())


def wrong(**changes):
    """What the rows of trees go by, but for one thing."""
    return mock.patch.object(cpu, "softmax_of", lambda impl: changed(base.softmax_of(impl), **changes))


def changed(softmax, off=0, **others):
    window = softmax.window + off if softmax.window else 0
    return softmax._replace(window=window, **others)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"off": 1}), ("mistral", {"off": -1}), ("gemma3", {"off": 10**6}), ("gemma3", {"off": -1}),
    ],
    ids=lambda value: str(value),
)  # fmt: skip
def test_a_wrong_sliding_window_is_seen(kind, changes):
    """Trees that end one token too far or too near, or see all, or do not cap: other texts."""
    with wrong(**changes):
        assert run(spec(kind, "itself"), folder(kind))[0] != plain(kind)


def test_soft_caps_that_trees_forget_are_seen():
    with wrong(soft_cap=0.0):
        assert run(spec("gemma2", "suffix"), folder("gemma2"))[0] != plain("gemma2")


def test_sinks_that_trees_forget_are_seen():
    with mock.patch.object(cpu.TreeCpuImpl, "_lane_sinks", lambda impl: None):
        assert run(spec("granite", "itself"), folder("granite"))[0] != plain("granite")


def test_sliding_groups_that_are_not_compacted_are_seen():
    """Layers of two groups may lie in one piece of memory, in other blocks: both are moved."""
    from vllm_crossspec.trees.commit import kernels

    original = kernels.make_kv_layers

    def one_of_each(caches):
        return original(list({cache.data_ptr(): (cache, group) for cache, group in reversed(caches)}.values()))

    with mock.patch.object(kernels, "make_kv_layers", one_of_each):
        assert run(spec("gemma3", "noisy"), folder("gemma3"))[0] != plain("gemma3")
    assert run(spec("gemma3", "noisy"), folder("gemma3"), then=sabotage.leave_kv_in_place)[0] != plain("gemma3")


# -- drafters ---------------------------------------------------------------------------------------------------------


def accepted_of_itself(**changes):
    """Accepted tokens of a target that drafts for itself, and of how many."""
    one_branch = {"type": "dynamic", "depth": 4, "top_k": 1, "num_nodes": 4, "by_batch_size": {"1": 4}}
    speculation = {"method": "draft_model", "model": str(folder("mistral")), "tree": one_branch}
    original = cpu.TreeCpuImpl._attend_draft_level

    def level(*arguments):
        with wrong(**changes):
            original(*arguments)

    with mock.patch.object(cpu.TreeCpuImpl, "_attend_draft_level", level):
        found, counts, _ = run(speculation, folder("mistral"), prompts()[1:2], tokens=1 + 5 * 10)
    assert found[0] == plain("mistral")[1][:51]
    return counts.accepted, 4 * counts.drafts


def test_a_sliding_target_drafts_for_itself_without_a_miss():
    """Every level sees what the target will see: one key more or less, and it misses."""
    assert accepted_of_itself() == (40, 40)
    for off in (1, -1):
        accepted, drafted = accepted_of_itself(off=off)
        assert accepted < drafted and drafted > 40


def test_a_sliding_drafter_drafts_alike_in_a_chain_and_in_a_tree_of_one_branch():
    """The pocket drafter, cut to a window: its chain is vLLM's own attention, the tree's levels are ours."""
    drafter, accepted, texts = eagle3(None, 20, engines.EAGLE3), {}, engines.prompts(3)
    document = " ".join(text.removeprefix("<|im_start|>user\n") for text in texts)
    texts = [texts[0], engines.chat(document + "\nSummarize.")]
    branch = {"type": "dynamic", "depth": 5, "top_k": 1, "num_nodes": 5, "by_batch_size": {"1": 5}}
    wide = {"num_nodes": 30, "by_batch_size": {"1": 30}}
    base.unregister()
    with engines.engine(None) as llm:
        wanted = engines.generate(llm, texts)
    chain = {"tree": engines.CHAIN, "num_speculative_tokens": 5}
    all_ = {"tree": branch}
    for name, model, keys in (
        ("chain", drafter, chain), ("branch", drafter, all_), ("tree", drafter, {"tree": wide}),
        ("far", engines.EAGLE3, chain),
    ):  # fmt: skip
        with engines.engine({"method": "eagle3", "model": str(model), **keys}) as llm:
            assert engines.generate(llm, texts) == wanted, name
            accepted[name] = (engines.counts(llm).accepted, engines.counts(llm).drafts)
    assert accepted["chain"] == accepted["branch"] != accepted["far"]
    assert accepted["tree"][0] / accepted["tree"][1] > accepted["chain"][0] / accepted["chain"][1] > 0.5


def test_windows_are_as_small_as_these_tests_say():
    assert max(len(prompt["prompt_token_ids"]) for prompt in prompts()) > 4 * WINDOW
