"""Engines of two tensor-parallel ranks: their text is plain's, their drafts those of one rank.

The ranks are forks of the tests' process, which has imported vLLM already: they start in two seconds, not in twenty
(where the process has one thread, as `make test` has it).
"""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import time
from unittest import mock

import engines
import pytest
import torch
from engines import CONFU, DART, DFLASH, EAGLE3, NGRAM, POCKET, counts, engine, generate, ours, prompts, tree
from servers import serving

from vllm_crossspec.cli.processes import BOUND_CORES

pytestmark = pytest.mark.e2e

NODES = 24
PAIR = {"eagle3": {"model": str(EAGLE3), "tree": {"num_nodes": NODES}}, "dflash": {"model": str(DFLASH)}}
METHODS = {
    "eagle3-chain": ours("eagle3", EAGLE3),
    "eagle3-tree": tree("eagle3", EAGLE3, NODES),
    "adaptive": tree("eagle3", EAGLE3, 60)
    | {"adaptive": {"type": "heterospec", "model": str(POCKET / "heterospec" / "calibration.json")}},
    "dflash-tree": tree("dflash", DFLASH, NODES),
    "dart-ngram": tree("dart", DART, NODES) | {"ngram": {"model": str(NGRAM)}},
    "confu-tree": tree("confu", CONFU, NODES),
    "flashhead-tree": tree("eagle3", EAGLE3, NODES) | {"head": {"model": str(POCKET / "flashhead-eagle3")}},
    "flashhead-draft-model": ours("draft_model", POCKET / "draft-model")
    | {"head": {"model": str(POCKET / "flashhead-draft-model")}},
    "whiflash": {
        "method": "whiflash",
        "num_speculative_tokens": engines.K,
        "drafters": PAIR,
        "router": {"policy": "neural", "model": str(POCKET / "router"), "threshold": 0.0},
    },
}


@contextlib.contextmanager
def two_ranks(spec, **overrides):
    """An engine of two ranks that tell each other through sockets: they share a core, on which nobody may spin."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.v1.executor import multiproc_executor

    with contextlib.ExitStack() as stack:
        # A fork of a process with several threads would wait for those that it does not have.
        context = multiprocessing.get_context("fork" if torch.get_num_threads() == 1 else "spawn")
        stack.enter_context(mock.patch.object(multiproc_executor, "get_mp_context", lambda: context))
        no_spinning = mock.patch.object(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda self: False)
        stack.enter_context(no_spinning)
        cores = os.environ.get(BOUND_CORES, "nobind")  # a test's own, which both ranks share
        stack.enter_context(
            mock.patch.dict(os.environ, {BOUND_CORES: f"{cores}|{cores}" if cores != "nobind" else cores})
        )
        ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        yield stack.enter_context(engine(spec, **ranks, **overrides))


def run(llm):
    """Texts, greedy and seeded, and what became of the drafts."""
    texts = generate(llm, prompts(4), max_tokens=24)
    texts += generate(llm, prompts(2), max_tokens=12, temperature=0.8, top_p=0.95, seed=7)
    return texts, counts(llm)[:3]


@pytest.fixture(scope="module")
def plain():
    with engine(None) as llm:
        return run(llm)[0]


@pytest.fixture(scope="module")
def one_rank():
    """What a method does with one rank, and how large its drafters' layers are; run when first asked for."""

    @functools.cache
    def ask(method):
        with engine(METHODS[method]) as llm:
            return run(llm), llm.collective_rpc(draft_sizes)[0]

    return ask


def draft_layers(worker, *kinds):
    """The drafters' layers of these kinds."""
    models = [proposer.model for proposer in worker.model_runner.speculator.proposers.values()]
    return [layer for model in models for layer in model.modules() if isinstance(layer, kinds)]


def draft_sizes(worker):
    """Numbers of weights of the drafters' layers that ranks share."""
    from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

    return [layer.weight.numel() for layer in draft_layers(worker, QKVParallelLinear, RowParallelLinear)]


def spoil_second_rank(worker):
    """Let the second rank's half of a drafter's attention say nothing."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    if worker.rank == 1:
        layer = draft_layers(worker, RowParallelLinear)[0]
        inner = layer.forward
        layer.forward = lambda rows: inner(rows * 0)


@pytest.mark.parametrize("method", METHODS)
def test_tensor_parallel_text_and_acceptance_are_those_of_one_rank(method, plain, one_rank):
    (texts, drafts), sizes = one_rank(method)
    with two_ranks(METHODS[method]) as llm:
        assert run(llm) == (texts, drafts)
        assert llm.collective_rpc(draft_sizes) == [[size // 2 for size in sizes]] * 2
        if method == "eagle3-tree":  # what the other rank computes counts, for drafts alone
            llm.collective_rpc(spoil_second_rank)
            spoilt = run(llm)
            assert spoilt[0] == texts and spoilt[1][1] - drafts[1] < 0.9 * drafts[1]
    assert sizes and texts == plain and drafts[1] > 30


@pytest.mark.parametrize("method", ["adaptive", "dart-ngram", "confu-tree", "flashhead-draft-model", "whiflash"])
def test_tensor_parallel_targets_take_drafters_that_are_whole_on_every_rank(method, plain, one_rank):
    """They wait for no other rank, and what they share with the target is gathered as ever."""
    (texts, drafts), sizes = one_rank(method)
    spec, whole = METHODS[method], {"draft_tensor_parallel_size": 1}
    spec = spec | ({"drafters": {name: one | whole for name, one in PAIR.items()}} if "drafters" in spec else whole)
    with two_ranks(spec) as llm:
        assert run(llm) == (texts, drafts)
        assert llm.collective_rpc(draft_sizes) == [sizes] * 2
    assert texts == plain


@pytest.mark.parametrize("whole", [False, True], ids=["sharded", "whole"])
def test_tensor_parallel_ranks_swap_a_drafter_together(whole, plain):
    """New weights are split as the old ones were; what one rank cannot take, none does."""
    longer = POCKET / "eagle3-longer"
    with engine(ours("eagle3", longer)) as llm:
        texts, drafts = run(llm)
    spec = ours("eagle3", EAGLE3) | ({"draft_tensor_parallel_size": 1} if whole else {})
    with two_ranks(spec) as llm:
        before = run(llm)
        with pytest.raises(Exception, match="its config.json says architectures"):
            llm.collective_rpc("crossspec_swap_drafter", args=("eagle3", str(DFLASH)))
        assert llm.collective_rpc("crossspec_swap_drafter", args=("eagle3", str(longer))) == [["eagle3"]] * 2
        after = run(llm)
    assert before[0] == after[0] == texts == plain
    grown = tuple(now - then for now, then in zip(after[1][:2], before[1][:2], strict=True))
    assert grown == drafts[:2] != before[1][:2]


def test_tensor_parallel_server_of_two_ranks(plain, monkeypatch):
    """Text is plain's, and the metrics are one engine's: what both ranks did is counted once."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv(BOUND_CORES, f"{cores[0]}|{cores[-1]}")
    settings = ("--tensor-parallel-size", "2", "--max-num-batched-tokens", "256", "--no-enable-prefix-caching")
    with serving(METHODS["whiflash"], *settings) as server:
        client = server.client()

        def complete(prompt, max_tokens=24, **sampling):
            sampling = sampling or {"temperature": 0}
            return client.completions.create(model="pocket", prompt=prompt, max_tokens=max_tokens, **sampling)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            greedy = list(pool.map(complete, prompts(4)))
        seeded = [complete(p, 12, temperature=0.8, top_p=0.95, seed=7) for p in prompts(2)]
        answers = [(a.choices[0].text, a.usage.completion_tokens) for a in greedy + seeded]
        assert [text for text, _ in answers] == plain_texts(plain)
        time.sleep(2)  # whatever was counted is published by now: once a second
        drafts = server.metric("vllm:spec_decode_num_drafts_total")
        assert server.metric("vllm:generation_tokens_total") == sum(tokens for _, tokens in answers)
        assert server.metric("crossspec:drafts_total") == drafts > 20
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert server.metric("crossspec:accepted_tokens_total") == accepted > 30
        assert all(server.metric("crossspec:drafts_total", drafter=name) > 0 for name in PAIR)
        assert server.metric("crossspec:router_decisions_total") == len(answers) + drafts


def plain_texts(ids):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engines.TARGET)
    return [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
