"""Training on a GPU: what can be checked without one, and, where there is one, that it gives the CPU's losses."""

import pytest
import torch
from tiny_training import DART, DEPTH, DFLASH, EAGLE3, HIDDEN, TRAINERS, frozen_target

from crossspec_tools.devices import choose_device
from crossspec_tools.train.dart import DartDrafter
from crossspec_tools.train.dflash import DFlashDrafter
from crossspec_tools.train.eagle3 import Eagle3Drafter
from crossspec_tools.train.generations import Batch, sample_anchors
from crossspec_tools.train.loop import Trainer
from crossspec_tools.train.recipes import LoopConfig
from crossspec_tools.train.states import States


def test_a_gpu_that_is_not_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device on this machine; give --device cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="--device gpu: choose auto, cpu or cuda"):
        choose_device("gpu")


@pytest.mark.parametrize("kind", TRAINERS)
def test_bad_devices_are_refused_before_anything_is_read(tmp_path, kind):
    train, config = TRAINERS[kind]
    with pytest.raises(ValueError, match="--device gpu"):
        train(tmp_path, tmp_path, tmp_path / "out", config, LoopConfig(steps=1), "gpu")


META = torch.device("meta")
"""Tensors without data: whatever a drafter makes on the CPU does not mix with them."""


def _eagle3(target, states, tokens, anchors):
    model = Eagle3Drafter(EAGLE3, target.config, torch.arange(96), seed=0).to(META)
    return torch.stack([*model.unroll(states, tokens, target.embedding.to(META), anchors, 3)])


def _dflash(target, states, tokens, anchors):
    model = DFlashDrafter(DFLASH, target.config, mask_id=3, seed=0).to(META)
    return model(states, tokens, target.embedding.to(META), anchors)


def _dart(target, states, tokens, anchors):
    model = DartDrafter(DART, target.config, torch.arange(96), seed=0).to(META)
    return model(states, tokens, target.embedding.to(META), anchors, "dense")


@pytest.mark.parametrize("draft", [_eagle3, _dflash, _dart])
def test_drafters_stay_on_the_device_of_their_inputs(target_folder, draft):
    target = frozen_target(target_folder, [2, DEPTH // 2, DEPTH - 3])
    batch = Batch(torch.zeros(4, 20, dtype=torch.int64), torch.full((4,), 3), torch.full((4,), 18)).to(META)
    anchors, real = sample_anchors(batch, -1, 6, torch.Generator())
    states = States(torch.zeros(4, 20, 3 * HIDDEN, device=META), torch.zeros(4, 20, HIDDEN, device=META))
    out = draft(target, states, batch.tokens, anchors)
    out.sum().backward()
    assert anchors.device == real.device == out.device == META


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_gpu_trains_as_the_cpu_does_and_the_cpu_goes_on(tmp_path, kind, responses, target_folder, monkeypatch):
    """For DART that is FlexAttention's backward pass against the dense form's, through the losses that follow."""
    train, config = TRAINERS[kind]
    loop, losses = LoopConfig(steps=6, lr=1e-3, warmup=2, save_every=3), {}
    for device in ("cpu", "cuda"):
        train(responses, target_folder, tmp_path / device, config, loop, device)
        losses[device] = losses(tmp_path / device)
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)
    run = Trainer.run

    def stops_early(self, title):
        run(self, title, stop_at=3)

    with monkeypatch.context() as patches:
        patches.setattr(Trainer, "run", stops_early)
        train(responses, target_folder, tmp_path / "both", config, loop, "cuda")
    assert len(losses(tmp_path / "both")) == 3
    train(responses, target_folder, tmp_path / "both", config, loop, "cpu")
    assert losses(tmp_path / "both") == pytest.approx(losses["cpu"], rel=1e-3)
