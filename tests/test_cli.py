"""The `crossspec` command where no engine is the point: arguments, prompt files, counting, documents, doctor.

The engine process is played by a script that speaks its protocol; tests with real engines are elsewhere.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from played import ENVIRONMENT, GENERATE, spec_file

from vllm_crossspec.cli import app, demo, doctor, models, processes, runner
from vllm_crossspec.cli.bench import read_configs
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.platform import platform


@pytest.fixture
def pocket(tmp_path):
    """A folder with the outlines of the demo's models."""
    for name in ["target", *models.folders_of(demo.METHODS)]:
        (tmp_path / "pocket" / name).mkdir(parents=True)
        (tmp_path / "pocket" / name / "config.json").write_text("{}")
    return tmp_path / "pocket"


def run(method="plain", **engine):
    """One job of the demo's, once."""
    prompts = [runner.Prompt(category="chat", turns=("Hello",), where="here")]
    job = runner.Job(method=method, engine=engine, sampling={"max_tokens": 4}, prompts=prompts)
    measurement = demo.measurement_of([job])
    measurement.carry_out()
    return measurement.runs


# ---- engine processes


def test_a_run_collects_its_events(play):
    play(GENERATE)
    (done,) = run(speculative_config={"method": "eagle3"})
    assert done.environment["device"] == "cpu"
    assert done.groups["chat"]["generations"][0]["accepted_histogram"] == [0, 0, 1]


FOLLOWING = """
from vllm_crossspec.jobs import offline
offline.environment = lambda: {"device": "cpu"}
def start(job, emit):
    def follow(order):
        if order["say"] == "no":
            raise ValueError("it will not")
        emit("said", what=order["say"])
    return follow
offline.run_job(start)
"""


@pytest.mark.slow
def test_both_sides_of_the_pipes_speak_alike(monkeypatch, tmp_path):
    (tmp_path / "following.py").write_text(FOLLOWING)
    monkeypatch.setattr(platform(), "start", lambda *arguments: None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with processes.started("it", {}, "following") as engine:  # it gets no orders, and ends all the same
        assert engine.about["device"] == "cpu" and engine.about["seconds"] < 60
    with processes.started("it", {}, "following") as engine:
        said = [list(engine.follow(say=word)) for word in ("a", "b")]
        assert said == [[{"event": "said", "what": word}, {"event": "done"}] for word in ("a", "b")]
        with pytest.raises(ValueError, match="^it: it will not$"):
            list(engine.follow(say="no"))


def test_a_refusal_is_the_engines_own_sentence(play):
    play('emit("error", message="speculative_config.tre: no such key"); sys.exit(1)')
    with pytest.raises(ValueError, match=r"^eagle3: speculative_config.tre: no such key$"):
        run("eagle3")


def test_a_death_is_told_with_its_cause_and_log(play):
    play(
        'print("loading", flush=True)\n'
        'print("(EngineCore pid=1) ERROR OSError: no space left", flush=True)\n'
        'raise RuntimeError("Engine core initialization failed. See root cause above.")'
    )
    with pytest.raises(processes.EngineError) as death:
        run("dflash")
    first, *rest = str(death.value).splitlines()
    assert first == "dflash: the engine's process ended with status 1: OSError: no space left"
    assert "loading" in rest


def test_a_killed_process_is_named(play):
    play("import signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(processes.EngineError, match="was ended by SIGKILL"):
        run()


def test_an_early_end_without_results_is_no_success(play):
    play(f"emit('ready', seconds=1.0, **{ENVIRONMENT!r})")
    with pytest.raises(processes.EngineError, match="^plain: the engine's process ended before it was through$"):
        run()


def test_a_forked_child_that_holds_the_pipe_does_not_keep_us(play):
    play("import time\nif os.fork() == 0:\n    time.sleep(60)\nelse:\n    os._exit(3)")
    started = time.monotonic()
    with pytest.raises(processes.EngineError, match="status 3"):
        run()
    assert time.monotonic() - started < 30


@pytest.mark.nightly
@pytest.mark.slow
def test_ending_the_command_ends_its_engines(play, pocket, tmp_path):
    pid_file = tmp_path / "pid"
    play(f"import time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(120)")
    code = "from vllm_crossspec.cli import app, processes; processes.CHILD_MODULE = 'played_engine'; app.main()"
    command = subprocess.Popen([sys.executable, "-c", code, "demo", "--pocket", str(pocket)])
    deadline = time.monotonic() + 120
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    command.terminate()
    assert command.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


# ---- demo and bench


def test_demo_writes_the_document(play, pocket, tmp_path, crossspec):
    play(GENERATE)
    file = tmp_path / "out.json"
    words = ("--models", "pocket", "--methods", "all", "--pocket", pocket, "--json", file)
    code, out, err = crossspec("demo", *words, "--max-tokens", 4)
    assert code == 0
    document = json.loads(file.read_text())
    keys = "method category num_prompts num_tokens num_target_calls num_verified_tokens acceptance_length"
    more = ["accepted_per_position", "identical_to_plain", "seconds"]
    assert all([*row][:10] == [*keys.split(), *more] for row in document["rows"])
    categories = ["chat", "math", "code", "agentic", "all"]
    assert [(r["method"], r["category"]) for r in document["rows"]] == [
        (method, category) for method in demo.METHODS for category in categories
    ]
    assert {*document["meta"]} >= {"versions", "command", "commit", "hardware"}
    assert document["meta"]["command"].startswith("crossspec demo --models pocket --methods all")
    assert "they say nothing of a GPU" in out and "eagle3" in out and "not a token of it" in out
    done = [line for line in err.splitlines() if " target calls, " in line]
    assert len(done) == len(demo.METHODS)
    assert done[0].startswith("plain: ") and all("every text plain's" in line for line in done[1:])


def test_demo_shows_the_headline_on_a_few_prompts(play, pocket, tmp_path, crossspec):
    play(GENERATE)
    file = tmp_path / "out.json"
    assert crossspec("demo", "--pocket", pocket, "--json", file)[0] == 0
    rows = [row for row in json.loads(file.read_text())["rows"] if row["category"] == "all"]
    assert [row["method"] for row in rows] == models.POCKET.headline
    assert {row["num_prompts"] for row in rows} == {4 * models.POCKET.headline_prompts}
    assert crossspec("demo", "--pocket", pocket, "--json", file, "--limit", 1, "--methods", "dart")[0] == 0
    rows = [row for row in json.loads(file.read_text())["rows"] if row["category"] == "all"]
    assert [(row["method"], row["num_prompts"]) for row in rows] == [("plain", 4), ("dart", 4)]


def test_demo_fails_where_a_greedy_text_differs(play, pocket, tmp_path, crossspec, monkeypatch):
    play(GENERATE)
    monkeypatch.setitem(demo.METHODS, "dflash", demo.METHODS["dflash"] | {"tokens": [5, 6, 7, 9]})
    file = tmp_path / "out.json"
    assert crossspec("demo", "--methods", "all", "--pocket", pocket, "--json", file)[0] == 1
    verdicts = {(r["method"], r["identical_to_plain"]) for r in json.loads(file.read_text())["rows"]}
    assert verdicts == {(method, method != "dflash") for method in demo.METHODS}
    assert crossspec("demo", "--pocket", pocket, "--sampled")[0] == 0


def test_bench_compares_files_of_configs(play, tmp_path, crossspec):
    play(GENERATE)
    same, other = spec_file(tmp_path, "same", method="x"), spec_file(tmp_path, "other", tokens=[1])
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"turns": ["b", "c"], "category": "writing"}\n')
    arguments = ["bench", "--model", "m", "--spec", same, "--spec", other, "--prompts", prompts]
    file = tmp_path / "out.json"
    assert crossspec(*arguments, "--json", file)[0] == 0
    rows = {(r["method"], r["category"]): r for r in json.loads(file.read_text())["rows"]}
    assert {category for _, category in rows} == {"prompts", "writing", "all"}
    assert rows["same", "all"]["identical_to_plain"] is True
    assert rows["other", "all"]["identical_to_plain"] is False
    assert crossspec(*arguments, "--require-identical")[0] == 1
    assert crossspec(*arguments, "--no-baseline", "--json", file)[0] == 0
    assert json.loads(file.read_text())["rows"][0]["identical_to_plain"] is None


def test_a_method_that_drafted_nothing_is_named_below_the_table(play, tmp_path, crossspec):
    play(GENERATE.replace("[0, 0, 1] if drafts", '[0, 0, 1] if "tokens" in drafts'))
    idle, busy = spec_file(tmp_path, "idle", method="x"), spec_file(tmp_path, "busy", tokens=[5, 6, 7, 8])
    code, _, err = crossspec("bench", "--model", "m", "--spec", idle, "--spec", busy, "--limit", 1)
    (note,) = [line for line in err.splitlines() if "nothing was drafted" in line]
    assert code == 0 and note.startswith("note: idle: nothing was drafted.") and '"by_batch_size": {"1": 60}' in note


def test_what_is_no_terminal_gets_whole_names_and_a_line_a_method(play, pocket, crossspec):
    play(GENERATE)
    code, out, err = crossspec("demo", "--pocket", pocket, "--methods", "plain,eagle3-longer-tree,whiflash-entropy")
    assert code == 0
    assert "eagle3-longer-tree" in out and "whiflash-entropy" in out
    told = [line.partition(":")[0] for line in err.splitlines() if line.endswith(" of 3)")]
    assert sorted(told) == ["eagle3-longer-tree", "plain", "whiflash-entropy"]


def test_bench_checks_all_configs_before_any_engine_starts(play, tmp_path, crossspec):
    play(f"open({str(tmp_path / 'started')!r}, 'a').write('x')\n{GENERATE}")
    good, bad = spec_file(tmp_path, "good", method="x"), spec_file(tmp_path, "bad", refused=1)
    code, out, err = crossspec("bench", "--model", "m", "--spec", good, "--spec", bad)
    assert code == 2 and out == ""
    assert err.splitlines()[-1] == "crossspec: bad: speculative_config.refused: no such key"
    assert not (tmp_path / "started").exists()
    assert crossspec("bench", "--model", "m", "--spec", good)[0] == 0
    assert (tmp_path / "started").read_text() == "xx"


@pytest.mark.parametrize("end", ["sys.exit(9)", "os.kill(os.getppid(), 15); import time; time.sleep(60)"])
def test_rows_of_finished_configs_outlive_what_comes_after(play, tmp_path, crossspec, end):
    play(f"if drafts.get('fails'):\n    {end}\n{GENERATE}")
    good, late = spec_file(tmp_path, "good", method="x"), spec_file(tmp_path, "late", fails=1)
    file = tmp_path / "out.json"
    code, out, err = crossspec("bench", "--model", "m", "--spec", good, "--spec", late, "--json", file)
    assert code == (2 if "exit" in end else 128 + signal.SIGTERM)
    document = json.loads(file.read_text())
    assert {row["method"] for row in document["rows"]} == {"plain", "good"}
    assert document["meta"]["unfinished"] == ["late"]
    assert "plain" in out and "good" in out
    if code == 2:
        assert "late: the engine's process ended with status 9" in err


def test_bench_hands_its_options_to_the_engine(play, tmp_path, crossspec):
    play(f"open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(job))\n{GENERATE}")
    options = "--batch-size 3 --temperature 0.5 --seed 7 --max-tokens 9 --dtype float32 --limit 1 --raw"
    assert crossspec("bench", "--model", "m", *options.split())[0] == 0
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["engine"]["max_num_seqs"] == 3 and seen["engine"]["dtype"] == "float32"
    assert seen["sampling"] | {"temperature": 0.5, "seed": 7, "max_tokens": 9} == seen["sampling"]
    assert seen["chat"] is False
    assert [len(group["prompts"]) for group in seen["groups"]] == [1, 1, 1, 1]


def test_mistakes_are_one_sentence(pocket, tmp_path, crossspec):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    number = tmp_path / "number.json"
    number.write_text("3")
    cases = {
        ("demo", "--methods", "eagle4"): "--methods eagle4: choose from plain, eagle3, dflash",
        ("demo", "--pocket", tmp_path): "target holds no model",
        ("demo", "--prompts", tmp_path / "none.jsonl"): "No such file",
        ("demo", "--pocket", pocket, "--json", tmp_path / "no" / "file"): "a folder that exists",
        ("bench", "--model", "m", "--no-baseline"): "name at least one --spec file",
        ("bench", "--model", "m", "--spec", broken): "is not JSON",
        ("bench", "--model", "m", "--spec", number): "is not an object",
        ("bench", "--model", "m", "--spec", tmp_path / "none.json"): "No such file",
        ("bench",): "missing option '--model'",
        ("demo", "--max-tokens", "0"): "--max-tokens",
        ("dmo",): "there is no command 'dmo'; did you mean 'demo'?",
    }
    for arguments, sentence in cases.items():
        code, _, err = crossspec(*arguments)
        assert code == 2, arguments
        assert sentence in " ".join(err.split()), arguments
        assert "Traceback" not in err


def test_an_engines_death_ends_the_command_with_its_log(play, pocket, crossspec):
    play('print("a last word", flush=True); sys.exit(9)')
    code, _, err = crossspec("demo", "--pocket", pocket)
    assert code == 2
    # Two run side by side, and either may be the first.
    assert re.search("(plain|eagle3-tree): the engine's process ended with status 9", err) and "a last word" in err


def test_debugging_shows_where_it_happened(monkeypatch):
    monkeypatch.setenv(app.DEBUG_VARIABLE, "1")
    monkeypatch.setattr(sys, "argv", ["crossspec", "demo", "--methods", "x"])
    with pytest.raises(ValueError, match="choose from"):
        app.main()


def test_two_configs_of_one_name_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    files = [spec_file(tmp_path, "same"), spec_file(tmp_path / "a", "same")]
    with pytest.raises(ValueError, match="another row is called 'same'"):
        read_configs(files)
    with pytest.raises(ValueError, match="'plain'"):
        read_configs([spec_file(tmp_path, "plain")])
    with pytest.raises(ValueError, match='^--spec {"method": "x"}: write it to a file and name that'):
        read_configs([Path('{"method": "x"}')])


# ---- prompt files


def test_prompts_of_both_kinds_are_read(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"category": "math", "prompt": "1+1?"}\n\n{"question_id": 81, "category": "writing", "turns": ["a", "b"]}\n'
        '{"prompt": "naïve \u2028 line"}\n',
        encoding="utf-8",
    )
    prompts = read_prompts(file)
    assert [p.category for p in prompts] == ["math", "writing", "prompts"]
    assert [p.turns for p in prompts] == [("1+1?",), ("a", "b"), ("naïve \u2028 line",)]
    assert prompts[1].where.endswith("p.jsonl, line 3")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "a"', "line 2 is not JSON"),
        ('["a"]', "line 2 is not an object"),
        ('{"text": "a"}', "line 2 needs either `prompt`"),
        ('{"prompt": "a", "turns": ["b"]}', "line 2 needs either `prompt`"),
        ('{"prompt": ""}', "none of them empty"),
        ('{"prompt": 3}', "line 2: `prompt` is a text"),
        ('{"turns": "abc"}', "line 2: `prompt` is a text and `turns` a list"),
        ('{"turns": []}', "line 2: `prompt` is a text and `turns` a list"),
        ('{"prompt": "a", "category": "all"}', "a word other than 'all'"),
        ('{"prompt": "a", "category": 3}', "a word other than 'all'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, sentence):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError) as problem:
        read_prompts(file)
    assert sentence in str(problem.value) and str(file) in str(problem.value)


def test_empty_and_binary_files_are_refused(tmp_path):
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(empty)
    with pytest.raises(ValueError, match="UTF-8"):
        read_prompts(binary)


def test_shipped_prompts_cover_the_categories():
    prompts = read_prompts(demo.demo_prompts())
    groups = runner.by_category(prompts)
    assert [*groups] == ["chat", "math", "code", "agentic"]
    assert all(len(group) >= 5 for group in groups.values())
    assert len({p.turns for p in prompts}) == len(prompts)


# ---- doctor


def distribution(folder, name, version):
    record = folder / f"{name}-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.nightly
@pytest.mark.slow
def test_doctor_tells_every_fault_of_a_broken_environment(tmp_path):
    distribution(tmp_path, "vllm", "0.31.2")
    distribution(tmp_path, "torchvision", "0.28.0")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    report = tmp_path / "report.json"
    broken = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "VLLM_PLUGINS": "other",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "PATH": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "vllm_crossspec.cli.app", "doctor", "--json", str(report)],
        env=os.environ | broken,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    document = json.loads(report.read_text())
    fixes = {check["name"]: check["fix"] for check in document["checks"] if check["status"] == doctor.FAIL}
    assert fixes["C compiler"].startswith("install gcc or clang")
    assert fixes["vLLM"].startswith("vllm_crossspec needs vLLM >=0.32,<0.34 and found 0.31.2")
    assert fixes["torchvision"].startswith("run `pip uninstall torchvision`")
    assert fixes["plugin"] == "add crossspec to VLLM_PLUGINS, or unset it"
    assert fixes["model runner"].startswith("unset VLLM_USE_V2_MODEL_RUNNER")
    assert all(fix in " ".join(done.stdout.split()) for fix in fixes.values())
    assert "nothing for sure" in document["can_run"]


def test_doctor_sees_a_hidden_or_mismatched_gpu(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.check_torch(["NVIDIA H200"])[0].status == doctor.FAIL
    assert doctor.check_gpu(["NVIDIA H200"])[0].status == doctor.FAIL
    assert doctor.check_gpu([])[0].status == doctor.WARN


def test_doctor_names_damaged_pocket_models(monkeypatch, pocket):
    monkeypatch.setattr(doctor, "find_pocket", lambda: pocket)
    checks = doctor.check_pocket()
    assert len(checks) == len(list(pocket.iterdir())) > 6
    assert all(check.status == doctor.FAIL for check in checks)
    (Path(pocket) / "target" / "model.safetensors").write_bytes(b"version https://git-lfs")
    assert "model.safetensors" in doctor.check_pocket()[0].found


@pytest.mark.e2e
def test_doctor_is_content_here(crossspec, tmp_path):
    code, out, err = crossspec("doctor", "--json", tmp_path / "report.json")
    assert code == 0, out + err
