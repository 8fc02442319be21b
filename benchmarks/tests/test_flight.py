"""Flights: slots with a clock, engines of one process, an archive, and tables that are made of it."""

import functools
import json
import sys
import tarfile
import time
from importlib import import_module
from pathlib import Path

import pytest

from vllm_crossspec.cli.demo import METHODS

module, tables_of = import_module("flight"), import_module("flight_tables")
engines_of, round_time = import_module("flight_engines"), import_module("round_time")
Flight, Slot = module.Flight, module.Slot

FLIGHTS = (1, 2, 3)


def command(code):
    return [sys.executable, "-c", code]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The slots of a flight, made once: they write the folders of models."""

    @functools.cache
    def make(flight, *words):
        folder = tmp_path_factory.getbasetemp() / "flights"
        options = module.arguments([str(flight), "--out", str(folder), *words])
        return module.Slots(options, folder / "-".join(["models", *words])).flight(flight)

    return make


def statuses(flight):
    return {name: state["status"] for name, state in flight.state.items()}


# -- the clock


def test_a_slot_that_hangs_is_ended_with_all_its_processes_and_costs_the_next_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.1)
    sleeps = f"{tmp_path.name!r}; import time; time.sleep(60)"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeps!r}]); {sleeps}"
    flight, started = Flight(tmp_path, "a"), time.time()
    flight.fly(
        [Slot(name="hangs", seconds=1, command=command(child)), Slot(name="next", seconds=9, command=command("pass"))],
        1.0,
    )
    assert statuses(flight) == {"hangs": "failed", "next": "passed"}
    assert flight.state["hangs"]["why"] == "ended by the clock" and time.time() - started < 30
    cmdlines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not any(tmp_path.name.encode() in line and b"sleep(60)" in line for line in cmdlines)


def test_seconds_that_a_slot_leaves_go_to_the_next(tmp_path):
    flight, ends = Flight(tmp_path, "a"), []
    flight._run = lambda slot, end: ends.append(end - time.time())
    flight.fly([Slot(name=name, seconds=100, command=["true"]) for name in "ab"], 2.0)
    assert ends == [pytest.approx(200, abs=5), pytest.approx(400, abs=5)]


def test_a_slot_without_time_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_SECONDS", 5)
    flight = Flight(tmp_path, "a")
    flight.fly([Slot(name="short", seconds=1, command=command("pass"))], 1.0)
    assert flight.state["short"]["why"] == "no time left"


def test_a_slot_needs_what_it_stands_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_pocket_or_none", lambda: tmp_path)
    flight = Flight(tmp_path, "a")
    flight.fly(
        [
            Slot(name="fails", seconds=20, command=command("print('AssertionError: 3\\nleaks'); raise SystemExit(2)")),
            Slot(name="on-it", seconds=20, command=command("pass"), needs="fails"),
            Slot(name="pocket", seconds=20, command=command("pass"), pocket=True),
            Slot(name="other", seconds=20, command=command("pass")),
        ],
        1.0,
    )
    assert flight.state["fails"]["why"] == "exit code 2: AssertionError: 3", "not what is printed at the end"
    assert flight.state["on-it"]["why"] == "needs fails"
    assert flight.state["pocket"]["why"] == "the pocket models are not here"
    assert statuses(flight)["other"] == "passed"


# -- what was flown already


def test_what_passed_is_flown_again_at_another_commit_alone(tmp_path):
    slot = Slot(name="once", seconds=20, command=command(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')"))
    for commit in ("a", "a", "b"):
        Flight(tmp_path, commit).fly([slot], 1.0)
    assert (tmp_path / "runs").read_text() == "xx"


def test_a_bare_machine_remembers_by_an_archive(tmp_path):
    there, here = Flight(tmp_path / "there", "a"), Flight(tmp_path / "here", "a")
    write = f"open({str(tmp_path / 'there' / 'good.json')!r}, 'w').write('1')"
    slots = [
        Slot(name="good", seconds=20, command=command(write)),
        Slot(name="bad", seconds=20, command=command("raise SystemExit(1)")),
    ]
    there.fly(slots, 1.0)
    there.archive(tmp_path / "flight.tar.xz", ["good", "bad"])
    here.remember(tmp_path / "flight.tar.xz")
    assert here.is_flown("good") and not here.is_flown("bad")
    assert (tmp_path / "here" / "good.json").read_text() == "1"
    later = Flight(tmp_path / "later", "b")
    later.remember(tmp_path / "flight.tar.xz")
    assert not later.state


def test_an_archive_has_the_end_of_a_long_log(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOG_BYTES", 10)
    flight = Flight(tmp_path, "a")
    flight.fly([Slot(name="long", seconds=20, command=command("print('x' * 99 + 'end of it')"))], 1.0)
    flight.archive(tmp_path / "flight.tar.xz", ["long"])
    with tarfile.open(tmp_path / "flight.tar.xz") as tar:
        assert tar.extractfile("long.log").read() == b"end of it\n"


# -- engines of one process

FAKE = """
import json, sys
plan, file = json.load(open(sys.argv[1])), sys.argv[3]
try:
    records = json.load(open(file))["engines"]
except OSError:
    records = {}
def write():
    json.dump({"engines": records}, open(file, "w"))
for entry in plan["engines"]:
    if entry["name"] in records:
        continue
    records[entry["name"]] = {"status": "begun"}
    write()
    if entry["engine"].get("crashes"):
        sys.exit("illegal memory access")
    records[entry["name"]] = {"status": "passed"}
    write()
"""


def test_an_engine_that_crashes_costs_itself_alone(tmp_path, monkeypatch):
    (tmp_path / "flight_engines.py").write_text(FAKE)
    monkeypatch.setattr(module, "HERE", tmp_path)
    engines = [{"name": n, "engine": {"crashes": n == "b"}, "seconds": 1, "jobs": []} for n in "abc"]
    flight = Flight(tmp_path / "out", "a")
    flight.fly([Slot(name="slot", seconds=60, engines=engines)], 1.0)
    records = json.loads((tmp_path / "out" / "slot.json").read_text())["engines"]
    assert {name: record["status"] for name, record in records.items()} == {"a": "passed", "b": "failed", "c": "passed"}
    assert flight.state["slot"]["why"] == "b: failed, exit code 1: illegal memory access"


def test_an_engine_without_time_is_not_begun(tmp_path):
    document = engines_of.Document(tmp_path / "out.json")
    entry = {"name": "late", "engine": {}, "seconds": 60, "jobs": []}
    engines_of.fly({"until": time.time() + 30, "engines": [entry]}, document)
    assert json.loads((tmp_path / "out.json").read_text())["engines"] == {"late": {"status": "no time left"}}


def test_jobs_are_known(made):
    kinds = {job["kind"] for n in FLIGHTS for slot in made(n) for e in slot.engines for job in e["jobs"]}
    assert kinds == set(engines_of.JOBS)


# -- the three flights


@pytest.mark.parametrize("flight", FLIGHTS)
@pytest.mark.parametrize("words", [(), ("--rehearse",)])
def test_a_flight_takes_twelve_minutes_at_most(flight, words, made):
    slots = made(flight, *words)
    assert sum(slot.seconds for slot in slots) <= 12 * 60
    names = [slot.name for slot in slots]
    assert len(set(names)) == len(names)
    assert all(slot.needs is None or slot.needs in names[: names.index(slot.name)] for slot in slots)
    for slot in slots:
        assert bool(slot.command) != bool(slot.engines)
        assert len({entry["name"] for entry in slot.engines}) == len(slot.engines)


@pytest.mark.parametrize("flight", FLIGHTS)
def test_graphs_are_captured_for_the_steps_that_are_measured(flight, made):
    """No engine uses vLLM's own sizes. Their largest is 512 tokens, which is 8 requests of 61 rows."""
    for slot in made(flight):
        for entry in slot.engines:
            compilation = entry["engine"].get("compilation_config")
            if entry["engine"].get("enforce_eager"):
                continue
            sizes = compilation["cudagraph_capture_sizes"]
            assert sizes == sorted(set(sizes)) and max(sizes) <= 2048
            mode = compilation.get("cudagraph_mode", "compiled")
            assert (mode == "FULL_AND_PIECEWISE") == (entry["env"] == round_time.BREAKABLE)
            assert mode != "FULL_DECODE_ONLY" or entry["name"] == "eagle3-tree-full", "the one that is compared"


def test_every_method_is_compared_in_float32_eager_and_under_graphs(made):
    slots = {slot.name: slot for slot in made(2)}
    for name, eager in (("identity-eager", True), ("identity-graphs", False)):
        engines = slots[name].engines
        assert [entry["name"] for entry in engines] == ["plain", *module.EVERY]
        assert all(entry["engine"]["dtype"] == "float32" for entry in engines)
        assert all(entry["engine"]["enforce_eager"] == eager for entry in engines)
        assert slots[name].env == module.WHOLE, "whole trees are verified"
    kinds = {name.partition("-")[0] for name in METHODS} - {"plain", "arm", "ngram"}
    assert {name.partition("-")[0] for name in module.EVERY} >= kinds


def test_a_dummy_drafter_keeps_its_own_head():
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM as Model

    kept = Model.__dict__.get("has_own_lm_head")
    try:
        round_time.keep_dummy_heads()
        assert Model.has_own_lm_head
    finally:
        if kept is None:
            del Model.has_own_lm_head
    assert not Model.has_own_lm_head


def test_kernels_are_tested_by_files_that_use_a_gpu_where_there_is_one():
    tests = Path(__file__).parents[2] / "tests"
    using = {file.stem.removeprefix("test_") for file in tests.glob("test_*.py") if "DEVICE" in file.read_text()}
    assert set(module.KERNEL_TESTS) <= using
    assert {name for name in using if name.endswith("_kernels")} <= set(module.KERNEL_TESTS)


def test_bad_words_are_one_sentence(capsys):
    for words, sentence in (([], "name a flight (1, 2 or 3)"), (["--tables", "x.md"], "--tables needs --archives")):
        with pytest.raises(SystemExit) as stopped:
            module.arguments(words)
        assert stopped.value.code == 2 and sentence in capsys.readouterr().err


# -- tables

ENVIRONMENT = {"device": "H100", "versions": {"vllm": "0.32.0"}, "simulated": False}


def group(tokens, seconds, accepted=0):
    one = {
        "token_ids": tokens,
        "text": "",
        "num_target_calls": len(tokens) - accepted,
        "accepted_histogram": [len(tokens) - accepted - 1, 0],
        "num_draft_tokens": 0,
        "ttft": 0.1,
        "times": [0.1 * i for i in range(len(tokens) - accepted)],
    }
    return {"seconds": seconds, "num_verified_tokens": 9, "routes": {}, "generations": [one]}


def answering(tokens, seconds, **environment):
    runs = [{"batch_size": 1, "groups": {"mixed": group(tokens, seconds)}}]
    return {"status": "passed", "environment": ENVIRONMENT | environment, "answers": [runs]}


def flown(tmp_path, documents, name="flight.tar.xz"):
    flight = Flight(tmp_path / "flown", "abc")
    for slot, records in documents.items():
        (flight.out / f"{slot}.json").write_text(json.dumps({"engines": records}))
        flight._write(slot, {"status": "passed", "why": "", "seconds": 1.0})
    flight.archive(tmp_path / name, list(documents))
    return tmp_path / name


def test_tables_stand_between_the_pages_marks(tmp_path):
    spread = {part: {"median": value} for part, value in (("round", 12.0), ("target", 7.0), ("draft", 4.5))}
    row = {"batch_size": 1, "device_ms": spread, "per_round": {"explicit_waits": {"draft": 1.0}}}
    point = {"batch_size": 8, "rows": 72, "rows_per_request": 9, "seconds": 0.0072}
    mixed = [{"decoding": 7, "prompt_tokens": n, "ms": 8.0 + n} for n in (0, 64)]
    kernels = [{"name": "gemm|x", "ms": 80.0, "launches": 16}]
    profile = {"batch_size": 1, "rounds": 8, "busy_ms": 72.0, "span_ms": 80.0, "num_kernels": 160, "kernels": kernels}
    arrivals = {"rate": 4.0, "requests": 9, "answered": 9, "tokens_per_second": 500.0}
    arrivals |= {key: {"p50": 1.0, "p90": 2.0} for key in ("ttft_ms", "tpot_ms", "latency_ms")}
    base = {"status": "passed", "environment": ENVIRONMENT}
    documents = {
        "steps": {"curve": base | {"curve": [[point]]}, "tree": base | {"mixed": [mixed], "profile": [[profile]]}},
        "rounds": {"eagle3": base | {"rounds": [[row]]}},
        "speed": {"plain": answering([1, 2, 3], 2.0), "dart": answering([1, 2, 4], 1.0)},
        "arrivals": {"plain": base | {"arrivals": [[arrivals]]}},
    }
    archive, page = flown(tmp_path, documents), tmp_path / "gpu.md"
    page.write_text(f"# Title\n{tables_of.BEGIN}\nold\n{tables_of.END}\nrest\n")
    for _ in range(2):  # writing it again changes nothing
        assert module.main(["--tables", str(page), "--archives", str(archive)]) == 0
    text = page.read_text()
    assert text.startswith("# Title\n") and text.endswith("\nrest\n") and "old" not in text
    assert "H100; vllm 0.32.0; commit abc." in text and text.count("#### Slots") == 1
    assert "| 9 | 7.20 |" in text
    assert "| eagle3 | 12.00 (7.00, 4.50) [1] |" in text
    assert "| tree | 8.0 | 72.0 |" in text
    assert "tree, batch 1: 20 kernels a round, 9.00 ms busy, 1.00 ms idle" in text
    assert "| `gemm/x` | 10.000 | 2 |" in text
    assert "| dart | 3 (2.00; 1.00) | no |" in text, "another text than plain's"
    assert "| plain | 4 | 9 of 9 | 500 | 1, 2 | 1, 2 | 1, 2 |" in text


def test_a_simulated_gpus_numbers_are_kept_out_of_the_page(tmp_path):
    archive = flown(tmp_path, {"speed": {"plain": answering([1, 2], 1.0, simulated=True)}})
    page = tmp_path / "gpu.md"
    page.write_text(f"{tables_of.BEGIN}\n{tables_of.END}\n")
    with pytest.raises(ValueError, match="is of a simulated GPU"):
        tables_of.write(page, [archive])
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="has no lines"):
        tables_of.write(page, [archive])


def test_the_results_page_has_the_marks():
    page = (Path(__file__).parents[2] / "docs" / "results" / "gpu.md").read_text()
    assert tables_of.BEGIN in page and tables_of.END in page


# -- real engines, on whatever is here


@pytest.mark.e2e
def test_engines_follow_each_other_in_one_process(tmp_path):
    """Every job that a CPU can do; the second engine's texts are the first one's."""
    prompts, pocket = tmp_path / "prompts.jsonl", module.find_pocket()
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Once upon a time", "def add(a, b):")))
    engine = {
        "model": str(pocket / "target"),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": 1 << 27,
        "enforce_eager": True,
    }
    tree = module.located({**METHODS["eagle3-tree"], "tree": {"num_nodes": 8, "by_batch_size": {"1": 8}}}, pocket)
    answers = {"kind": "answers", "prompts": str(prompts), "batch_sizes": [1, 2]}
    answers["sampling"] = {"temperature": 0.0, "max_tokens": 12}
    arrivals = {"kind": "arrivals", "prompts": str(prompts), "rates": [20.0], "seconds": 0.2, "max_tokens": 4}
    mixed = {"kind": "mixed", "decoding": 1, "prompts": [8]}
    words = ["--shape", "pocket", "--batch-sizes", "1", "--context", "16", "--rounds", "2"]
    rounds = {"kind": "rounds", "options": words}
    points = {"kind": "curve", "points": [[1, 1], [2, 9]], "context": 16}
    engines = [
        {"name": "plain", "engine": engine, "jobs": [answers, arrivals]},
        {"name": "tree", "engine": engine | {"speculative_config": tree}, "jobs": [answers, mixed, rounds, points]},
    ]
    slot = Slot(name="all", seconds=240, engines=[entry | {"seconds": 1} for entry in engines])
    flight = Flight(tmp_path / "out", "a")
    flight.fly([slot], 1.0)
    assert flight.state["all"]["why"] == ""
    records = json.loads((tmp_path / "out" / "all.json").read_text())["engines"]
    rows = {
        (row.method, row.batch_size): row for row in tables_of.rows(tables_of.runs_of(records)) if row.category == "all"
    }
    assert set(rows) == {(method, size) for method in ("plain", "tree") for size in (1, 2)}
    assert rows["tree", 1].identical_to_plain and rows["tree", 2].identical_to_plain
    assert rows["tree", 1].acceptance_length > 1.5, "it drafts"
    (loop,) = records["plain"]["arrivals"][0]
    assert loop["answered"] == loop["requests"] > 0 and loop["tokens_per_second"] > 0
    assert [point["prompt_tokens"] for point in records["tree"]["mixed"][0]] == [0, 8]
    assert records["tree"]["rounds"][0][0]["num_rounds"] > 0
    assert [(p["rows"], p["seconds"] > 0) for p in records["tree"]["curve"][0]] == [(1, True), (18, True)]
    page = tables_of.tables(flight.state, {"all": records})
    assert "| tree | 1 |" not in page and "plain's texts" in page
