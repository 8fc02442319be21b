"""`vllm serve` with each method, the official client, and what happens when things go wrong."""

import concurrent.futures
import json
import os
import time

import engines
import httpx
import openai
import pytest
from servers import serving
from transformers import AutoTokenizer

pytestmark = pytest.mark.e2e

MAX_TOKENS = 32
SPECS = {
    "eagle3": engines.ours("eagle3", engines.EAGLE3),
    "confu": engines.ours("confu", engines.CONFU),
}


@pytest.fixture(scope="module")
def questions():
    rows = [json.loads(line) for line in (engines.POCKET / "prompts.jsonl").read_text().splitlines()]
    return [row["prompt"] for row in rows][::3][:8]


@pytest.fixture(scope="module")
def plain(questions):
    """What the target alone answers, offline."""
    known = dict(zip(engines.prompts(24), engines.plain(24, MAX_TOKENS), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(engines.TARGET)
    return [tokenizer.decode(known[engines.chat(q)], skip_special_tokens=True) for q in questions]


def ask(client, question, **extra):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(
        model="pocket", messages=messages, temperature=0, max_tokens=MAX_TOKENS, **extra
    )


def complete(client, question, **extra):
    return client.completions.create(
        model="pocket", prompt=engines.chat(question), temperature=0, max_tokens=MAX_TOKENS, **extra
    )


def test_the_client_gets_plains_text(questions, plain):
    with serving(SPECS["eagle3"]) as server:
        check_the_client(server, "eagle3", questions, plain)


def check_the_client(server, name, questions, plain):
    client = server.client()
    assert complete(client, questions[0]).choices[0].text == plain[0]
    assert ask(client, questions[1]).choices[0].message.content == plain[1]
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, questions[2], stream=True))
    assert streamed == plain[2]
    drafts = server.wait_for_metric("crossspec:drafts_total", above=0, drafter=name)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda q: ask(client, q).choices[0].message.content, questions))
    assert answers == plain

    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        complete(client, "word " * 2000)
    with pytest.raises(openai.BadRequestError, match="the extra argument 'crossspec' is 'of'; use one of tree, c"):
        ask(client, questions[0], extra_body={"vllm_xargs": {"crossspec": "of"}})
    assert complete(client, questions[0]).choices[0].text == plain[0]
    check_metrics(server, name, drafts)


def check_metrics(server, name, drafts_before):
    time.sleep(2)  # whatever was counted is published by now: once a second
    drafts = server.wait_for_metric("crossspec:drafts_total", above=drafts_before, drafter=name)
    accepted = server.metric("crossspec:accepted_tokens_total", drafter=name)
    assert server.metric("crossspec:accepted_tokens_per_pos_total", drafter=name) == accepted
    assert server.metric("crossspec:draft_tokens_total", drafter=name) >= engines.K * drafts * 0.9
    assert accepted >= server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.nightly
def test_killed_with_requests_in_flight_and_started_again(questions, plain, monkeypatch):
    # A server may be started by a program that runs an engine of its own.
    monkeypatch.setenv("CROSSSPEC_METRICS_DIR", f"{os.getpid()}:/nowhere")
    with serving(SPECS["confu"]) as server:
        check_the_client(server, "confu", questions, plain)
        stream = ask(server.client(), questions[0], stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        server.kill()
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            for _ in stream:
                pass
    with serving(SPECS["confu"]) as server:
        assert ask(server.client(), questions[0]).choices[0].message.content == plain[0]


@pytest.mark.nightly
def test_requests_of_a_batch_go_different_ways(questions, plain):
    drafters = {"eagle3": {"model": str(engines.EAGLE3)}, "dflash": {"model": str(engines.DFLASH)}}
    spec = {"method": "whiflash", "drafters": drafters, "router": {"policy": "entropy", "threshold": 0.5}}
    with serving(spec, "--max-num-seqs", "16", "--max-num-batched-tokens", "1024") as server:
        client = server.client()
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda q: complete(client, q).choices[0].text, questions * 2))
        assert answers == plain * 2
        time.sleep(2)  # whatever was counted is published by now: once a second

        def total(name, **labels):
            return server.metric(f"crossspec:{name}_total", **labels)

        # Every step that gave a request tokens was one decision: one for its prompt and one a verified draft.
        assert total("router_decisions") == 16 + server.metric("vllm:spec_decode_num_drafts_total")
        for drafter in drafters:
            assert total("router_decisions", drafter=drafter) >= total("drafts", drafter=drafter) > 0
            switches = total("router_switches", drafter=drafter)
            assert switches == server.metric("crossspec:router_backlogs_count", drafter=drafter) > 0
            assert switches == server.metric("crossspec:router_backlogs_bucket", drafter=drafter, le="+Inf")
            missed = total("router_missed_tokens", drafter=drafter)
            assert missed == server.metric("crossspec:router_backlogs_sum", drafter=drafter)
            assert total("router_caught_up_tokens", drafter=drafter) >= total("router_missed_tokens", drafter=drafter)
        assert total("round_seconds", stage="draft") > 0
