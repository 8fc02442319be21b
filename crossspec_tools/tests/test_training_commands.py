"""Training's commands, and bad input to them: one sentence that names the option."""

import json
from dataclasses import replace

import pytest
from tiny_training import DEPTH, DRAFT_MODEL, EAGLE3, LOOP, RESPONSES, TRAINERS, VOCAB, train_command
from transformers import AutoTokenizer, GemmaConfig, GemmaForCausalLM
from typer.testing import CliRunner

from crossspec_tools.train.cli import app as train_app
from crossspec_tools.train.data import read_rows
from crossspec_tools.train.dflash import train_dflash
from crossspec_tools.train.draft_model import train_draft_model
from crossspec_tools.train.eagle3 import train_eagle3
from crossspec_tools.train.generate import generate
from crossspec_tools.train.generations import Generation, write_shard
from crossspec_tools.train.recipes import DFlashConfig, Eagle3Config, LoopConfig


@pytest.mark.parametrize("train, config", TRAINERS.values(), ids=TRAINERS)
def test_bad_folders_are_one_sentence(tmp_path, train, config, responses, target_folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="has no config.json"):
        train(responses, empty, tmp_path / "out", config, LOOP)
    (empty / "config.json").write_text((target_folder / "config.json").read_text())
    with pytest.raises(ValueError, match="has no weights"):
        train(responses, empty, tmp_path / "out", config, LOOP)
    with pytest.raises(ValueError, match="crossspec train generate"):
        train(empty, target_folder, tmp_path / "out", config, LOOP)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    write_shard(foreign / "train-00000.jsonl.gz", [Generation([1], [VOCAB, 2], "chat", True)])
    with pytest.raises(ValueError, match=f"token {VOCAB}, but the target has {VOCAB} tokens"):
        train(foreign, target_folder, tmp_path / "out", config, LOOP)
    write_shard(foreign / "train-00000.jsonl.gz", [Generation([1], [5, 2], "chat", True)])
    with pytest.raises(ValueError, match="holds 1 row; one step needs 4"):
        train(foreign, target_folder, tmp_path / "out", config, LOOP)
    shard = foreign / "train-00000.jsonl.gz"
    shard.write_bytes(shard.read_bytes()[:-12])
    with pytest.raises(ValueError, match="is damaged"):
        train(foreign, target_folder, tmp_path / "out", config, LOOP)


def test_bad_sizes_are_one_sentence(tmp_path, responses, target_folder):
    with pytest.raises(ValueError, match=r"--draft-vocab 999 must lie within 1\.\.288"):
        train_eagle3(responses, target_folder, tmp_path, Eagle3Config(draft_vocab_size=999), LOOP)
    with pytest.raises(ValueError, match="--target-layers 9"):
        train_dflash(responses, target_folder, tmp_path, DFlashConfig(num_target_layers=9), LOOP)
    for sizes, sentence in (
        ({"num_layers": DEPTH + 1}, f"--layers {DEPTH + 1} must be at most the target's {DEPTH}"),
        ({"intermediate_size": 49}, "--intermediate-size 49 must be at most the target's 48"),
    ):
        with pytest.raises(ValueError, match=sentence):
            train_draft_model(responses, target_folder, tmp_path, replace(DRAFT_MODEL, **sizes), LOOP)


def test_a_draft_model_of_another_architecture_is_one_sentence(tmp_path, responses, target_folder):
    config = GemmaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    folder = tmp_path / "gemma"
    GemmaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(target_folder).save_pretrained(folder)
    with pytest.raises(ValueError, match="--target is a gemma model; draft models are made for llama and qwen3 ones"):
        train_draft_model(responses, folder, tmp_path / "out", DRAFT_MODEL, LOOP)


def test_other_settings_do_not_resume(tmp_path, responses, target_folder):
    train_eagle3(responses, target_folder, tmp_path, EAGLE3, LoopConfig(steps=2))
    with pytest.raises(ValueError, match="other steps"):
        train_eagle3(responses, target_folder, tmp_path, EAGLE3, LoopConfig(steps=1))
    with pytest.raises(
        ValueError, match="other anchors_per_row"
    ):  # without more steps nothing would be trained with them
        train_eagle3(responses, target_folder, tmp_path, replace(EAGLE3, anchors_per_row=2), LoopConfig(steps=2))


def test_text_without_rows_is_one_sentence(tmp_path, target_folder):
    with pytest.raises(ValueError, match="no file matches"):
        generate(tmp_path, target_folder, tmp_path / "out", RESPONSES)
    (tmp_path / "train-a.jsonl").write_text("not json\n")
    with pytest.raises(ValueError, match="train-a.jsonl:1"):
        read_rows(tmp_path)


def test_commands_refuse_before_they_work(tmp_path, data, responses, target_folder):
    nowhere = tmp_path / "nowhere"
    for kind in TRAINERS:
        error = train_command(kind, "--data", nowhere, "--target", target_folder, "--out", tmp_path / "out")
        assert "--data" in str(error) and "crossspec train generate" in str(error)
        error = train_command(kind, "--data", responses, "--target", tmp_path, "--out", tmp_path / "out")
        assert isinstance(error, ValueError) and "config.json" in str(error)
        more = ["--steps", 2, "--epochs", 1]
        error = train_command(kind, "--data", nowhere, "--target", target_folder, "--out", tmp_path / "out", *more)
        assert str(error) == "--steps 2 and --epochs 1 both say how long to train: give one of them"
    error = train_command("generate", "--data", data, "--target", target_folder, "--out", data)
    assert isinstance(error, ValueError) and "folder of their own" in str(error)
    error = train_command("target", "--data", nowhere, "--out", tmp_path / "out")
    assert isinstance(error, ValueError) and "--data" in str(error)


@pytest.mark.parametrize("kind", ["", "target", "generate", *TRAINERS])
def test_help_teaches(kind):
    result = CliRunner().invoke(train_app, [*([kind] if kind else []), "--help"])
    assert result.exit_code == 0 and "--out" in result.output


def test_commands_train_resume_and_restart(tmp_path, responses, target_folder):
    words = ["--data", responses, "--target", target_folder, "--out", tmp_path, "--threads", 1, "--float32"]
    words += ["--rows-per-step", 4, "--anchors", 2, "--steps", 2]
    assert train_command("dflash", *words, "--block-size", 3) is None
    assert "block_size" in str(train_command("dflash", *words, "--block-size", 4))
    assert train_command("dflash", *words, "--block-size", 4, "--restart") is None
    assert json.loads((tmp_path / "model" / "config.json").read_text())["block_size"] == 4
