"""What the CPU lane's compiler is worth: engines with compiled kernels beside the same engines in Triton's interpreter.

    python benchmarks/cpu_lane.py                                          # plain and EAGLE-3's tree, one core
    python benchmarks/cpu_lane.py --methods plain,eagle3-tree,dart,confu-tree --prompts 2 --max-tokens 64 --repeats 3
    python benchmarks/cpu_kernels.py                                       # the same for single kernels, and a launch

Methods are the demo's, on the pocket models. For each of them an engine that compiles and one that interprets take
turns on the same core, so that what else the machine does falls on both; a first turn of each, which may compile, does
not count. `speedup` is the median of the turns' ratios; a ratio on a shared machine is worth more than its seconds.
Texts, target calls and accepted drafts must be equal to the last token, else the exit status is 1.

Prints one JSON document as its last line; benchmarks/README.md describes it. For machines without a GPU.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_crossspec.cli import demo, meta, runner
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.rows import ALL, Run, rows
from vllm_crossspec.cli.runner import Job
from vllm_crossspec.pocket_models import find_pocket

MODES = ("compiled", "interpreted")
INTERPRET = "TRITON_INTERPRET"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--methods", default="plain,eagle3-tree", help="of `crossspec demo`, comma-separated")
    add("--prompts", type=int, default=1, help="of each category")
    add("--max-tokens", type=int, default=32, help="longest answer")
    add("--repeats", type=int, default=2, help="turns that count")
    add("--core", type=int, default=None, help="that every engine keeps to; the last one by default")
    add("--json", type=Path, help="also write the document to this file")
    options = parser.parse_args(argv)
    try:
        options.names = demo.choose(options.methods)
    except ValueError as problem:
        parser.error(str(problem))
    if min(options.prompts, options.max_tokens, options.repeats) < 1:
        parser.error("--prompts, --max-tokens and --repeats are at least 1")
    return options


def jobs(options: argparse.Namespace) -> list[Job]:
    """One for each method."""
    prompts = demo.first_of_each(read_prompts(demo.demo_prompts()), options.prompts)
    sampling = {"temperature": 0.0, "max_tokens": options.max_tokens}
    return [demo.make_job(name, find_pocket(), prompts, sampling) for name in options.names]


@contextlib.contextmanager
def kernels(mode: str) -> Iterator[None]:
    """Engines started inside compile their kernels, or interpret them."""
    before = os.environ.pop(INTERPRET, None)
    if mode == "interpreted":
        os.environ[INTERPRET] = "1"
    try:
        yield
    finally:
        os.environ.pop(INTERPRET, None)
        if before is not None:
            os.environ[INTERPRET] = before


def generate(job: Job, mode: str, core: int) -> Run:
    """One engine, start to end."""
    with kernels(mode):
        run = runner.run(job, lambda event: None, [core])
    assert run.environment["kernels_interpreted"] == (mode == "interpreted")
    return run


def seconds(run: Run) -> float:
    """Of generating, without the engine's start."""
    return float(sum(group["seconds"] for group in run.groups.values()))


def measure(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """One method's row."""
    turns = [{mode: generate(job, mode, options.core) for mode in MODES} for _ in range(options.repeats + 1)]
    counted = turns[1:]
    done = {mode: [group["generations"] for group in turns[0][mode].groups.values()] for mode in MODES}
    (row,) = (row for row in rows([turns[0]["compiled"]]) if row.category == ALL)
    return {
        "method": job.method,
        "num_tokens": row.num_tokens,
        "num_target_calls": row.num_target_calls,
        "acceptance_length": row.acceptance_length,
        "equal": done["compiled"] == done["interpreted"],
        "speedup": statistics.median(seconds(t["interpreted"]) / seconds(t["compiled"]) for t in counted),
        **{f"{mode}_seconds": [seconds(turn[mode]) for turn in counted] for mode in MODES},
    }


def main() -> int:
    """Measure, print, and fail where compiled and interpreted engines differ."""
    options = arguments()
    if options.core is None:
        options.core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    measured = []
    for job in jobs(options):
        measured.append(measure(job, options))
        print(f"{job.method}: {measured[-1]['speedup']:.1f} times as fast, equal: {measured[-1]['equal']}", flush=True)
    about = {"commit": meta.commit(), "hardware": meta.hardware(), "command": " ".join(sys.argv)}
    document = {"rows": measured, "meta": about | {"prompts": options.prompts, "max_tokens": options.max_tokens}}
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))
    return 0 if all(row["equal"] for row in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
