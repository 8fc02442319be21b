"""No pickle, no code from checkpoints, no path from a request, no text in metrics and logs (docs/use/security.md)."""

import ast
import functools
import gzip
import json
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import checkpoints
import pytest
import torch
from engines import DFLASH, EAGLE3, POCKET, TARGET, engine, generate, ours, prompts

from vllm_crossspec.drafting.flashhead.embedding import tensor_files
from vllm_crossspec.kinds.checkpoint import check_drafter, check_weight_files, kind_of, read_config
from vllm_crossspec.kinds.drafter import drafter_kind
from vllm_crossspec.kinds.identity import identify
from vllm_crossspec.kinds.manifest import read_tensors
from vllm_crossspec.types import TargetFacts

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "vllm_crossspec", "crossspec_tools", "packages/cpu_lane/crossspec_cpu_lane", "benchmarks", "research", "examples",
)  # fmt: skip

# ---- what no file of ours does


UNSAFE_MODULES = {
    "_pickle", "cloudpickle", "dill", "imp", "joblib", "jsonpickle", "marshal", "pickle", "ruamel", "shelve", "yaml",
}  # fmt: skip
UNSAFE_CALLS = {
    "__import__", "compile", "eval", "exec", "ctypes.CDLL", "importlib.import_module",
    "importlib.metadata.entry_points",
    "importlib.util.spec_from_file_location", "os.popen", "os.system", "pandas.read_pickle", "runpy.run_module",
    "runpy.run_path", "subprocess.getoutput", "subprocess.getstatusoutput", "tarfile.open", "tempfile.mktemp",
    "torch.hub.load", "torch.jit.load", "torch.ops.load_library", "torch.package.PackageImporter",
    "torch.serialization.add_safe_globals", "urllib.request.urlopen",
}  # fmt: skip
NAMED_HERE = {"ctypes.CDLL", "importlib.import_module"}
"""Calls that are harmless where the name of what they load stands in the call."""
NEEDED = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}
FORBIDDEN_VALUES = {"shell": True, "allow_pickle": True, "trust_remote_code": True, "weights_only": False}
SERIALIZATION = "VLLM_ALLOW_INSECURE_SERIALIZATION"

EXCEPTIONS = {
    ("benchmarks/flight.py", "tarfile.open"): "archives of flights; members are taken out by the filter for data",
    ("benchmarks/flight_engines.py", SERIALIZATION): "its jobs are functions that it hands to its own engine",
    ("benchmarks/flight_tables.py", "tarfile.open"): "the same archives, read and not taken out",
    ("benchmarks/round_time.py", SERIALIZATION): "its probes are functions that it hands to its own engine",
    ("research/paper_tables.py", "importlib.import_module"): "modules of its own folder, by a tuple in it",
    (
        "packages/cpu_lane/crossspec_cpu_lane/driver.py",
        "ctypes.CDLL",
    ): "the lane's kernels, in the user's own cache",
    ("packages/cpu_lane/crossspec_cpu_lane/driver.py", "exec"): "a launcher, written out of a kernel's own signature",
    ("packages/cpu_lane/crossspec_cpu_lane/run.py", "exec"): "likewise",
    ("packages/cpu_lane/crossspec_cpu_lane/products.py", "torch.ops.load_library"): "likewise",
    ("vllm_crossspec/api.py", "importlib.import_module"): "names that stand in the file",
    ("vllm_crossspec/cli/app.py", "importlib.metadata.entry_points"): "commands of installed packages",
    ("packages/cpu_lane/crossspec_cpu_lane/vllm/forks.py", "runpy.run_module"): "a job, in a process that it forked",
    ("packages/cpu_lane/crossspec_cpu_lane/vllm/preload.py", "importlib.import_module"): "names that stand in the file",
    ("vllm_crossspec/cli/doctor.py", "importlib.import_module"): "names that stand in the file",
    ("vllm_crossspec/cli/doctor.py", "importlib.metadata.entry_points"): "it lists them and loads none",
    ("crossspec_tools/flashhead/cli.py", "importlib.import_module"): "names that stand in the file",
    ("benchmarks/load.py", "urllib.request.urlopen"): "the health of a server that it has started",
    ("vllm_crossspec/cli/server.py", "urllib.request.urlopen"): "the server that the user names, http or https",
    ("crossspec_tools/train/cli_drafters.py", "importlib.import_module"): "a module that a trainer of ours names",
    ("vllm_crossspec/kinds/checkpoint.py", "importlib.import_module"): "a module that a DrafterKind names",
    ("vllm_crossspec/cli/models.py", "importlib.metadata.entry_points"): "sets of models of installed packages",
    ("vllm_crossspec/platform.py", "importlib.metadata.entry_points"): "platforms of installed packages",
    ("vllm_crossspec/vllm_api/check.py", "importlib.import_module"): "modules of vLLM in our inventory",
    ("vllm_crossspec/files.py", "import pickle"): "the name of the error by which torch refuses code",
    ("vllm_crossspec/model_names.py", "urllib.request.urlopen"): "the hub's own address: whether it has a model",
    ("vllm_crossspec/kinds/registry.py", "importlib.import_module"): "what an entry of a registry names",
    ("vllm_crossspec/kinds/registry.py", "importlib.metadata.entry_points"): "entries of installed packages",
}
"""All places that do one of these things all the same, and why each may."""


def _names(tree):
    """What each name that is imported stands for, dotted."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                (a.asname or a.name.split(".")[0]): a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    return found


def _dotted(node, names):
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, names)):
        return f"{owner}.{node.attr}"
    return None


@functools.cache
def parsed(file):
    return ast.parse(file.read_text())


def unsafe(tree):
    """Each unsafe thing that a program does, in a word."""
    names, found = _names(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"import {a.name}" for a in node.names if a.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
            found.append(f"import {node.module}")
        elif isinstance(node, ast.Constant) and node.value == SERIALIZATION:
            found.append(SERIALIZATION)
        elif isinstance(node, ast.Call):
            found += _of_call(node, _dotted(node.func, names) or "")
    return found


def _of_call(node, called):
    given = {k.arg: getattr(k.value, "value", ...) for k in node.keywords}
    first = node.args[0] if node.args else None
    if called in UNSAFE_CALLS and not (called in NAMED_HERE and isinstance(first, ast.Constant)):
        yield called
    if called in NEEDED and given.get(NEEDED[called][0], ...) is not NEEDED[called][1]:
        yield f"{called} without {NEEDED[called][0]}={NEEDED[called][1]}"
    if ".Auto" in called and called.endswith(".from_pretrained") and given.get("trust_remote_code", ...) is not False:
        yield f"{called} without trust_remote_code=False"
    yield from (f"{name}={value}" for name, value in FORBIDDEN_VALUES.items() if given.get(name, ...) is value)


def _files():
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return sorted(file for file in files if "tests" not in file.parts)


def test_nothing_unsafe_is_called_but_where_a_reason_is_given():
    found = {(str(file.relative_to(ROOT)), what) for file in _files() for what in unsafe(parsed(file))}
    assert found == set(EXCEPTIONS), found ^ set(EXCEPTIONS)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import pickle", "import pickle"),
        ("from joblib import load", "import joblib"),
        ("import yaml as y", "import yaml"),
        ("eval('1')", "eval"),
        ("exec(text)", "exec"),
        ("import torch\ntorch.load(path)", "torch.load without weights_only=True"),
        ("from torch import load as l\nl(path, weights_only=flag)", "torch.load without weights_only=True"),
        ("import torch\ntorch.load(path, weights_only=False)", "weights_only=False"),
        ("import numpy as np\nnp.load(path)", "numpy.load without allow_pickle=False"),
        ("import subprocess as s\ns.run(line, shell=True)", "shell=True"),
        ("import os\nos.system(line)", "os.system"),
        ("from importlib import import_module\nimport_module(name)", "importlib.import_module"),
        ("import ctypes\nctypes.CDLL(path)", "ctypes.CDLL"),
        (
            "from transformers import AutoConfig\nAutoConfig.from_pretrained(folder)",
            "transformers.AutoConfig.from_pretrained without trust_remote_code=False",
        ),
        ("f(trust_remote_code=True)", "trust_remote_code=True"),
        ("import os\nos.environ['VLLM_ALLOW_INSECURE_SERIALIZATION'] = '1'", SERIALIZATION),
    ],
)
def test_what_is_unsafe_is_seen(code, what):
    assert what in unsafe(ast.parse(code))


def test_what_is_safe_is_not_taken_for_unsafe():
    calls = ["re.compile(x)", "torch.load(x, weights_only=True)", "ctypes.CDLL('libcuda.so.1')", "m.eval()"]
    assert unsafe(ast.parse("\n".join(["import ctypes, re, torch", *calls]))) == []


# ---- checkpoints


FACTS = TargetFacts("the target", hidden_size=64, vocab_size=256, num_layers=8)


@pytest.fixture()
def target(tmp_path):
    (tmp_path / "target").mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    rest = {"head_dim": 32, "vocab_size": 256, "num_hidden_layers": 8, "max_position_embeddings": 512}
    config = {**sizes, **rest, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    return tmp_path / "target"


class Armed:
    """Makes a file where a pickle of it is read as code."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.fixture()
def armed(tmp_path, target):
    """A drafter whose weights are a pickle with code in it."""
    plain = checkpoints.random_eagle3(tmp_path / "plain", target)
    folder = checkpoints.eagle3_as_bin(plain, tmp_path / "armed")
    file = folder / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    torch.save({**tensors, "more": Armed(tmp_path / "marker")}, file)
    return folder


HOLDS_MORE = "holds more than tensors, which could run as code when it is read; save its tensors alone, best as .safet"


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: check_drafter("eagle3", str(folder), "KEY", FACTS),
        lambda folder: check_weight_files(folder, "KEY"),
        lambda folder: read_tensors(folder, "KEY"),
        lambda folder: tensor_files(folder, "KEY"),
    ],
    ids=["check", "files", "swap", "head"],
)
def test_a_pickle_with_code_is_refused_and_not_run(armed, tmp_path, read):
    with pytest.raises(ValueError, match=f"^KEY.*pytorch_model.bin {HOLDS_MORE}") as caught:
        read(armed)
    assert "\n" not in str(caught.value) and not (tmp_path / "marker").exists()


def test_the_pickle_is_armed(armed, tmp_path):
    torch.load(armed / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "marker").exists()


def test_what_a_trainer_left_beside_weights_is_not_read(armed, tmp_path, target):
    folder = checkpoints.eagle3_as_bin(tmp_path / "plain", tmp_path / "trained")
    shutil.copy(armed / "pytorch_model.bin", folder / "training_args.bin")
    assert check_drafter("eagle3", str(folder), "KEY", FACTS).vocab_size == 256
    assert "more" not in read_tensors(folder, "KEY") and not (tmp_path / "marker").exists()


def test_weights_without_names_are_refused(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="KEY: .*pytorch_model.bin holds no tensors by name; copy it again"):
        read_tensors(tmp_path, "KEY")


def with_code(source, folder, marker):
    """A copy of a checkpoint whose config.json names a module in its folder, as custom models do."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    (folder / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from transformers import Qwen3Config, LlamaConfig\n"
        f"class EvilConfig({ {'llama': 'LlamaConfig'}.get(config.get('model_type'), 'Qwen3Config') }):\n    pass\n"
    )
    return folder


def test_our_checks_run_no_code_of_a_folder(tmp_path, target):
    folder = with_code(checkpoints.random_eagle3(tmp_path / "plain", target), tmp_path / "evil", tmp_path / "marker")
    check_drafter("eagle3", str(folder), "KEY", FACTS)
    assert "auto_map" in read_config(str(folder), "KEY")
    assert kind_of(folder) is drafter_kind("eagle3", "")
    identify(str(folder), "KEY")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "named", ["/etc", "../other", "clusters/../../other", "/", ".."], ids=["absolute", "up", "out", "root", "parent"]
)
def test_clusters_lie_in_the_folder_whose_config_names_them(tmp_path, named):
    from vllm_crossspec.drafting.flashhead.assets import named_folder, read_assets
    from vllm_crossspec.drafting.flashhead.check import _local

    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps({"flash_head_cache_dir": named}))
    with pytest.raises(ValueError, match="flash_head_cache_dir '.*' leads out of its folder; name one that lies there"):
        read_assets(tmp_path / "head", key="head.model")
    assert named_folder({"flash_head_cache_dir": "flash_head_assets"}, "") == "flash_head_assets"
    assert _local(str(tmp_path / "head"), "head.model", None) == tmp_path / "head"


@pytest.mark.parametrize("tokens", [256, 10**9])
def test_a_config_cannot_ask_for_any_number_of_draft_tokens(tmp_path, target, tokens):
    from vllm_crossspec.config.parse import parse
    from vllm_crossspec.frontend.resolve import resolved

    plain = checkpoints.random_dflash(tmp_path / "plain", target, block_size=8)
    config = json.loads((plain / "config.json").read_text()) | {"block_size": tokens + 1}
    (plain / "config.json").write_text(json.dumps(config))
    settings = parse({"method": "dflash", "model": str(plain), "tree": {"type": "chain"}}, [])
    with pytest.raises(
        ValueError,
        match=rf"model: config.json of .* asks for {tokens} draft tokens; a request has 1 to 255: give num_spec",
    ):
        resolved(settings, "dflash", FACTS)


# ---- input files


def test_a_small_file_cannot_fill_the_memory(tmp_path, monkeypatch):
    from crossspec_tools.ngram import inputs
    from vllm_crossspec.cli import prompts as files

    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"prompt": "x" * 5000}).encode()))
    assert len(files.read_prompts(path)) == 1
    monkeypatch.setattr(files, "MAX_UNPACKED", 4096)
    with pytest.raises(ValueError, match="holds more than 4096 bytes: unpack it, and give the file that comes out"):
        files.read_prompts(path)

    path.write_bytes(gzip.compress(json.dumps({"tokens": [1] * 3000}).encode()))
    (piece,) = inputs.cut([path], 1 << 20)
    assert len(list(inputs.read_piece(piece, 3, None, None))) == 1
    monkeypatch.setattr(inputs, "MAX_LINE", 4096)
    with pytest.raises(ValueError, match=r"line at byte 0\) is longer than 4096 bytes: write a document a line"):
        list(inputs.read_piece(piece, 3, None, None))


def test_an_array_of_objects_is_no_input(tmp_path):
    import numpy as np

    from crossspec_tools.ngram.inputs import cut

    np.save(tmp_path / "ids.npy", np.array([Armed(tmp_path / "marker")], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="ids.npy is no whole .npy file"):
        cut([tmp_path / "ids.npy"], 100)
    assert not (tmp_path / "marker").exists()


# ---- requests


WATCHED = {"open", "os.listdir", "os.scandir", "glob.glob", "socket.connect", "subprocess.Popen", "import"}
_seen: list[str] | None = None


def _watch(event, arguments):
    if _seen is not None and event in WATCHED:
        _seen.append(f"{event} {arguments[:1]}")


@pytest.fixture()
def watched():
    """What of the system is asked for from here on."""
    global _seen
    sys.addaudithook(_watch)  # for good: Python takes no hook back
    _seen = []
    yield _seen
    _seen = None


@pytest.mark.parametrize("key", ["crossspec", "crossspec_category", "model", "folder", "lookup"])
def test_what_a_request_says_never_reaches_a_file(tmp_path, watched, key):
    from vllm_crossspec.step import requests

    (tmp_path / "here").write_text("x")
    paths = str(tmp_path / "here"), "../../etc/passwd", "file:///etc/passwd", "/etc", "os:system"
    watched.clear()
    for value in (*paths, {"model": "/"}, ["/"]):
        parameters = SimpleNamespace(extra_args={key: value}, structured_outputs=None, bad_words=None)
        if key.startswith("crossspec"):
            with pytest.raises(requests.RequestError):
                requests.check_request(parameters, ("chat", "math"))
            continue
        requests.check_request(parameters, ("chat", "math"))
        requests.opted_out(parameters)
        requests.draft_mode(parameters)
        requests.category_number(parameters, ("chat", "math"))
    assert watched == []
    (tmp_path / "here").read_text()
    assert watched, "nothing is seen"


def test_a_long_value_of_a_request_is_not_repeated_whole():
    from vllm_crossspec.step.requests import RequestError, check_request

    with pytest.raises(RequestError) as caught:
        check_request(SimpleNamespace(extra_args={"crossspec": "secret " * 10**5}), ())
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("arguments", [(), ("eagle3",), ("eagle3", 5), (["eagle3"], "/"), ("eagle3", "/", "/")])
def test_a_swap_with_other_arguments_never_reaches_a_worker(monkeypatch, arguments):
    """Of several workers that raise, vLLM would take one's answer for another question's."""
    from vllm_crossspec.hooks import engine_core as core

    monkeypatch.setattr(core, "settings_of", lambda config: object())
    with pytest.raises(ValueError, match="takes a drafter's name and the folder of a checkpoint, two texts"):
        core.collective_rpc(SimpleNamespace(vllm_config=None), pytest.fail, core.SWAP, args=arguments)


# ---- metrics and logs


def test_labels_of_metrics_come_from_the_config_or_are_numbers():
    import prometheus_client

    from vllm_crossspec.metrics.adaptive import TreeSizeCounters
    from vllm_crossspec.metrics.counters import AcceptanceCounters
    from vllm_crossspec.metrics.export import Publisher, _make_counters
    from vllm_crossspec.metrics.routing import RoutingCounters
    from vllm_crossspec.metrics.stages import StageClock

    names, stages = ("one", "another"), ("route", "draft")
    acceptance = AcceptanceCounters(dict.fromkeys(names, 3), 4, device=torch.device("cpu"))
    sizes = TreeSizeCounters(3)
    publisher = Publisher(_make_counters(), engine=7654)
    publisher.add_acceptance(acceptance.snapshot())
    publisher.add_swaps(acceptance.swaps)
    publisher.add_stop(acceptance.has_stopped)
    publisher.add_routing(
        RoutingCounters(names, 4).snapshot()["drafters"], StageClock(stages, torch.device("cpu")).seconds
    )
    publisher.add_sizes({"one": sizes.snapshot()})
    values, shown = {}, set()
    for metric in prometheus_client.REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith("crossspec:") and sample.labels.get("engine") == "7654":
                shown.add(metric.name)
                for label, value in sample.labels.items():
                    values.setdefault(label, set()).add(value)
    assert shown == {name.removesuffix("_total") for name in publisher.metrics}
    assert values.pop("drafter") == set(names) and values.pop("stage") == set(stages)
    assert set(values) == {"engine", "position", "bin", "le"}
    assert all(float(value) >= 0 for numbers in values.values() for value in numbers)


TEXTS = {
    "all_token_ids", "answer", "answers", "extra_args", "messages", "output", "outputs", "params", "prompt", "prompts",
    "req_id", "req_ids", "request", "request_id", "requests", "sampling_params", "text", "texts", "token_ids", "tokens",
}  # fmt: skip


def logged(tree):
    """Names in what a program hands to a log."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func, {}) in LOGS:
            for part in (*node.args, *node.keywords):
                found |= {n.id for n in ast.walk(part) if isinstance(n, ast.Name)}
                found |= {n.attr for n in ast.walk(part) if isinstance(n, ast.Attribute)}
    return found


LOGS = {"warnings.warn", "print"} | {
    f"logger.{level}" for level in ("debug", "info", "info_once", "warning", "warning_once", "error", "exception")
}


def test_no_text_and_no_request_goes_into_a_log():
    package = ROOT / "vllm_crossspec"
    for file in package.rglob("*.py"):
        if package / "cli" not in file.parents and package / "jobs" not in file.parents:
            assert not logged(parsed(file)) & TEXTS, file
    assert logged(ast.parse("logger.info('%s', request.prompt)")) & TEXTS == {"request", "prompt"}


def test_metrics_are_labelled_in_one_place():
    for file in (ROOT / "vllm_crossspec").rglob("*.py"):
        calls = {
            n.func.attr for n in ast.walk(parsed(file)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        }
        assert "labels" not in calls or file.name == "export.py", file


# ---- vLLM


def config_of(folder, method, trust_remote_code):
    """What vLLM makes of a drafter's folder before weights are loaded."""
    from vllm import EngineArgs

    spec = {"method": method, "model": str(folder), "num_speculative_tokens": 3, "tree": {"type": "chain"}}
    arguments = EngineArgs(
        str(TARGET), dtype="float32", max_model_len=512, enforce_eager=True, speculative_config=spec,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    return arguments.create_engine_config()


@pytest.fixture()
def code_of_folders(tmp_path, monkeypatch):
    """Transformers copies modules that it is to run into a folder; the user's own stays clean."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.e2e
@pytest.mark.usefixtures("code_of_folders")
@pytest.mark.parametrize(("method", "folder"), [("eagle3", EAGLE3), ("dflash", DFLASH)])
def test_trust_in_the_target_is_no_trust_in_its_drafter(tmp_path, monkeypatch, method, folder):
    from vllm_crossspec.vllm_api import speculative as built

    folder = with_code(folder, tmp_path / "evil", tmp_path / "marker")
    for trust in (False, True):
        config = config_of(folder, method, trust)
        speculative = config.speculative_config
        assert config.model_config.trust_remote_code == trust == speculative.target_model_config.trust_remote_code
        assert not speculative.draft_model_config.trust_remote_code
    assert not (tmp_path / "marker").exists()
    monkeypatch.setattr(built, "_as_trusted", lambda target, drafter: target)
    config_of(folder, method, trust_remote_code=True)
    assert (tmp_path / "marker").exists(), "the folder's module is not what would run"


@pytest.mark.e2e
@pytest.mark.usefixtures("code_of_folders")
def test_a_draft_model_is_trusted_as_the_target_is(tmp_path):
    """A language model of its own may be one that vLLM knows from its folder alone. The module is seen to run."""
    folder = with_code(POCKET / "draft-model", tmp_path / "evil", tmp_path / "marker")
    config_of(folder, "draft_model", trust_remote_code=False)
    assert not (tmp_path / "marker").exists()
    config_of(folder, "draft_model", trust_remote_code=True)
    assert (tmp_path / "marker").exists()


@pytest.mark.e2e
@pytest.mark.usefixtures("code_of_folders")
def test_an_engine_runs_no_code_of_its_drafter(tmp_path):
    folder = with_code(EAGLE3, tmp_path / "evil", tmp_path / "marker")
    with engine(ours("eagle3", folder), trust_remote_code=True) as llm:
        assert all(generate(llm, prompts(2), max_tokens=8))
    assert not (tmp_path / "marker").exists()


@pytest.mark.e2e
def test_vllms_own_reader_of_pickles_runs_no_code(armed, tmp_path):
    from vllm.model_executor.model_loader.weight_utils import multi_thread_pt_weights_iterator, pt_weights_iterator

    for read in (pt_weights_iterator, multi_thread_pt_weights_iterator):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            list(read([str(armed / "pytorch_model.bin")], False))
    assert not (tmp_path / "marker").exists()


@pytest.mark.e2e
@pytest.mark.parametrize("offsets", [[0, 0, 98], [0, -2, 0], [2**62, 0, 0]])
def test_draft_tokens_that_the_target_does_not_have_are_refused(offsets):
    """Embeddings and kernels would read memory where they point."""
    from vllm_crossspec.drafting.heads import DenseHead, make_head

    drafter = SimpleNamespace(head=None)
    head = SimpleNamespace(lm_head=None, draft_id_to_target_id=torch.tensor([0, 0, 97]))
    assert isinstance(make_head(head, drafter, is_coupled=True, max_rows=1, folder="F", vocab_size=100), DenseHead)
    head.draft_id_to_target_id = torch.tensor(offsets)
    with pytest.raises(
        ValueError, match="speculative_config: F: its d2t makes draft tokens the target's .* has 100; copy"
    ):
        make_head(head, drafter, is_coupled=True, max_rows=1, folder="F", vocab_size=100)
