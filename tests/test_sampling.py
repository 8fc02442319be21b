"""Unseeded sampling has the target's distribution: chi-squared over a vocabulary small enough to resolve a bias.

The target here is a random Llama of eight tokens, so this is also the Llama flavour of both drafters.
"""

import functools
import itertools

import checkpoints
import engines
import pytest
import sabotage
import torch
from scipy.stats import chisquare

pytestmark = pytest.mark.e2e

VOCAB, PROMPT = 8, [1, 5, 2, 7, 3]
SAMPLES, BROKEN_SAMPLES = 384, 128


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.lm_head.weight.data.mul_(4.0)  # a distribution with likely and unlikely tokens
    folder = tmp_path_factory.mktemp("llama") / "target"
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def expected(target):
    """Probability of every pair of second and third token, exactly: float [V * V]."""
    _, model = target
    pairs = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)

    def following(tokens):
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0, -1].double().softmax(-1)

    first = following(PROMPT)
    for a, b in itertools.product(range(VOCAB), repeat=2):
        second = following([*PROMPT, a])
        pairs[b] += first[a] * second[b] * following([*PROMPT, a, b])
    return pairs.flatten().numpy()


def p_value(llm, expected, samples_wanted):
    prompts = [{"prompt_token_ids": PROMPT}] * samples_wanted
    samples = engines.generate(llm, prompts, max_tokens=3, temperature=1.0, ignore_eos=True, detokenize=False)
    observed = torch.zeros(VOCAB * VOCAB)
    for _, second, third in samples:
        observed[second * VOCAB + third] += 1
    return chisquare(observed.numpy(), expected * samples_wanted / expected.sum()).pvalue


DRAFTERS = {
    "eagle3": checkpoints.random_eagle3,
    "eagle3, qwen3 flavour": functools.partial(checkpoints.random_eagle3, flavour="qwen3"),
    "dflash": checkpoints.random_dflash,
    "eagle3, tree": checkpoints.random_eagle3,
    "dflash, tree": checkpoints.random_dflash,
    "confu, tree": checkpoints.random_confu,
}
TREES = {
    "eagle3, tree": {"depth": 3, "top_k": 3, "num_nodes": 10},
    "dflash, tree": {"num_nodes": 10},
    "confu, tree": {"depth": 3, "top_k": 2, "num_nodes": 6},  # 14 rows of a request
}


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_distribution_is_the_targets(tmp_path, target, expected, drafter):
    folder, _ = target
    made = DRAFTERS[drafter](tmp_path / "drafter", folder)
    spec = engines.ours(drafter.split(",")[0], made) | {"num_speculative_tokens": 3}
    if drafter in TREES:
        spec["tree"] = TREES[drafter]
    settings = {
        "max_model_len": 64,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "skip_tokenizer_init": True,
    }
    with engines.engine(spec, model=folder, **settings) as llm:
        p = p_value(llm, expected, SAMPLES)
        counts = engines.counts(llm)
        llm.collective_rpc(sabotage.accept_everything)
        p_broken = p_value(llm, expected, BROKEN_SAMPLES)
    print(f"{drafter}: p {p}, broken {p_broken}, {counts}")
    assert 0 < counts.accepted < 2.9 * counts.drafts, "both verdicts must occur"
    assert p > 1e-3
    assert p_broken < 1e-6
