"""The dense output layer's best tokens by two kernels: those of PyTorch's operations, and of a FlashHead's order."""

import engines
import pytest
import torch
from hopper import compile_in_subprocess

from vllm_crossspec.drafting import best_logits, noise
from vllm_crossspec.drafting.heads import DenseHead
from vllm_crossspec.platform import Platform, platform

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def case(rows, vocab, kind, reduced, dtype=torch.float32):
    """Logits, the keys of their noise, and the offsets of a reduced vocabulary."""
    make = torch.Generator().manual_seed(rows * vocab)
    logits = (torch.randn(rows, vocab, generator=make) * 3).to(DEVICE, dtype)
    offsets = (torch.arange(vocab) * 2).to(DEVICE) if reduced else None
    if kind == "uncoupled":
        return logits, None, offsets
    slots = torch.tensor([i % 5 - 1 if kind == "sampled" else -(i % 2) for i in range(rows)])
    temperature, seeds = torch.tensor([0.0, 0.7, 1.0, 2.5]), torch.tensor([3, -(1 << 62) + 5, 1 << 40, 12345])
    positions = torch.randint(0, 1 << 20, (rows,), generator=make)
    given = (part.to(DEVICE) for part in (slots, positions, temperature, seeds))
    return logits, noise.NoiseKeys(*given, sharpness=1.5), offsets


def expected(logits, k, keys, offsets):
    ranked = logits.float()
    if keys is not None:
        ranked = noise.add_target_noise_naive(keys._replace(offsets=offsets), ranked)
    best, ids = ranked.topk(k, dim=-1)
    log_probs = best - ranked.logsumexp(dim=-1, keepdim=True)
    return (ids if offsets is None else ids + offsets[ids]), log_probs


@pytest.mark.parametrize("reduced", [False, True], ids=["", "reduced vocabulary"])
@pytest.mark.parametrize("kind", ["uncoupled", "greedy", "sampled"])
@pytest.mark.parametrize(("rows", "vocab", "k"), [(1, 7, 7), (6, 2048, 10), (3, 5000, 1), (5, 9001, 32)])
def test_kernels_are_the_twins(rows, vocab, k, kind, reduced):
    logits, keys, offsets = case(rows, vocab, kind, reduced)
    found = best_logits.best_logits(logits, k, keys, offsets)
    tokens, log_probs = expected(logits, k, keys, offsets)
    assert torch.equal(found.tokens, tokens)
    torch.testing.assert_close(found.log_probs, log_probs, rtol=1e-5, atol=2e-5)


def test_of_equal_logits_the_smaller_token_comes_first():
    logits = torch.zeros(2, 5000, device=DEVICE, dtype=torch.bfloat16)
    logits[1, [4999, 4000, 17]] = 2.0
    found = best_logits.best_logits(logits, 4, None)
    assert found.tokens.tolist() == [[0, 1, 2, 3], [17, 4000, 4999, 0]]


def test_what_is_no_number_is_no_candidate():
    """A masked token has no chance, and a row without any logit names tokens that exist."""
    logits = torch.full((3, 2100), float("-inf"), device=DEVICE)
    logits[0, 2050], logits[1] = 1.0, float("nan")
    found = best_logits.best_logits(logits, 2, None, torch.arange(2100, device=DEVICE))
    assert found.tokens.tolist() == [[4100, 0], [0, 0], [0, 0]]
    assert found.log_probs[0].tolist() == [0.0, float("-inf")]
    assert found.log_probs[1:].isneginf().all()


COMPILE_FOR_HOPPER = """
from hopper import compile_only
compiled = compile_only()
import torch
import test_best_logits as cases

for kind, reduced, dtype, k in [("uncoupled", False, torch.bfloat16, 10), ("sampled", True, torch.bfloat16, 10),
                                ("sampled", True, torch.float32, 1)]:
    logits, keys, offsets = cases.case(80, 32000, kind, reduced, dtype)
    cases.best_logits.best_logits(logits, k, keys, offsets)
assert set(compiled) == {"_chunk_logits_kernel", "_top_tokens_kernel"}, set(compiled)
"""


def test_kernels_compile_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)


@pytest.mark.parametrize("keys", [True, False])
def test_a_gpus_dense_head_ranks_by_them(keys, monkeypatch):
    """More candidates than a chain of choices finds quickly are left to PyTorch."""
    logits, given, offsets = case(4, 3000, "sampled", True)
    given = given if keys else None
    head = DenseHead(lambda hidden: hidden, offsets)
    by_torch = [head.choose(logits, given), *(head.candidates(logits, given, k)[1] for k in (5, 40))]
    monkeypatch.setattr(type(platform()), "ranks_by_kernels", True)
    calls = []
    monkeypatch.setattr(
        "vllm_crossspec.drafting.heads.best_logits", lambda *a: calls.append(a[1]) or best_logits.best_logits(*a)
    )
    by_kernels = [head.choose(logits, given), *(head.candidates(logits, given, k)[1] for k in (5, 40))]
    assert all(map(torch.equal, by_kernels, by_torch)) and calls == [1, 5]
    assert Platform.ranks_by_kernels


@pytest.mark.e2e
def test_an_engine_drafts_the_same_by_them(monkeypatch):
    spec, sampled = engines.tree("eagle3", engines.EAGLE3, num_nodes=12), {"temperature": 0.8, "seed": 7}
    plain = [engines.plain(4), engines.plain(4, **sampled)]
    accepted = []
    for by_kernels in (False, True):
        monkeypatch.setattr(type(platform()), "ranks_by_kernels", by_kernels)
        with engines.engine(spec, **engines.LARGE_STEPS) as llm:
            assert engines.generate(llm, engines.prompts(4)) == plain[0]
            assert engines.generate(llm, engines.prompts(4), **sampled) == plain[1]
            accepted.append(engines.counts(llm).per_position)
    assert accepted[0] == accepted[1]
