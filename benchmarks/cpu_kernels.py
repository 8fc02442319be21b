"""How much faster kernels are compiled than interpreted on a CPU, and what a launch costs.

    python benchmarks/cpu_kernels.py                                        # plain and EAGLE-3's tree, pocket models
    python benchmarks/cpu_kernels.py --methods plain,dart,confu --launches 3

Engines of `crossspec demo` generate in this process, with every sampler; the first launches of each specialisation of
every kernel are made in Triton's interpreter, too, from the same memory, and compared (tests/compared.py). A kernel's
ratio is the processor's seconds of its launches interpreted over the shortest that each took compiled; the compiler's
own time is in neither. A launch is that of a kernel that stores one number, warm. Prints a table, and one JSON document
as its last line; benchmarks/README.md describes it. Needs a machine without a GPU.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import triton
import triton.language as tl
from compared import Recorder
from rich.console import Console
from rich.table import Table
from vllm import LLM, SamplingParams

from vllm_crossspec.cli import meta
from vllm_crossspec.cli.demo import METHODS, located
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.pocket_models import find_pocket

POCKET = find_pocket()
PROMPTS = 3
TOKENS = 12


@triton.jit
def _one_kernel(out_ptr):
    tl.store(out_ptr, 1)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--methods", default="plain,eagle3-tree", help="of `crossspec demo`, with commas between them")
    add("--launches", type=int, default=2, help="of each specialisation that are compared and timed")
    add("--repeats", type=int, default=20, help="of each compiled launch, of which the shortest counts")
    add("--json", type=Path, help="also write the document to this file")
    options = parser.parse_args(argv)
    options.methods = options.methods.split(",")
    if unknown := [m for m in options.methods if m not in METHODS]:
        parser.error(f"--methods {unknown[0]}: give names of {', '.join(METHODS)}")
    return options


def sampling() -> list[list[SamplingParams]]:
    """What each prompt is generated with, so that every sampler's kernels run."""
    everything = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=50, seed=3, repetition_penalty=1.1, presence_penalty=0.1,
        logprobs=2, bad_words=["the"], min_tokens=4, max_tokens=TOKENS,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1)
    return [[greedy, everything, SamplingParams(temperature=0.7, seed=1, max_tokens=TOKENS)], [greedy] * PROMPTS]


def generate(method: str) -> None:
    """An engine of one method, in this process."""
    extra = {} if METHODS[method] is None else {"speculative_config": located(METHODS[method], POCKET)}
    llm = LLM(
        str(POCKET / "target"), dtype="float32", max_num_seqs=16, max_model_len=512, enforce_eager=True,
        enable_prefix_caching=False, disable_log_stats=True, distributed_executor_backend="uni", **extra,
    )  # fmt: skip
    prompts = read_prompts(POCKET / "prompts.jsonl")[:PROMPTS]
    messages = [[{"role": "user", "content": p.turns[0]}] for p in prompts]
    for params in sampling():
        llm.chat(messages, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()


def launch_microseconds(groups: int = 200, size: int = 100) -> float:
    """What one launch of a trivial kernel costs, warm: that of the fastest group."""
    out = torch.zeros(1, dtype=torch.int32)
    launch = _one_kernel[(1,)]
    launch(out)
    best = float("inf")
    for _ in range(groups):
        start = time.perf_counter()
        for _ in range(size):
            launch(out)
        best = min(best, (time.perf_counter() - start) / size)
    return best * 1e6


def row_of(found: dict[str, Any]) -> dict[str, Any]:
    """A kernel's row of the document."""
    return {
        "kernel": found["kernel"],
        "launches": found["compared"],
        "interpreted_ms": 1e3 * found["interpreted_s"] / found["compared"],
        "compiled_ms": 1e3 * found["compiled_s"] / found["compared"],
        "ratio": found["interpreted_s"] / found["compiled_s"],
        "equal": not found["wrong"],
        "ulp_of_libraries": found["ulp"] if found["ulp"] != float("inf") else None,
        "wrong": found["wrong"],
    }


def main(argv: list[str] | None = None) -> int:
    """The command: its exit code."""
    options = arguments(argv)
    if torch.cuda.is_available() or triton.knobs.runtime.interpret:
        print("kernels are not compiled for the CPU here: run it without a GPU and without TRITON_INTERPRET=1")
        return 2
    torch.set_num_threads(1)
    cost = launch_microseconds()
    with Recorder(launches=options.launches, repeat=options.repeats) as recorder:
        for method in options.methods:
            generate(method)
    rows = sorted((row_of(r) for r in recorder.rows() if r["compiled_s"]), key=lambda r: r["ratio"])
    median = statistics.median(r["ratio"] for r in rows)
    table = Table("kernel", "launches", "interpreted (ms)", "compiled (ms)", "ratio", "equal")
    for r in rows:
        name = r["kernel"].rpartition(":")[2]
        numbers = [f"{r['interpreted_ms']:.1f}", f"{r['compiled_ms']:.3f}", f"{r['ratio']:.0f}"]
        table.add_row(name, str(r["launches"]), *numbers, "yes" if r["equal"] else "NO")
    Console(width=120).print(table)
    print(f"{len(rows)} kernels, compiled {median:.0f} times as fast in the median; a launch costs {cost:.1f} us")
    document = {
        "methods": options.methods,
        "launch_us": cost,
        "median_ratio": median,
        "kernels": rows,
        "meta": {
            "versions": {"triton": triton.__version__, "torch": torch.__version__},
            "hardware": meta.hardware(),
            "commit": meta.commit(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    }
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))
    print(json.dumps(document))
    return 0 if all(r["equal"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
