"""`crossspec batch`: files of prompts, one engine or several on Ray, rows that fail, jobs that are stopped."""

import gzip
import json
import sys
import threading
from pathlib import Path

import commands
import engines
import pytest
from documents import ROOT

from vllm_crossspec.cli import batch, batch_rows, replicas
from vllm_crossspec.cli.batch_rows import read_requests

sys.path.insert(0, str(ROOT / "benchmarks"))

WORDS = ("--model", engines.TARGET, "--dtype", "float32", "--max-tokens", 8, "--max-model-len", 512)
QUESTION = "Why do leaves turn yellow?"
SPEC = engines.tree("eagle3", engines.EAGLE3, num_nodes=8)


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def openai(name, url="/v1/chat/completions", **body):
    asked = {"messages": [{"role": "user", "content": QUESTION}]} if "chat" in url else {"prompt": QUESTION}
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "any", **asked, **body}}


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
        "raw": False, "url": None,
    }  # fmt: skip
    assert second["messages"] == rows[1]["messages"] and second["sampling"] == {"extra_args": {"crossspec": "off"}}
    assert third["prompt"] == [1, 2] and third["kept"] == {"topic": None}


def test_batch_reads_openais_rows(tmp_path):
    file = write(tmp_path / "rows.jsonl", openai("a", max_completion_tokens=3), openai("b", "/v1/completions"))
    chat, completion = read_requests(file)
    assert chat["sampling"] == {"max_completion_tokens": 3} and "messages" in chat
    assert (completion["id"], completion["prompt"], completion["raw"]) == ("b", QUESTION, True)


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
    "`url` is \\['/v1/completions'\\]: write POST": [{"custom_id": "a", "url": ["/v1/completions"], "body": {}}],
    "line 2: `custom_id` 'a' is that of": [openai("a"), openai("a")],
    "do not go together: split the file": [openai("a"), {"prompt": "a"}],
    "OpenAI's batch format has no `bodi`; did you mean 'body'": [{"custom_id": "a", "bodi": {}}],
    "`url` is '/v1/embeddings': write POST and one of": [{"custom_id": "a", "url": "/v1/embeddings", "body": {}}],
    "`body` needs `messages`, not empty": [{"custom_id": "a", "url": "/v1/chat/completions", "body": {}}],
    "holds no row": [],
}


@pytest.mark.parametrize("sentence", BAD_ROWS)
def test_batch_refuses_rows_in_one_sentence(sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        read_requests(write(tmp_path / "rows.jsonl", *BAD_ROWS[sentence]))


def test_batch_refuses_what_is_no_parquet(tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1, or not")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="to read Parquet needs pyarrow: run `pip install"):
        read_requests(file)
    monkeypatch.undo()
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="rows.parquet is no Parquet file, or damaged"):
        read_requests(file)


# ---- refusing before anything starts


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(batch, "run_missing", refuse)


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
    (parts / "rows-000000.jsonl").write_text("of the first job\n")
    status, _, said = crossspec("batch", rows, out, *WORDS, "--temperature", 1)
    assert status == 2 and "is of a job with another sampling ({'max_tokens': 8, 'temperature': 0.0" in said
    write(rows, {"prompt": "b"})
    status, _, said = crossspec("batch", rows, out, *WORDS)
    assert status == 2 and "is of a job with another IN: name another OUT, or give what it was begun with" in said
    assert (parts / "rows-000000.jsonl").read_text() == "of the first job\n"


def test_batch_needs_ray_for_several_engines(tmp_path, monkeypatch, crossspec):
    monkeypatch.setitem(sys.modules, "ray", None)
    rows = write(tmp_path / "rows.jsonl", {"prompt": "a"})
    status, _, said = crossspec("batch", rows, tmp_path / "out.jsonl", *WORDS, "--replicas", 2)
    assert status == 2 and "batch: 2 engines need Ray: run `pip install" in said


def test_batch_refuses_a_shard_that_lacks_a_row(tmp_path):
    requests = [{"row": number} for number in range(3)]
    write(tmp_path / "rows-000000.jsonl", {"number": 0}, {"row": 0}, {"row": 1})
    with pytest.raises(batch.EngineError, match="has 2 rows, not 3: delete it"):
        batch._gather(tmp_path / "out.jsonl", tmp_path, requests, 3)
    assert not (tmp_path / "out.jsonl").exists()


# ---- shards between replicas


def shards(count):
    return [{"number": number} for number in range(count)]


def test_ray_shard_of_a_dead_replica_goes_to_another():
    queue = replicas.Queue(shards(2))
    first, second = queue.take(), queue.take()
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(queue.take()))
    waiting.start()
    queue.finish(second, done=True)
    assert not taken and not queue.is_over, "the first may still come back"
    queue.finish(first, done=False)
    waiting.join(10)
    assert taken == [first]
    queue.finish(first, done=True)
    assert queue.is_over and queue.take() is None and queue.num_left == 0


def test_ray_shard_that_kills_every_replica_is_given_up():
    queue, tries = replicas.Queue(shards(2)), 0
    while (shard := queue.take()) is not None:
        tries += shard["number"] == 0
        queue.finish(shard, done=shard["number"] != 0)
    assert tries == replicas.TRIES and queue.given_up == shards(1) and queue.num_left == 1


# ---- with engines


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Rows of ours and of OpenAI's through one engine in this process: output rows and counts by drafter."""
    from vllm_crossspec.engine.jobs.batch import Answers

    folder = tmp_path_factory.mktemp("answered")
    files = {
        "ours": [
            {"prompt": QUESTION, "id": "a", "topic": "leaves"},
            {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4},
            {"prompt": QUESTION, "extra_args": {"crossspec": "off"}},
            {"prompt": QUESTION, "temperature": 1.0},
            {"prompt": QUESTION, "temperature": 1.0, "seed": 3},
            {"prompt": QUESTION, "structured_outputs": {"regex": "[a-c]{3}"}},
            {"prompt": "long " * 3000},
            {"prompt": QUESTION, "extra_args": {"crossspec": "of"}},
            {"prompt": QUESTION, "temperature": "hot"},
            {"prompt": QUESTION, "sampling": {"temprature": 1.0}},
            {"prompt": QUESTION, "top_p": 7},
            {"prompt": QUESTION, "sampling": {"n": 2}},
            {"prompt": [99999]},
        ],
        "openai": [
            openai("a", max_completion_tokens=8),
            openai("b", "/v1/completions", max_tokens=8, vllm_xargs={"crossspec": "chain"}),
            openai("c", tools=[{"type": "function"}]),
            openai("d", response_format={"type": "json_schema"}),
            openai("e", stream=True),
        ],
    }
    job = {
        "engine": {"model": "pocket", "speculative_config": SPEC},
        "sampling": {"max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0},
        "seed": 0, "chat": None,
    }  # fmt: skip
    found = {}
    with engines.engine(SPEC, per_request_spec_decode_metrics="summary") as llm:
        answers = Answers(llm, job, lambda event, **fields: None)
        for name, rows in files.items():
            before = answers.counted()
            requests = read_requests(write(folder / name, *rows), ["topic"] if name == "ours" else [])
            answered = json.loads(json.dumps(answers.answer(requests)))
            found[name] = answered, answers.by_drafter(before, answered)
    return found


@pytest.mark.e2e
def test_batch_answers_rows(answered):
    rows, _ = answered["ours"]
    first, chat, off, sampled, row_of_seed_three, structured, *_ = rows
    assert (first["row"], first["id"], first["topic"], first["error"]) == (0, "a", "leaves", None)
    assert first["tokens"] == 8 and chat["tokens"] == 4 and first["text"].startswith(chat["text"])
    assert off["text"] == first["text"] and off["acceptance"]["rounds"] == 0
    assert sampled["text"] != first["text"]
    assert sampled["text"] == row_of_seed_three["text"], "a row without a seed has its number"
    assert len(structured["text"]) == 3 and {*structured["text"]} <= {*"abc"}
    assert {row["error"] is None for row in rows[:6]} == {True}
    assert {(*row,) for row in rows} == {(*first,)}, "all rows have the same columns"


BAD_PARAMETERS = (
    "maximum context length is 512 tokens", "the extra argument 'crossspec' is 'of'; use one of tree, chain, off",
    "Expected `float`, got `str` - at `$.temperature`", "`temprature` is no sampling parameter; did you mean",
    "top_p must be in (0, 1], got 7.0", "`n` is 2: a row has one answer", "Token id 99999 is out of vocabulary",
)  # fmt: skip


@pytest.mark.e2e
def test_batch_row_that_fails_is_its_own_error(answered):
    bad = answered["ours"][0][6:]
    assert [row["text"] for row in bad] == [None] * len(BAD_PARAMETERS)
    for row, sentence in zip(bad, BAD_PARAMETERS, strict=True):
        assert sentence in row["error"]


@pytest.mark.e2e
def test_batch_tells_acceptance_by_row_and_drafter(answered):
    """What the device counted is what vLLM counted of the rows."""
    rows, drafters = answered["ours"]
    told = [row["acceptance"] for row in rows if row["acceptance"] is not None]
    assert told[0]["drafter"] == "eagle3" and told[0]["length"] == pytest.approx(
        1 + told[0]["accepted_tokens"] / told[0]["rounds"], abs=1e-3
    )
    sums = {name: sum(one[name] for one in told) for name in ("rounds", "accepted_tokens")}
    assert sums["accepted_tokens"] > 0 and {name: drafters["eagle3"][name] for name in sums} == sums


@pytest.mark.e2e
def test_batch_answers_openais_rows(answered):
    (chat, completion, *bad), _ = answered["openai"]
    body = chat["response"]["body"]
    assert (chat["custom_id"], chat["response"]["status_code"], chat["error"]) == ("a", 200, None)
    assert body["choices"][0]["message"]["content"] == answered["ours"][0][0]["text"]
    assert body["usage"]["completion_tokens"] == 8 and body["metrics"]["speculative_decoding"]["rounds"] > 0
    assert completion["response"]["body"]["choices"][0]["text"]
    for row, word in zip(bad, ("`tools` is no sampling parameter", "`response_format` is", "`stream` is"), strict=True):
        assert word in row["error"]["message"] and row["response"]["status_code"] == 400


@pytest.mark.e2e
def test_batch_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    rows = write(tmp_path / "rows.jsonl", *({"prompt": f"{QUESTION} {i}", "temperature": i % 2} for i in range(6)))
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    words = ("batch", rows, tmp_path / "out.jsonl", *WORDS, "--shard-rows", 2, "--spec", tmp_path / "spec.json")
    commands.crossspec(*words[:2], tmp_path / "whole.jsonl", *words[3:])
    original = batch.run_missing

    def stopped(*arguments):
        def listen(event):
            if event["event"] == "shard":
                raise InterruptedError

        return original(*arguments[:-1], listen)

    monkeypatch.setattr(batch, "run_missing", stopped)
    with pytest.raises(InterruptedError):
        batch_once(words)
    parts = tmp_path / "out.jsonl.parts"
    done = {file: file.stat().st_mtime_ns for file in parts.glob("rows-*.jsonl")}
    assert 1 <= len(done) < 3 and not (tmp_path / "out.jsonl").exists()
    monkeypatch.undo()
    kept, gather = {}, batch._gather

    def look(*given):
        kept.update((file, file.stat().st_mtime_ns) for file in done)
        gather(*given)

    monkeypatch.setattr(batch, "_gather", look)
    commands.crossspec(*words, "--json", tmp_path / "summary.json")
    assert kept == done, "what was done is not done again"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["answered_now"] == 6 - 2 * len(done) and summary["rows"] == 6
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    again = commands.crossspec(*words)
    assert "6 rows in" in again and summary["drafters"]["eagle3"]["rounds"] > 0


def batch_once(words):
    """The command without `main`, which would make a sentence of what stops it."""
    from vllm_crossspec.cli.app import app

    app([str(word) for word in words], standalone_mode=False)


@pytest.mark.e2e
def test_ray_batch_survives_a_killed_replica(tmp_path):
    """Two nodes, one replica killed: all rows, each once, as one engine and plain generation write them."""
    pytest.importorskip("ray")
    import batch_cluster

    found = batch_cluster.run(tmp_path, count=40, max_tokens=8, shard_rows=4, after=2, batch_size=8)
    assert found["processes_killed"] and found["engines_died"] == 1 and found["killed_processes_are_gone"]
    assert found["shards_done_before"] < found["shards"]
    assert found["rows_in_output"] == found["different_ids"] == 40 and found["errors"] == 0
    assert found["texts_unlike_one_engines"] == found["texts_unlike_plain"] == 0
    sums = {name: sum(one[name] for one in found["drafters"].values()) for name in ("rounds", "accepted_tokens")}
    assert sums == {name: found["row_sums"][name] for name in sums}, "summed over replicas, but for what was lost"
    assert found["drafters"].keys() == {"eagle3", "dflash"} and all(one["rounds"] for one in found["drafters"].values())
    # The comparison can fail: no row is like its neighbour.
    out = batch_cluster.texts(tmp_path / "two.jsonl")
    assert batch_cluster.differing(out, [*out[1:], out[0]]) == 40


def test_batch_columns_are_vllms():
    """Sampling parameters that the command reads without vLLM are vLLM's."""
    from vllm import SamplingParams

    assert {*batch_rows.SAMPLING} <= {*SamplingParams.__struct_fields__}
