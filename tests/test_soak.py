"""A router's arms under `vllm serve` with every kind of request at once: right answers, no lost blocks, no growing
memory. Two drafters with caches, a form of one, a lookup that keeps answers, and nothing.

CROSSSPEC_SOAK_SECONDS says for how long; 40 seconds by default.
"""

import concurrent.futures
import itertools
import os
import threading
import time
from pathlib import Path

import engines
import pytest
from servers import serving
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.e2e

SECONDS = float(os.environ.get("CROSSSPEC_SOAK_SECONDS", "40"))
CONCURRENCY = 16
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "seed": 2, "extra_body": {"top_k": 20, "repetition_penalty": 1.2}},
    {"temperature": 0.0, "extra_body": {"structured_outputs": {"regex": "(yes|no), [a-z ]{5,20}"}}},
    {"temperature": 0.0, "extra_body": {"vllm_xargs": {"crossspec": "off"}}},
    {"temperature": 1.0, "seed": 3, "extra_body": {"vllm_xargs": {"crossspec": "chain"}}},
]
SERVER = ["--max-num-seqs", str(CONCURRENCY), "--max-num-batched-tokens", "1024"]
SPEC = {
    "method": "whiflash",
    "drafters": {
        "eagle3": {"model": str(engines.EAGLE3), "tree": {"num_nodes": 24}},
        "chain": {"of": "eagle3", "num_speculative_tokens": 4},
        "dflash": {"model": str(engines.DFLASH), "tree": {"num_nodes": 24}},
        "suffix": {"tree": {"num_nodes": 16}, "lookup": {"share": True, "cache_tokens": 4096}},
        "plain": {"type": "nothing"},
    },
    "router": {"policy": "goodput"},
}
DRAFTERS = ["eagle3", "chain", "dflash", "suffix"]
MAX_TOKENS = 24
GROWTH = 48 << 20
"""Bytes by which the processes may grow in the second half."""
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_ARENA_MAX": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
"""Caches that would pass for leaks are kept small. glibc gives large pieces back as soon as they are free, so that what
is resident is what is in use. On a CPU oneDNN keeps code for every number of tokens that a step had (1.1 MiB for the
pocket target alone): by default of some 200 numbers, with this of the last 32, which is what vLLM's layers hold."""


def resident_bytes(process_group):
    """Memory of all processes of a server."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(") ", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == process_group:
            total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total


def complete(client, prompt, kind):
    answer = client.completions.create(model="pocket", prompt=prompt, max_tokens=MAX_TOKENS, **kind)
    return answer.choices[0].text


def leave(client, prompt):
    """Ask for a stream and hang up after its first piece."""
    stream = client.completions.create(model="pocket", prompt=prompt, max_tokens=200, stream=True, temperature=0.0)
    next(iter(stream))
    stream.close()


def idle_usage(server):
    """KV-cache usage once nothing runs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0:
            return server.metric("vllm:kv_cache_usage_perc")
        time.sleep(0.5)
    raise AssertionError("requests still run a minute after the last answer")


def soak(server, prompts, expected, seconds):
    """Keep the server busy; the number of answers. Every one is compared."""
    deadline, numbers, lock = time.monotonic() + seconds, itertools.count(), threading.Lock()

    def work(client):
        answered = 0
        while time.monotonic() < deadline:
            with lock:
                number = next(numbers)
            prompt, kind = number % len(prompts), number // len(prompts) % len(KINDS)
            if number % 11 == 10:
                leave(client, prompts[prompt])
                continue
            assert complete(client, prompts[prompt], KINDS[kind]) == expected[prompt, kind], (prompt, kind)
            answered += 1
        return answered

    with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
        return sum(pool.map(work, [server.client() for _ in range(CONCURRENCY)]))


def test_mixed_requests_for_a_while(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    prompts = engines.prompts(4)
    wanted = [(p, k) for p in range(len(prompts)) for k in range(len(KINDS))]
    expected = plain_texts(prompts, wanted)
    with serving(SPEC, *SERVER) as server:
        group = os.getpgid(server.process.pid)
        assert once(server, prompts, wanted) == expected
        answers, resident = [], []
        for _ in range(2):
            answers.append(soak(server, prompts, expected, SECONDS / 2))
            assert idle_usage(server) == 0
            resident.append(resident_bytes(group))
        routed = {name: server.metric("crossspec:router_decisions_total", drafter=name) for name in SPEC["drafters"]}
        print(f"{answers} answers, {[round(size / 2**20) for size in resident]} MiB after each half, rounds {routed}")
        assert min(routed[name] for name in DRAFTERS) > 0, "every drafter has drafted"
        assert sum(answers) > CONCURRENCY
        assert resident[1] - resident[0] < GROWTH


def plain_texts(prompts, wanted):
    """What the target alone answers to these pairs of prompt and kind, offline."""
    with engines.engine(None, max_num_seqs=CONCURRENCY, max_num_batched_tokens=1024) as llm:
        sampling = [SamplingParams(max_tokens=MAX_TOKENS, **offline(KINDS[kind])) for _, kind in wanted]
        outputs = llm.generate([prompts[prompt] for prompt, _ in wanted], sampling, use_tqdm=False)
        return dict(zip(wanted, (output.outputs[0].text for output in outputs), strict=True))


def offline(kind):
    """A kind's fields as plain vLLM's own parameters."""
    fields = {**kind, **kind.get("extra_body", {})}
    if outputs := fields.pop("structured_outputs", None):
        fields["structured_outputs"] = StructuredOutputsParams(**outputs)
    return {name: value for name, value in fields.items() if name not in ("extra_body", "vllm_xargs")}


def once(server, prompts, wanted):
    """The answers to these pairs of prompt and kind, asked for together."""
    client = server.client()
    with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
        texts = pool.map(lambda pk: complete(client, prompts[pk[0]], KINDS[pk[1]]), wanted)
        return dict(zip(wanted, texts, strict=True))
