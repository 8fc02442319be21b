"""Coupled drafts look at the very numbers that the target's sampler draws with."""

import pytest
import torch
from vllm.v1.worker.gpu.sample import gumbel

from vllm_crossspec.engine import cpu_patches as cpu
from vllm_crossspec.engine import noise

VOCAB = 1500


def case(rows, seed=0):
    make = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=make) * 3
    positions = torch.randint(0, 1 << 20, (rows,), generator=make)
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5])
    seeds = torch.tensor([3, -(1 << 62) + 5, 1 << 40, 12345])
    slots = torch.tensor([i % 5 - 1 for i in range(rows)])
    return logits, slots, positions, temperature, seeds


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize(("reduced", "sharpness"), [(False, 1.0), (True, 1.0), (True, 2.0)])
def test_kernel_equals_its_twin(reduced, sharpness, use_fp64):
    logits, slots, positions, temperature, seeds = case(7)
    offsets = torch.arange(VOCAB) * 2 if reduced else None
    out = torch.full((7, VOCAB), float("nan"))
    noise._add_target_noise_kernel[(7, 2)](
        logits, VOCAB, out, VOCAB, offsets, slots, positions, temperature, seeds, VOCAB, sharpness,
        ROWS_PER_ENTRY=1, USE_FP64=use_fp64, BLOCK=noise.BLOCK,
    )  # fmt: skip
    twin = noise.add_target_noise_naive(logits, offsets, slots, positions, temperature, seeds, use_fp64, sharpness)
    # vLLM's series for log1p is good to 6e-7, and noise of 15 has a spacing of 1e-6.
    torch.testing.assert_close(out, twin, rtol=2e-6, atol=1e-5)


def test_greedy_and_padding_rows_stay_as_they_are():
    logits, slots, positions, temperature, seeds = case(10)
    out = noise.add_target_noise(
        logits, offsets=None, idx_mapping=slots, positions=positions, temperature=temperature, seeds=seeds
    )
    untouched = (slots < 1).nonzero().flatten()
    assert torch.equal(out[untouched], logits[untouched])
    assert not torch.isclose(out[slots > 0], logits[slots > 0]).all(dim=1).any()


@pytest.mark.parametrize("mixed", [False, True])
def test_what_has_no_noise_is_sharpened_and_nothing_else(mixed):
    """With sampled requests in the batch, and in one of greedy requests alone."""
    logits, slots, positions, temperature, seeds = case(10)
    slots = slots if mixed else slots.clamp(max=0)
    keys = {"idx_mapping": slots, "positions": positions, "temperature": temperature, "seeds": seeds}
    plain, sharp = (noise.add_target_noise(logits, offsets=None, **keys, sharpness=s) for s in (1.0, 2.0))
    sampled = slots > 0
    assert torch.equal(sharp[sampled], plain[sampled]) and bool(sampled.any()) == mixed
    assert torch.equal(sharp[~sampled], 2 * logits[~sampled])


def test_entries_of_several_rows():
    logits, _, positions, temperature, seeds = case(6)
    by_entry = noise.add_target_noise(
        logits,
        offsets=None,
        idx_mapping=torch.tensor([1, 3]),
        positions=positions,
        temperature=temperature,
        seeds=seeds,
    )
    by_row = noise.add_target_noise(
        logits,
        offsets=None,
        idx_mapping=torch.tensor([1, 1, 1, 3, 3, 3]),
        positions=positions,
        temperature=temperature,
        seeds=seeds,
    )
    assert torch.equal(by_entry, by_row)


@pytest.mark.parametrize("reduced", [False, True])
def test_a_drafter_that_is_the_target_foresees_every_sample(reduced):
    """With the target's own logits the first choice is the token that vLLM's sampler draws, always."""
    logits, slots, positions, temperature, seeds = case(64)
    slots = slots.clamp(min=0)
    drawn = gumbel.gumbel_sample(
        logits, slots, temperature, seeds, positions, apply_temperature=True, is_drafting=False
    )
    offsets = torch.zeros(VOCAB, dtype=torch.int64) if reduced else None
    seen = noise.add_target_noise(
        logits, offsets=offsets, idx_mapping=slots, positions=positions, temperature=temperature, seeds=seeds
    )
    assert torch.equal(seen.argmax(dim=-1), drawn)
    moved = noise.add_target_noise(
        logits, offsets=offsets, idx_mapping=slots, positions=positions + 1, temperature=temperature, seeds=seeds
    )
    assert not torch.equal(moved.argmax(dim=-1), drawn)


@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("apply_temperature", [False, True])
def test_sampling_without_the_interpreter_is_vllms(monkeypatch, is_drafting, apply_temperature):
    """What stands in for vLLM's kernel on a CPU draws the same tokens, and keeps the same drafts' logits."""
    logits, slots, positions, temperature, seeds = case(40, seed=1)
    cpu._accept_integer_masks()
    kernel = gumbel._gumbel_sample_kernel
    kernel = getattr(kernel, "original", kernel)  # an engine in this process may have replaced it already
    drawn = []
    for stand_in in (kernel, cpu._GumbelSample(kernel)):
        monkeypatch.setattr(gumbel, "_gumbel_sample_kernel", stand_in)
        cache = torch.zeros(4, 10, VOCAB)
        column = torch.arange(40) // 5 % 10
        sampled = gumbel.gumbel_sample(
            logits, slots, temperature, seeds, positions, apply_temperature, is_drafting, cache, column
        )
        drawn.append((sampled, cache))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert (drawn[0][1] != 0).any()
