"""What goes wrong while an engine serves ends in a clear error or in plain generation: no wrong token, nothing stuck.

With CROSSSPEC_FAULT_TABLE=FILE what was seen under `vllm serve` is appended there, a row of docs/use/faults.md a fault.
"""

import concurrent.futures
import contextlib
import json
import os
import shutil
import socket
import time
import urllib.error

import engines
import openai
import psutil
import pytest
import sabotage
import torch
from engines import LARGE_STEPS as SETTINGS
from engines import mixed_answers
from servers import serving, serving_with_faults

pytestmark = pytest.mark.e2e

NGRAM_TREE = engines.tree("dart", engines.DART, 20, type="continuity")
HETEROSPEC = {"adaptive": {"model": str(engines.POCKET / "heterospec" / "calibration.json")}}
SPECS = {
    "chain": engines.ours("eagle3", engines.EAGLE3),
    "tree": engines.tree("eagle3", engines.EAGLE3, 20),
    "sizes by request": engines.tree("eagle3", engines.EAGLE3) | HETEROSPEC,
    "soft prompts": engines.tree("confu", engines.CONFU, 12),
    "blocks": NGRAM_TREE | {"ngram": {"model": str(engines.NGRAM)}},
    "routed": engines.both("eagle3") | {"router": {"policy": "entropy", "threshold": 0.5}},
}


@pytest.fixture(scope="module")
def plain():
    """The target's answers to the mixed batch, and to eight prompts."""
    return engines.plain_mixed_answers()[0], engines.plain(8, 16)


def stats(llm):
    return llm.collective_rpc("crossspec_stats")[0]


def has_stopped(llm):
    return llm.collective_rpc(lambda worker: worker.model_runner.speculator.counters.has_stopped)[0]


def keep_planned_drafts(llm, planned):
    """Of every step."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def spy(*arguments, **options):
        output = schedule(*arguments, **options)
        planned.append(output.scheduled_spec_decode_tokens)
        return output

    scheduler.schedule = spy


def blocks_in_use(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.usage


@pytest.mark.parametrize(("name", "is_async"), [*((name, False) for name in SPECS), ("tree", True), ("routed", True)])
def test_fault_no_memory_for_a_draft(name, is_async, plain):
    """In mid-round, with the rows of other drafts planned already: the rest of every text is decoded plainly."""
    with engines.engine(SPECS[name], async_scheduling=is_async, **SETTINGS) as llm:
        llm.collective_rpc(sabotage.run_out_of_memory, args=(2, "dflash") if name == "routed" else (6,))
        assert mixed_answers(llm)[0] == plain[0]
        assert has_stopped(llm)
        drafted = stats(llm)
        assert sum(own["accepted_tokens"] for own in drafted.values()) > 0, "it drafted before"
        planned = []
        keep_planned_drafts(llm, planned)
        assert engines.generate(llm, engines.prompts(8), max_tokens=16) == plain[1]
        assert stats(llm) == drafted, "and not afterwards"
        assert is_async or not any(planned)
        assert blocks_in_use(llm) == 0


def test_fault_no_memory_on_one_of_several_ranks_ends_the_engine(monkeypatch):
    """The others would draft on, and wait for it for ever."""
    with engines.engine(SPECS["chain"], **SETTINGS) as llm:
        llm.collective_rpc(sabotage.run_out_of_memory, args=(3,))
        speculator = llm.collective_rpc(lambda worker: worker.model_runner.speculator)[0]
        monkeypatch.setattr(speculator.vllm_config.parallel_config, "world_size", 2)
        with pytest.raises(torch.OutOfMemoryError):
            engines.generate(llm, engines.prompts(2))
        assert not has_stopped(llm)


@pytest.mark.parametrize("kind", ["truncated", "replaced"])
def test_fault_ngram_store_changes_while_it_is_mapped(kind, plain, tmp_path):
    """Cut short it would end the process; a new file in its place is not noticed, as `crossspec ngram` writes them."""
    store = tmp_path / "store.safetensors"
    shutil.copy(engines.NGRAM, store)
    with engines.engine(NGRAM_TREE | {"ngram": {"model": str(store)}}, **SETTINGS) as llm:
        assert engines.generate(llm, engines.prompts(8), max_tokens=16) == plain[1]
        drafted = stats(llm)
        assert drafted["dart"]["accepted_tokens"] > 0
        if kind == "truncated":
            os.truncate(store, 4096)
        else:
            shutil.copy(engines.NGRAM, tmp_path / "new")
            os.replace(tmp_path / "new", store)
            os.truncate(store, 4096)
        assert mixed_answers(llm)[0] == plain[0]
        assert has_stopped(llm) == (kind == "truncated")
        assert (stats(llm) == drafted) == (kind == "truncated")


# ---- under `vllm serve`

CONCURRENCY = 16
SETTINGS_OF_SERVER = ["--max-num-seqs", str(CONCURRENCY), "--max-num-batched-tokens", "1024"]
RECOVERY_SECONDS = 60
BAD_BODIES = [
    b"{",
    b"\xff\xfe",
    b"[]",
    {},
    {"prompt": "a", "model": "nobody"},
    {"prompt": None},
    {"prompt": ""},
    {"prompt": "a " * 5000},
    {"prompt": [10**9]},
    {"prompt": [-1]},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "top_p": 2},
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "max_tokens": 10**9},
    {"prompt": "a", "n": 0},
    {"prompt": "a", "logprobs": 10**6},
    {"prompt": "a", "min_tokens": 30, "max_tokens": 3},
    {"prompt": "a", "logit_bias": {"99999999": 5}},
    {"prompt": "a", "structured_outputs": {"regex": "("}},
    {"prompt": "a", "structured_outputs": {"json": "{"}},
    {"prompt": "a", "structured_outputs": {"choice": []}},
    {"prompt": "a", "vllm_xargs": {"crossspec": "fast"}},
    {"prompt": "a", "vllm_xargs": {"crossspec": 3}},
    {"prompt": "a", "vllm_xargs": {"crossspec": ["off"]}},
    {"prompt": "a", "vllm_xargs": {"crossspec": "/etc/passwd"}},
    {"prompt": "a", "vllm_xargs": {"crossspec_category": "law"}},
]


@pytest.fixture(scope="module")
def questions():
    return engines.prompts(8)


@pytest.fixture(scope="module")
def texts(questions):
    """Plain's, short and long."""
    with engines.engine(None, **SETTINGS) as llm:
        decode = llm.get_tokenizer().decode
        return {
            length: [decode(ids, skip_special_tokens=True) for ids in engines.generate(llm, questions, length, **more)]
            for length, more in ((24, {}), (300, {"ignore_eos": True}))
        }


@pytest.fixture(scope="module")
def router_folder(tmp_path_factory):
    return shutil.copytree(engines.POCKET / "router", tmp_path_factory.mktemp("router") / "router")


@pytest.fixture(scope="module")
def server(router_folder):
    """One server for all faults that it outlives; the last of them stops its drafting."""
    drafters = {"eagle3": {"model": str(engines.EAGLE3), "tree": {"num_nodes": 20}}, "dflash": DFLASH_TREE}
    router = {"policy": "neural", "model": str(router_folder), "threshold": 0.0}
    spec = {"method": "whiflash", "drafters": drafters, "router": router}
    with serving_with_faults(spec, *SETTINGS_OF_SERVER) as running:
        yield running


DFLASH_TREE = {
    "model": str(engines.DFLASH),
    "tree": {"type": "continuity", "num_nodes": 20},
    "ngram": {"model": str(engines.NGRAM)},
}


def ask(server, prompt, max_tokens=24, **more):
    answer = server.client().completions.create(
        model="pocket", prompt=prompt, max_tokens=max_tokens, temperature=0, **more
    )
    return answer.choices[0].text


def health(server):
    """The status of /health; None where nobody answers."""
    try:
        server.get("/health")
    except urllib.error.HTTPError as problem:
        return problem.code
    except OSError:
        return None
    return 200


def recovered(server, questions, texts):
    """Seconds until every text is plain's again, no request is left and every block is free; /health says yes."""
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda question: ask(server, question), questions)) == texts[24]
    while (left := busy(server)) != (0, 0, 0):
        assert time.monotonic() - began < RECOVERY_SECONDS, left
        time.sleep(0.1)
    assert health(server) == 200
    assert json.loads(server.post("/collective_rpc", {"method": "count_requests"})[1])["results"] == ["0"]
    return time.monotonic() - began


def busy(server):
    """Requests that run, requests that wait, share of the cache's blocks in use: as /metrics has them."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc")
    return tuple(server.metric(name) for name in names)


def report(fault, client, did, seconds):
    """A row of the table."""
    if file := os.environ.get("CROSSSPEC_FAULT_TABLE"):
        with open(file, "a") as table:
            table.write(f"| {fault} | {client} | {did} | {seconds} |\n")


def test_fault_clients_hang_up(server, questions, texts):
    """Before the first token and after it, while others are served; nobody makes the rest of their answers."""
    made = server.metric("vllm:generation_tokens_total")

    def leave(number):
        body = {"model": "pocket", "prompt": questions[number % 8], "max_tokens": 300, "stream": True, "ignore_eos": 1}
        with open_stream(server, body) as (connection, _):
            if number % 2:
                connection.recv(100)

    with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
        left = pool.map(leave, range(60))
        good = pool.map(lambda question: ask(server, question), questions)
        assert list(good) == texts[24] and len(list(left)) == 60
    seconds = recovered(server, questions, texts)
    assert server.metric("vllm:generation_tokens_total") - made < 60 * 300 / 2
    report("60 clients hang up", "(gone)", "requests aborted, blocks freed", f"{seconds:.1f} s")


@contextlib.contextmanager
def open_stream(server, body, buffer=4096):
    """A connection with as small a buffer, on which an answer has been asked for; and its file."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect(("127.0.0.1", server.port))
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        with connection.makefile("rb") as file:
            yield connection, file


def test_fault_readers_stall(server, questions, texts):
    """Their answers are made, their blocks are freed, others are served; read later, the text is whole."""
    asked = {"model": "pocket", "max_tokens": 300, "stream": True, "ignore_eos": True, "temperature": 0, "logprobs": 20}
    with contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(open_stream(server, asked | {"prompt": q}))[1] for q in questions[:4]]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda question: ask(server, question), questions)) == texts[24]
        seconds = recovered(server, questions, texts)
        for file, text in zip(stalled, texts[300][:4], strict=True):
            pieces = [line[6:] for line in file.read().splitlines() if line.startswith(b"data: {")]
            assert "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces) == text
    report("4 readers stall", "their whole text, once they read", "others were served", f"{seconds:.1f} s")


def test_fault_flood_of_bad_requests(server, questions, texts):
    """Each is refused with a sentence, none is the server's mistake, and good ones between them are answered."""

    def refused(number):
        body = BAD_BODIES[number % len(BAD_BODIES)]
        body = {"model": "pocket", **body} if isinstance(body, dict) else body
        return number % len(BAD_BODIES), *server.post("/v1/completions", body)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = pool.map(refused, range(20 * len(BAD_BODIES)))
        good = pool.map(lambda question: ask(server, question), questions)
        assert list(good) == texts[24]
        found = {number: (status, text) for number, status, text in answers}
    wrong = {str(BAD_BODIES[n])[:80]: found[n] for n in found if not 400 <= found[n][0] < 500 or not found[n][1]}
    assert wrong == {}
    assert all("Traceback" not in text for _, text in found.values())
    assert (
        "use one of tree, chain, off"
        in found[BAD_BODIES.index({"prompt": "a", "vllm_xargs": {"crossspec": "fast"}})][1]
    )
    seconds = recovered(server, questions, texts)
    report(
        f"{20 * len(BAD_BODIES)} bad requests",
        "400 to 422 and a sentence",
        "good ones were answered",
        f"{seconds:.1f} s",
    )


def test_fault_router_files_are_overwritten(server, router_folder, questions, texts):
    """In place, while it routes: it goes by what it has read."""
    before = {name: server.metric("crossspec:router_decisions_total", drafter=name) for name in ("eagle3", "dflash")}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda question: ask(server, question), questions)
        for file in router_folder.iterdir():
            file.write_bytes(b"{")
        assert list(answers) == texts[24]
    seconds = recovered(server, questions, texts)
    routed = {
        name: server.wait_for_metric("crossspec:router_decisions_total", n, drafter=name) for name, n in before.items()
    }
    assert all(routed[name] > n for name, n in before.items())
    report("a router's files overwritten", "nothing", "routed by what it had read", f"{seconds:.1f} s")


def test_fault_no_memory_for_a_draft_of_a_server(server, questions, texts):
    """It says so in its log and its metrics, is healthy, and answers."""
    assert server.metric("crossspec:drafting_stops_total") == 0
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda question: ask(server, question, 300, extra_body={"ignore_eos": True}), questions)
        time.sleep(1)
        assert server.post("/collective_rpc", {"method": "run_out_of_memory", "args": [3]})[0] == 200
        assert list(answers) == texts[300]
    seconds = recovered(server, questions, texts)
    assert server.wait_for_metric("crossspec:drafting_stops_total", above=0) == 1
    said = [line for line in server.log.read_text().splitlines() if "drafting has stopped" in line]
    assert len(said) == 1 and "GPU 0 is full." in said[0]
    drafts = server.metric("crossspec:drafts_total")
    recovered(server, questions, texts)
    time.sleep(2)  # whatever was counted is published by now: once a second
    assert server.metric("crossspec:drafts_total") == drafts
    report("no memory for a draft", "nothing", "drafting stopped; the texts went on plainly", f"{seconds:.1f} s")


def test_fault_worker_is_killed_in_mid_round(questions):
    """Every client gets an error, /health says no, and the server ends by itself, so that it is started again."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            serving(SPECS["tree"], *SETTINGS_OF_SERVER, "--distributed-executor-backend", "mp")
        )
        start = time.monotonic() - began
        streams = [
            server.client().completions.create(
                model="pocket", prompt=question, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            for question in questions
        ]
        for stream in streams:
            next(iter(stream))
        family = psutil.Process(server.process.pid).children(recursive=True)
        (worker,) = [child for child in family if "Worker" in "".join(child.cmdline())]
        worker.kill()
        began = time.monotonic()
        for stream in streams:
            with pytest.raises(openai.APIError, match="EngineCore encountered an issue"):
                for _ in stream:
                    pass
        told = time.monotonic() - began
        status = health(server)
        assert status in (503, None)
        server.process.wait(timeout=60)
        ended = time.monotonic() - began
    did = f"`/health`: {status or 'refused'}; it ended by itself after {ended:.1f} s"
    report("its worker is killed", f"an error in the stream after {told:.1f} s", did, f"a start ({start:.0f} s here)")
