"""The benchmark of servers under load: its command line, its tables, and one small run."""

import json
from importlib import import_module
from pathlib import Path

import pytest

import vllm_crossspec

load = import_module("load")
POCKET = Path(vllm_crossspec.__file__).parent / "pocket"


def document(seconds, texts=("a", "b"), **more):
    """What vLLM's client would write of a run whose answers take so long."""
    times = {f"p{p}_{what}_ms": seconds * p for p in load.PERCENTILES for what in ("ttft", "tpot", "itl")}
    return {"output_throughput": 9.0, "median_e2el_ms": 1e3 * seconds, "generated_texts": list(texts), **times, **more}


def test_rows_compare_with_plain_of_the_same_turn(tmp_path):
    runs = {
        ("plain", 0.5, 0): document(2.0), ("plain", 0.5, 1): document(4.0),
        ("fast", 0.5, 0): document(1.0, spec_decode_acceptance_length=2.5), ("fast", 0.5, 1): document(5.0),
        ("other", 0.5, 0): document(2.0), ("other", 0.5, 1): document(2.0, ["a", "c"]),
    }  # fmt: skip
    for (name, share, turn), found in runs.items():
        load.run_file(tmp_path, name, share, turn).write_text(json.dumps(found))
    plain, fast, other = load.rows_of(tmp_path, ["plain", "fast", "other"], [0.5], 2)
    assert plain.speedup is plain.identical is None and plain.answer == 3.0
    assert (fast.speedup, fast.least, fast.identical, fast.acceptance_length) == (1.4, 0.8, True, 2.5)
    assert fast.ttft == (150.0, 270.0, 297.0) and other.identical is False
    lines = load.table([plain, fast, other])
    assert lines[3].startswith("| 50% | fast | 1.40 (0.80) | 3.00 | 9.0 |") and lines[4].endswith("| others |")
    load.draw([plain, fast, other], tmp_path / "load.svg")
    assert "fast" in (tmp_path / "load.svg").read_text()


def test_what_cannot_be_measured_is_said_at_once(tmp_path, capsys):
    spec, other = tmp_path / "eagle3.json", tmp_path / "other" / "eagle3.json"
    other.parent.mkdir()
    for file in (spec, other):
        file.write_text("{}")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    usual = ["--model", "m", "--prompts", str(spec), "--out", str(tmp_path / "out")]
    for words, said in (
        (["--spec", "nowhere.json"], "there is no file nowhere.json"),
        (["--spec", str(spec), "--spec", str(other)], "two methods are called 'eagle3'"),
        (["--spec", str(broken)], "is no JSON"),
    ):
        assert load.main([*usual, *words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        load.arguments([*usual, "--loads", "0.5,0"])
    assert "are above 0" in " ".join(capsys.readouterr().err.split())


def test_a_server_that_does_not_start_says_why(tmp_path, capsys):
    given = ["--model", "/nowhere", "--prompts", str(POCKET / "prompts.jsonl"), "--out", str(tmp_path / "out")]
    assert load.main(given) == 2
    said = capsys.readouterr().err
    assert said.startswith("the server did not start") and "nowhere" in said


def test_servers_answer_arrivals_with_plains_texts(tmp_path, capsys):
    spec = tmp_path / "tree.json"
    spec.write_text(json.dumps({"method": "eagle3", "model": str(POCKET / "eagle3"), "tree": {"num_nodes": 12}}))
    out = tmp_path / "out"
    serve = ["--", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    words = ["--model", str(POCKET / "target"), "--prompts", str(POCKET / "prompts.jsonl"), "--spec", str(spec)]
    words += ["--out", str(out), "--loads", "0.8", "--requests", "8", "--tokens", "16", "--max-num-seqs", "4"]
    load.main([*words, *serve])
    found = json.loads((out / "load.json").read_text())["rows"]
    assert [row["method"] for row in found] == ["plain", "tree"]
    assert found[1]["identical"] and found[1]["answer"] > 0 and "tree at 80%" in capsys.readouterr().out
    load.main([*words, *serve])  # nothing is measured again
    assert "tree at 80%" not in capsys.readouterr().out
