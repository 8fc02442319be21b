"""Engines with a KV cache in float8: with drafts they say what they say without, over the same cache.

The target is the pocket one as a checkpoint with scales of its own for every layer's keys and values, which vLLM reads
into a float8 cache without being told. Processors without AVX-512 run vLLM's kernels as ``float8_kernels`` has them.
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import engines
import float8_kernels
import pytest
import sabotage
import target_kinds
import torch
from safetensors.torch import load_file, save_file
from vllm.platforms import current_platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from vllm_crossspec.engine.attention import base
from vllm_crossspec.engine.attention.cpu import TreeCpuImpl
from vllm_crossspec.engine.frontend import refuse

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(torch.cuda.is_available(), reason="float32 over float8 is for CPUs"),
]

SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}
SMALL_TREE = {"num_nodes": 16}


@functools.cache
def target():
    """The pocket target with a scale for the keys and one for the values of each layer."""
    folder = Path(tempfile.mkdtemp()) / "target"
    shutil.copytree(engines.TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))
    weights = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for name, scale in (("k_scale", 0.03 + 0.01 * (layer % 3)), ("v_scale", 0.007 + 0.002 * (layer % 2))):
            weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def routed(trees):
    """EAGLE-3 and DFlash behind a router of entropy, in the middle of what the pocket target shows."""
    eagle3 = {"tree": {"depth": 4, "top_k": 3, "num_nodes": 10}} if trees else {"num_speculative_tokens": 4}
    dflash = {"num_speculative_tokens": 7} | ({"tree": {"num_nodes": 12}} if trees else {})
    drafters = {
        "dflash": {"model": str(engines.DFLASH), **dflash}, "eagle3": {"model": str(engines.EAGLE3), **eagle3}
    }  # fmt: skip
    return {"method": "whiflash", "drafters": drafters, "router": {"policy": "entropy", "threshold": 1.0}}


DRAFT_MODEL = {"method": "draft_model", "model": str(engines.TARGET)}
CHAINS = {
    "suffix": target_kinds.LOOKUPS["chain"],
    "eagle3": engines.ours("eagle3", engines.EAGLE3),
    "dflash": engines.ours("dflash", engines.DFLASH),
    "draft_model": DRAFT_MODEL | {"num_speculative_tokens": 4, "tree": engines.CHAIN},
    "whiflash": routed(trees=False),
}
TREES = {
    "suffix": target_kinds.LOOKUPS["tree"],
    "eagle3": engines.tree("eagle3", engines.EAGLE3, **SMALL_TREE),
    "dflash": engines.tree("dflash", engines.DFLASH, **SMALL_TREE),
    "dart": engines.tree("dart", engines.DART, **SMALL_TREE),
    "draft_model": DRAFT_MODEL | {"tree": SMALL_TREE},
    "whiflash": routed(trees=True),
}


def run(speculation, kind="auto", then=None, look=None, model=None):
    """An engine's answers, and what ``look`` finds in its worker; ``then`` breaks it first."""
    if speculation is None:
        base.unregister()  # plain decoding by vLLM's own attention, whatever ran before
    with float8_kernels.on_any_cpu(), engines.engine(speculation, model or target(), kv_cache_dtype=kind) as llm:
        if then is not None:
            llm.collective_rpc(then)
        found = target_kinds.answers(llm, engines.prompts(2), 28)
        return found, llm.collective_rpc(look)[0] if look else None


@functools.cache
def plain(kind="auto", model=None):
    return run(None, kind, model=model)[0].texts


def kinds_and_scales(worker):
    """Of every layer."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    return [(x.is_draft_layer, x.kv_cache.dtype, x._k_scale_float, x._v_scale_float) for x in layers.values()]


def test_fp8_cache_of_a_checkpoint_changes_the_text():
    """Else all that follows would show little: the cache is in bytes, every layer has scales, and texts are others."""
    with float8_kernels.on_any_cpu():
        _, found = run(target_kinds.LOOKUPS["tree"], look=kinds_and_scales)
    assert len(found) == 8 and {dtype for _, dtype, *_ in found} == {torch.uint8}
    assert len({scales for _, _, *scales in map(tuple, found) for scales in [tuple(scales)]}) == 6
    with engines.engine(None, kv_cache_dtype="auto") as llm:
        assert target_kinds.answers(llm, engines.prompts(2), 28).texts != plain()


@pytest.mark.parametrize("name", CHAINS)
def test_fp8_chains_say_what_plain_decoding_says(name):
    found, _ = run(CHAINS[name])
    assert found.texts == plain()
    assert found.counts.accepted > 10


@pytest.mark.parametrize("name", TREES)
def test_fp8_trees_say_what_plain_decoding_says(name):
    """The drafters' own caches are in float8, too."""
    found, layers = run(TREES[name], look=kinds_and_scales)
    assert found.texts == plain()
    assert found.counts.accepted > 10
    assert {dtype for _, dtype, *_ in layers} == {torch.uint8}


def test_fp8_trees_of_a_checkpoint_without_scales():
    """Asked for by the user. ConFu belongs to the pocket target itself; its soft prompts are not quantised."""
    confu = engines.tree("confu", engines.CONFU, **SMALL_TREE)
    found, _ = run(confu, "fp8", model=engines.TARGET)
    assert found.texts == plain("fp8", engines.TARGET) != plain()
    assert found.counts.accepted > 10


def test_fp8_trees_of_another_type():
    found, _ = run(TREES["suffix"], "fp8_e5m2", model=engines.TARGET)
    assert found.texts == plain("fp8_e5m2", engines.TARGET) != plain("fp8", engines.TARGET)
    assert found.counts.accepted > 10


def test_fp8_trees_by_the_kernels_of_a_gpu():
    assert run(TREES["eagle3"], then=sabotage.attend_in_two_passes)[0].texts == plain()


# -- negative controls ------------------------------------------------------------------------------------------------


def test_fp8_trees_that_forget_the_scales_are_seen():
    original = TreeCpuImpl.spans

    def spans(impl, layer, *arguments):
        return original(impl, SimpleNamespace(_k_scale_float=0.03, _v_scale_float=0.007), *arguments)

    with mock.patch.object(TreeCpuImpl, "spans", spans):
        assert run(TREES["eagle3"])[0].texts != plain()


def test_fp8_paths_that_are_not_moved_are_seen():
    assert run(TREES["eagle3"], then=sabotage.leave_kv_in_place)[0].texts != plain()
