"""Coupled drafts look at the very numbers that the target's sampler draws with."""

import pytest
import torch
from vllm.v1.worker.gpu.sample import gumbel

from vllm_crossspec.drafting import noise

VOCAB = 1500


def case(rows, seed=0):
    make = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=make) * 3
    positions = torch.randint(0, 1 << 20, (rows,), generator=make)
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5])
    seeds = torch.tensor([3, -(1 << 62) + 5, 1 << 40, 12345])
    slots = torch.tensor([i % 5 - 1 for i in range(rows)])
    return logits, noise.NoiseKeys(slots, positions, temperature, seeds)


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize(("reduced", "sharpness"), [(False, 1.0), (True, 1.0), (True, 2.0)])
def test_kernel_equals_its_twin(reduced, sharpness, use_fp64):
    logits, keys = case(7)
    offsets = torch.arange(VOCAB) * 2 if reduced else None
    keys = keys._replace(use_fp64=use_fp64, sharpness=sharpness, offsets=offsets)
    out = torch.full((7, VOCAB), float("nan"))
    noise._add_target_noise_kernel[(7, 2)](
        logits, VOCAB, out, VOCAB, VOCAB, sharpness, *keys.arguments, **keys.constants(7), BLOCK=noise.BLOCK
    )
    twin = noise.add_target_noise_naive(keys, logits)
    # vLLM's series for log1p is good to 6e-7, and noise of 15 has a spacing of 1e-6.
    torch.testing.assert_close(out, twin, rtol=2e-6, atol=1e-5)


def test_greedy_and_padding_rows_stay_as_they_are():
    logits, keys = case(10)
    out, slots = noise.add_target_noise(keys, logits), keys.idx_mapping
    untouched = (slots < 1).nonzero().flatten()
    assert torch.equal(out[untouched], logits[untouched])
    assert not torch.isclose(out[slots > 0], logits[slots > 0]).all(dim=1).any()


@pytest.mark.parametrize("mixed", [False, True])
def test_what_has_no_noise_is_sharpened_and_nothing_else(mixed):
    """With sampled requests in the batch, and in one of greedy requests alone."""
    logits, keys = case(10)
    slots = keys.idx_mapping if mixed else keys.idx_mapping.clamp(max=0)
    keys = keys._replace(idx_mapping=slots)
    plain, sharp = (noise.add_target_noise(keys._replace(sharpness=s), logits) for s in (1.0, 2.0))
    sampled = slots > 0
    assert torch.equal(sharp[sampled], plain[sampled]) and bool(sampled.any()) == mixed
    assert torch.equal(sharp[~sampled], 2 * logits[~sampled])


def test_entries_of_several_rows():
    logits, keys = case(6)
    by_entry = noise.add_target_noise(keys._replace(idx_mapping=torch.tensor([1, 3])), logits)
    by_row = noise.add_target_noise(keys._replace(idx_mapping=torch.tensor([1, 1, 1, 3, 3, 3])), logits)
    assert torch.equal(by_entry, by_row)


@pytest.mark.parametrize("reduced", [False, True])
def test_a_drafter_that_is_the_target_foresees_every_sample(reduced):
    """With the target's own logits the first choice is the token that vLLM's sampler draws, always."""
    logits, keys = case(64)
    offsets = torch.zeros(VOCAB, dtype=torch.int64) if reduced else None
    keys = keys._replace(idx_mapping=keys.idx_mapping.clamp(min=0), offsets=offsets)
    slots, positions, temperature, seeds, *_ = keys
    drawn = gumbel.gumbel_sample(
        logits, slots, temperature, seeds, positions, apply_temperature=True, is_drafting=False
    )
    seen = noise.add_target_noise(keys, logits)
    assert torch.equal(seen.argmax(dim=-1), drawn)
    moved = noise.add_target_noise(keys._replace(positions=positions + 1), logits)
    assert not torch.equal(moved.argmax(dim=-1), drawn)
