"""A router's arms under `vllm serve` with every kind of request at once: right answers, no lost blocks, no growing
memory. Two drafters with caches, a form of one, a lookup that keeps answers, and nothing.

CROSSSPEC_SOAK_SECONDS says for how long (24 by default), or CROSSSPEC_SOAK_REQUESTS how many requests;
CROSSSPEC_SOAK_CONCURRENCY how many at once (16 by default). CROSSSPEC_SOAK_FILE is a JSON file for what was seen.
"""

import concurrent.futures
import itertools
import json
import os
import threading
import time
from pathlib import Path

import engines
import pytest
from servers import serving_with_faults
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.e2e

REQUESTS = int(os.environ.get("CROSSSPEC_SOAK_REQUESTS", "0"))
PROMPTS = 40 if REQUESTS else 4
SECONDS = float(os.environ.get("CROSSSPEC_SOAK_SECONDS", "24"))
CONCURRENCY = int(os.environ.get("CROSSSPEC_SOAK_CONCURRENCY", "16"))
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "seed": 2, "extra_body": {"top_k": 20, "repetition_penalty": 1.2}},
    {"temperature": 0.0, "extra_body": {"structured_outputs": {"regex": "(yes|no), [a-z ]{5,20}"}}},
    {"temperature": 0.0, "extra_body": {"vllm_xargs": {"crossspec": "off"}}},
    {"temperature": 1.0, "seed": 3, "extra_body": {"vllm_xargs": {"crossspec": "chain"}}},
]
SERVER = ["--max-num-seqs", str(CONCURRENCY), "--max-num-batched-tokens", "1024", "--block-size", "32"]
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
PARTS = 4 if REQUESTS else 2
"""Between which the server is left alone until nothing runs, and looked at."""
GROWTH_MIB = 48
"""By which the processes may grow in the second half."""
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


def soak(server, prompts, expected, part):
    """Keep the server busy for a part of the time, or of the requests; answers and those who left. All are compared."""
    deadline, numbers, lock = time.monotonic() + SECONDS / PARTS, itertools.count(), threading.Lock()

    def goes_on(number):
        return number < REQUESTS // PARTS if REQUESTS else time.monotonic() < deadline

    def work(client):
        answered = left = 0
        while True:
            with lock:
                number = next(numbers)
            if not goes_on(number):
                return answered, left
            number += part * (REQUESTS // PARTS)
            prompt, kind = number % len(prompts), number // len(prompts) % len(KINDS)
            if number % 11 == 10:
                leave(client, prompts[prompt])
                left += 1
                continue
            assert complete(client, prompts[prompt], KINDS[kind]) == expected[prompt, kind], (prompt, kind)
            answered += 1

    with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
        return tuple(map(sum, zip(*pool.map(work, [server.client() for _ in range(CONCURRENCY)]), strict=True)))


def known_requests(server):
    """How many the worker still knows of."""
    return json.loads(server.post("/collective_rpc", {"method": "count_requests"})[1])["results"]


def test_mixed_requests_for_a_while(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    prompts = sharing(engines.prompts(PROMPTS))
    wanted = [(p, k) for p in range(len(prompts)) for k in range(len(KINDS))]
    expected = plain_texts(prompts, wanted)
    began = time.monotonic()
    with serving_with_faults(SPEC, *SERVER) as server:
        group = os.getpgid(server.process.pid)
        assert once(server, prompts, wanted) == expected
        parts, resident, usage = [], [], []
        for part in range(PARTS):
            parts.append(soak(server, prompts, expected, part))
            usage.append(idle_usage(server))
            resident.append(round(resident_bytes(group) / 2**20))
        seen = {
            "answers": sum(answers for answers, _ in parts),
            "left": sum(left for _, left in parts),
            "concurrency": CONCURRENCY,
            "prompts": len(prompts),
            "seconds": round(time.monotonic() - began),
            "resident_mib": resident,
            "blocks_in_use": usage,
            "known_requests": known_requests(server),
            "decisions": {
                name: server.metric("crossspec:router_decisions_total", drafter=name) for name in SPEC["drafters"]
            },
            "prefix_hits": server.metric("vllm:prefix_cache_hits_total"),
            "preemptions": server.metric("vllm:num_preemptions_total"),
        }
    print(seen)
    if file := os.environ.get("CROSSSPEC_SOAK_FILE"):
        Path(file).write_text(json.dumps(seen, indent=1) + "\n")
    assert usage == [0] * PARTS and seen["known_requests"] == ["0"]
    assert min(seen["decisions"][name] for name in DRAFTERS) > 0, "every drafter has drafted"
    assert seen["answers"] > CONCURRENCY and seen["prefix_hits"] > 0
    assert resident[-1] - resident[PARTS // 2 - 1] < GROWTH_MIB


def sharing(prompts):
    """Every second one behind a text that these have in common, longer than a block of the cache."""
    common = prompts[0].removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    return [f"{common}\n{p.removeprefix('<|im_start|>user' + chr(10))}" if n % 2 else p for n, p in enumerate(prompts)]


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
