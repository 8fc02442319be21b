"""What is wrong with a config or a model's name is said first, by `crossspec check` and by all that begin with it."""

import dataclasses
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_args

import pytest
from played import spec_file

import vllm_crossspec
from vllm_crossspec import model_names, plugin
from vllm_crossspec.cli import processes
from vllm_crossspec.config.native_keys import INTERNAL_KEYS
from vllm_crossspec.frontend import precheck

POCKET = Path(vllm_crossspec.__file__).parent / "pocket"
CONFIGS = Path(__file__).parents[1] / "configs"
EAGLE3 = {"method": "eagle3", "model": str(POCKET / "eagle3"), "tree": {"num_nodes": 8}}

HEAVY = ("torch", "triton", "vllm", "transformers", "ray", "matplotlib", "sklearn")

WRONG = {
    "key": (EAGLE3 | {"tree": {"dept": 3}}, "speculative_config: unknown key 'tree.dept'; did you mean 'depth'?"),
    "type": (EAGLE3 | {"tree": {"depth": "8"}}, "speculative_config.tree.depth: input should be a valid integer"),
    "method": (EAGLE3 | {"method": "eagle33"}, "unknown method 'eagle33'; did you mean 'eagle3'?"),
    "native": (EAGLE3 | {"num_spec_tokens": 3}, "did you mean 'num_speculative_tokens'?"),
    "folder": (EAGLE3 | {"model": "no/such/folder"}, "speculative_config.model: there is no folder 'no/such/folder'"),
    "config": (EAGLE3 | {"model": str(POCKET)}, "has no config.json; it is not a checkpoint folder"),
    "drafters": ({"method": "whiflash", "drafters": {"eagle3": {"model": "x"}}}, "drafters.eagle3.model: there is"),
}  # fmt: skip
WRONG_FOR_THE_TARGET = {
    "kind": (EAGLE3 | {"model": str(POCKET / "target")}, "not an EAGLE-3 drafter"),
    "block": ({"method": "dflash", "model": str(POCKET / "dflash"), "num_speculative_tokens": 40, "tree": {}}, "use 7"),
    "store": ({"method": "dart", "model": str(POCKET / "dart"), "ngram": "none.safetensors"}, "there is no such file"),
    "router": (
        {
            "method": "whiflash",
            "drafters": {name: {"model": str(POCKET / name)} for name in ("eagle3", "dflash")},
            "router": {"policy": "neural", "model": "no-router"},
        },
        "speculative_config.router.model",
    ),
}


def test_vllms_names_are_read_off_its_source():
    from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod

    methods = {name for part in get_args(SpeculativeMethod) for name in (get_args(part) or (part,))}
    keys = {field.name for field in dataclasses.fields(SpeculativeConfig)} - INTERNAL_KEYS
    assert precheck.native_names() == (methods, keys)


def test_without_vllm_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(precheck, "native_names", lambda: None)
    assert precheck.parse({"method": "eagle33"}) is None


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_is_one_sentence(crossspec, case):
    spec, sentence = WRONG[case]
    code, out, err = crossspec("check", "--spec", json.dumps(spec))
    assert (code, out) == (2, "") and sentence in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("case", WRONG_FOR_THE_TARGET)
def test_a_config_of_another_target_is_one_sentence(crossspec, monkeypatch, case):
    monkeypatch.chdir(CONFIGS.parent)
    spec, sentence = WRONG_FOR_THE_TARGET[case]
    assert crossspec("check", "--spec", json.dumps(spec))[0] == 0
    code, out, err = crossspec("check", "--model", POCKET / "target", "--spec", json.dumps(spec))
    assert (code, out) == (2, "") and sentence in err and len(err.splitlines()) == 1


def test_every_fault_of_several_files_is_told_and_what_is_right(crossspec, tmp_path):
    good = spec_file(tmp_path, "good", **EAGLE3)
    files = [spec_file(tmp_path, name, **WRONG[name][0]) for name in ("key", "folder")]
    native = spec_file(tmp_path, "native", method="eagle3", model="x/y")
    code, out, err = crossspec(
        "check", *(word for file in (files[0], good, files[1], native) for word in ("--spec", file))
    )
    assert code == 2 and [line.split(":")[0] for line in err.splitlines()] == [str(file) for file in files]
    assert (
        f"good.json: method eagle3, verification match\n  drafter eagle3: a dynamic tree of 8 nodes, from {POCKET}"
        in out
    )
    assert "native.json: vLLM's own" in out


def test_configs_of_the_pocket_models_are_right(crossspec, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    files = sorted(CONFIGS.glob("pocket-*.json"))
    code, out, err = crossspec("check", "--model", POCKET / "target", *(w for file in files for w in ("--spec", file)))
    assert (code, err) == (0, "") and out.count("method ") == len(files)


def test_keys_are_checked_without_anything_heavy():
    script = (
        "import sys; from vllm_crossspec.cli import app\n"
        f"sys.argv = ['crossspec', 'check', '--spec', {json.dumps(EAGLE3)!r}]\n"
        "try: app.main()\nexcept SystemExit as end: code = end.code\n"
        f"print(code, [name for name in {HEAVY} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "0 []"


def test_the_command_imports_nothing_heavy_before_it_speaks():
    """What `--help` of any command imports; `train` is imported when it is asked for."""
    script = (
        "import sys, vllm_crossspec.cli.app, crossspec_tools.train.cli\n"
        "sys.argv = ['crossspec', 'ngram', 'info', 'no-store']\n"
        "try: vllm_crossspec.cli.app.main()\nexcept SystemExit as end: print(end.code)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[:2] == ["2", "[]"]
    assert "no-store: there is no such file; `crossspec ngram build` or `import` writes one" in found.stderr


COMMANDS = {
    "bench": (),
    "batch": ("rows.jsonl", "out.jsonl"),
    "collect": ("--out", "records"),
    "costs": ("--out", "costs.json"),
}
PAIR = {"eagle3": {"model": str(POCKET / "eagle3")}, "dflash": {"model": str(POCKET / "dflash"), "tre": 1}}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("wrong", ["spec", "model"])
def test_commands_check_before_they_start_anything(crossspec, tmp_path, monkeypatch, command, wrong):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(processes, "engine_process", None)  # nothing can be started
    spec = spec_file(tmp_path, "wrong", method="whiflash", drafters=PAIR)
    model = POCKET / "target" if wrong == "spec" else "nonexist"
    code, out, err = crossspec(command, *COMMANDS[command], "--model", model, "--spec", spec)
    sentence = {
        "spec": "wrong: speculative_config: unknown key 'drafters.dflash.tre'; did you mean 'tree'?",
        "model": "--model: there is no folder 'nonexist'; give the target's folder or a hub id like ORG/NAME",
    }[wrong]
    assert (code, out, err) == (2, "", f"crossspec: {sentence}\n")


def test_heterospecs_calibration_checks_first(crossspec, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "engine_process", None)
    given = ("calibrate", "heterospec", "--out", tmp_path / "c.json", "--spec", json.dumps(EAGLE3 | {"tre": 1}))
    code, _, err = crossspec(*given)
    assert code == 2 and "unknown key 'tre'; did you mean 'tree'?" in err


# ---- vLLM's own commands


def as_vllm(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", *map(str, words)])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("serve", "x/y", "--speculative-config", json.dumps(WRONG["key"][0])), WRONG["key"][1]),
        (("serve", "x/y", "-sc", json.dumps(WRONG["folder"][0])), WRONG["folder"][1]),
        (
            ("serve", "nonexist", f"--speculative_config={json.dumps(EAGLE3)}"),
            "model: there is no folder 'nonexist'; give",
        ),
        (("run-batch", "--model", "/no", "-sc", json.dumps(EAGLE3)), "model: there is no folder '/no'; give"),
    ],
)
def test_vllms_commands_end_before_they_have_imported_vllm(monkeypatch, words, sentence):
    as_vllm(monkeypatch, *words)
    with pytest.raises(SystemExit) as end:
        plugin.check_early()
    assert str(end.value.code).startswith(f"vllm_crossspec: {sentence}")
    monkeypatch.setattr(sys, "argv", ["/home/me/serve.py", *sys.argv[1:]])
    plugin.check_early()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("serve",),
        ("serve", "nonexist"),
        ("serve", "nonexist", "--speculative-config"),
        ("serve", "nonexist", "--speculative-config", "{"),
        ("serve", "nonexist", "--speculative-config", '{"method": "eagle3", "model": "vllms/own"}'),
        ("serve", "--config", "options.yaml", "-sc", json.dumps(EAGLE3)),
        ("serve", "nonexist", "--load-format", "runai_streamer", "-sc", json.dumps(EAGLE3)),
        ("serve", "nonexist", "-sc", '{"tree": {}}', "--spec-method", "eagle3"),
        ("serve", "nonexist", "--speculative-config.method", "eagle3", "--speculative-config.tre", "1"),
    ],
)
def test_what_a_command_line_does_not_tell_whole_is_left_to_the_engine(monkeypatch, words):
    as_vllm(monkeypatch, *words)
    plugin.check_early()


def test_vllms_command_that_leaves_the_plugin_out_is_left_alone(monkeypatch):
    as_vllm(monkeypatch, "serve", "x/y", "--speculative-config", json.dumps(WRONG["key"][0]))
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    plugin.check_early()
    monkeypatch.setenv("VLLM_PLUGINS", "other,crossspec")
    with pytest.raises(SystemExit):
        plugin.check_early()


def test_the_early_check_stops_no_import_of_torch(monkeypatch):
    """torch would end with an error of its own where the check raises one."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [])  # of a program that embeds Python
    plugin.check_early()
    as_vllm(monkeypatch, "serve", "nonexist", "-sc", json.dumps(EAGLE3))
    looked = []

    def unreadable(*about):
        looked.append(about)
        raise PermissionError("no")

    monkeypatch.setattr(precheck, "check_folders", unreadable)
    plugin.check_early()
    assert len(looked) == 1


def test_a_wrong_key_ends_vllms_command_before_vllm_is_imported():
    program = Path(sys.executable).with_name("vllm")
    words = [program, "serve", "x/y", "--speculative-config", json.dumps(WRONG["key"][0])]
    run = subprocess.run([sys.executable, "-X", "importtime", *words], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1 and WRONG["key"][1] in run.stderr
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert "vllm_crossspec.frontend.precheck" in imported and "torch._inductor" not in imported


# ---- names of models


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub of this machine that answers with a status; returns how to say which, and what it was asked."""
    asked, status = [], [404]

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, *args):
            pass

    from huggingface_hub import constants

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield status, asked
        server.shutdown()


@pytest.mark.parametrize(("code", "sentence"), [(404, "the hub has none"), (401, "log in"), (200, None), (503, None)])
def test_the_hub_is_asked_once(hub, code, sentence):
    status, asked = hub
    status[0] = code
    found = model_names.hub_problem("org/name", "v1")
    assert asked == ["/api/models/org/name/revision/v1"]
    assert found is None if sentence is None else sentence in found


def test_a_hub_that_does_not_answer_is_a_sentence(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match="^--model: no config.json for 'org/name'; .* does not answer .*refused"):
        model_names.require_target("org/name", "--model")


def test_offline_the_hub_is_not_asked(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="^--model: .* HF_HUB_OFFLINE=1 forbids the hub; give a local folder"):
        model_names.require_target("org/name", "--model")
    assert hub[1] == []


@pytest.mark.parametrize("name", ["nonexist", "./a/b", "a/b/c", "/a", "~/x", "a b/c", "../x", ""])
def test_what_is_no_folder_and_no_hub_id_is_not_looked_for(hub, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="^KEY: "):
        model_names.require_target(name, "KEY")
    assert hub[1] == []


def test_targets_of_other_formats_are_left_to_vllm(hub, tmp_path):
    (tmp_path / "mistral").mkdir()
    (tmp_path / "mistral" / "params.json").touch()
    (tmp_path / "model.gguf").touch()
    cached = tmp_path / "models--gpt2" / "snapshots" / "1"
    cached.mkdir(parents=True)
    (cached / "config.json").touch()
    (tmp_path / "models--gpt2" / "refs").mkdir()
    (tmp_path / "models--gpt2" / "refs" / "main").write_text("1")
    for name in (tmp_path / "mistral", tmp_path / "model.gguf", "s3://bucket/model", "gpt2"):
        model_names.require_target(str(name), "--model")
    assert hub[1] == []
