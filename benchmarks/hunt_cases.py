"""Cases of the hunt for a text that is not plain's: drawn at random, run in an engine, and shrunk.

A case is a JSON object: `spec` (a speculative config), `engine` (vLLM's arguments), `requests` (prompt, sampling
parameters, the step `at` which each arrives, after how many tokens it is aborted), and `widths` (whether draft lengths
by load are measured at the start). Paths in it begin with "pocket/". With a joint budget every round drafts, and any
number of its rows is verified, because little pays on the machines where hunts run.
"""

import contextlib
import gc
import itertools
import json
import os
import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from vllm_crossspec.pocket_models import find_pocket

POCKET = find_pocket()
Case = dict[str, Any]
Texts = list[list[int]]

MODELS = {"eagle3": "eagle3", "dflash": "dflash", "dart": "dart", "confu": "confu", "draft_model": "draft-model"}
"""Folders of the pocket drafters, by type. Lookups (`ngram`, `suffix`) have none."""
TREES = {
    "eagle3": ("dynamic",), "confu": ("dynamic",), "draft_model": ("dynamic",),
    "dflash": ("best_first", "continuity"), "dart": ("continuity", "best_first"), "ngram": ("matches",),
    "suffix": ("matches",),
}  # fmt: skip
HEADS = {"eagle3": "flashhead-eagle3", "draft_model": "flashhead-draft-model"}
NEURAL = 0.1
"""Of the cases: a trained router is of two drafters, which would seldom be drawn together."""
SHARES_ROWS = 0.4
"""Of the cases whose trees could have a joint budget."""
LATE = 0.5
"""Of the routers that can go by the round before."""
ENGINE: Mapping[str, Any] = MappingProxyType({
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512, "block_size": 32,
    "enable_prefix_caching": True, "async_scheduling": False,
})  # fmt: skip
"""What plain decoding has, and every case where it says nothing else. Tests share it, so it must not change."""
KV_CACHE_BYTES = 128 << 20
"""Of an engine: ten times what its requests can fill. Most of an engine's start would be to clear a gibibyte."""
OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n"]}
GRAMMARS = (
    {"choice": ["yes", "no", "perhaps, but only if it rains"]},
    {"regex": "[A-Z][a-z]{2,8}( [a-z]{2,8}){3}\\."},
    {"json": OBJECT},
)


# -- drawing ----------------------------------------------------------------------------------------------------------


@cache
def questions() -> tuple[str, ...]:
    """The demo's prompts."""
    rows = (POCKET / "prompts.jsonl").read_text().splitlines()
    return tuple(json.loads(row)["prompt"] for row in rows)


def chat(text: str) -> str:
    """One user message in the pocket target's format."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def draw(seed: int, number: int, count: int) -> Case:
    """Case ``number`` of a hunt, with ``count`` requests; the same whenever it is drawn."""
    rng = random.Random(f"{seed}/{number}")
    spec, apart = _draw_spec(rng), random.Random(f"{seed}/{number}/neural")
    if apart.random() < NEURAL:
        spec = _draw_neural(apart)
    engine, widths = _draw_engine(rng, spec), rng.random() < 0.1
    if _could_share_rows(spec) and random.Random(f"{seed}/{number}/budget").random() < SHARES_ROWS:
        spec["tree"]["budget"], widths = "batch", True
    if spec.get("router", {}).get("policy") == "goodput" and random.Random(f"{seed}/{number}/wait").random() < LATE:
        spec["router"]["wait"] = False
    return {"spec": spec, "engine": engine, "widths": widths, "requests": _draw_requests(rng, count)}


def _could_share_rows(spec: dict[str, Any]) -> bool:
    tree = spec.get("tree", {"type": "chain"})
    return tree.get("type") != "chain" and spec["method"] != "confu" and "by_batch_size" not in tree


@contextlib.contextmanager
def any_rows(seed: int = 0) -> Iterator[None]:
    """With a joint budget every round drafts, and any number of the step's rows is verified: none and all as often.

    The scheduler runs in this process, and so must the worker.
    """
    from vllm_crossspec.budget import feature
    from vllm_crossspec.load.schedule import LiveSchedule

    rng = random.Random(seed)

    def widest(schedule: Any, batch: int) -> int:
        return int(max(schedule.rounds))

    def rows(plan: Any, worth: Any, costs: Any, most: int) -> int:
        return rng.choice([0, most, rng.randint(0, most), rng.randint(0, most)])

    with mock.patch.object(LiveSchedule, "__getitem__", widest), mock.patch.object(feature, "best_rows", rows):
        yield


def _draw_neural(rng: random.Random) -> dict[str, Any]:
    drafters = {kind: _draw_drafter(rng, kind, alone=False) for kind in ("eagle3", "dflash")}
    router = {"policy": "neural", "model": "pocket/router", "threshold": rng.choice([-0.4, 0.0, 0.4])}
    return {"method": "whiflash", "drafters": drafters, "router": router | _maybe(rng, 0.3, max_backlog=65)}


def _maybe(rng: random.Random, chance: float, **keys: Any) -> dict[str, Any]:
    return keys if rng.random() < chance else {}


def _draw_spec(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.55:
        kind = rng.choice(list(TREES))
        return {"method": kind, **_draw_drafter(rng, kind, alone=True)}
    kinds = [kind for kind in TREES if kind != "draft_model"]
    chosen = rng.sample(kinds, rng.randint(2, 4))
    drafters = {kind: _draw_drafter(rng, kind, alone=False) for kind in chosen}
    if rng.random() < 0.2:
        drafters["nothing"] = {}
    names = list(drafters)
    router: dict[str, Any] = {"policy": rng.choice(["goodput", "entropy", "fixed"])}
    if router["policy"] == "entropy":
        cuts = sorted((rng.uniform(0.1, 3.0) for _ in names[1:]), reverse=True)
        router["threshold"] = cuts if len(cuts) > 1 else cuts[0]
        router |= _maybe(rng, 0.3, entropy_of="sampling")
    elif router["policy"] == "fixed":
        router["drafter"] = rng.choice(names)
    router |= _maybe(rng, 0.15, lazy=False) | _maybe(rng, 0.3, max_backlog=rng.choice([65, 100]))
    return {"method": "whiflash", "drafters": drafters, "router": router}


def _draw_drafter(rng: random.Random, kind: str, alone: bool) -> dict[str, Any]:
    drafter: dict[str, Any] = {"model": f"pocket/{MODELS[kind]}"} if kind in MODELS else {}
    if kind == "eagle3" and rng.random() < 0.12:  # sizes by request go with the tree that they were calibrated for
        return drafter | {"tree": {"num_nodes": 60}, "adaptive": {"model": "pocket/heterospec/calibration.json"}}
    if kind in HEADS and rng.random() < 0.3:
        drafter["head"] = {"model": f"pocket/{HEADS[kind]}", **_maybe(rng, 0.5, num_probes=rng.randint(1, 24))}
        drafter["head"] |= _maybe(rng, 0.2, clusters="drawn") | _maybe(rng, 0.2, grouped=True)
    if rng.random() < 0.35:
        drafter["tree"] = {"type": "chain"}
        if kind in ("eagle3", "confu", "draft_model", "ngram", "suffix"):
            drafter["num_speculative_tokens"] = rng.randint(1, 9)
        if alone and kind in ("eagle3", "dflash") and "head" not in drafter and rng.random() < 0.1:
            drafter["verification"] = "rejection"
    else:
        drafter["tree"] = tree = {"type": rng.choice(TREES[kind]), "num_nodes": rng.choice([1, 3, 8, 20, 33, 60])}
        if kind == "confu":
            tree["num_nodes"] = min(tree["num_nodes"], 20)
        if tree["type"] == "dynamic":
            tree |= {"depth": rng.randint(1, 8), "top_k": rng.randint(1, 10)}
        if tree["type"] == "continuity":
            tree |= _maybe(rng, 0.5, beam_width=rng.randint(1, 20), top_k=rng.randint(2, 20))
        if tree["type"] in ("best_first", "continuity"):
            drafter |= _maybe(rng, 0.5, ngram={"model": "pocket/ngram/store.safetensors"})
        if tree["type"] != "matches":
            tree |= _maybe(rng, 0.3, sharpness=rng.choice([0.5, 1.0, 3.0]))
        nodes = tree["num_nodes"]
        tree |= _maybe(rng, 0.4, by_batch_size={"1": nodes, "3": max(nodes // 3, 1), "6": rng.choice([0, 1])})
    if kind == "suffix":
        drafter |= _maybe(rng, 0.4, lookup={"share": True})
    if alone and kind in MODELS and drafter.get("verification") != "rejection":
        drafter |= _maybe(rng, 0.15, draft_sample_method="greedy")
    return drafter


def _draw_engine(rng: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    engine = {
        "max_num_seqs": rng.choice([1, 2, 4, 8, 16]),
        "max_num_batched_tokens": rng.choice([128, 200, 512, 1024]),
        "block_size": rng.choice([32, 64, 128]),
        "enable_prefix_caching": rng.random() < 0.7,
        "async_scheduling": rng.random() < 0.4,
    }
    if rng.random() < 0.3:  # so few blocks that requests are preempted
        engine["num_gpu_blocks_override"] = 512 // engine["block_size"] * 2 + rng.randint(1, 6)
    return engine


def _draw_requests(rng: random.Random, count: int) -> list[dict[str, Any]]:
    prefix = " ".join(rng.sample(questions(), 3))[: rng.choice([40, 300, 700])]
    requests, at = [], 0
    for _ in range(count):
        at += rng.choice([0, 0, 0, 0, 1, 2, 7])
        request: dict[str, Any] = {"prompt": _draw_prompt(rng, prefix), "sampling": _draw_sampling(rng), "at": at}
        requests.append(request | _maybe(rng, 0.06, abort_after=rng.randint(1, 20)))
    return requests


def _draw_prompt(rng: random.Random, prefix: str) -> str:
    question = rng.choice(questions())
    shape = rng.random()
    if shape < 0.35:
        return chat(question)
    if shape < 0.6:
        return chat(f"{prefix}\n{question}")
    if shape < 0.75:
        return chat(" ".join(rng.sample(questions(), rng.randint(2, 4)))[: rng.randint(100, 900)])
    if shape < 0.9:  # what lookups find
        return chat("\n".join([question[:60]] * rng.randint(2, 5)) + "\nAgain, please.")
    return question[: rng.randint(1, 30)]


def _draw_sampling(rng: random.Random) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 8, 24, 24, 40, 64]), "temperature": 0.0}
    if rng.random() < 0.55:
        sampling |= {"temperature": rng.choice([0.3, 0.8, 1.0, 1.4]), "seed": rng.randrange(1 << 31)}
        sampling |= _maybe(rng, 0.4, top_p=rng.choice([0.5, 0.9, 0.97]))
        sampling |= _maybe(rng, 0.3, top_k=rng.choice([1, 5, 50]))
    sampling |= _maybe(rng, 0.3, ignore_eos=True)
    sampling |= _maybe(rng, 0.08, repetition_penalty=rng.choice([1.1, 1.5]))
    sampling |= _maybe(rng, 0.06, presence_penalty=0.7) | _maybe(rng, 0.06, frequency_penalty=-0.4)
    sampling |= _maybe(rng, 0.05, min_tokens=rng.randint(1, sampling["max_tokens"]))
    sampling |= _maybe(rng, 0.06, stop=[rng.choice([" the", ".", "\n", "is"])])
    sampling |= _maybe(rng, 0.05, bad_words=[rng.choice(["the", "is", "a"])])
    sampling |= _maybe(rng, 0.04, logprobs=rng.randint(1, 3))
    sampling |= _maybe(rng, 0.07, extra_args={"crossspec": rng.choice(["off", "chain"])})
    sampling |= _maybe(rng, 0.05, structured_outputs=rng.choice(GRAMMARS))
    return sampling


def features(case: Case) -> list[str]:
    """What a case has, for counts of pairs: kinds of drafters, trees and heads, settings, and kinds of requests."""
    spec, engine = case["spec"], case["engine"]
    drafters = spec.get("drafters", {spec["method"]: spec})
    found = {f"drafter {kind}" for kind in drafters}
    for own in drafters.values():
        found |= {f"tree {own['tree'].get('type', 'dynamic')}"} if "tree" in own else set()
        found |= {key for key in ("head", "ngram", "adaptive", "lookup", "verification") if key in own}
        found |= {"by load"} if "by_batch_size" in own.get("tree", {}) else set()
        found |= {"budget"} if "budget" in own.get("tree", {}) else set()
    found |= {f"router {spec['router']['policy']}"} if "router" in spec else set()
    found |= {"a round late"} if not spec.get("router", {}).get("wait", True) else set()
    found |= {"few blocks"} if "num_gpu_blocks_override" in engine else set()
    found |= {"async"} if engine.get("async_scheduling") else set()
    found |= {"prefix cache"} if engine.get("enable_prefix_caching", True) else set()
    found |= {"one at a time"} if engine.get("max_num_seqs") == 1 else set()
    found |= {"measured widths"} if case["widths"] else set()
    for request in case["requests"]:
        sampling = request["sampling"]
        found.add("seeded" if sampling["temperature"] else "greedy")
        found |= {"aborted"} if "abort_after" in request else set()
        for key in ("structured_outputs", "bad_words", "stop", "logprobs", "extra_args", "min_tokens"):
            found |= {key} if key in sampling else set()
        found |= {"penalties"} if any(key.endswith("penalty") for key in sampling) else set()
    return sorted(found)


# -- running ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def async_scheduling_on_cpu() -> Iterator[None]:
    """Let engines schedule asynchronously on a CPU, too, where vLLM turns it off as not worth it.

    The scheduler runs in this process, which is the one that is changed.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def keep_async(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        original(cls, config)
        config.scheduler_config.async_scheduling = wanted

    with mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(keep_async)):
        yield


def placed(value: Any) -> Any:
    """With the pocket models' folder in the place of "pocket/"."""
    if isinstance(value, dict):
        return {key: placed(own) for key, own in value.items()}
    if isinstance(value, str) and value.startswith("pocket/"):
        return str(POCKET / value.removeprefix("pocket/"))
    return value


def collecting_no_garbage() -> Any:
    """vLLM asks for it a dozen times while an engine starts and ends, a tenth of a second each, or a whole one."""
    return mock.patch.object(gc, "collect", return_value=0)


_started = itertools.count()


@contextlib.contextmanager
def engine_here(model: Path, spec: dict[str, Any] | None, **settings: Any) -> Iterator[Any]:
    """An engine in this process, where one starts in about a second; shut down at the end.

    Without a ``spec`` it decodes plainly; ``settings`` go over those that make it small.
    """
    from vllm import LLM

    small = {
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    if next(_started) % 4 == 0:  # what the last engines left behind; all else is no garbage
        gc.collect()
        gc.freeze()
    with collecting_no_garbage(), mock.patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would be stronger than the setting
        llm = LLM(str(model), speculative_config=spec, use_tqdm_on_load=False, **(small | settings))
    try:
        yield llm
    finally:
        with collecting_no_garbage():
            llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def engine(case: Case | None, **over: Any) -> Iterator[Any]:
    """An engine of the pocket target in this process, with settings over the case's; None: plain decoding."""
    settings = ENGINE | (case["engine"] if case else {"max_num_seqs": 16}) | over
    environment = {"HF_HUB_OFFLINE": "1"}
    if case and not case["widths"]:
        environment["CROSSSPEC_FIXED_WIDTHS"] = "1"
    spec = placed(case["spec"]) if case else None
    has_budget = case is not None and "budget" in case["spec"].get("tree", {})
    with (
        mock.patch.dict(os.environ, environment),
        any_rows() if has_budget else contextlib.nullcontext(),
        async_scheduling_on_cpu(),
        engine_here(POCKET / "target", spec, **settings) as llm,
    ):
        yield llm


def parameters(sampling: dict[str, Any]) -> Any:
    """vLLM's sampling parameters of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(sampling)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)


def answers(llm: Any, requests: list[dict[str, Any]], is_plain: bool = False) -> Texts:
    """Token ids of the answers, each request added at its step; plain decoding has all at once, and aborts none."""
    core = llm.llm_engine
    texts: Texts = [[] for _ in requests]
    waiting = sorted(range(len(requests)), key=lambda i: 0 if is_plain else requests[i]["at"])
    for step in itertools.count():
        while waiting and (is_plain or requests[waiting[0]]["at"] <= step):
            number = waiting.pop(0)
            core.add_request(str(number), requests[number]["prompt"], parameters(requests[number]["sampling"]))
        if not core.has_unfinished_requests():
            if not waiting:
                return texts
            continue
        for output in core.step():
            number = int(output.request_id)
            texts[number] = list(output.outputs[0].token_ids)
            after = None if is_plain else requests[number].get("abort_after")
            if after is not None and not output.finished and len(texts[number]) >= after:
                core.abort_request([output.request_id])
    raise AssertionError


def differing(case: Case, plain: Texts, found: Texts) -> list[int]:
    """Requests whose text is not plain's; one that was aborted has the beginning of it."""
    wrong = []
    for number, (request, wanted, given) in enumerate(zip(case["requests"], plain, found, strict=True)):
        if "abort_after" in request and request["abort_after"] <= len(given):
            wanted = wanted[: len(given)]
        if given != wanted:
            wrong.append(number)
    return wrong
