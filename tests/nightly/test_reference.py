"""Ours against the papers' code: with the same weights, every draft round equals the reference's, token for token.

Runs where a checkout of the reference is (docs/results/parity.md). That ours equal vLLM's native methods is tested
everywhere.
"""

import functools
import os
import random
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import engines
import pytest
import torch
from checkpoints import as_jetspec
from reference import compare, fvliang, haoai, models, recorder, safeailab, target, zlab
from transformers import AutoTokenizer

pytestmark = pytest.mark.e2e

LENGTHS = (1, 2, 5, 17, 33, 64, 100, 7)
MODELS = ("wide", "narrow", "pocket", "smollm2")
SAMPLINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 5}}


class Case(NamedTuple):
    """Models, draft length and prompts of one engine."""

    models: models.Models
    num_draft_tokens: int
    prompts: list[list[int]]


@functools.cache
def scratch():
    return tempfile.TemporaryDirectory(prefix="crossspec-reference-")


def random_prompts():
    draw = random.Random(0)
    return [[draw.randrange(4, models.VOCAB) for _ in range(length)] for length in LENGTHS]


def pocket_prompts():
    tokenizer = AutoTokenizer.from_pretrained(engines.TARGET)
    return [tokenizer.encode(text) for text in engines.prompts(8)]


@functools.cache
def case(name):
    if name == "wide":
        return Case(models.wide(Path(scratch().name) / name), 7, random_prompts())
    if name == "narrow":
        return Case(models.narrow(Path(scratch().name) / name), 4, random_prompts())
    if name == "smollm2":
        return smollm2()
    return Case(models.Models(engines.TARGET, engines.EAGLE3, engines.DFLASH, engines.DART), 7, pocket_prompts())


def smollm2():
    """A public model and our drafters for it, on every second of its package's prompts."""
    pytest.importorskip("gguf", reason="the library that reads GGUF files is not installed")
    from vllm_crossspec_smollm2.models import MODELS

    from vllm_crossspec.cli.prompts import read_prompts

    if (why := MODELS.missing()) is not None:
        pytest.skip(why)
    found, here = MODELS.target(), MODELS.find()
    tokenizer = AutoTokenizer.from_pretrained(found)
    texts = [prompt.turns[0] for prompt in read_prompts(here / "prompts.jsonl")][::2]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    return Case(models.Models(found, here / "eagle3", here / "dflash", here / "dart"), 7, prompts)


@functools.cache
def traces(name, method, whose="ours"):
    """What one engine generated and drafted, by sampling; drafts are greedy for sampled requests, too."""
    one = case(name)
    folder = jetspec_folder(name) if method == "jetspec" else getattr(one.models, method)
    spec = {
        "ours": engines.ours(method, folder) | {"draft_sample_method": "greedy"},
        # With the same sampler behind them sampled texts, and so the rounds, are native's.
        "ours, rejection": engines.ours(method, folder) | {"verification": "rejection"},
        "native": engines.native(method, folder),
    }[whose]
    spec["num_speculative_tokens"] = one.num_draft_tokens
    with engines.engine(spec, model=one.models.target, skip_tokenizer_init=True) as llm:
        llm.collective_rpc(recorder.start)
        return {how: recorder.trace(llm, one.prompts, 24, **options) for how, options in SAMPLINGS.items()}


@functools.cache
def hf_target(name):
    return target.load(case(name).models.target)


def checkout(reference):
    where = os.environ.get(reference.VARIABLE)
    if not where:
        pytest.skip(f"the reference is not at hand: {reference.HOW_TO_GET}")
    return Path(where)


def eagle3_agreement(name, how, break_it: Callable = lambda model: None, shift=0, roll=0):
    """Our EAGLE-3 beside SafeAILab's; the last three arguments spoil the reference."""
    hf, one = hf_target(name), case(name)
    model = safeailab.load(checkout(safeailab), one.models.eagle3, hf, one.num_draft_tokens)
    break_it(model)
    layers = tuple(layer + shift for layer in safeailab.tapped_layers(hf.config.num_hidden_layers))
    total = compare.Agreement()
    for trace in traces(name, "eagle3")[how]:
        states = target.states(hf, trace.tokens, layers).roll(roll, dims=1)
        drafted = safeailab.drafts(model, states, trace.tokens, sorted(trace.drafts))
        total += compare.compare(trace.drafts, drafted)
    return report(f"EAGLE-3 {name} {how}", total)


def dflash_agreement(name, how, break_it: Callable = lambda model: None):
    """Our DFlash beside z-lab's; the last argument spoils the reference."""
    one, source = case(name), checkout(zlab)
    model = zlab.load(source, one.models.dflash)
    break_it(model)
    total = compare.Agreement()
    for trace in traces(name, "dflash")[how]:
        block = one.num_draft_tokens + 1
        drafted = zlab.drafts(source, model, hf_target(name), trace.tokens, trace.num_prompt_tokens, block)
        total += compare.compare(trace.drafts, drafted)
    return report(f"DFlash {name} {how}", total)


@functools.cache
def jetspec_folder(name):
    return as_jetspec(Path(scratch().name) / f"{name}-jetspec", case(name).models.dflash)


def jetspec_agreement(name, how, break_it: Callable = lambda model: None):
    """Our JetSpec beside hao-ai-lab's, with the DFlash drafters' weights; the last argument spoils the reference."""
    one, hf = case(name), hf_target(name)
    model = haoai.load(checkout(haoai), jetspec_folder(name))
    break_it(model)
    layers, total = tuple(layer + 1 for layer in model.target_layer_ids), compare.Agreement()
    for trace in traces(name, "jetspec")[how]:
        states, starts = target.states(hf, trace.tokens, layers), sorted(trace.drafts)
        drafted = haoai.drafts(model, hf, states, trace.tokens, starts, one.num_draft_tokens)
        total += compare.compare(trace.drafts, drafted)
    return report(f"JetSpec {name} {how}", total)


def dart_agreement(name, how, break_it: Callable = lambda model: None, shift=0, roll=0):
    """Our DART's first choices beside fvliang's logits; the last three arguments spoil the reference."""
    hf, one, source = hf_target(name), case(name), checkout(fvliang)
    model = fvliang.load(source, one.models.dart, hf.get_input_embeddings().weight)
    break_it(model)
    kept = model.d2t + torch.arange(len(model.d2t))
    layers = tuple(layer + shift for layer in fvliang.tapped_layers(hf.config.num_hidden_layers))
    total = compare.Agreement()
    for trace in traces(name, "dart")[how]:
        states = target.states(hf, trace.tokens, layers).roll(roll, dims=1)
        cache, done, drafted = fvliang.Cache(source, model, len(trace.tokens) + 16), 0, {}
        for known in sorted(trace.drafts):
            logits = fvliang.draft_logits(model, states[:, done : known - 1], trace.tokens[:known], cache)
            logits = logits[: one.num_draft_tokens]
            drafted[known] = compare.Draft(kept[logits.argmax(dim=-1)].tolist(), compare.top_gaps(logits))
            done = known - 1
        total += compare.compare(trace.drafts, drafted)
    return report(f"DART {name} {how}", total)


def report(what, agreement):
    print(f"{what}: {agreement}")
    return agreement


def check(agreement, name, how):
    assert agreement.is_full, agreement
    assert len(agreement.ties) <= 0.01 * agreement.rounds, agreement
    assert agreement.rounds > (100 if name == "wide" else 50), agreement
    if name != "wide" and how == "greedy":
        assert agreement.accepted > 20, agreement


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("name", MODELS)
def test_eagle3_drafts_as_safeailab(name, how):
    checkout(safeailab)
    check(eagle3_agreement(name, how), name, how)


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("name", MODELS)
def test_dflash_drafts_as_zlab(name, how):
    checkout(zlab)
    check(dflash_agreement(name, how), name, how)


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("name", MODELS)
def test_dart_drafts_as_fvliang(name, how):
    checkout(fvliang)
    check(dart_agreement(name, how), name, how)


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("name", MODELS)
def test_jetspec_drafts_as_haoai(name, how):
    checkout(haoai)
    agreement = jetspec_agreement(name, how)
    # Weights that were not trained for it: little is accepted.
    assert agreement.is_full and len(agreement.ties) <= 0.01 * agreement.rounds, agreement
    assert agreement.rounds > 50, agreement


def see_the_whole_block(model):
    """JetSpec: as vLLM runs such a checkpoint."""
    for layer in model.layers:
        layer.self_attn.is_causal = False


@pytest.mark.parametrize("break_it", [see_the_whole_block])
def test_a_spoilt_jetspec_reference_is_seen(break_it):
    agreement = jetspec_agreement("wide", "greedy", break_it)
    assert agreement.equal_rounds < 0.5 * agreement.rounds


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_drafts_as_native(method):
    mine, native = traces("narrow", method, "ours, rejection"), traces("narrow", method, "native")
    assert mine == native
    assert all(trace.drafts for trace in mine["greedy"])


def test_context_keys_are_normed_with_each_layers_own_weights():
    """What the comparison with z-lab found: vLLM's CPU kernel takes the first layer's weights for all layers."""
    from crossspec_cpu_lane.vllm.patches import mend_context_norm
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    if not torch.cuda.is_available():
        mend_context_norm()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    keys, weights = torch.randn(3, 5, 2, 32, device=device), torch.rand(3, 32, device=device)
    model = types.SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    expected = keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + 1e-6) * weights[:, None, None]
    torch.testing.assert_close(DFlashQwen3Model._normalize_context_k(model, keys), expected)


def shift_chain_positions(model):
    """EAGLE-3: rows that come one at a time stand one position too early."""

    def earlier(module, args, kwargs):
        if kwargs["position_ids"].shape[-1] == 1:
            kwargs["position_ids"] = (kwargs["position_ids"] - 1).clamp(min=0)
        return args, kwargs

    model.midlayer.register_forward_pre_hook(earlier, with_kwargs=True)


def shift_block_positions(model):
    """DFlash: the block stands one position too far from its context."""

    def later(module, args):
        hidden, positions = args
        positions = positions.clone()
        positions[:, -hidden.shape[1] :] += 1
        return hidden, positions

    model.rotary_emb.register_forward_pre_hook(later)


def shift_layers(model):
    """DFlash: the layer ids are read in vLLM's numbering."""
    model.target_layer_ids = [layer - 1 for layer in model.target_layer_ids]


def change_mask(model):
    """DFlash: another token stands for "to be drafted"."""
    model.mask_token_id += 1


@pytest.mark.parametrize(
    "spoilt",
    [{"break_it": shift_chain_positions}, {"shift": 1}, {"roll": 1}],
    ids=["positions", "layers", "states"],
)
def test_a_spoilt_eagle3_reference_is_seen(spoilt):
    agreement = eagle3_agreement("wide", "greedy", **spoilt)
    assert agreement.equal_rounds < 0.5 * agreement.rounds


def change_mask_vector(model):
    """DART: another vector stands for "to be drafted"."""
    model.midlayer.mask_rep.data *= 1.5


@pytest.mark.parametrize(
    "spoilt",
    [{"break_it": change_mask_vector}, {"shift": 1}, {"roll": 1}],
    ids=["mask", "layers", "states"],
)
def test_a_spoilt_dart_reference_is_seen(spoilt):
    agreement = dart_agreement("wide", "greedy", **spoilt)
    assert agreement.equal_rounds < 0.5 * agreement.rounds


@pytest.mark.parametrize("break_it", [shift_block_positions, shift_layers, change_mask])
def test_a_spoilt_dflash_reference_is_seen(break_it):
    agreement = dflash_agreement("wide", "greedy", break_it)
    assert agreement.equal_rounds < 0.5 * agreement.rounds


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_the_target_is_the_same_in_both(method):
    """The engine's greedy text is the transformers target's choice: states of another model would prove nothing."""
    checkout(safeailab if method == "eagle3" else zlab)
    for trace in traces("wide", method)["greedy"]:
        choices, gaps = target.greedy(hf_target("wide"), trace.tokens)
        for i in range(trace.num_prompt_tokens, len(trace.tokens)):
            assert trace.tokens[i] == choices[i - 1] or gaps[i - 1] < compare.TIE


def test_a_comparison_sees_a_missing_round_and_a_wrong_token():
    whole = {3: [1, 2], 4: [5, 6]}
    reference = {start: compare.Draft(tokens, [1.0, 1.0]) for start, tokens in whole.items()}
    assert compare.compare(whole, reference).is_full
    assert not compare.compare({3: [1, 2]}, reference).is_full
    assert not compare.compare(whole | {4: [5, 7]}, reference).is_full
    tied = reference | {4: compare.Draft([5, 7], [1.0, 1e-6])}
    assert compare.compare(whole, tied).is_full and len(compare.compare(whole, tied).ties) == 1
    assert compare.top_gaps(torch.tensor([[1.0, 4.0, 2.0]])) == [2.0]
