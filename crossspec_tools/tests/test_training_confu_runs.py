"""Runs that go on from a trained EAGLE-3 drafter: ConFu's, and the EAGLE-3 that it is compared with."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import checkpoints
import confu_offline
import engines
import paper_tables
import pytest
import texts
import torch
from papers import confu as paper
from safetensors.torch import save_file
from tiny_training import (
    CONFU,
    DEPTH,
    EAGLE3,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LOOP,
    VOCAB,
    load,
    losses,
    write_eagle3,
)
from tiny_training import train_command as command
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from crossspec_tools.train import eagle3
from crossspec_tools.train.cli import app as train_app
from crossspec_tools.train.cli_drafters import CONFU as CONFU_TRAINER
from crossspec_tools.train.confu import train_confu
from crossspec_tools.train.drafter_run import offline_acceptance
from crossspec_tools.train.eagle3 import train_eagle3
from crossspec_tools.train.generations import Generation, read_generations, write_shard
from crossspec_tools.train.recipes import ConfuConfig, LoopConfig, options_of
from vllm_crossspec.drafters.confu.checkpoint import ConfuShape, check_target, read_shape
from vllm_crossspec.kinds.checkpoint import check_drafter, read_config
from vllm_crossspec.kinds.identity import Target
from vllm_crossspec.types import TargetFacts

STILL = LoopConfig(steps=1, lr=0.0)
"""A run that learns nothing: what it writes is what it began as."""


@pytest.fixture(scope="module")
def start_run(tmp_path_factory, responses, target_folder):
    folder = tmp_path_factory.mktemp("eagle3")
    write_eagle3(folder, responses, target_folder)
    return folder


@pytest.fixture(scope="module")
def start(start_run):
    return start_run / "model"


@pytest.fixture(scope="module")
def config(start):
    return replace(CONFU, start=str(start))


# ---- going on


def test_eagle3_goes_on_from_the_weights_of_its_start(tmp_path, start_run, start, responses, target_folder):
    train_eagle3(responses, target_folder, tmp_path / "still", replace(EAGLE3, start=str(start)), STILL)
    (settings, tensors), (old_settings, old) = load(tmp_path / "still" / "model"), load(start)
    assert settings == old_settings
    assert tensors.keys() == old.keys() and all(torch.equal(tensors[name], old[name]) for name in old)
    first, fresh = losses(tmp_path / "still")[0], losses(start_run)
    assert first < 0.5 * (fresh[0] + fresh[-1])
    # Its own sizes are those of its start, whatever is asked for.
    other = replace(EAGLE3, start=str(start), intermediate_size=40, draft_vocab_size=7)
    train_eagle3(responses, target_folder, tmp_path / "other", other, STILL)
    assert load(tmp_path / "other" / "model")[0] == old_settings


def test_confu_begins_as_its_start(tmp_path, config, start, responses, target_folder):
    train_confu(responses, target_folder, tmp_path, config, STILL)
    (settings, tensors), (old_settings, old) = load(tmp_path / "model"), load(start)
    for name, tensor in old.items():
        assert torch.equal(tensors[name.replace("midlayer.", "layers.0.")], tensor), name
    layer = settings["transformer_layer_config"]
    assert settings["draft_vocab_size"] == old_settings["draft_vocab_size"] == len(tensors["d2t"])
    assert all(value == old_settings[name] for name, value in layer.items())
    # What is new starts as something, not as zeros, and both mixtures have experts that differ.
    for name in ("soft_prompts.keys", "soft_prompts.values", "contemplate_embed.experts", "future_embed.router"):
        assert tensors[name].float().abs().max() > 0, name
    assert not torch.equal(tensors["contemplate_embed.experts"][0], tensors["contemplate_embed.experts"][1])


def test_the_checkpoint_is_the_format_that_is_read(tmp_path, config, responses, target_folder):
    train_confu(responses, target_folder, tmp_path / "run", config, STILL)
    folder = tmp_path / "run" / "model"
    of_target = TargetFacts("target", HIDDEN, VOCAB, DEPTH)
    facts = check_drafter("confu", str(folder), "key", of_target)
    assert facts.default_draft_tokens == CONFU.num_steps and facts.draft_vocab_size == 96
    assert facts.target_layers == (2, 4, 5)
    settings = read_config(str(folder), "key")
    assert read_shape(settings, "key") == ConfuShape(CONFU.num_soft_prompts, 4, 2, DEPTH, KV_HEADS, HEAD_DIM)
    check_target(settings, "key", Target(of_target, str(target_folder)))
    torch.manual_seed(1)
    target = json.loads((target_folder / "config.json").read_text())
    Qwen3ForCausalLM(Qwen3Config(**target)).save_pretrained(tmp_path / "sibling")
    with pytest.raises(ValueError, match="trained for another target .* than sibling, whose weight files"):
        check_target(settings, "key", Target(of_target, str(tmp_path / "sibling")))
    # The tests of engines have random drafters of this format.
    random_settings, random_tensors = load(checkpoints.random_confu(tmp_path / "random", target_folder, 96))
    tensors = load(folder)[1]
    assert random_settings.keys() == settings.keys() and random_settings["target"].keys() == settings["target"].keys()
    assert {n: x.ndim for n, x in random_tensors.items()} == {n: x.ndim for n, x in tensors.items()}


@pytest.mark.parametrize("changes", [{"num_experts": 1, "top_experts": 1}, {"replicas": 0}])
def test_ablations_train(tmp_path, config, changes, responses, target_folder):
    figures = train_confu(responses, target_folder, tmp_path, replace(config, **changes), LoopConfig(steps=2))
    assert figures["dev_accept"] >= 1 and f"accept_pos_{CONFU.num_steps}" in figures
    assert len(losses(tmp_path)) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_trains_as_the_cpu_does(tmp_path, config, responses, target_folder):
    """FlexAttention and its backward pass under the block mask, against plain attention under the bool one."""
    loop = LoopConfig(steps=6, lr=1e-2, warmup=2)
    for device in ("cpu", "cuda"):
        train_confu(responses, target_folder, tmp_path / device, config, loop, device)
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


# ---- the paper's recipe


def test_the_papers_recipe_trains_and_goes_on(tmp_path, start, responses, target_folder):
    options = {"num_soft_prompts": 3, "num_experts": 4, "replicas": 2, "num_steps": 4}
    few = {"rows_per_step": 4, "anchors_per_row": 5, "bfloat16": False}
    recipe = options_of(ConfuConfig, has_papers=True)(start=str(start), recipe_name="paper", **options, **few)
    config = CONFU_TRAINER.config_of(recipe)
    flat = {"lr": 2e-3, "warmup": 1, "cooldown": 0.0, "save_every": 2}
    for out, steps in (("whole", 4), ("stopped", 2), ("stopped", 4)):
        train_confu(responses, target_folder, tmp_path / out, config, LoopConfig(steps=steps, **flat))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    tensors = load(tmp_path / "stopped" / "model")[1]
    assert not tensors["future_skip.weight"].any() and tensors["soft_prompts.keys"].any()
    learned = torch.load(tmp_path / "stopped" / "state.pt", weights_only=True)["model"]
    assert not learned["future_skip.weight"].any()
    pocket = CONFU_TRAINER.config_of(recipe._replace(recipe_name="pocket"))
    assert pocket == replace(ConfuConfig(**options, **few), start=config.start)
    names = "aimed", "future_loss", "future_skip", "new_rate", "replicas_choose", "step_decay"
    with pytest.raises(ValueError, match="of a run with other " + ".*, ".join(rf"{name} \(" for name in names)):
        train_confu(responses, target_folder, tmp_path / "whole", pocket, LoopConfig(steps=5, **flat))
    # What is given counts, beside the paper's others.
    other = CONFU_TRAINER.config_of(recipe._replace(future_skip=True, new_rate=3.0))
    assert other == replace(config, future_skip=True, new_rate=3.0)


# ---- the commands


def words(responses, target_folder, start, out):
    options = {
        "--data": responses, "--target": target_folder, "--start": start, "--out": out, "--rows-per-step": 4,
        "--anchors": 5, "--num-steps": 4, "--threads": 1, "--device": "cpu", "--steps": 60, "--lr": 0.01,
    }  # fmt: skip
    return [str(word) for pair in options.items() for word in pair] + ["--float32"]


SIZES = ["--soft-prompts", "3", "--experts", "4", "--replicas", "2"]


def test_a_run_killed_by_a_signal_goes_on_bit_equal(tmp_path, start, responses, target_folder):
    """The state of step 100 is there when the signal comes; what was done after it is done again."""

    def given(out):
        sizes = ["--anchors", "3", "--replicas", "1", "--num-steps", "2", "--steps", "140"]
        return ["confu", *words(responses, target_folder, start, tmp_path / out), *SIZES, *sizes]

    program = "import sys; from crossspec_tools.train.cli import app; app(sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", program, *given("killed")], stdout=subprocess.DEVNULL)
    state, deadline = tmp_path / "killed" / "state.pt", time.monotonic() + 200
    while not state.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert torch.load(state, weights_only=True)["step"] == 100
    assert not (tmp_path / "killed" / "acceptance.json").exists()
    assert command(*given("whole")) is None and command(*given("killed")) is None
    whole = losses(tmp_path / "whole")
    assert len(whole) == 140 and losses(tmp_path / "killed") == whole
    assert sum(whole[-20:]) < 0.99 * sum(whole[:20])
    expected, tensors = (load(tmp_path / name / "model")[1] for name in ("whole", "killed"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_commands_claim_their_folders(tmp_path, start, responses, target_folder):
    given = [*words(responses, target_folder, start, tmp_path), "--steps", 1]
    assert command("confu", *given, *SIZES) is None
    assert command("confu", *given, *SIZES) is None  # done already
    assert "other replicas" in str(command("confu", *given, *SIZES, "--replicas", 1))
    assert "other" in str(command("eagle3", *given))
    other = tmp_path / "start"
    other.mkdir()
    for file in start.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert "other start" in str(command("confu", *given, *SIZES, "--start", other))
    assert command("eagle3", *given, "--restart") is None
    assert load(tmp_path / "model")[0]["architectures"] == ["LlamaForCausalLMEagle3"]


def test_help_teaches():
    said = CliRunner().invoke(train_app, ["--help"]).output
    assert "train confu --start" in said
    said = CliRunner().invoke(train_app, ["confu", "--help"], env={"COLUMNS": "200"}).output
    for option in ("--start", "--soft-prompts", "--experts", "--top-experts", "--anchors", "--replicas", "--num-steps"):
        assert option in said, option
    assert "--start" in CliRunner().invoke(train_app, ["eagle3", "--help"], env={"COLUMNS": "200"}).output


def test_commands_refuse_before_they_work(tmp_path, start_run, start, responses, target_folder):
    out = tmp_path / "out"
    given = words(responses, target_folder, start, out)
    for kind in ("confu", "eagle3"):
        error = command(kind, *given, "--start", tmp_path / "nowhere")
        assert isinstance(error, ValueError) and "--start" in str(error) and "crossspec train eagle3" in str(error)
        error = command(kind, *given, "--start", start_run)
        assert str(error) == f"--start {start_run} has no config.json; its drafter is in {start}"
    at = given.index("--start")
    assert CliRunner().invoke(train_app, ["confu", *given[:at], *given[at + 2 :]]).exit_code == 2
    error = command("confu", *given, "--experts", 2, "--top-experts", 3)
    assert str(error) == "--top-experts 3 must be at most --experts 2, of which they are chosen"
    for option, value in (("--soft-prompts", 0), ("--experts", 0), ("--replicas", -1), ("--no-future", 1.5)):
        result = CliRunner().invoke(train_app, ["confu", *map(str, given), option, str(value)], env={"COLUMNS": "200"})
        assert result.exit_code == 2 and option in result.output, option
    error = command("confu", *given, "--recipe", "papr")
    assert str(error) == "--recipe: no recipe is called 'papr'; did you mean 'paper'?"
    for option in ("--draft-vocab", "--intermediate-size"):
        assert str(command("eagle3", *given, option, 7)).startswith(f"{option} 7: a drafter that goes on from --start")
    assert not out.exists()


# ---- bad input


def refused(tmp_path, responses, target_folder, config, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        train_confu(responses, target_folder, tmp_path / "refused", config, LOOP)
    assert "\n" not in str(caught.value) and not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"num_soft_prompts": 999}, "--soft-prompts 999 begin as the first text of --data, which has [0-9]+ tokens"),
        ({"start": ""}, "--start is missing; give an EAGLE-3 drafter"),
        ({"start": "/nowhere"}, "--start /nowhere is not a folder"),
    ],
)
def test_bad_sizes_are_one_sentence(tmp_path, config, responses, target_folder, changes, sentence):
    refused(tmp_path, responses, target_folder, replace(config, **changes), sentence)


def copy_of(start, folder, tensors=None, **changes):
    """A start with other settings and tensors; None drops one."""
    settings, old = load(start)
    folder.mkdir()
    settings = {name: x for name, x in (settings | changes).items() if x is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({n: x for n, x in (old | (tensors or {})).items() if x is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "tensors, changes, sentence",
    [
        ({}, {"hidden_size": 64}, "reads states of width 64"),
        ({}, {"vocab_size": 300}, "a vocabulary of 300 tokens, but"),
        ({}, {"num_attention_heads": 1}, "has num_attention_heads 1, but the target has 2"),
        ({}, {"head_dim": 8}, f"has head_dim 8, but the target has {HEAD_DIM}"),
        ({}, {"rope_theta": 5e5}, "has rope_theta 500000.0, but the target has 10000"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, r"reads target layers \[1, 2, 3\], not \[2, 4, 5\]"),
        ({"fc.weight": None}, {}, "its files have no tensor fc.weight"),
        ({"d2t": None}, {}, "its files have no tensor d2t"),
        (
            {"midlayer.mask_rep": torch.zeros(64)},
            {},
            "its files have a tensor midlayer.mask_rep",
        ),
        (
            {"norm.weight": torch.zeros(33)},
            {},
            r"norm.weight has the shape \[33\]",
        ),
    ],
)
def test_an_eagle3_drafter_of_another_target_is_one_sentence(
    tmp_path, config, start, responses, target_folder, tensors, changes, sentence
):
    folder = copy_of(start, tmp_path / "start", tensors, **changes)
    sentence = f"--start.*{sentence}"
    refused(tmp_path, responses, target_folder, replace(config, start=str(folder)), sentence)
    with pytest.raises(ValueError, match=sentence):
        train_eagle3(responses, target_folder, tmp_path / "refused", replace(EAGLE3, start=str(folder)), LOOP)


def test_other_drafters_are_no_start(tmp_path, config, start, responses, target_folder):
    confu = checkpoints.random_confu(tmp_path / "confu", target_folder, 96)
    sentence = f"--start {confu} is a drafter of kind confu in speculators' format; give an EAGLE-3 drafter"
    refused(tmp_path, responses, target_folder, replace(config, start=str(confu)), sentence)
    dflash = checkpoints.random_dflash(tmp_path / "dflash", target_folder)
    refused(tmp_path, responses, target_folder, replace(config, start=str(dflash)), "not an EAGLE-3 drafter")


def test_weights_may_be_a_bin_of_tensors_and_no_more(tmp_path, config, start, responses, target_folder):
    """SafeAILab's published drafters are such files; one that would run code when it is read runs none."""
    as_bin = checkpoints.eagle3_as_bin(start, tmp_path / "bin")
    for name, folder in (("bin", as_bin), ("safe", start)):
        train_confu(responses, target_folder, tmp_path / f"from-{name}", replace(config, start=str(folder)), STILL)
    tensors, expected = (load(tmp_path / f"from-{name}" / "model")[1] for name in ("bin", "safe"))
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], x) for name, x in expected.items())
    train_eagle3(responses, target_folder, tmp_path / "eagle3", replace(EAGLE3, start=str(as_bin)), STILL)
    assert torch.equal(load(tmp_path / "eagle3" / "model")[1]["fc.weight"], expected["fc.weight"])

    class Runs:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    torch.save({**load(start)[1], "fc.weight": Runs()}, as_bin / "pytorch_model.bin")
    sentence = "--start: .*pytorch_model.bin holds more than tensors"
    refused(tmp_path, responses, target_folder, replace(config, start=str(as_bin)), sentence)
    assert not (tmp_path / "ran").exists()


def test_bad_targets_and_data_are_one_sentence(tmp_path, config, responses, target_folder):
    windowed = tmp_path / "windowed"
    settings = json.loads((target_folder / "config.json").read_text())
    windowed.mkdir()
    settings["layer_types"] = ["full_attention"] * (DEPTH - 1) + ["sliding_attention"]
    (windowed / "config.json").write_text(json.dumps(settings | {"use_sliding_window": True, "sliding_window": 8}))
    (windowed / "model.safetensors").touch()
    refused(tmp_path, responses, windowed, config, "--target has layers of sliding_attention")
    refused(tmp_path, responses, tmp_path, config, "has no config.json")
    refused(tmp_path, tmp_path, target_folder, config, "crossspec train generate")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    write_shard(foreign / "train-00000.jsonl.gz", [Generation([1], [VOCAB, 2], "chat", True)])
    refused(tmp_path, foreign, target_folder, config, f"token {VOCAB}, but the target has {VOCAB} tokens")


# ---- what a run is worth


@pytest.fixture(scope="module")
def still(tmp_path_factory, config, responses, target_folder):
    """A ConFu drafter as it begins."""
    folder = tmp_path_factory.mktemp("still")
    train_confu(responses, target_folder, folder, config, STILL)
    return folder / "model"


def test_the_papers_tables(tmp_path, still, start, responses, target_folder):
    given = ["--responses", responses, "--target", target_folder, "--confu", still, "--control", start]
    sizes = {"table-3": ["--nodes", 9, "--temperatures", "1,0", "--max-tokens", 20], "figure-5": ["--length", 4]}
    rows = {}
    for name, options in sizes.items():
        words = ["confu", name, *given, "--rows", 6, *options, "--json", tmp_path / name]
        assert paper_tables.main(list(map(str, words))) == 0
        rows[name] = json.loads((tmp_path / name).read_text())["tables"][0]["rows"]
    assert [(row["temperature"], row["texts"] > 0) for row in rows["table-3"]] == [(0.0, True), (1.0, True)]
    assert all(low <= seen <= high for row in rows["table-3"] for seen, low, high in (row["confu"], row["gain"]))
    shares = [row["control"][0] for row in rows["figure-5"]]
    assert len(shares) == 4 and 1 > shares[0] > 0 and shares == sorted(shares, reverse=True)
    # By the places, and by the rounds as a whole: 1 + the shares' sum are tokens a round.
    inputs = paper_tables.arguments(["confu", "figure-5", *map(str, given), "--rows", "6"])
    models = confu_offline.load_models(inputs)
    rows_read = confu_offline.read_rows(inputs, 4)
    for decoded in paper.decode_all(models, rows_read, confu_offline.Size(4, 4, 1)):
        assert (decoded.reached.sum(1) == decoded.walk.tokens - decoded.walk.rounds).all()
    assert shares[0] == pytest.approx(decoded.reached[:, 0].sum() / decoded.walk.rounds.sum())
    # Where next to nothing is left to chance, the target says what it says greedily.
    cold, warm = (paper.sampled(models, rows_read, temperature, 24, seed=0) for temperature in (1e-4, 1.0))
    assert [row.response_ids for row in cold] == [row.response_ids for row in rows_read]
    assert [row.response_ids for row in warm] != [row.response_ids for row in rows_read]


def test_trainings_side_by_side(tmp_path, config, still, start, start_run, responses, target_folder):
    other = tmp_path / "other"
    train_confu(responses, target_folder, other, replace(config, replicas=0), LoopConfig(steps=6, lr=3e-2, warmup=1))
    given = ["--responses", responses, "--target", target_folder, "--confu", still, "--control", start]
    words = ["confu", "table-4", *given, "--rows", 6, "--nodes", 9, "--json", tmp_path / "made.json"]
    words += ["--runs", still.parent, other, start_run]
    assert paper_tables.main(list(map(str, words))) == 0
    whole, without, eagle3 = json.loads((tmp_path / "made.json").read_text())["tables"][0]["rows"]
    told = ["ConFu", "replicas 0, steps 6, lr 0.03, warmup 1", "EAGLE-3"]
    assert [row["training"] for row in (whole, without, eagle3)] == told
    assert without["tau"] != whole["tau"] and without["gain"][0] != 0
    words[1], words[words.index("--runs") :] = "table-3", ["--temperatures", 0]
    assert paper_tables.main(list(map(str, words))) == 0
    (row,) = json.loads((tmp_path / "made.json").read_text())["tables"][0]["rows"]
    assert row["confu"] == whole["tau"] and row["control"] == eagle3["tau"] != without["tau"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("table-4", "--runs", "nowhere"), "--runs nowhere is no finished --out of `crossspec train confu`"),
        (("table-3", "--nodes", "9,x"), "--nodes 9,x: give numbers with commas between them"),
        (("table-3", "--nodes", "999"), "--nodes 999: 1 to 710"),
        (("table-3", "--temperatures", "-1"), "--temperatures -1: none may be below 0"),
        (("figure-5", "--length", "0"), "--length 0: give 1 or more"),
        (("figure-5",), "--responses nowhere: no dev-"),
    ],
)
def test_the_papers_tables_refuse(words, sentence, capsys):
    assert paper_tables.main(["confu", words[0], "--responses", "nowhere", *words[1:]]) == 2
    assert sentence in capsys.readouterr().err


def test_the_table_of_futures(tmp_path, still, start, responses, target_folder):
    """Its control's chains accept what training measures."""
    given = ["--responses", responses, "--target", target_folder, "--confu", still, "--control", start]
    words = ["confu", "futures", *given, "--nodes", "0,9", "--json", tmp_path / "found.json"]
    assert paper_tables.main(list(map(str, words))) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["tables"][0]["rows"]
    rates = {(row["nodes"], row["drafter"]): row["tokens_per_round"] for row in rows}
    assert len(rates) == 6
    target = texts.open_target(target_folder)
    control = confu_offline.load_control(start, target)
    longer = [row for row in read_generations(responses, "dev", VOCAB) if len(row.response_ids) > paper.DEPTH]
    draft = lambda batch, anchors: eagle3.drafts(control, target, batch, anchors, confu_offline.CHAIN)  # noqa: E731
    expected = offline_acceptance(control, target, longer, draft, confu_offline.CHAIN)
    assert rates[0, "control"]["all"] == pytest.approx(expected["dev_accept"], abs=1e-3)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"--responses": "nowhere"}, "--responses nowhere: no dev-"),
        ({"--confu": "start"}, "--confu: .* not a ConFu drafter"),
        ({"--control": "nowhere"}, "--control nowhere is not a folder"),
        ({"--nodes": "999"}, "--nodes 999: 0 to 710"),
    ],
)
def test_the_table_of_futures_refuses(given, sentence, start, responses, target_folder, capsys):
    words = {"--responses": responses, "--target": target_folder, "--confu": engines.CONFU, "--control": start}
    words |= {key: start if value == "start" else value for key, value in given.items()}
    if "--control" in given:
        words |= {"--target": engines.TARGET}
    assert paper_tables.main(["confu", "futures", *(str(word) for pair in words.items() for word in pair)]) == 2
    assert re.search(sentence, capsys.readouterr().err)
