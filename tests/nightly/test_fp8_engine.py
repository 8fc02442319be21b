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
from crossspec_cpu_lane.vllm.attention import TreeCpuImpl
from safetensors.torch import load_file, save_file
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from vllm_crossspec import devices
from vllm_crossspec.frontend import refuse
from vllm_crossspec.platform import Platform
from vllm_crossspec.trees.attention import base

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
TOKENS = 18


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
    "draft_model": DRAFT_MODEL | {"tree": SMALL_TREE | {"depth": 4, "top_k": 4}},
    "whiflash": routed(trees=True),
}


def run(speculation, kind="auto", then=None, look=None, model=None):
    """An engine's answers, and what ``look`` finds in its worker; ``then`` breaks it first."""
    if speculation is None:
        base.unregister()  # plain decoding by vLLM's own attention, whatever ran before
    with float8_kernels.on_any_cpu(), engines.engine(speculation, model or target(), kv_cache_dtype=kind) as llm:
        if then is not None:
            llm.collective_rpc(then)
        found = target_kinds.answers(llm, engines.prompts(2), TOKENS)
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
    _, found = run(target_kinds.LOOKUPS["tree"], look=kinds_and_scales)
    assert len(found) == 8 and {dtype for _, dtype, *_ in found} == {torch.uint8}
    assert len({layer[2:] for layer in found}) == 6
    with engines.engine(None, kv_cache_dtype="auto") as llm:
        assert target_kinds.answers(llm, engines.prompts(2), TOKENS).texts != plain()


@pytest.mark.parametrize("name", CHAINS)
def test_fp8_chains_say_what_plain_decoding_says(name):
    found, _ = run(CHAINS[name])
    assert found.texts == plain()
    assert found.counts.accepted > 5


@pytest.mark.parametrize("name", TREES)
def test_fp8_trees_say_what_plain_decoding_says(name):
    """The drafters' own caches are in float8, too."""
    found, layers = run(TREES[name], look=kinds_and_scales)
    assert found.texts == plain()
    assert found.counts.accepted > 5
    assert {dtype for _, dtype, *_ in layers} == {torch.uint8}


def test_fp8_trees_of_a_checkpoint_without_scales():
    """Asked for by the user. ConFu belongs to the pocket target itself; its soft prompts are not quantised."""
    confu = engines.tree("confu", engines.CONFU, **SMALL_TREE)
    found, _ = run(confu, "fp8", model=engines.TARGET)
    assert found.texts == plain("fp8", engines.TARGET) != plain()
    assert found.counts.accepted > 5


def test_fp8_trees_of_another_type():
    found, _ = run(TREES["suffix"], "fp8_e5m2", model=engines.TARGET)
    assert found.texts == plain("fp8_e5m2", engines.TARGET) != plain("fp8", engines.TARGET)
    assert found.counts.accepted > 5


def test_fp8_trees_by_the_kernels_of_a_gpu():
    assert run(TREES["eagle3"], then=sabotage.attend_in_two_passes)[0].texts == plain()


# -- negative controls ------------------------------------------------------------------------------------------------


def test_fp8_trees_that_forget_the_scales_are_seen():
    original = TreeCpuImpl.spans

    def spans(impl, layer, *arguments):
        return original(impl, SimpleNamespace(_k_scale_float=0.03, _v_scale_float=0.007), *arguments)

    with mock.patch.object(TreeCpuImpl, "spans", spans):
        assert run(TREES["eagle3"])[0].texts != plain()


def entries(speculation, then=None, tokens=40):
    """Bytes of the target's cache [layers, tokens, heads, both], of one request alone."""
    prompt = engines.prompts(2)[1]

    def of(worker):
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        caches = [layer.kv_cache for layer in layers if not layer.is_draft_layer]
        both = [torch.cat(TreeCpuImpl.kv_views(cache), dim=-1)[1:] for cache in caches]  # block 0 is nobody's
        return torch.stack([x.transpose(1, 2).flatten(0, 1)[:length].int() for x in both])

    if speculation is None:
        base.unregister()
    with float8_kernels.on_any_cpu(), engines.engine(speculation, target()) as llm:
        length = len(llm.get_tokenizer().encode(prompt)) + tokens - 1  # the last token's are not computed
        if then is not None:
            llm.collective_rpc(then)
        engines.generate(llm, [prompt], tokens, ignore_eos=True)
        return llm.collective_rpc(of)[0]


def test_fp8_entries_of_accepted_paths_are_those_of_plain_decoding():
    """Moved as bytes; of so many rows together some keys and values fall on the other side of a step of float8."""
    wanted = entries(None)
    found, left = entries(TREES["eagle3"]), entries(TREES["eagle3"], then=sabotage.leave_kv_in_place)
    assert wanted.count_nonzero() > 0.9 * wanted.numel()
    assert (found != wanted).float().mean() < 1e-3 < 0.1 < (left != wanted).float().mean()


# -- refusals ---------------------------------------------------------------------------------------------------------


def without_weights(tmp_path):
    """A target that an engine could not load."""
    for name in ("config.json", *target_kinds.TOKENIZER):
        shutil.copy(engines.TARGET / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "has_avx512", "words"),
    [
        (
            {"kv_cache_dtype": "fp8"},
            False,
            r"a KV cache in fp8 with draft trees on a processor without AVX-512, which vLLM's kernel needs "
            r"\(use --kv-cache-dtype auto\)",
        ),
        (
            {"kv_cache_dtype": "fp8_per_token_head"},
            True,
            r"a KV cache in fp8_per_token_head with draft trees \(use --kv-cache-dtype auto or fp8\)",
        ),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]},
            True,
            r"a KV cache in fp8 with draft trees that some layers have in another type "
            r"\(leave out --kv-cache-dtype-skip-layers\)",
        ),
    ],
    ids=["processor", "kind", "skipped"],
)
def test_fp8_caches_that_trees_cannot_read_are_refused_before_weights_load(tmp_path, settings, has_avx512, words):
    model = without_weights(tmp_path)
    engine = engines.engine(TREES["suffix"], model, **settings)
    with mock.patch.object(devices, "has_avx512", lambda: has_avx512), pytest.raises(ValueError, match=words), engine:
        pass


def test_fp8_scheme_of_a_checkpoint_is_refused_as_the_users_setting_is(tmp_path):
    """vLLM reads it when it builds the layers, which is later."""
    model = without_weights(tmp_path)
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": SCHEME}
    (model / "config.json").write_text(json.dumps(config))
    engine = engines.engine(TREES["suffix"], model)
    with (
        mock.patch.object(devices, "has_avx512", lambda: False),
        pytest.raises(ValueError, match="in fp8 with"),
        engine,
    ):
        pass


@pytest.mark.parametrize(
    ("dtype", "reads", "words"),
    [
        (torch.bfloat16, True, None),
        (torch.bfloat16, False, "on a GPU whose FlashAttention does not read it (use fp8 on Hopper, or"),
        (torch.float32, True, "and a target in float32 on a GPU (use --dtype bfloat16, or --kv-cache-dtype auto)"),
    ],
    ids=["read", "not-read", "float32"],
)
def test_fp8_caches_on_a_gpu(dtype, reads, words, monkeypatch):
    """FlashAttention 3 reads fp8_e4m3 on Hopper; others, and what other backends read, are refused."""
    monkeypatch.setattr(refuse, "platform", Platform)
    monkeypatch.setattr(FlashAttentionBackend, "supports_kv_cache_dtype", classmethod(lambda cls, dtype: reads))
    cache = SimpleNamespace(cache_dtype="fp8", kv_cache_dtype_skip_layers=[])
    config = SimpleNamespace(
        cache_config=cache, quant_config=None, kv_transfer_config=None, model_config=SimpleNamespace(dtype=dtype)
    )
    found = refuse._unsupported_by_trees(config)
    assert len(found) == (words is not None)
    assert all(words in sentence and "a KV cache in fp8 with draft trees" in sentence for sentence in found)


@pytest.mark.parametrize(
    ("head_size", "words"),
    [
        (80, "its heads are no multiple of 32, as fp8 needs on a CPU; set kv_cache_dtype to auto"),
        (64, "fp8 needs a processor with AVX-512; set kv_cache_dtype to auto"),
    ],
    ids=["heads", "processor"],
)
def test_fp8_layers_that_vllms_kernel_does_not_take_are_refused(head_size, words):
    """A drafter's, too, which may have a type of its own."""
    with mock.patch.object(devices, "has_avx512", lambda: False), pytest.raises(ValueError, match=words):
        TreeCpuImpl(4, head_size, 0.1, 2, kv_cache_dtype="fp8")
