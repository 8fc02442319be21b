"""`crossspec batch`: files of prompts, one engine or several on Ray, rows that fail, jobs that are stopped."""

import contextlib
import gzip
import json
import os
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

import commands
import engines
import pytest

from crossspec_tools.records import sharded
from vllm_crossspec.cli import batch
from vllm_crossspec.cli.batch import read_requests

WORDS = ("--model", engines.TARGET, "--dtype", "float32", "--max-tokens", 8, "--max-model-len", 512)
QUESTION = "Why do leaves turn yellow?"
SPEC = engines.tree("eagle3", engines.EAGLE3, num_nodes=8)


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


# ---- reading


def test_batch_reads_rows_of_ours(tmp_path):
    rows = [
        {"prompt": "a", "id": 7, "max_tokens": 3, "sampling": {"max_tokens": 4, "top_k": 2}, "topic": "tea"},
        {"messages": [{"role": "user", "content": "b"}], "extra_args": {"crossspec": "off"}},
        {"prompt": [1, 2]},
    ]
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    first, second, third = read_requests(file, ["topic"])
    assert first == {
        "row": 0, "id": 7, "kept": {"topic": "tea"}, "prompt": "a", "sampling": {"max_tokens": 3, "top_k": 2},
    }  # fmt: skip
    assert second["messages"] == rows[1]["messages"] and second["sampling"] == {"extra_args": {"crossspec": "off"}}
    assert third["prompt"] == [1, 2] and third["kept"] == {"topic": None}


def test_batch_reads_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"prompt": "a", "max_tokens": 3}, {"prompt": "b", "max_tokens": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [request["sampling"] for request in read_requests(tmp_path / "rows.parquet")] == [{"max_tokens": 3}, {}]


BAD_ROWS = {
    "line 1 needs `prompt` or `messages`, not empty": [{"id": 1}],
    "line 1 needs `prompt` or `messages`, not empty, and not both": [{"prompt": "a", "messages": [{"role": "user"}]}],
    "line 2: no column is called `promt`; did you mean 'prompt'\\?; --keep promt would": [
        {"prompt": "a"},
        {"promt": "b"},
    ],
    "`prompt` must be a text, or a list of token ids": [{"prompt": {"text": "a"}}],
    '`messages` must be a list of {"role"': [{"messages": "hello"}],
    "`sampling` must be an object": [{"prompt": "a", "sampling": 0.7}],
    "line 2: `id` 1 is that of .*line 1, too": [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}],
    "line 1: `id` must be a text or a number": [{"prompt": "a", "id": [1]}],
    "line 2 is of OpenAI's batch format: have `vllm run-batch` answer it": [{"prompt": "a"}, {"custom_id": "b"}],
    "`prompt` must be a text, or a list of token": [{"prompt": 5}],
    "holds no row": [],
}


@pytest.mark.parametrize("sentence", BAD_ROWS)
def test_batch_refuses_rows_in_one_sentence(sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        read_requests(write(tmp_path / "rows.jsonl", *BAD_ROWS[sentence]))


def test_batch_refuses_what_is_no_parquet(tmp_path):
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1, or not")
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="rows.parquet is no Parquet file, or damaged"):
        read_requests(file)


ACCEPTANCE = {"rounds": 2, "draft_tokens": 8, "accepted_tokens": 3, "length": 2.5, "drafter": "eagle3"}


def part(number, engine, acceptance, drafters):
    row = {"row": number, "text": "b", "tokens": 9, "acceptance": acceptance, "error": None}
    return {"rows": [row], "engine": engine, "drafters": drafters}


def device(drafts):
    return {"eagle3": {"drafts": drafts, "draft_tokens": 4 * drafts, "accepted_tokens": drafts, "other": []}}


@pytest.mark.parametrize("drafts", [0, 8])
def test_batch_says_below_its_table_that_nothing_was_drafted(drafts, tmp_path, monkeypatch, crossspec):
    acceptance = dict.fromkeys(ACCEPTANCE, drafts)
    monkeypatch.setattr(batch, "_answered", lambda *job: [part(0, "x", acceptance, device(drafts))])
    rows, out = write(tmp_path / "rows.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    code, _, err = crossspec("batch", rows, out, *WORDS, "--spec", tmp_path / "spec.json")
    assert code == 0 and ("note: spec: nothing was drafted." in err) is (drafts == 0)


# ---- what is said at the end


def test_batch_sums_what_each_engine_said_last(tmp_path, monkeypatch, crossspec):
    """Counts of an engine go on from shard to shard; what a killed one counted of a lost shard is left out."""
    told = [("x", 2), ("y", 3), ("x", 7)]
    parts = [part(number, engine, ACCEPTANCE, device(drafts)) for number, (engine, drafts) in enumerate(told)]
    monkeypatch.setattr(batch, "_answered", lambda *job: parts)
    rows = write(tmp_path / "rows.jsonl", *[{"prompt": "a"}] * 3)
    code, said, _ = crossspec("batch", rows, tmp_path / "out.jsonl", *WORDS, "--json", tmp_path / "summary.json")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["drafters"] == {"eagle3": {"rounds": 10, "draft_tokens": 40, "accepted_tokens": 10}}
    assert (summary["rows"], summary["tokens"], summary["rounds"], summary["errors"]) == (3, 27, 6, 0)
    assert "eagle3: 10 rounds with drafts, 40 draft tokens, 10 accepted, acceptance length 2.00" in said and code == 0


def test_batch_says_which_rows_are_missing(tmp_path, monkeypatch, crossspec):
    monkeypatch.setattr(batch, "_answered", lambda *job: [part(1, "x", ACCEPTANCE, {})])
    rows = write(tmp_path / "rows.jsonl", *[{"prompt": "a"}] * 3)
    status, _, said = crossspec("batch", rows, tmp_path / "out.jsonl", *WORDS)
    assert status == 2 and "batch: 2 rows missing, whose engines died 3 times; what is done is kept" in said
    assert not (tmp_path / "out.jsonl").exists()


# ---- refusing before anything starts


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(batch, "_answered", refuse)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("none.jsonl", "out.jsonl"), "none.jsonl: No such file or directory"),
        (("rows.jsonl", "none/out.jsonl"), "OUT none/out.jsonl: name a file in a folder that exists"),
        (("rows.jsonl", "rows.jsonl"), "OUT rows.jsonl is IN: name another file"),
        (("rows.jsonl", "there.jsonl"), "there.jsonl is there and no job of this command's that could go on"),
        (("rows.jsonl", "out.jsonl", "--keep", "prompt"), "--keep prompt is a column that is read: give others"),
        (("rows.jsonl", "out.jsonl", "--spec", "none.json"), "none.json: No such file or directory"),
        (("rows.jsonl", "out.jsonl", "--engine-args", '{"max_num_seqs": 3}'), "max_num_seqs is not to be set here"),
    ],
)
def test_batch_refuses_in_one_sentence(words, sentence, tmp_path, monkeypatch, crossspec):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", {"prompt": "a"})
    (tmp_path / "there.jsonl").write_text("another's\n")
    status, _, said = crossspec("batch", *words, *WORDS)
    assert status == 2 and sentence in " ".join(said.split()) and "Traceback" not in said
    assert (tmp_path / "there.jsonl").read_text() == "another's\n" and not (tmp_path / "out.jsonl.parts").exists()


@pytest.mark.usefixtures("nothing_starts")
def test_batch_keeps_another_jobs_rows(tmp_path, crossspec):
    rows, out = write(tmp_path / "rows.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    parts = Path(f"{out}.parts")
    with pytest.raises(AssertionError, match="an engine was started"):
        crossspec("batch", rows, out, *WORDS)
    kept = parts.read_text()
    status, _, said = crossspec("batch", rows, out, *WORDS, "--temperature", 1)
    assert status == 2 and "is of a job with another sampling.temperature (0.0, here" in said
    write(rows, {"prompt": "b"})
    status, _, said = crossspec("batch", rows, out, *WORDS)
    assert status == 2 and "is of a job with another IN: name another OUT, or give what it was begun with" in said
    assert parts.read_text() == kept


def test_batch_needs_ray(tmp_path, monkeypatch, crossspec):
    monkeypatch.setitem(sys.modules, "ray.data", None)
    rows = write(tmp_path / "rows.jsonl", {"prompt": "a"})
    status, _, said = crossspec("batch", rows, tmp_path / "out.jsonl", *WORDS)
    assert status == 2 and "batch needs ray.data: run `pip install" in said


# ---- with engines


@contextlib.contextmanager
def replica_here(spec):
    """A replica whose engine runs in this process."""
    sampling = {"max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0}
    job = {"engine": {"model": "pocket", "speculative_config": spec}, "sampling": sampling, "seed": 0, "chat": None}
    metrics = {} if spec is None else {"per_request_spec_decode_metrics": "summary"}
    with (
        engines.engine(spec, **metrics) as llm,
        mock.patch("vllm_crossspec.jobs.offline.start_engine", return_value=llm),
        mock.patch.dict(os.environ),
    ):
        yield batch.Replica({**job, "cwd": os.getcwd()})


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Rows through one engine in this process, in two shards: output rows and the device's counts by drafter."""
    folder = tmp_path_factory.mktemp("answered")
    rows = [
        {"prompt": QUESTION, "id": "a", "topic": "leaves"},
        {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4},
        {"prompt": QUESTION, "extra_args": {"crossspec": "off"}},
        {"prompt": QUESTION, "temperature": 1.0},
        {"prompt": QUESTION, "temperature": 1.0, "seed": 3},
        {"prompt": QUESTION, "structured_outputs": {"regex": "[a-c]{3}"}},
        {"prompt": QUESTION, "min_p": 1.0, "temperature": 1.0},
        {"prompt": QUESTION, "sampling": {"logit_bias": {"300": 100}}},
        {"prompt": "long " * 3000},
        {"prompt": QUESTION, "extra_args": {"crossspec": "of"}},
        {"prompt": QUESTION, "temperature": "hot"},
        {"prompt": QUESTION, "sampling": {"temprature": 1.0}},
        {"prompt": QUESTION, "top_p": 7},
        {"prompt": QUESTION, "sampling": {"n": 2}},
        {"prompt": [99999]},
        {"prompt": QUESTION, "sampling": {"logit_bias": {"the": 1}}},
        {"prompt": QUESTION, "sampling": {"logit_bias": dict.fromkeys(map(str, range(1025)), 1.0)}},
    ]
    requests = read_requests(write(folder / "rows", *rows), ["topic"])
    with replica_here(SPEC) as replica:
        first, second = (json.loads(json.dumps(replica.answer(part))) for part in (requests[:3], requests[3:]))
    return first["rows"] + second["rows"], second["drafters"]


@pytest.mark.e2e
def test_batch_answers_rows(answered):
    rows, _ = answered
    first, chat, off, sampled, row_of_seed_three, structured, likeliest, biased, *_ = rows
    assert (first["row"], first["id"], first["topic"], first["error"]) == (0, "a", "leaves", None)
    assert first["tokens"] == 8 and chat["tokens"] == 4 and first["text"].startswith(chat["text"])
    assert off["text"] == first["text"] and off["acceptance"]["rounds"] == 0
    assert sampled["text"] != first["text"]
    assert sampled["text"] == row_of_seed_three["text"], "a row without a seed has its number"
    assert len(structured["text"]) == 3 and {*structured["text"]} <= {*"abc"}
    assert likeliest["text"] == first["text"], "nothing else is as likely as the likeliest token"
    assert biased["text"] == biased["text"][: len(biased["text"]) // 8] * 8, "one token, again and again"
    assert biased["text"] != first["text"]
    assert {row["error"] is None for row in rows[:8]} == {True}
    assert {(*row,) for row in rows} == {(*first,)}, "all rows have the same columns"


BAD_PARAMETERS = (
    "maximum context length is 512 tokens", "the extra argument 'crossspec' is 'of'; use one of tree, chain, off",
    "Expected `float`, got `str` - at `$.temperature`", "`temprature` is no sampling parameter; did you mean",
    "top_p must be in (0, 1], got 7.0", "`n` is 2: a row has one answer", "Token id 99999 is out of vocabulary",
    "Expected `int`, got `str` - at `key` in `$.logit_bias`", "logit_bias has 1025 tokens; give 1024 at most",
)  # fmt: skip


@pytest.mark.e2e
def test_batch_row_that_fails_is_its_own_error(answered):
    bad = answered[0][8:]
    assert [row["text"] for row in bad] == [None] * len(BAD_PARAMETERS)
    for row, sentence in zip(bad, BAD_PARAMETERS, strict=True):
        assert sentence in row["error"]


@pytest.mark.e2e
def test_batch_tells_acceptance_by_row_and_drafter(answered):
    """What the device counted is what vLLM counted of the rows."""
    rows, drafters = answered
    told = [row["acceptance"] for row in rows if row["acceptance"] is not None]
    assert told[0]["drafter"] == "eagle3" and told[0]["length"] == pytest.approx(
        1 + told[0]["accepted_tokens"] / told[0]["rounds"], abs=1e-3
    )
    rounds, accepted = (sum(one[name] for one in told) for name in ("rounds", "accepted_tokens"))
    assert accepted > 0 and [drafters["eagle3"][name] for name in ("drafts", "accepted_tokens")] == [rounds, accepted]


@pytest.fixture
def ray_here(tmp_path, monkeypatch):
    """Ray on this machine for one test, whose folder has modules; a busy machine starts nodes and workers slowly."""
    ray = pytest.importorskip("ray")
    for name in ("RAY_raylet_start_wait_time_s", "RAY_worker_register_timeout_seconds"):
        monkeypatch.setenv(name, "300")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    yield ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    ray.shutdown()


def wordings(count):
    """The demo's prompts in other words, numbered; every second one is sampled."""
    lines = (engines.POCKET / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    for i in range(count):
        sampling = {"temperature": 0.8, "top_p": 0.95} if i % 2 else {}
        yield {"id": f"row-{i}", "prompt": f"{prompts[i % len(prompts)]} ({i})", **sampling}


def actors(pid):
    """Process ids of Ray Data's actors that a process started, itself or by others."""
    try:
        children = [
            int(pid) for task in Path(f"/proc/{pid}/task").iterdir() for pid in (task / "children").read_text().split()
        ]
        is_actor = b"MapWorker(MapBatches(Replica))" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return []
    return [pid] * is_actor + [actor for child in children for actor in actors(child)]


class Killer(threading.Thread):
    """Kills (SIGKILL) one of two replicas once some shards are done; ``killed`` is its process id."""

    def __init__(self, parts, after):
        super().__init__(daemon=True)
        self.parts, self.after, self.killed, self.over = parts, after, None, threading.Event()

    def run(self):
        while not self.killed and not self.over.wait(0.05):
            done = self.parts.read_text().count("\n") - 1 if self.parts.exists() else 0
            if done >= self.after and len(found := actors(os.getpid())) == 2:
                self.killed = found[-1]
                os.kill(self.killed, signal.SIGKILL)


@pytest.mark.e2e
@pytest.mark.usefixtures("ray_here")
def test_batch_survives_a_killed_replica_and_a_stop(tmp_path, monkeypatch):
    """Every row is answered once, and as by plain generation; CROSSSPEC_BATCH_ROWS makes the job larger."""
    count = int(os.environ.get("CROSSSPEC_BATCH_ROWS", "40"))
    rows = write(tmp_path / "rows.jsonl", *wordings(count))
    (tmp_path / "spec.json").write_text(json.dumps(engines.both("eagle3") | {"router": ROUTER}))
    words = (*WORDS, "--shard-rows", max(count // 12, 1), "--batch-size", 8)
    drafted = ("batch", rows, tmp_path / "out.jsonl", *words, "--spec", tmp_path / "spec.json", "--replicas", 2)
    with replica_here(None) as replica:
        plain = replica.answer(read_requests(rows))["rows"]
    parts, original = tmp_path / "out.jsonl.parts", batch._answered

    def stopped(*job):
        for number, answer in enumerate(original(*job)):
            yield answer
            if number == 3:
                raise InterruptedError

    monkeypatch.setattr(batch, "_answered", stopped)
    with pytest.raises(InterruptedError):
        batch_once(drafted)
    monkeypatch.undo()
    done = parts.read_text()
    assert done.count("\n") == 5 and not (tmp_path / "out.jsonl").exists()
    parts.write_text(done + '{"rows": [{"row": 11, "te')  # a line that the stop cut
    killer = Killer(parts, after=6)
    killer.start()
    commands.crossspec(*drafted, "--json", tmp_path / "summary.json")
    killer.over.set()
    killer.join()
    assert killer.killed and not Path(f"/proc/{killer.killed}").exists()
    assert parts.read_text().startswith(done), "what was done is not done again"
    found = read(tmp_path / "out.jsonl")
    assert [row["id"] for row in found] == [f"row-{i}" for i in range(count)]
    texts = [row["text"] for row in found]
    assert texts == [row["text"] for row in plain] and len({*texts}) > count // 2, "the comparison can fail"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["rows"], summary["errors"]) == (count, 0) and summary["answered_now"] < count
    assert summary["drafters"].keys() == {"eagle3", "dflash"}
    for name in ("rounds", "accepted_tokens"):
        assert summary[name] == sum(one[name] for one in summary["drafters"].values()) > 0, "but for what was lost"
    assert f"{count} rows in" in commands.crossspec(*drafted), "a job that is done says so again"


ROUTER = {"policy": "entropy", "threshold": 1.5}


def batch_once(words):
    """The command without `main`, which would make a sentence of what stops it."""
    from vllm_crossspec.cli.app import app

    app([str(word) for word in words], standalone_mode=False)


@pytest.mark.e2e
@pytest.mark.usefixtures("ray_here")
def test_batch_engine_that_refuses_is_one_sentence(tmp_path, crossspec):
    rows = write(tmp_path / "rows.jsonl", {"prompt": "a"})
    more = ("--engine-args", '{"max_num_batched_token": 3}')
    status, _, said = crossspec("batch", rows, tmp_path / "out.jsonl", *WORDS, *more)
    assert status == 2 and "batch: --engine-args max_num_batched_token: vLLM's EngineArgs has no such field" in said


# ---- shards of other commands, by engines on Ray

PLAYED_ENGINE = """
import json, os, sys
from pathlib import Path
job, events = json.load(open(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w", buffering=1)
died = Path(job["died"])
print(json.dumps({"event": "ready"}), file=events)
for order in map(json.loads, open(job["orders"])):
    shard = job["shards"][order["shard"]]
    if shard["number"] == job["bad"] and len(list(died.iterdir())) < job["deaths"]:
        (died / str(os.getpid())).touch()
        print("ZeroDivisionError: a shard")
        sys.exit(3)
    if job["engine"]["model"] == "bad":
        print(json.dumps({"event": "error", "message": "no such target"}), file=events)
        sys.exit(1)
    Path(job["out"], shard["file"]).write_text(str(shard["number"]))
    print(json.dumps({"event": "shard", "number": shard["number"], "num_made": 2}), file=events)
    print(json.dumps({"event": "done"}), file=events)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ray_here")
def test_shards_are_shared_among_engines_on_ray(tmp_path, monkeypatch):
    """Engines are played by a script; one that dies begins its part anew, and is given up after three times."""
    (tmp_path / "played_engine.py").write_text(PLAYED_ENGINE)
    work = sharded.Work("played", "played_engine", "records")
    shards = [{"number": i, "file": f"shard-{i}", "num_texts": 1} for i in range(5)]
    monkeypatch.chdir(tmp_path)

    def run(name, model="good", deaths=0):
        (tmp_path / name / "died").mkdir(parents=True)
        engine = {"model": model, "tensor_parallel_size": None}
        job = {"engine": engine, "out": str(tmp_path / name), "died": str(tmp_path / name / "died"), "bad": 3}
        return sharded.run_missing(work, {**job, "deaths": deaths}, shards, 4, engines=2)

    assert run("whole", deaths=1) == 10 and len(list((tmp_path / "whole" / "died").iterdir())) == 1
    assert [(tmp_path / "whole" / f"shard-{i}").read_text() for i in range(5)] == list("01234")
    with pytest.raises(sharded.EngineError, match="ended with status 3: ZeroDivisionError: a shard"):
        run("given up", deaths=9)
    assert len(list((tmp_path / "given up" / "died").iterdir())) == 1 + sharded.RETRIES
    with pytest.raises(ValueError, match="^played: no such target$"):
        run("refused", model="bad")


def test_several_engines_need_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    shards = [{"number": 0, "file": "none", "num_texts": 1}]
    with pytest.raises(ValueError, match="collect: several engines need Ray: run `pip install"):
        sharded.run_missing(sharded.Work("collect", "", "records"), {"out": "nowhere"}, shards, 4, engines=2)


def test_batch_columns_are_vllms():
    """Sampling parameters that the command reads without vLLM are vLLM's."""
    from vllm import SamplingParams

    assert {*batch.SAMPLING} <= {*SamplingParams.__struct_fields__}
