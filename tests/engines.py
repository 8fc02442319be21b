"""Running engines for the tests: one at a time, each through every scenario, results kept for the session.

An engine runs in the tests' own process, where it starts in about a second. What breaks it there is mended at its end.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import sabotage
import torch

import vllm_crossspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from hunt_cases import async_scheduling_on_cpu as async_scheduling_on_cpu
from hunt_cases import chat, engine_here

POCKET = Path(vllm_crossspec.__file__).parent / "pocket"
TARGET, EAGLE3, DFLASH, DART = POCKET / "target", POCKET / "eagle3", POCKET / "dflash", POCKET / "dart"
CONFU = POCKET / "confu"
NGRAM = POCKET / "ngram" / "store.safetensors"
CHAIN = {"type": "chain"}
NO_ENTROPY = 100.0
"""Nats that no distribution has: with it as the threshold the entropy policy takes the parallel drafter, with 0 the
autoregressive one."""
K = 7


def native(method: str, folder: Path) -> dict[str, Any]:
    """vLLM's own method with these weights."""
    return {"method": method, "model": str(folder), "num_speculative_tokens": K}


def ours(method: str, folder: Path) -> dict[str, Any]:
    """Our proposer with these weights."""
    return native(method, folder) | {"tree": CHAIN}


def tree(method: str, folder: Path, num_nodes: int = 60, **sizes: Any) -> dict[str, Any]:
    """Our proposer with draft trees of its own kind."""
    steps = {"num_speculative_tokens": K} if method == "dflash" else {}
    return {"method": method, "model": str(folder), "tree": {"num_nodes": num_nodes, **sizes}, **steps}


def both(active: str) -> dict[str, Any]:
    """Both pocket drafters loaded together, of which the router always takes one, the other caught up."""
    router = {"policy": "entropy", "threshold": 0.0 if active == "eagle3" else NO_ENTROPY}
    return {
        "method": "whiflash",
        "num_speculative_tokens": K,
        "drafters": {"eagle3": {"model": str(EAGLE3)}, "dflash": {"model": str(DFLASH)}},
        "router": router,
    }


def prompts(count: int) -> list[str]:
    """The first ``count`` demo prompts, taken from the categories in turn, as chat text."""
    rows = [json.loads(line) for line in (POCKET / "prompts.jsonl").read_text().splitlines()]
    by_category: dict[str, list[str]] = {}
    for row in rows:
        by_category.setdefault(row["category"], []).append(row["prompt"])
    mixed = [p for group in zip(*by_category.values(), strict=False) for p in group]
    return [chat(p) for p in mixed[:count]]


REPLAYS_GRAPHS = torch.cuda.is_available() and bool(os.environ.get("CROSSSPEC_TEST_GRAPHS"))
"""Whether engines capture and replay CUDA graphs; asked for by the environment variable."""


def on_a_gpu() -> dict[str, Any]:
    """Settings where there is a GPU: a small part of it for each worker, and CUDA graphs if they are asked for."""
    if not torch.cuda.is_available():
        return {}
    settings: dict[str, Any] = {"gpu_memory_utilization": 0.05}
    if REPLAYS_GRAPHS:
        settings["enforce_eager"] = False
        settings["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return settings


@contextlib.contextmanager
def norms_in_place() -> Iterator[None]:
    """Let norms write over what they were given, as a GPU's do: whoever still needs it must have kept it."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    original = RMSNorm.forward_native

    def forward_native(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return original(norm, x)
        normed, total = original(norm, x, residual)
        return x.copy_(normed), residual.copy_(total)

    with mock.patch.object(RMSNorm, "forward_native", forward_native):
        yield


@contextlib.contextmanager
def engine(spec: dict[str, Any] | None, model: Path = TARGET, **overrides: Any) -> Iterator[Any]:
    """An engine in float32 without graphs, small enough for chunked prompts; shut down at the end."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        **on_a_gpu(),
    }
    with norms_in_place(), engine_here(model, spec, **(settings | overrides)) as llm:
        try:
            yield llm
        finally:
            llm.collective_rpc(sabotage.mend)


def generate(llm: Any, texts: list[Any], max_tokens: int = 40, **sampling: Any) -> list[list[int]]:
    """Token ids of each completion, all requests at once; greedy unless told otherwise."""
    from vllm import SamplingParams

    parameters = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | sampling))
    return [list(o.outputs[0].token_ids) for o in llm.generate(texts, parameters, use_tqdm=False)]


class Counts(NamedTuple):
    """vLLM's own speculative counters."""

    drafts: int
    accepted: int
    per_position: list[int]
    prefix_hits: int


def counts(llm: Any) -> Counts:
    """vLLM's counters of the newest engine of this process."""
    values = {m.name: m for m in llm.get_metrics()}

    def value(name: str, default: Any = 0) -> Any:
        metric = values.get(name)
        return default if metric is None else getattr(metric, "values", None) or getattr(metric, "value", default)

    return Counts(
        drafts=int(value("vllm:spec_decode_num_drafts")),
        accepted=int(value("vllm:spec_decode_num_accepted_tokens")),
        per_position=list(value("vllm:spec_decode_num_accepted_tokens_per_pos", [])),
        prefix_hits=int(value("vllm:prefix_cache_hits")),
    )


class Results(NamedTuple):
    """What one engine did in every scenario."""

    tokens: dict[str, list[list[int]]]
    counts: Counts
    stats: dict[str, Any] | None
    is_async: bool


def run_scenarios(spec: dict[str, Any] | None, **overrides: Any) -> Results:
    """Start an engine, run all scenarios, stop it."""
    short = prompts(8)
    document = " ".join(p.removeprefix("<|im_start|>user\n") for p in short)
    long = [chat(f"{document}\n{question}") for question in ("Summarize.", "What is this about?")]
    with engine(spec, **overrides) as llm:
        tokens = {"one": [generate(llm, [p])[0] for p in short[:2]], "eight": generate(llm, short)}
        lengths = [len(llm.get_tokenizer().encode(text)) for text in long]
        assert min(lengths) > 128, f"the long prompts ({lengths} tokens) must not fit one chunk"
        tokens["chunked"] = generate(llm, long[:1], max_tokens=24)
        before = counts(llm).prefix_hits
        tokens["prefix"] = generate(llm, [*long, *short[:3]], max_tokens=24)
        assert counts(llm).prefix_hits > before, "no prompt hit the prefix cache"
        totals = counts(llm)
        stats = llm.collective_rpc("crossspec_stats")[0]
        is_async = bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
        seeded = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
        tokens["seeded"] = generate(llm, short[:3], max_tokens=12, **seeded)
        tokens["seeded again"] = generate(llm, short[:3], max_tokens=12, **seeded)
    return Results(tokens, totals, stats, is_async)
