"""DFlash drafters that go on from a trained one: with its weights, and with more layers or other blocks."""

import functools
import json
from dataclasses import replace

import checkpoints
import pytest
import torch
from safetensors.torch import save_file
from tiny_training import DFLASH, HIDDEN, LOOP, VOCAB, load, losses, train_command
from transformers import AutoConfig

from crossspec_tools.train.blocks import write_drafter
from crossspec_tools.train.dflash import DFlashDrafter, begin_as, checkpoint, read_start, train_dflash
from crossspec_tools.train.recipes import LoopConfig
from crossspec_tools.train.states import States

MASK_ID = 3
command = functools.partial(train_command, "dflash")
STILL = LoopConfig(steps=1, lr=0.0)
"""A run that learns nothing: what it writes is what it began as."""


@pytest.fixture(scope="module")
def target(target_folder):
    return AutoConfig.from_pretrained(target_folder)


@pytest.fixture(scope="module")
def start(tmp_path_factory, target):
    """Two layers of random weights, the norms' too."""
    model = DFlashDrafter(DFLASH, target, MASK_ID, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if parameter.ndim == 1 else noise)
    folder = tmp_path_factory.mktemp("dflash") / "model"
    write_drafter(folder, *checkpoint(model, DFLASH, target))
    return folder


# ---- what it begins as


@pytest.mark.parametrize("block_size", [DFLASH.block_size, 9])
@pytest.mark.parametrize("num_layers", [2, 3, 5])
@torch.no_grad()
def test_more_layers_begin_as_the_same_drafter(start, target, num_layers, block_size):
    config = replace(DFLASH, start=str(start), num_layers=num_layers, block_size=block_size)
    model, old = (DFlashDrafter(c, target, MASK_ID, seed=7) for c in (config, replace(DFLASH, block_size=block_size)))
    old.load_state_dict(load(start)[1])
    begin_as(model, read_start(config, target, MASK_ID))
    torch.manual_seed(0)
    states = States(torch.randn(2, 12, DFLASH.num_target_layers * HIDDEN), torch.empty(0))
    tokens, embedding = torch.randint(VOCAB, (2, 12)), torch.randn(VOCAB, HIDDEN)
    arguments = states, tokens, embedding, torch.tensor([[0, 4, 11], [1, 1, 8]])
    assert torch.equal(model(*arguments), old(*arguments))
    for layer in model.layers[2:]:  # zero alone where it adds to the stream, or nothing would be learned
        assert all(
            x.weight.abs().max() > 0 for x in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.up_proj)
        )


def test_a_run_begins_with_its_start_and_trains_every_layer(tmp_path, start, responses, target_folder):
    config = replace(DFLASH, start=str(start), num_layers=3, block_size=9)
    train_dflash(responses, target_folder, tmp_path / "still", config, STILL)
    (settings, tensors), (old_settings, old) = load(tmp_path / "still" / "model"), load(start)
    own = {"block_size": 9, "num_hidden_layers": 3, "max_window_layers": 3, "layer_types": ["full_attention"] * 3}
    assert settings == old_settings | own
    assert all(torch.equal(tensors[name], x) for name, x in old.items())
    assert {name.partition(".2.")[0] for name in tensors.keys() - old.keys()} == {"layers"}
    train_dflash(responses, target_folder, tmp_path / "run", config, LoopConfig(steps=3, lr=1e-2, warmup=1))
    learned = load(tmp_path / "run" / "model")[1]
    assert [name for name, x in tensors.items() if x.ndim == 2 and torch.equal(learned[name], x)] == []


def test_a_stopped_run_goes_on_and_another_start_is_another_run(tmp_path, start, responses, target_folder):
    flat = {"lr": 2e-3, "warmup": 1, "cooldown": 0.0, "save_every": 2}
    config = replace(DFLASH, start=str(start), num_layers=3)
    train_dflash(responses, target_folder, tmp_path / "whole", config, LoopConfig(steps=4, **flat))
    train_dflash(responses, target_folder, tmp_path / "stopped", config, LoopConfig(steps=2, **flat))
    train_dflash(responses, target_folder, tmp_path / "stopped", config, LoopConfig(steps=4, **flat))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "recipe.json").read_text())["start"] == str(start)
    with pytest.raises(ValueError, match="of a run with other start"):
        train_dflash(
            responses, target_folder, tmp_path / "whole", replace(config, start=""), LoopConfig(steps=5, **flat)
        )


# ---- the command


def words(responses, target_folder, start, out):
    folders = ["--data", responses, "--target", target_folder, "--start", start, "--out", out]
    return [*folders, "--threads", 1, "--float32", "--rows-per-step", 4, "--anchors", 2, "--steps", 1]


def test_sizes_that_are_not_given_are_those_of_the_start(tmp_path, start, responses, target_folder):
    given = words(responses, target_folder, start, tmp_path)
    assert command(*given) is None and load(tmp_path / "model")[0] == load(start)[0]
    assert "other block_size (5, here 7), num_layers (2, here 3)" in str(
        command(*given, "--layers", 3, "--block-size", 7)
    )
    assert command(*given, "--layers", 3, "--block-size", 7, "--restart") is None
    settings = load(tmp_path / "model")[0]
    assert (settings["num_hidden_layers"], settings["block_size"], settings["intermediate_size"]) == (3, 7, 48)


def test_the_command_refuses_before_it_works(tmp_path, start, responses, target_folder):
    out = tmp_path / "out"
    error = command(*words(responses, target_folder, start.parent, out))
    assert str(error) == f"--start {start.parent} has no config.json; its drafter is in {start}"
    for folder in ("nowhere", "broken"):
        error = command(*words(responses, target_folder, tmp_path / folder, out))
        assert isinstance(error, ValueError) and "crossspec train dflash" in str(error)
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / "config.json").write_text("{")
    given = words(responses, target_folder, start, out)
    for more, sentence in (
        (("--layers", 1), f"--layers 1: --start {start} has 2, which all stay; give as many or more"),
        (("--intermediate-size", 64), f"--intermediate-size 64: --start {start} has 48, which stays; leave"),
        (("--target-layers", 2), f"--target-layers 2 reads [1, 5] of the target, but --start {start} [1, 3, 5]; give"),
    ):
        error = command(*given, *more)
        assert isinstance(error, ValueError) and str(error).startswith(sentence)
    assert not out.exists()


# ---- bad input


@pytest.mark.parametrize(
    "tensors, changes, sentence",
    [
        ({}, {"hidden_size": 64}, "reads states of width 64"),
        ({}, {"vocab_size": VOCAB + 1}, f"a vocabulary of {VOCAB + 1} tokens"),
        (
            {},
            {"num_attention_heads": 1},
            "has num_attention_heads 1, but the target has 2",
        ),
        ({}, {"rope_theta": 5e5}, "has rope_theta 500000.0, but the target has 10000"),
        (
            {},
            {"layer_types": ["full_attention", "sliding_attention"]},
            "has layers of sliding_attention; give a DFlash",
        ),
        ({}, {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3, 5]}}, "has token 5 as its mask, but"),
        ({}, {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2, 5]}}, r"\[1, 3, 5\] of .* \[1, 2, 5\]"),
        ({}, {"num_hidden_layers": None}, "config.json has no 'num_hidden_layers'"),
        (
            {},
            {"num_hidden_layers": 1},
            "have a tensor layers.1.input_layernorm.weight, which no DFlash drafter with this config.json has",
        ),
        (
            {"layers.1.mlp.up_proj.weight": None},
            {},
            "have no tensor layers.1.mlp.up_proj.weight, which its config.json asks for",
        ),
        (
            {"norm.weight": torch.zeros(33)},
            {},
            r"norm.weight has the shape \[33\], but its config.json asks for \[32\]",
        ),
    ],
)
def test_another_drafter_is_one_sentence(tmp_path, start, responses, target_folder, tensors, changes, sentence):
    settings, old = load(start)
    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({n: x for n, x in (settings | changes).items() if x is not None}))
    save_file({n: x for n, x in (old | tensors).items() if x is not None}, folder / "model.safetensors")
    refused(tmp_path, folder, responses, target_folder, sentence)


def test_other_kinds_are_no_start(tmp_path, responses, target_folder):
    eagle3 = checkpoints.random_eagle3(tmp_path / "eagle3", target_folder)
    refused(tmp_path, eagle3, responses, target_folder, "not a DFlash drafter")
    confu = checkpoints.random_confu(tmp_path / "confu", target_folder, 96)
    refused(
        tmp_path, confu, responses, target_folder, "is a drafter of kind confu in speculators' format; give a DFlash"
    )


def refused(tmp_path, folder, responses, target_folder, sentence):
    with pytest.raises(ValueError, match=f"--start.*{sentence}|--target-layers.*{sentence}") as caught:
        train_dflash(responses, target_folder, tmp_path / "out", replace(DFLASH, start=str(folder)), LOOP)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
