"""Our DART drafter beside fvliang's: one checkpoint, the same logits, prefilled and in rounds over its cache.

Runs where a checkout of the reference is at hand (docs/results/parity.md); what training computes is tested everywhere
against a sequential forward of our own (`test_training_dart.py`).
"""

import os
from pathlib import Path

import pytest
import torch
from reference import fvliang
from reference.target import states as tapped_states
from safetensors.torch import load_file
from tiny_training import DART, DEPTH, HIDDEN, VOCAB, frozen_target

from crossspec_tools.train.blocks import write_drafter
from crossspec_tools.train.dart import DartDrafter, checkpoint
from crossspec_tools.train.recipes import DartConfig
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers

pytestmark = pytest.mark.skipif(
    fvliang.VARIABLE not in os.environ, reason=f"the reference is not at hand: {fvliang.HOW_TO_GET}"
)
CHECKOUT = Path(os.environ.get(fvliang.VARIABLE, "."))
TOLERANCE = 1e-4
"""Float32 sums in another order, and rotations from a table: logits of order 10 come out some 1e-5 apart."""
LENGTH = 60


@pytest.fixture(scope="module")
def target(target_folder):
    return frozen_target(target_folder, default_target_layers(DEPTH))


def loud_tensors(model, seed):
    """Random weights everywhere; norms vary, and the mask is as loud as an embedding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.3 * noise if name.endswith("norm.weight") else noise if "mask" in name else 0.3 * noise
            )


def make_pair(folder, target, num_drafts, theta=None):
    """Our drafter and the reference's, both from the checkpoint that ours wrote."""
    config = DartConfig(**(vars(DART) | {"num_drafts": num_drafts}))
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:96].sort().values
    model = DartDrafter(config, target.config, kept, seed=0)
    model.theta = theta or model.theta
    loud_tensors(model, seed=num_drafts)
    write_drafter(folder, *checkpoint(model, target.config))
    # The file holds bfloat16: ours goes on with what was written.
    written = {name: x.float() for name, x in load_file(folder / "model.safetensors").items() if x.is_floating_point()}
    assert not model.load_state_dict(written, strict=False).unexpected_keys
    reference = fvliang.load(CHECKOUT, folder, target.embedding)
    assert torch.equal(reference.d2t + torch.arange(len(kept)), kept)
    assert torch.equal(reference.t2d.nonzero().flatten(), kept)
    return model, reference


def text(seed=0):
    return torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def ours(model, target, tokens, known):
    """Logits [len(known), d, draft vocabulary] of drafts after so many known tokens, all from one training pass."""
    batch = torch.tensor([tokens])
    anchors = torch.tensor([[count - 2 for count in known]])
    return model(target.states(batch), batch, target.embedding, anchors)[0]


def difference(one, other):
    return (one - other).abs().max().item()


@pytest.mark.parametrize("num_drafts, theta", [(2, None), (8, None), (8, 500.0)])
def test_prefilled_drafts_equal_the_references(tmp_path, target, num_drafts, theta):
    model, reference = make_pair(tmp_path / "drafter", target, num_drafts, theta)
    tokens = text()
    features = tapped_states(target.model, tokens, fvliang.tapped_layers(DEPTH))
    known = [2, 3, 5, 17, 33, LENGTH]
    mine = ours(model, target, tokens, known)
    assert mine.std() > 1
    for count, logits in zip(known, mine, strict=True):
        cache = fvliang.Cache(CHECKOUT, reference, LENGTH + num_drafts)
        theirs = fvliang.draft_logits(reference, features[:, : count - 1], tokens[:count], cache)
        assert theirs.shape == (num_drafts, 96)
        assert difference(logits, theirs) < TOLERANCE


@pytest.mark.parametrize("rounds", [(7, 8, 9, 10, 11), (2, 10, 11, 16, 24, 25, 40, LENGTH)], ids=str)
def test_drafts_in_rounds_equal_the_references(tmp_path, target, rounds):
    """From round to round it keeps the entries and lets go of the masks, in whose places the next entries come."""
    model, reference = make_pair(tmp_path / "drafter", target, 8)
    tokens = text(1)
    features = tapped_states(target.model, tokens, fvliang.tapped_layers(DEPTH))
    cache, done = fvliang.Cache(CHECKOUT, reference, LENGTH + 8), 0
    for count, logits in zip(rounds, ours(model, target, tokens, list(rounds)), strict=True):
        theirs = fvliang.draft_logits(reference, features[:, done : count - 1], tokens[:count], cache)
        assert difference(logits, theirs) < TOLERANCE
        done = count - 1


def _wrong_layers(model, reference, features, tokens):
    return features.roll(HIDDEN, dims=-1), tokens


def _older_features(model, reference, features, tokens):
    return features.roll(1, dims=1), tokens


def _other_token(model, reference, features, tokens):
    return features, [*tokens[:-1], (tokens[-1] + 1) % VOCAB]


def _other_mask(model, reference, features, tokens):
    reference.midlayer.mask_rep.data[HIDDEN:] *= 1.1
    return features, tokens


def _other_mask_residual(model, reference, features, tokens):
    reference.midlayer.mask_rep.data[:HIDDEN] *= 1.1
    return features, tokens


def _one_norm(model, reference, features, tokens):
    compute = reference.lm_head
    reference.compute_logits = lambda hidden: compute(hidden)
    return features, tokens


@pytest.mark.parametrize(
    "spoil", [_wrong_layers, _older_features, _other_token, _other_mask, _other_mask_residual, _one_norm]
)
def test_a_spoiled_reference_differs(tmp_path, target, spoil):
    model, reference = make_pair(tmp_path / "drafter", target, 8)
    tokens = text()
    features = tapped_states(target.model, tokens, fvliang.tapped_layers(DEPTH))[:, : LENGTH - 1]
    logits = ours(model, target, tokens, [LENGTH])[0]
    features, tokens = spoil(model, reference, features, tokens)
    cache = fvliang.Cache(CHECKOUT, reference, LENGTH + 8)
    assert difference(logits, fvliang.draft_logits(reference, features, tokens, cache)) > 100 * TOLERANCE


def test_masks_that_stay_in_the_cache_show(tmp_path, target):
    model, reference = make_pair(tmp_path / "drafter", target, 8)
    tokens = text()
    features = tapped_states(target.model, tokens, fvliang.tapped_layers(DEPTH))
    cache = fvliang.Cache(CHECKOUT, reference, LENGTH + 32)
    fvliang.draft_logits(reference, features[:, :9], tokens[:10], cache)
    cache.lengths.fill_ = lambda value: None
    theirs = fvliang.draft_logits(reference, features[:, 9:12], tokens[:13], cache)
    assert difference(ours(model, target, tokens, [13])[0], theirs) > 100 * TOLERANCE
