"""DART in whole engines: plain's text, drafts as the trained model makes them, and no trace of masks in the cache."""

import functools
from unittest import mock

import engines
import pytest
import torch
from engines import results
from reference import recorder

pytestmark = pytest.mark.e2e

DRAFTING = ["dart", "dart-tree", "dflash-continuity", "dflash, n-grams, best first"]


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("scenario", ["one", "eight", "chunked", "prefix"])
@pytest.mark.parametrize("name", DRAFTING)
def test_greedy_is_plain(name, scenario):
    assert results(name).tokens[scenario] == results("plain").tokens[scenario]


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("name", DRAFTING)
def test_seeded_text_is_plains_token_for_token(name):
    tokens = results(name).tokens
    assert tokens["seeded again"] == tokens["seeded"] == results("plain").tokens["seeded"]


def test_trees_are_accepted_further_than_chains():
    chain, tree = results("dart").counts, results("dart-tree").counts
    assert 0.6 < chain.accepted / chain.drafts < tree.accepted / tree.drafts - 0.5


# -- what one engine drafts, beside the model that was trained ------------------------------------------------------


@functools.cache
def prompts():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engines.TARGET)
    return [tokenizer.encode(text) for text in engines.prompts(4)]


@functools.cache
def trained():
    """The drafter as ``crossspec train`` has it, and its frozen target, in float32."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from crossspec_tools.train.dart import DartDrafter
    from crossspec_tools.train.recipes import DartConfig
    from crossspec_tools.train.states import FrozenTarget
    from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers

    causal_lm = AutoModelForCausalLM.from_pretrained(engines.TARGET, dtype=torch.float32).eval()
    target = FrozenTarget(causal_lm, default_target_layers(causal_lm.config.num_hidden_layers), False)
    tensors = load_file(engines.DART / "model.safetensors")
    kept = tensors.pop("d2t") + torch.arange(len(tensors.pop("t2d").nonzero()))
    model = DartDrafter(DartConfig(), causal_lm.config, kept, seed=0)
    model.load_state_dict({name: x.float() for name, x in tensors.items()} | {"kept": kept})
    return model.eval(), target


@torch.inference_mode()
def equal_rounds(traces):
    """(rounds whose drafts are the trained model's, ties aside, rounds)."""
    model, target = trained()
    equal = total = 0
    for trace in traces:
        tokens = torch.tensor([[*trace.tokens, 0]])
        states = target.states(tokens)
        for known, drafted in trace.drafts.items():
            logits = model(states, tokens, target.embedding, torch.tensor([[known - 2]]))[0, 0]
            top = logits.topk(2, dim=-1)
            is_tie = top.values[:, 0] - top.values[:, 1] < 1e-4
            first = model.kept[top.indices[:, 0]]
            equal += bool(((first == torch.tensor(drafted)) | is_tie).all())
            total += 1
    return equal, total


@pytest.fixture(scope="module")
def llm():
    spec = engines.ENGINES["dart"] | {"draft_sample_method": "greedy"}
    with engines.engine(spec, skip_tokenizer_init=True, enable_prefix_caching=False) as running:
        running.collective_rpc(recorder.start)
        yield running


def proposer(llm):
    host = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.speculator
    return host.proposers["dart"]


def drafted(llm):
    return equal_rounds(recorder.trace(llm, prompts(), 24))


def test_the_engine_drafts_as_the_trained_model(llm):
    """In batches, past rejected drafts, and past the masks that each round leaves behind the accepted tokens."""
    equal, total = drafted(llm)
    assert equal == total > 40


def test_masks_left_in_the_cache_would_be_seen(llm):
    """Where accepted entries do not take the places of the masks before them, drafts are others'."""
    before = proposer(llm)._store_context

    def lose_entries_but_prompts(num_tokens, num_graph_reqs, is_dummy):
        if num_tokens > 60:
            before(num_tokens, num_graph_reqs, is_dummy)

    with mock.patch.object(proposer(llm), "_store_context", lose_entries_but_prompts):
        equal, total = drafted(llm)
    assert equal < 0.9 * total
    equal, total = drafted(llm)
    assert equal == total


def test_shifted_positions_would_be_seen(llm):
    from vllm_crossspec.drafters.dart import inputs

    def shifted(step, **arguments):
        inputs.prepare_rows(step, **arguments)
        arguments["out"].positions[1:] += 1

    with mock.patch("vllm_crossspec.drafters.dart.proposer.prepare_rows", shifted):
        equal, total = drafted(llm)
    assert equal < 0.9 * total
