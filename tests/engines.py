"""Running engines for the tests: one at a time, each through every scenario, results kept for the session.

An engine runs in the tests' own process, where it starts in about a second. What breaks it there is mended at its end.
What the target alone answers is computed once a session, by the worker that asks first.
"""

import contextlib
import fcntl
import functools
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import sabotage
import torch

import vllm_crossspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from hunt_cases import async_scheduling_on_cpu as async_scheduling_on_cpu
from hunt_cases import chat, engine_here

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
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


def of_configs(name: str) -> dict[str, Any]:
    """What ``configs/pocket-<name>.json`` says."""
    text = (ROOT / "configs" / f"pocket-{name}.json").read_text()
    spec: dict[str, Any] = json.loads(text.replace("vllm_crossspec/pocket", str(POCKET)))
    return spec


ENGINES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    **{name: of_configs(name) for name in ("eagle3", "dflash", "eagle3-tree", "dflash-tree", "confu", "confu-tree")},
    "native eagle3": native("eagle3", EAGLE3),
    "native dflash": native("dflash", DFLASH),
    "eagle3, rejection": ours("eagle3", EAGLE3) | {"verification": "rejection"},
    "both, eagle3 drafts": both("eagle3"),
    "both, dflash drafts": both("dflash"),
    "dart": {"method": "dart", "model": str(DART), "tree": CHAIN},
    "dart-tree": of_configs("dart"),
    "dflash-continuity": of_configs("dflash-continuity"),
    "dflash, n-grams, best first": tree("dflash", DFLASH, 24, type="best_first") | {"ngram": str(NGRAM)},
    "ngram": {"method": "ngram", "tree": CHAIN, "num_speculative_tokens": 5},
    "ngram-tree": {"method": "ngram", "tree": {"num_nodes": 12}},
    "suffix": {"method": "suffix", "tree": {"num_nodes": 12}},
    "suffix-share": {"method": "suffix", "tree": {"num_nodes": 12}, "lookup": {"share": True}},
    "suffix-chain": {"method": "suffix", "tree": CHAIN, "lookup": {"share": True}},
}
"""Engines that go through all scenarios."""
ASYNC = ("eagle3", "dflash", "dflash-tree", "dart-tree", "confu")
"""Those of them that schedule asynchronously; without it our counters and vLLM's count the same rounds."""


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


def long_prompt() -> str:
    """A prompt that must be read in several steps."""
    document = " ".join(p.removeprefix("<|im_start|>user\n") for p in prompts(8))
    return chat(f"{document}\nSummarize.")


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
    """An engine in float32 without graphs, small enough for chunked prompts; shut down at the end.

    With ``async_scheduling`` it schedules asynchronously on a CPU, too.
    """
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        **on_a_gpu(),
    }
    is_async = overrides.get("async_scheduling")
    with (
        norms_in_place(),
        async_scheduling_on_cpu() if is_async else contextlib.nullcontext(),
        engine_here(model, spec, **(settings | overrides)) as llm,
    ):
        assert is_async is None or is_async == llm.llm_engine.vllm_config.scheduler_config.async_scheduling
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


SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
OPTIONS: dict[str, dict[str, Any]] = {
    "biased": {"logit_bias": dict.fromkeys(range(300, 900), -3.0)},
    "min_p": {"temperature": 1.0, "seed": 7, "min_p": 0.3},
    "biased min_p": {"temperature": 1.0, "seed": 7, "min_p": 0.3, "logit_bias": dict.fromkeys(range(300, 900), -3.0)},
}
"""What vLLM refuses beside drafts and sample-and-match serves; the biased ids are among the commonest ones."""


def answer_or_refusal(llm: Any, texts: list[Any], **sampling: Any) -> Any:
    """As :func:`generate`; where the engine refuses these parameters, its sentence."""
    from vllm.exceptions import VLLMValidationError

    try:
        return generate(llm, texts, max_tokens=16, **sampling)
    except VLLMValidationError as refused:
        return str(refused)


def run_broken(llm: Any, how: Callable[[Any], None], run: Callable[[Any], T]) -> tuple[T, float]:
    """Break one part, run, restore it. Returns the result of ``run`` and accepted tokens a draft."""
    llm.collective_rpc(how)
    before = counts(llm)
    try:
        found = run(llm)
    finally:
        llm.collective_rpc(sabotage.mend)
    after = counts(llm)
    return found, (after.accepted - before.accepted) / (after.drafts - before.drafts)


# -- every scenario -----------------------------------------------------------------------------------------------


class Results(NamedTuple):
    """What one engine did in every scenario."""

    tokens: dict[str, list[list[int]]]
    counts: Counts
    stats: dict[str, Any] | None
    more: Any


def run_scenarios(
    spec: dict[str, Any] | None, is_async: bool = False, then: Callable[[Any], Any] | None = None
) -> Results:
    """Start an engine, run all scenarios and what a test wants ``then``, stop it.

    The token budget of a step (128) cuts the trees of a batch short, so that their widths vary.
    """
    short = prompts(8)
    document = " ".join(p.removeprefix("<|im_start|>user\n") for p in short)
    long = [chat(f"{document}\n{question}") for question in ("Summarize.", "What is this about?")]
    with engine(spec, async_scheduling=is_async) as llm:
        tokens = {"one": [generate(llm, [p])[0] for p in short[:2]], "eight": generate(llm, short)}
        lengths = [len(llm.get_tokenizer().encode(text)) for text in long]
        assert min(lengths) > 128, f"the long prompts ({lengths} tokens) must not fit one chunk"
        tokens["chunked"] = generate(llm, long[:1], max_tokens=24)
        before = counts(llm).prefix_hits
        tokens["prefix"] = generate(llm, [*long, *short[:3]], max_tokens=24)
        assert counts(llm).prefix_hits > before, "no prompt hit the prefix cache"
        totals = counts(llm)
        stats = llm.collective_rpc("crossspec_stats")[0]
        for name in ("seeded", "seeded again"):
            tokens[name] = generate(llm, short[:3], max_tokens=12, **SEEDED)
        for name, asked in OPTIONS.items():
            tokens[name] = answer_or_refusal(llm, short[:3], **asked)
        return Results(tokens, totals, stats, then and then(llm))


def kept(name: str, make: Callable[[], T]) -> T:
    """What ``make`` returns, made once a session: the worker that asks first keeps it in a file for the others."""
    file = Path(os.environ["CROSSSPEC_TEST_SESSION"]) / f"{name}.pickle"
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_bytes(pickle.dumps(make()))
        found: T = pickle.loads(file.read_bytes())
        return found


@functools.cache
def results(name: str, then: Callable[[Any], Any] | None = None) -> Results:
    """What an engine of the table did."""
    key = f"{name}, {then.__name__}" if then else name
    return kept(key, lambda: run_scenarios(ENGINES[name], name in ASYNC, then))


# -- what the target alone answers --------------------------------------------------------------------------------


SAMPLED: tuple[dict[str, Any], ...] = (
    {},
    SEEDED,
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 11},
)
"""Sampling that tests compare with plain's."""


@functools.cache
def _answers_of_plain() -> tuple[dict[Any, list[int]], Any]:
    def make() -> tuple[dict[Any, list[int]], Any]:
        texts, known = prompts(24), {}
        with engine(None, **LARGE_STEPS) as llm:
            for sampling in SAMPLED:
                for text, tokens in zip(texts, generate(llm, texts, **sampling), strict=True):
                    known[text, *sorted(sampling.items())] = tokens
            return known, mixed_answers(llm)

    return kept("answers of plain", make)


def plain(count: int, max_tokens: int = 40, **sampling: Any) -> list[list[int]]:
    """Plain's answers to :func:`prompts`, of which up to 24 of 40 tokens are kept for the session.

    Ask before an engine starts, as plain's may have to start, and vLLM's counters are those of the newest one.
    """
    assert max_tokens <= 40
    known = _answers_of_plain()[0]
    return [known[text, *sorted(sampling.items())][:max_tokens] for text in prompts(count)]


def plain_mixed_answers() -> Any:
    """Plain's :func:`mixed_answers`, kept for the session."""
    return _answers_of_plain()[1]


LARGE_STEPS = {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
"""Settings in which whole trees of a batch fit into a step, and nothing is left for the next run to find."""


def mixed_answers(llm: Any) -> tuple[list[list[int]], list[list[dict[int, float]]]]:
    """Token ids and, where asked for, log-probabilities of a batch in which no two requests ask for the same."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    everything = {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "logprobs": 3,
        "min_tokens": 8,
    }
    wanted: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {**everything, "seed": 11},
        {**everything, "seed": 12, "temperature": 0.0},
        {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex=r"(yes|no|maybe), [a-z ]{10,40}\.")},
        {"temperature": 0.0, "bad_words": [" the", " a"]},
        {"temperature": 0.0, "extra_args": {"crossspec": "chain"}},
        {"temperature": 1.0, "seed": 13, "extra_args": {"crossspec": "off"}},
        {"temperature": 1.0, "seed": 14, "logprobs": 2},
        *OPTIONS.values(),
        {**everything, **OPTIONS["biased min_p"]},
    ]
    parameters = [SamplingParams(max_tokens=24, **({"temperature": 0.0} | fields)) for fields in wanted]
    outputs = [o.outputs[0] for o in llm.generate(prompts(len(wanted)), parameters, use_tqdm=False)]
    logprobs = [
        [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs or ()]
        for output in outputs
    ]
    return [list(output.token_ids) for output in outputs], logprobs
