"""Training of the drafters on a tiny random target: seconds, on CPU, without vLLM."""

import json
from dataclasses import fields, replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import (
    DEPTH,
    DFLASH,
    EAGLE3,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LOOP,
    TRAINERS,
    VOCAB,
    check_entry_drafter,
    frozen_target,
    losses,
)

from crossspec_tools.train import dflash, eagle3
from crossspec_tools.train.dflash import train_dflash
from crossspec_tools.train.eagle3 import Eagle3Drafter, train_eagle3
from crossspec_tools.train.loop import Trainer
from crossspec_tools.train.muon import Float32Muon
from crossspec_tools.train.recipes import (
    ConfuConfig,
    DartConfig,
    DFlashConfig,
    DraftModelConfig,
    Eagle3Config,
    JetSpecConfig,
    LoopConfig,
)
from crossspec_tools.train.states import States


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muon_in_float32_is_torchs(shape):
    """Except for the rounding of bfloat16. Each resumes the other's state."""
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(shape, generator=generator), torch.randn((4, *shape), generator=generator)
    kinds = {
        "own": (Float32Muon, Float32Muon),
        "torch": (torch.optim.Muon,) * 2,
        "changed": (Float32Muon, torch.optim.Muon),
    }
    found = {}
    for name, (first, second) in kinds.items():
        matrix = torch.nn.Parameter(start.clone())
        optimizer = first([matrix], 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
        for step, gradient in enumerate(gradients):
            if step == 2:
                state, optimizer = optimizer.state_dict(), second([matrix], 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
                optimizer.load_state_dict(state)
            matrix.grad = gradient.clone()
            optimizer.step()
        found[name] = matrix.detach() - start
    for name in ("own", "changed"):
        assert (found[name] - found["torch"]).norm() < 0.02 * found["torch"].norm()
    assert (found["own"].T.flatten() - found["torch"].flatten()).norm() > 0.5 * found["torch"].norm(), "it can fail"


@pytest.mark.parametrize("kind", TRAINERS)
def test_loss_falls_and_a_killed_run_resumes_bit_equal(tmp_path, kind, responses, target_folder, monkeypatch):
    train, config = TRAINERS[kind]
    figures = train(responses, target_folder, tmp_path / "whole", config, LOOP)
    assert figures == {} or figures["dev_accept"] >= 1
    found = losses(tmp_path / "whole")
    assert len(found) == LOOP.steps
    assert sum(found[-6:]) < 0.9 * sum(found[:6])

    # The kill comes at step 9; the last state on disk is of step 6.
    step, calls = Trainer._train_step, []

    def dying(self):
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "_train_step", dying)
    with pytest.raises(KeyboardInterrupt):
        train(responses, target_folder, tmp_path / "killed", config, LOOP)
    monkeypatch.setattr(Trainer, "_train_step", step)
    assert len(losses(tmp_path / "killed")) == 6
    train(responses, target_folder, tmp_path / "killed", config, LOOP)
    assert losses(tmp_path / "killed") == found
    whole = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "killed" / "model" / "model.safetensors").items():
        assert torch.equal(tensor, whole[name]), name
    assert (tmp_path / "whole" / "loss.png").stat().st_size > 1000


def test_a_finished_run_goes_on_with_more_steps(tmp_path, responses, target_folder):
    """Where the rate is flat and no step decays it, more steps are what one longer run would have made."""
    flat = {"lr": 2e-3, "warmup": 1, "cooldown": 0.0, "save_every": 2}
    train_eagle3(responses, target_folder, tmp_path / "long", EAGLE3, LoopConfig(steps=6, **flat))
    out = tmp_path / "prolonged"
    train_eagle3(responses, target_folder, out, EAGLE3, LoopConfig(steps=4, **flat))
    train_eagle3(responses, target_folder, out, EAGLE3, LoopConfig(steps=6, **flat))
    assert losses(out) == losses(tmp_path / "long")
    assert json.loads((out / "recipe.json").read_text())["steps"] == 6
    # What it draws from the responses may change as well; fewer steps than it has made, or another rate, may not.
    train_eagle3(responses, target_folder, out, replace(EAGLE3, anchors_per_row=2), LoopConfig(steps=7, **flat))
    assert losses(out)[:6] == losses(tmp_path / "long")
    with pytest.raises(ValueError, match=r"of a run with other anchors_per_row \(2, here 8\), steps \(7, here 5\)"):
        train_eagle3(responses, target_folder, out, EAGLE3, LoopConfig(steps=5, **flat))
    (out / "recipe.json").unlink()
    with pytest.raises(ValueError, match="--steps 5: .*state.pt has 7 behind it; give more, or another --out"):
        train_eagle3(responses, target_folder, out, EAGLE3, LoopConfig(steps=5, **flat))
    with pytest.raises(ValueError, match="of a run with other lr"):
        train_eagle3(responses, target_folder, out, EAGLE3, LoopConfig(steps=8, **flat | {"lr": 1e-3}))
    assert len(losses(out)) == 7


PAPERS = LoopConfig(
    steps=9,
    lr=1e-2,
    optimizer="adamw",
    beta2=0.999,
    warmup=3,
    schedule="cosine",
    weight_decay=0.0,
    clip=0.5,
    save_every=4,
)
"""The settings of DART's paper in a short run."""


def _small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3, bias=False))


def _batches():
    """Some with steep slopes, which every clip scales down, and some that none does."""
    scale = torch.tensor([0.02, 3.0, 0.1, 1.0])[:, None, None]
    return cycle(scale * torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(1)))


def _error(model, batch, generator=None):
    return (model(batch) * batch[:, :3]).sum(), {}


def _trained(out: Path, config: LoopConfig, stop_at: int | None = None) -> list[torch.Tensor]:
    model = _small_model()
    Trainer(model, _batches(), _error, out, config).run("small", stop_at)
    return [parameter.detach() for parameter in model.parameters()]


def _by_torch(config: LoopConfig) -> list[torch.Tensor]:
    """The same run with torch's own AdamW, schedulers and clip."""
    model = _small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.999), weight_decay=0.0)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / config.warmup, total_iters=config.warmup - 1)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps - config.warmup)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [config.warmup])
    norms = []
    for _, batch in zip(range(config.steps), _batches(), strict=False):
        _error(model, batch)[0].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert min(norms) < 0.5 and max(norms) > 1.0
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_adamw_cosine_and_clip_are_torchs_own(tmp_path):
    expected = _by_torch(PAPERS)
    # Rates are products of other factors, in another order: float64 roundings, that Adam's division carries on.
    torch.testing.assert_close(_trained(tmp_path / "paper", PAPERS), expected, rtol=1e-5, atol=1e-6)
    for name in ("optimizer", "beta2", "schedule", "clip"):
        other = replace(PAPERS, **{name: getattr(LoopConfig(steps=9), name)})
        differences = [(a - b).abs().max() for a, b in zip(_trained(tmp_path / name, other), expected, strict=True)]
        assert max(differences) > 1e-4, name


def test_a_stopped_run_of_the_papers_goes_on_to_the_same_bits(tmp_path):
    whole = _trained(tmp_path / "whole", PAPERS)
    _trained(tmp_path / "stopped", PAPERS, stop_at=5)
    assert all(torch.equal(a, b) for a, b in zip(_trained(tmp_path / "stopped", PAPERS), whole, strict=True))
    with pytest.raises(ValueError, match=r"of a run with other clip \(0.5, here 1.0\)"):
        _trained(tmp_path / "stopped", replace(PAPERS, clip=1.0))


@pytest.mark.parametrize("config", [ConfuConfig, DartConfig, DFlashConfig, DraftModelConfig, Eagle3Config])
def test_no_setting_of_a_drafter_is_hidden_by_one_of_the_loop(config):
    """Both stand in one recipe.json, which tells a run that goes on from another one."""
    assert not {x.name for x in fields(config)} & {x.name for x in fields(LoopConfig)}


def test_a_dflash_run_with_another_decay_is_another_run(tmp_path, responses, target_folder):
    train_dflash(responses, target_folder, tmp_path, DFLASH, LoopConfig(steps=1))
    with pytest.raises(ValueError, match="of a run with other decay"):
        train_dflash(responses, target_folder, tmp_path, replace(DFLASH, decay=7.0), LoopConfig(steps=2))


def test_jetspec_trains_causal_blocks_in_its_authors_format(tmp_path, responses, target_folder):
    """From a DFlash drafter's weights, too. The control: DFlash's masks see how long their block is."""
    recipe = {f.name: getattr(DFLASH, f.name) for f in fields(DFLASH)}
    train_dflash(responses, target_folder, tmp_path / "dflash", DFLASH, LoopConfig(steps=1))
    start = str(tmp_path / "dflash" / "model")
    config = JetSpecConfig(**recipe | {"start": start})
    train_dflash(responses, target_folder, tmp_path / "jetspec", config, LoopConfig(steps=2))
    saved = json.loads((tmp_path / "jetspec" / "model" / "config.json").read_text())
    assert saved["dflash_config"]["causal_head"] is True and saved["architectures"] == ["DFlashDraftModel"]
    assert json.loads((Path(start) / "config.json").read_text())["dflash_config"].keys().isdisjoint({"causal_head"})

    target = frozen_target(target_folder, [2, 4])
    states = States(torch.randn(1, 12, DFLASH.num_target_layers * HIDDEN), torch.randn(1, 12, HIDDEN))
    given = (states, torch.arange(12)[None] + 4, target.embedding, torch.tensor([[3, 7]]))
    for kind, is_causal in ((config, True), (DFLASH, False)):
        short, long = (
            dflash.DFlashDrafter(replace(kind, block_size=size), target.config, 3, seed=0)(*given) for size in (4, 6)
        )
        assert torch.allclose(short, long[:, :, :3], atol=1e-5) is is_causal


def test_dflash_masks_with_the_token_that_is_named(tmp_path, responses, target_folder):
    train_dflash(responses, target_folder, tmp_path, replace(DFLASH, mask_token="<|endoftext|>"), LoopConfig(steps=1))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dflash_config"]["mask_token_id"] == 0
    with pytest.raises(ValueError, match="--mask-token <none>: the target's tokenizer has no such token"):
        train_dflash(responses, target_folder, tmp_path, replace(DFLASH, mask_token="<none>"), LoopConfig(steps=1))


def test_eagle3_checkpoint_is_safeailabs_format(tmp_path, responses, target_folder):
    train_eagle3(responses, target_folder, tmp_path, EAGLE3, LoopConfig(steps=1))
    config = check_entry_drafter(tmp_path / "model")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (96, VOCAB, 1)


def test_eagle3_with_the_whole_vocabulary_has_no_token_map(target_folder):
    config = frozen_target(target_folder, [2, 4, 5]).config
    model = Eagle3Drafter(EAGLE3, config, torch.arange(VOCAB), seed=0)
    assert not {"d2t", "t2d"} & set(eagle3.checkpoint(model, config)[1])


def test_dflash_checkpoint_is_z_labs_format(tmp_path, responses, target_folder):
    train_dflash(responses, target_folder, tmp_path, DFLASH, LoopConfig(steps=1))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    H, Q, KV, inner = HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, 48
    layer = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (Q, H),
        "self_attn.k_proj.weight": (KV, H),
        "self_attn.v_proj.weight": (KV, H),
        "self_attn.o_proj.weight": (H, Q),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate_proj.weight": (inner, H),
        "mlp.up_proj.weight": (inner, H),
        "mlp.down_proj.weight": (H, inner),
    }
    expected = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    expected |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    assert {name: tuple(x.shape) for name, x in tensors.items()} == expected
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [1, 3, 5]}
    assert config["block_size"] == 5 and config["num_target_layers"] == DEPTH


def test_layer_ids_follow_z_lab():
    assert dflash.target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert dflash.target_layer_ids(8, 5) == [1, 2, 3, 4, 5]
    assert dflash.target_layer_ids(8, 1) == [4]
    with pytest.raises(ValueError, match=r"within 1\.\.5"):
        dflash.target_layer_ids(8, 6)
