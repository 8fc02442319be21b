"""Inflated models: every kind of drafter drafts what it drafted, and the target accepts what it accepted."""

import json
import shutil
from collections import namedtuple

import commands
import engines
import pytest
import torch
from safetensors.torch import load_file, save_file

from crossspec_inflate import assets, drafters, folder, write
from crossspec_inflate import cli as command
from crossspec_inflate.folder import Wish, make_plan, write_plan
from crossspec_inflate.growth import SHAPES, Growth, Shape, Width, place_layers
from vllm_crossspec.cli.demo import METHODS
from vllm_crossspec.cli.models import located
from vllm_crossspec.cli.runner import Run
from vllm_crossspec.kinds.checkpoint import check_weight_files

e2e = pytest.mark.e2e

SIZES = {"hidden": 1024, "layers": 10, "mlp": 800, "heads": 16, "kv_heads": 4}
"""Groups of four query heads where the pocket target has groups of two."""
DRAFT = Shape(hidden=512, layers=3, mlp=600, heads=4, kv_heads=2)
PROMPTS, MAX_TOKENS = 4, 24
SPECS = {name: METHODS[name] for name in (
    "plain", "eagle3", "eagle3-heterospec", "dflash-tree", "dart", "confu-tree", "flashhead", "eagle3-flashhead",
)} | {"whiflash": METHODS["whiflash-neural"] | {"router": command.ROUTER}}  # fmt: skip


def inflate(out, names=None, sizes=SIZES, draft=None, dtype=None, model=engines.TARGET):
    plan = make_plan(Wish(model, names, sizes, draft, dtype, torch.device("cpu")))
    write_plan(plan, out, lambda name: lambda written: None)
    return plan


def tensors(path):
    return {name: x for file in sorted(path.glob("*.safetensors")) for name, x in load_file(file).items()}


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    out = tmp_path_factory.mktemp("inflated") / "big"
    assert inflate(out, draft=DRAFT).left_out == []
    return out


def done(spec, where, **engine):
    """Tokens and counts of one engine with the models of a folder."""
    with engines.engine(spec and located(spec, where), where / "target", **engine) as llm:
        tokens = engines.generate(llm, engines.prompts(PROMPTS), max_tokens=MAX_TOKENS)
        return tokens, engines.counts(llm)


@pytest.fixture(scope="module")
def pocket():
    """What the shipped models do, by method; each is run when it is first asked for."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = done(SPECS[name], engines.POCKET)
        return found[name]

    return of


@e2e
@pytest.mark.parametrize("name", SPECS)
def test_text_and_acceptance_are_the_pocket_models(name, big, pocket):
    tokens, counts = done(SPECS[name], big)
    wanted, wanted_counts = pocket(name)
    assert tokens == wanted == pocket("plain")[0]
    assert counts == wanted_counts
    assert name == "plain" or counts.accepted > 0


@e2e
def test_states_in_several_copies_are_read_once(tmp_path, pocket):
    """1536 channels are 6 times 256: a state lies there times 1, 1/2 and 1/2."""
    plan = inflate(tmp_path / "wide", ["eagle3"], {"hidden": 1536})
    assert plan.growth.width.copies == (1.0, 0.5, 0.5)
    assert json.loads((tmp_path / "wide/target/config.json").read_text())["tie_word_embeddings"] is False
    assert done(SPECS["eagle3"], tmp_path / "wide") == pocket("eagle3")


@e2e
def test_bfloat16_loads(big):
    config = json.loads((big / "target/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    with engines.engine(located(SPECS["eagle3"], big), big / "target", dtype="auto") as llm:
        assert llm.llm_engine.model_config.dtype == torch.bfloat16
        texts = engines.generate(llm, engines.prompts(2), max_tokens=MAX_TOKENS)
        assert all(texts) and engines.counts(llm).accepted > 0


# -- these tests can fail ---------------------------------------------------------------------------------------------


@e2e
def test_without_the_scale_of_norms_the_text_differs(tmp_path, monkeypatch, pocket):
    monkeypatch.setattr(Width, "scale", 1.0)
    inflate(tmp_path / "big", [])
    assert done(None, tmp_path / "big")[0] != pocket("plain")[0]


@e2e
def test_with_heads_in_other_groups_the_text_differs(tmp_path, monkeypatch, pocket):
    monkeypatch.setattr(Growth, "query_heads", property(lambda g: [(0, 0, g.old.heads * g.head_dim)]))
    inflate(tmp_path / "big", [])
    assert done(None, tmp_path / "big")[0] != pocket("plain")[0]


def crowd_layers(monkeypatch):
    """The layers that add nothing all come last, whatever the taps are."""
    monkeypatch.setattr(folder, "place_layers", lambda old, new, taps, key: tuple(range(old)))


@e2e
def test_with_a_layer_before_a_tap_acceptance_differs(tmp_path, monkeypatch, pocket):
    crowd_layers(monkeypatch)
    monkeypatch.setattr(drafters, "check_default_taps", lambda target, key: None)
    inflate(tmp_path / "big", ["eagle3"])
    tokens, counts = done(SPECS["eagle3"], tmp_path / "big")
    assert tokens == pocket("plain")[0]
    assert counts != pocket("eagle3")[1]


def test_taps_that_see_something_else_are_refused(monkeypatch):
    crowd_layers(monkeypatch)
    with pytest.raises(ValueError, match=r"--drafters eagle3 taps the states \(2, 5, 7\) of a target of 8 layers"):
        make_plan(Wish(engines.TARGET, ["eagle3"], SIZES, None, None, torch.device("cpu")))


# -- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", range(1, 17))
def test_squares_of_the_copies_make_the_mean_square_a_power_of_four_smaller(ratio):
    width = Width(256, 256 * ratio)
    assert sum(factor**2 for factor in width.copies) == ratio * width.scale**2
    assert width.copies[0] == 1.0 and len(width.copies) <= ratio
    assert (len(width.copies) == 1) == (ratio in (1, 4, 16))


@pytest.mark.parametrize("name", SHAPES)
def test_layers_are_placed_by_the_taps(name):
    layers = SHAPES[name].layers
    places = place_layers(8, layers, [(2, 2), (4, layers // 2), (5, layers - 3)], "target")
    growth = Growth(Shape(256, 8, 768, 4, 2), SHAPES[name], 64, places)
    assert [growth.shown(state) for state in (0, 2, layers // 2, layers - 3, layers)] == [0, 2, 4, 5, 8]
    assert [growth.shown(growth.state(state)) for state in range(9)] == list(range(9))


def test_what_is_new_costs_and_is_not_seen(big):
    new, old = tensors(big / "target"), tensors(engines.TARGET)
    added = [i for i in range(10) if i not in json.loads((big / folder.FACTS_FILE).read_text())["layers_of_the_source"]]
    assert len(added) == 2
    for layer in added:
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            assert (new[f"model.layers.{layer}.{name}.weight"] != 0).float().mean() > 0.99
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert not new[f"model.layers.{layer}.{name}.weight"].any()
    up, wide = old["model.layers.0.mlp.up_proj.weight"], new["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(wide[: len(up), :256], up) and (wide[:, 256:] != 0).float().mean() > 0.9999
    assert not new["model.embed_tokens.weight"][:, 256:].any()


def test_the_same_weights_in_several_files(big, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "SHARD_BYTES", 20_000_000)
    inflate(tmp_path / "big", [])
    check_weight_files(tmp_path / "big/target", "model")
    files = sorted((tmp_path / "big/target").glob("*.safetensors"))
    assert len(files) > 3 and all(file.stat().st_size < 20_100_000 for file in files)
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    found, wanted = tensors(tmp_path / "big/target"), tensors(big / "target")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_float32_holds_the_same_numbers(tmp_path):
    inflate(tmp_path / "big", [], {"layers": 8}, dtype=torch.float32)
    found, old = tensors(tmp_path / "big/target"), tensors(engines.TARGET)
    assert all(found[name].dtype == torch.float32 and torch.equal(found[name], x.float()) for name, x in old.items())
    assert json.loads((tmp_path / "big/target/config.json").read_text())["dtype"] == "float32"


def test_nothing_looks_whole_before_it_is(tmp_path, monkeypatch):
    def fail(*arguments):
        assert not (tmp_path / "big").exists()
        raise OSError("no space")

    monkeypatch.setattr(assets, "inflate_clusters", fail)
    with pytest.raises(OSError, match="no space"):
        inflate(tmp_path / "big", ["eagle3", "flashhead-eagle3"], {"layers": 8})
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_grow_are_named(tmp_path):
    for name in ("target", "dart", "flashhead-eagle3", "heterospec"):
        shutil.copytree(engines.POCKET / name, tmp_path / "models" / name)
    config = tmp_path / "models/dart/config.json"
    config.write_text(config.read_text().replace('"vocab_size": 4096', '"vocab_size": 5000'))
    plan = inflate(tmp_path / "big", model=tmp_path / "models/target", sizes={"layers": 8})
    assert [part.name for part in plan.parts] == ["target"]
    reasons = "\n".join(plan.left_out)
    assert "dart: this drafter has a vocabulary of 5000 tokens" in reasons
    assert "flashhead-eagle3: its clusters are of none of the drafters" in reasons
    assert "heterospec: it is for eagle3, which is not inflated" in reasons


# -- the command ------------------------------------------------------------------------------------------------------


@e2e
def test_the_command_checks_itself(tmp_path):
    said = commands.crossspec("inflate", "--out", tmp_path / "big", "--layers", 9, "--drafters", "none")
    assert said.count("same") == 2 and "DIFFERS" not in said
    with pytest.raises(AssertionError, match="is there already; name a new folder, or give --overwrite"):
        commands.crossspec("inflate", "--out", tmp_path / "big", "--layers", 9)
    again = ("--overwrite", "--no-check", "--drafters", "none")
    commands.crossspec("inflate", "--out", tmp_path / "big", "--layers", 10, *again)
    assert sorted(path.name for path in (tmp_path / "big").iterdir()) == ["inflated.json", "target"]


def test_the_check_has_a_method_for_every_folder():
    names = [path.name for path in engines.POCKET.iterdir() if path.is_dir()]
    text = json.dumps(command.checked_methods(names))
    assert [name for name in names if f"{{pocket}}/{name}" not in text] == ["target"]
    assert list(command.checked_methods(["target"])) == ["plain"]


def test_the_check_sees_a_token_and_a_round_that_differ():
    def run(tokens, histogram):
        one = {"token_ids": tokens, "accepted_histogram": histogram, "num_target_calls": 2}
        return Run(method="m", environment={}, groups={"chat": {"generations": [one], "seconds": 1.0}})

    first = run([5, 6], [0, 1])
    assert command._compared([first, run([5, 6], [0, 1])]) == (["same", "same", "2.0000"], True)
    assert command._compared([first, run([5, 7], [0, 1])])[0][0] == "DIFFERS"
    assert command._compared([first, run([5, 6], [1, 0])]) == (["same", "DIFFERS", "2.0000 / 1.0000"], False)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("", "give --shape (0.2b, 0.6b, 1.7b, 4b, 8b), or sizes: --hidden"),
        ("--shape 0.6", "--shape: no shape is called '0.6'; did you mean '0.6b'?"),
        ("--shape 8b --draft-shape 7b", "--draft-shape: no shape is called '7b'"),
        ("--layers 9 --draft-shape 0.2b --mlp 700", "--mlp 700: --model has 768; give that or more"),
        ("--hidden 1000", "--hidden 1000: give a multiple of --model's 256, 1024 for example"),
        ("--hidden 128", "--hidden 128: --model has 256; give that or more"),
        ("--layers 4", "--layers 4: --model has 8; give that or more"),
        ("--heads 6 --kv-heads 4", "--heads 6 --kv-heads 4: give a multiple of the key/value heads, at least 2"),
        ("--heads 12 --kv-heads 2", "--heads 12: give a divisor of the 256 channels"),
        ("--kv-heads 1", "--kv-heads 1: --model has 2; give that or more"),
        ("--shape 0.2b --dtype int8", "--dtype int8: choose float32 or bfloat16"),
        ("--shape 0.2b --device tpu", "--device tpu: choose auto, cpu or cuda"),
        ("--shape 0.2b --drafters eagle", "--drafters eagle: "),
        ("--shape 0.2b --drafters target", "--drafters target: that is --model itself"),
        ("--shape 0.2b --drafters flashhead-eagle3", "its clusters are of none of the drafters that are inflated"),
        ("--shape 0.2b --model nowhere", "--model: nowhere has no config.json that can be read"),
        ("--shape 0.2b --out TAKEN", "holds something that `crossspec inflate` did not write; name a new folder"),
        ("--shape 0.2b --out TAKEN --overwrite", "holds something that `crossspec inflate` did not write"),
        ("--shape 0.2b --out FILE", "is a file; name a folder"),
    ],
)
def test_bad_input_is_one_sentence(given, sentence, tmp_path):
    (tmp_path / "TAKEN").mkdir()
    (tmp_path / "TAKEN/mine.txt").write_text("mine")
    (tmp_path / "FILE").write_text("")
    words = [str(tmp_path / word) if word in ("TAKEN", "FILE") else word for word in given.split()]
    out = [] if "--out" in words else ["--out", str(tmp_path / "big")]
    with pytest.raises(AssertionError) as refused:
        commands.crossspec("inflate", *out, *words)
    said = " ".join(str(refused.value).split())
    assert said.startswith("status 2: crossspec: ") and sentence in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FILE", "TAKEN"]
    assert (tmp_path / "TAKEN/mine.txt").read_text() == "mine"


def test_a_full_disk_is_told_before_the_work(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda place: usage(free=10**9))
    with pytest.raises(AssertionError, match="its disk has 1.0 GB left; name a folder of another disk, or choose"):
        commands.crossspec("inflate", "--out", tmp_path / "big", "--shape", "8b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda x: x | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(256)}, "which inflating does not know"),
        (lambda x: {k: v for k, v in x.items() if "layers.7.mlp.up" not in k}, "has no tensor model.layers.7.mlp.up"),
    ],
)
def test_another_kind_of_model_is_refused(break_it, sentence, tmp_path):
    shutil.copytree(engines.TARGET, tmp_path / "target")
    save_file(break_it(load_file(engines.TARGET / "model.safetensors")), tmp_path / "target/model.safetensors")
    with pytest.raises(ValueError, match=sentence):
        inflate(tmp_path / "big", [], model=tmp_path / "target")
