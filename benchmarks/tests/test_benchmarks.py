"""The benchmark script: its command line, its configs, its document; and one small run."""

import argparse
import functools
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import vllm_crossspec
from vllm_crossspec.config.parse import is_ours, parse
from vllm_crossspec.drafters.confu.checkpoint import check_target
from vllm_crossspec.drafting.flashhead.check import check_head
from vllm_crossspec.frontend.resolve import resolve_tree
from vllm_crossspec.heterospec.calibration import drafter_policy
from vllm_crossspec.kinds.checkpoint import check_drafter, read_config
from vllm_crossspec.kinds.identity import Target
from vllm_crossspec.ngram_store.store import open_store
from vllm_crossspec.routing.checkpoint import check_router
from vllm_crossspec.types import TargetFacts

FOLDER = Path(__file__).resolve().parents[1]
round_time, shapes = import_module("round_time"), import_module("shapes")
methods, switch_cost = import_module("methods"), import_module("switch_cost")
kernels, kernel_cases = import_module("kernels"), import_module("kernel_cases")
cpu_speed = import_module("cpu_speed")

FOLDERS = ("target", "eagle3", "confu", "dflash", "dart", "draft-model", "clusters", "router", "ngram")
MODELS = {name: f"/models/{name}" for name in FOLDERS}
POCKET = Path(vllm_crossspec.__file__).parent / "pocket"
SPREAD = {"median", "p90"}
checked = functools.partial(check_drafter, has_weights=False)
"""Configs alone: the engine makes up the weights."""


def run(script: str, *words: str, folder: Path) -> dict[str, Any]:
    """The document of a script in a process of its own: the last line, which it writes to a file, too."""
    command = [sys.executable, str(FOLDER / script), *words, "--json", str(folder / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads((folder / "out.json").read_text())
    return found


def options(*extra: str) -> argparse.Namespace:
    return round_time.arguments(list(extra))


def test_help_names_every_method(capsys):
    with pytest.raises(SystemExit):
        options("--help")
    shown = "".join(capsys.readouterr().out.split())  # lines break at hyphens
    assert all(method in shown for method in round_time.METHODS)


def test_an_unknown_method_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        options("--methods", "none,eagle4")
    assert stopped.value.code == 2
    assert "there is no method 'eagle4'" in capsys.readouterr().err


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_configs_are_drafters_of_their_target(name, tmp_path):
    shape = shapes.SHAPES[name]
    models = shapes.write_models(tmp_path, shape)
    target = json.loads((models["target"] / "config.json").read_text())
    facts = TargetFacts(str(models["target"]), target["hidden_size"], target["vocab_size"], target["num_hidden_layers"])
    eagle3 = checked("eagle3", str(models["eagle3"]), "model", facts)
    confu = checked("confu", str(models["confu"]), "model", facts)
    of_confu = json.loads((models["confu"] / "config.json").read_text())
    check_target(of_confu, "model", Target(facts, str(models["target"])))
    dflash = checked("dflash", str(models["dflash"]), "model", facts)
    dart = checked("dart", str(models["dart"]), "model", facts)
    assert confu == eagle3._replace(target_hidden_size=shape.hidden_size, default_draft_tokens=7)
    assert eagle3.target_layers == dart.target_layers == (2, shape.num_layers // 2, shape.num_layers - 3)
    assert eagle3.draft_vocab_size == dart.draft_vocab_size == shape.draft_vocab_size
    assert dart.max_draft_tokens == shape.dart_tokens
    assert dflash.max_draft_tokens == shape.dflash_block - 1
    assert len(set(dflash.target_layers)) == shapes.NUM_DFLASH_TAPS
    check_router(models["router"], hidden_size=shape.hidden_size, drafters=("eagle3", "dflash"), key="router.model")


def test_taps_of_8b_are_those_of_the_public_checkpoint():
    assert shapes.dflash_taps(shapes.SHAPES["8b"].num_layers) == [1, 9, 17, 25, 33]


@pytest.mark.parametrize("method", [m for m in round_time.METHODS if m not in methods.MATCHED])
def test_speculative_configs_are_ours_or_native(method):
    chosen = options("--tokens", "5", "--acceptance", "3")
    assert method in chosen.methods
    config = round_time.speculative_config(method, MODELS, chosen)
    if method == "none":
        assert config is None
        return
    sampling = {"rejection_sample_method", "synthetic_acceptance_length"}
    native_keys = {"model", "method", "num_speculative_tokens", *sampling}
    assert is_ours(config, {"eagle3", "dflash"}, native_keys) is not method.startswith("native-")
    if method.startswith("native-"):
        assert config["synthetic_acceptance_length"] == 3
        return
    settings = parse(config, native_keys)
    assert settings.verification == "rejection"  # whose sampler the synthetic one is
    assert settings.active == method.removesuffix("-chain").replace("-", "_")
    (drafter,) = settings.drafters.values()
    assert drafter.tree.is_chain and drafter.native["rejection_sample_method"] == "synthetic"


def settings_of(method: str, *words: str) -> Any:
    """What our parser makes of a method's config, and its captured sizes, at batch 1 and 4."""
    chosen = options("--tokens", "5", "--nodes", "40", "--batch-sizes", "1,4", *words)
    engine = round_time.engine_settings(method, MODELS, chosen)
    return parse(engine["speculative_config"], {"model", "method"}), engine["compilation_config"][
        "cudagraph_capture_sizes"
    ]


@pytest.mark.parametrize("method", methods.MATCHED)
def test_what_matching_alone_verifies_is_not_accepted_by_chance(method, capsys):
    assert method not in options("--acceptance", "3").methods
    with pytest.raises(SystemExit):
        options("--methods", method, "--acceptance", "3")
    assert "verifies chains only: leave out the trees and confu" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "depth"), [("eagle3-tree", None), ("dflash-tree", 5)])
def test_tree_methods(method, depth):
    settings, sizes = settings_of(method)
    (drafter,) = settings.drafters.values()
    assert (drafter.tree.num_nodes, drafter.num_speculative_tokens) == (40, depth)
    assert {1, 6, 10, 41, 4, 24, 164} <= set(sizes)


@pytest.mark.parametrize(("method", "rows"), [("confu", {1, 12, 2}), ("confu-tree", {1, 82, 11})])
def test_contemplating_methods(method, rows):
    settings, sizes = settings_of(method)
    (drafter,) = settings.drafters.values()
    assert settings.contemplates and drafter.model == MODELS["confu"]
    (plain,) = settings_of(method.replace("confu", "eagle3"))[0].drafters.values()
    # Nothing cuts the drafts at larger batches: ConFu's chains would get a measured schedule, EAGLE-3's have none.
    whole = {"by_batch_size": {1: 40 if method == "confu-tree" else 5}}
    assert drafter.tree == plain.tree.model_copy(update=whole)
    assert drafter.num_speculative_tokens == plain.num_speculative_tokens
    assert sizes == sorted(rows | {4 * n for n in rows})  # plain rows; verification, contemplate rows and all; levels


def test_several_tree_sizes_are_a_run_each(monkeypatch, tmp_path, capsys):
    ran = []

    def run_method(method, models, folder, chosen):
        ran.append((method, chosen.nodes))
        return {"engine": None, "rows": [], "error": "1", "log": "no engine here"}

    arguments = ["--shape", "pocket", "--methods", "none,eagle3-tree,confu-tree", "--nodes", "30,60"]
    monkeypatch.setattr(round_time, "run_method", run_method)
    monkeypatch.setattr(sys, "argv", ["round_time.py", *arguments, "--folder", str(tmp_path)])
    assert round_time.main() == 1
    trees = [(method, size) for size in (30, 60) for method in ("eagle3-tree", "confu-tree")]
    assert ran == [("none", 30), *trees]
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(r["method"], r["num_nodes"]) for r in found["rows"]] == [("none", None), *trees]
    assert [r["speculative_config"]["tree"]["num_nodes"] for r in found["rows"][1:]] == [30, 30, 60, 60]
    assert found["meta"]["num_nodes"] == [30, 60]


def test_adaptive_trees_are_in_the_surest_bin(tmp_path):
    chosen = options("--shape", "pocket", "--methods", methods.ADAPTIVE, "--batch-sizes", "1,4")
    models = methods.model_folders(chosen, tmp_path)
    config = methods.speculative_config(methods.ADAPTIVE, models, chosen)
    (drafter,) = parse(config, {"model", "method"}).drafters.values()
    resolved = drafter.model_copy(update={"tree": resolve_tree(drafter)})
    policy = drafter_policy(resolved, read_config(drafter.model, "model"), None, "adaptive")
    assert policy == methods.paper_policy(chosen)
    assert policy.bin_of(100.0) == 0 and (policy.extensions[0], policy.widths[0]) == (4, 22)
    assert {23, 40, 61, 10} <= methods.query_lengths(methods.ADAPTIVE, chosen)
    fixed = methods.speculative_config("eagle3-tree", models, chosen)
    assert {k: v for k, v in config.items() if k != "adaptive"} == fixed


@pytest.mark.parametrize("method", methods.STANDALONE)
def test_a_draft_model_of_its_own(method, tmp_path):
    chosen = options("--shape", "pocket", "--methods", method, "--batch-sizes", "1,4", "--tokens", "5")
    models = methods.model_folders(chosen, tmp_path)
    facts = TargetFacts("target", 256, 4096, 8)
    assert checked("draft_model", models["draft-model"], "model", facts).vocab_size == 4096
    config = round_time.speculative_config(method, models, chosen)
    (drafter,) = parse(config, {"model", "method"}).drafters.values()
    assert (drafter.kind, drafter.tree.is_chain) == (methods.STANDALONE[method], True)
    assert Path(models["clusters"]).exists() is (method == "flashhead")
    if drafter.head is not None:
        check_head(
            drafter, read_config(drafter.model, "model"), checked("flashhead", drafter.model, "model", facts), "head"
        )
    sizes = round_time.engine_settings(method, models, chosen)["compilation_config"]["cudagraph_capture_sizes"]
    assert {1, 2, 4, 6, 8, 24} <= set(sizes)


@pytest.mark.parametrize("method", methods.SEARCHED)
def test_searched_methods(method):
    settings, sizes = settings_of(method, "--tokens", "7")
    (drafter,) = settings.drafters.values()
    assert (drafter.kind, drafter.tree.type) == (method.partition("-")[0], "continuity")
    assert (drafter.tree.num_nodes, drafter.num_speculative_tokens) == (40, 7)
    has_ngrams = method in methods.WITH_NGRAMS
    assert (drafter.ngram.model if drafter.ngram else None) == (MODELS["ngram"] if has_ngrams else None)
    queries = 7 if drafter.kind == "dart" else 8  # DFlash's block has the last accepted token before the drafted ones
    assert {1, 4, 41, 164, queries, 4 * queries} <= set(sizes)


def test_a_store_is_made_for_methods_with_ngrams_alone(tmp_path):
    without = methods.model_folders(options("--shape", "pocket", "--methods", "dart-nongram,dart-chain"), tmp_path)
    assert not Path(without["ngram"]).exists()
    models = methods.model_folders(options("--shape", "pocket", "--methods", "none,dart"), tmp_path)
    store = open_store(Path(models["ngram"]), vocab_size=shapes.SHAPES["pocket"].vocab_size)
    assert (store.order, models["ngram"]) == (3, without["ngram"])
    # Whatever is drafted was seen, and something after it: a lookup has a node to search.
    followers = store.offsets[1 : store.header.vocab_size + 1] - store.offsets[: store.header.vocab_size]
    assert int(followers.min()) > 0
    made = os.stat(models["ngram"]).st_mtime_ns
    methods.model_folders(options("--shape", "pocket", "--methods", "dart"), tmp_path)
    assert os.stat(models["ngram"]).st_mtime_ns == made


@pytest.mark.parametrize("method", methods.ROUTED)
def test_routed_methods(method):
    settings, sizes = settings_of(method, "--threshold", "1.5")
    assert settings.is_routed and settings.routing_order == ("eagle3", "dflash")
    assert {name: drafter.tree.num_nodes for name, drafter in settings.drafters.items()} == {"eagle3": 40, "dflash": 40}
    assert settings.drafters["dflash"].num_speculative_tokens == 5
    router = settings.router
    assert (router.policy, router.threshold) == (method.removeprefix("whiflash-"), (1.5,))
    assert router.model == (MODELS["router"] if router.policy == "neural" else None)
    # The passes of a mixed batch: verification, one row a request, levels, blocks.
    assert {1, 4, 41, 164, 10, 40, 6, 24} <= set(sizes)


def test_checkpoints_take_the_dummies_place(tmp_path):
    chosen = options("--checkpoints", str(POCKET), "--methods", "whiflash-neural")
    models = methods.model_folders(chosen, tmp_path)
    folders = ("target", "eagle3", "confu", "dflash", "dart")
    assert {name: models[name] for name in folders} == {name: str(POCKET / name) for name in folders}
    assert Path(models["ngram"]).is_file()
    hidden_size = json.loads((POCKET / "target" / "config.json").read_text())["hidden_size"]
    check_router(models["router"], hidden_size=hidden_size, drafters=("eagle3", "dflash"), key="router.model")
    assert round_time.engine_settings("whiflash-neural", models, chosen)["load_format"] == "auto"
    assert round_time.engine_settings("whiflash-neural", models, options())["load_format"] == "dummy"


def test_costs_of_a_switch_are_shares_of_the_round():
    row = switch_cost.describe(8.0, 2.0, {1: 0.1, 90: 0.5}, {"neural": 0.03})
    assert (row["round_ms"], row["draft_ms"]) == (10.0, 2.0)
    assert row["switch"] == {"1": {"ms": 0.1, "percent_of_round": 1.0}, "90": {"ms": 0.5, "percent_of_round": 5.0}}
    assert row["router"]["neural"] == {"ms": 0.03, "percent_of_round": 0.3}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the benchmark times what it only counts here")
def test_kernels_are_counted_without_a_gpu(tmp_path, capsys):
    words = ["--only", "attention,commit,build,search,head", "--shape", "pocket", "--nodes", "20", "--path", "4"]
    assert kernels.main([*words, "--batch-sizes", "1,3", "--json", str(tmp_path / "out.json")]) == 0
    found, shown = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr()
    assert found == json.loads(shown.out.splitlines()[-1]) and kernels.NO_GPU in shown.err
    assert found["meta"]["times_mean_something"] is False and found["floor_us"] is None
    launches = {1: {}, 3: {}}
    for row in found["rows"]:
        launches[row["batch_size"]][row["name"]] = row["launches"]
    assert launches[1] == launches[3], "whatever the batch"
    of = launches[1]
    assert (of["compact_kv"], of["tail_attention"], of["best_first"], of["DynamicTree"]) == (1, 1, 1, 10)
    assert (of["continuity"], of["continuity, n-grams on the host"]) == (11, 18)
    heads = {(name.rpartition(", ")[2], count) for name, count in of.items() if name.startswith("flashhead")}
    assert heads == {("choice", 4), ("candidates", 5)} and sum("head" in name for name in of) == 8


@pytest.mark.parametrize("group", kernel_cases.CASES)
def test_kernels_that_are_timed_agree_with_their_twins(group, tmp_path):
    chosen = kernels.arguments(["--nodes", "20", "--path", "4"])
    chosen.folder = tmp_path
    shape = shapes.SHAPES["pocket"]._replace(num_layers=2, vocab_size=320, draft_vocab_size=200)
    for case in kernel_cases.CASES[group](2, shape, chosen):
        case.run()
        assert case.check is None or case.check(), case.name


@pytest.mark.parametrize("is_real", [True, False])
def test_a_kernel_disagrees_with_its_twin_only_where_the_gpu_computes(is_real, monkeypatch):
    times = iter([{"median": 6.0}, {"median": 2.0}])
    monkeypatch.setattr(kernels, "time_case", lambda *_: next(times))
    cases = [kernel_cases.Case("a", print, None, {}), kernel_cases.Case("b", print, lambda: False, {"beside": "a"})]
    monkeypatch.setattr(kernels, "all_cases", lambda _: [({}, cases)])
    first, second = kernels.measure(kernels.arguments([]), has_gpu=True, is_real=is_real)
    assert first["agrees"] is None and second["agrees"] is (False if is_real else None)
    assert second["speedup"] == 3.0 and "speedup" not in first


def a_round(batch_size: int, tokens: int, scale: float) -> dict:
    stages = {"prepare": 1.0, "target": 10.0, "between": 0.5, "sample": 2.0, "draft": 4.0}
    return {
        "num_requests": batch_size,
        "num_tokens": tokens,
        "host_ms": {stage: ms * scale for stage, ms in stages.items()},
        "device_ms": {stage: 2 * ms * scale for stage, ms in stages.items()},
        "counts": {"graph_replays/target": 1, "allocations/draft": 6},
    }


def test_document_adds_up():
    chosen = options("--methods", "none,native-eagle3", "--shape", "pocket")
    rounds = [a_round(2, 500, 50.0)] + [a_round(2, 16, s) for s in (9.0, 9.0, 9.0, 9.0, 1.0, 2.0, 3.0)]
    run = {"rounds": rounds, "tokens_per_round": 1.0, "sync_places": {}}
    row = round_time.summarise({"time": run, "count": run}, 2, chosen)
    assert row["num_rounds"] == 3  # neither the prompts' round nor the warm-up's
    host = row["host_ms"]
    assert set(host) == {"round", "target", "draft", "rest", "rest_parts"}
    assert host["round"] == {"median": 35.0, "p90": 52.5}
    assert (host["target"]["median"], host["draft"]["median"], host["rest"]["median"]) == (20.0, 8.0, 7.0)
    assert sum(part["median"] for part in host["rest_parts"].values()) == host["rest"]["median"]
    assert row["device_ms"]["round"]["median"] == 70.0
    assert row["per_round"] == {"graph_replays": {"target": 1.0}, "allocations": {"draft": 6.0}}

    engine = {"device": "a GPU", "simulated": False}
    results = {
        ("none", 60): {"engine": engine, "rows": [row]},
        ("native-eagle3", 60): {"engine": None, "rows": [], "error": "1", "log": "what happened"},
    }
    found = json.loads(json.dumps(round_time.document(results, MODELS, chosen)))
    assert [r["method"] for r in found["rows"]] == ["none", "native-eagle3"]
    assert [r["proposer"] for r in found["rows"]] == [None, "vllm"]
    assert found["rows"][1]["error"] == "1"
    meta = found["meta"]
    assert {"versions", "command", "commit", "hardware", "weights", "acceptance"} <= set(meta)
    assert meta["times_mean_something"] is True


@pytest.mark.parametrize(
    ("device", "simulated", "kind"), [("cpu", False, "cpu"), ("a GPU", True, "simulated GPU"), ("a GPU", False, "gpu")]
)
def test_meta_says_whether_times_mean_something(device, simulated, kind):
    engine = {"device": device, "simulated": simulated}
    meta = round_time.meta({"none": {"engine": engine, "rows": []}}, options())
    assert meta["hardware"]["kind"] == kind
    assert meta["times_mean_something"] is (kind == "gpu")
    assert (meta["note"] is None) is (kind == "gpu")


def test_no_decode_round_is_an_error_in_the_row():
    run = {"rounds": [a_round(2, 16, 1.0)], "tokens_per_round": 1.0, "sync_places": {}}
    row = round_time.summarise({"time": run, "count": run}, 2, options())
    assert "KV cache" in row["error"]


@pytest.mark.e2e
@pytest.mark.slow
def test_pocket_shape_runs(tmp_path):
    arguments = ["--shape", "pocket", "--methods", "none,native-eagle3,eagle3", "--batch-sizes", "1,2"]
    arguments += ["--context", "20", "--tokens", "3", "--rounds", "3", "--folder", str(tmp_path)]
    found = run("round_time.py", *arguments, folder=tmp_path)
    assert [(r["method"], r["batch_size"]) for r in found["rows"]] == [
        (method, size) for method in ("none", "native-eagle3", "eagle3") for size in (1, 2)
    ]
    for row in found["rows"]:
        assert set(row["host_ms"]["round"]) == SPREAD
        assert row["host_ms"]["round"]["median"] > 0
        assert row["tokens_per_round"] >= 1
        assert (row["host_ms"]["draft"]["median"] > 0) is (row["method"] != "none")


@pytest.mark.e2e
@pytest.mark.slow
def test_routed_rounds_run(tmp_path):
    arguments = ["--checkpoints", str(POCKET), "--methods", ",".join(methods.ROUTED), "--batch-sizes", "2"]
    arguments += ["--context", "20", "--tokens", "4", "--nodes", "8", "--rounds", "2", "--threshold", "0"]
    found = run("round_time.py", *arguments, "--folder", str(tmp_path), folder=tmp_path)
    assert [row["method"] for row in found["rows"]] == list(methods.ROUTED)
    assert found["meta"]["weights"] == str(POCKET)
    assert all(row["host_ms"]["draft"]["median"] > 0 and row["tokens_per_round"] >= 1 for row in found["rows"])


@pytest.mark.e2e
@pytest.mark.slow
def test_costs_of_a_switch_are_measured(tmp_path):
    arguments = ["--checkpoints", str(POCKET), "--batch-sizes", "2", "--contexts", "30,60", "--backlogs", "1,90"]
    found = run("switch_cost.py", *arguments, "--tokens", "4", "--nodes", "8", "--repeats", "2", folder=tmp_path)
    assert (found["meta"]["benchmark"], found["meta"]["times_mean_something"]) == ("switch_cost", False)
    assert [(row["context"], row["drafter"]) for row in found["rows"]] == [
        (context, drafter) for context in (30, 60) for drafter in ("eagle3", "dflash")
    ]
    for row in found["rows"]:
        assert row["round_ms"] > row["draft_ms"] > 0
        assert set(row["switch"]) == {"1", "90"} and set(row["router"]) == set(switch_cost.POLICIES)
        assert all(cost["ms"] > 0 for cost in (*row["switch"].values(), *row["router"].values()))


def test_a_router_is_compared_with_the_best_arm_of_each_turn():
    seconds = {"arm-a": [1.0, 4.0], "arm-b": [3.0, 2.0], "goodput": [0.5, 4.0], "plain": [0.1, 0.1]}
    rows = [{"method": method, "seconds_by_repeat": turns} for method, turns in seconds.items()]
    rows = [row | {"batch_size": 1, "category": "all"} for row in rows]
    assert cpu_speed.over_best_arm(rows, 1) == [2.0, 0.5]
    assert cpu_speed.over_best_arm(rows[:2], 1) == cpu_speed.over_best_arm(rows, 4) == []
