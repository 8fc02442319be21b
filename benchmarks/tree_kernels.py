"""Times the kernels of draft trees by CUDA events, each against its plain PyTorch twin, at a public model's shapes.

    python benchmarks/tree_kernels.py                              # Qwen3-8B shapes, trees of 60 nodes
    python benchmarks/tree_kernels.py --only commit,attention --batch-sizes 8 --contexts 16384

Prints one JSON document as its last line; benchmarks/README.md describes it. Needs an NVIDIA GPU.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from round_time import NOT_MEANINGFUL, _commit, _versions, numbers
from shapes import SHAPES
from tree_cases import DEPTH, Case, build_cases, commit_cases, make_step, noise_cases, verify_cases

CASES = {"commit": commit_cases, "verify": verify_cases, "build": build_cases, "noise": noise_cases}
GROUPS = (*CASES, "attention")
BETWEEN_RUNS = 256 << 20  # bytes written before every run, more than any L2 holds
NO_GPU = "tree_kernels.py times kernels by CUDA events and needs an NVIDIA GPU; this machine has none"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="8b", help="sizes of the target and its drafters")
    add("--only", type=_groups, default=list(GROUPS), help="comma-separated, of: " + ", ".join(GROUPS))
    add("--batch-sizes", type=numbers, default=[1, 8, 32], help="requests, comma-separated")
    add("--contexts", type=numbers, default=[2048, 16384], help="tokens before the tree, for the attention")
    add("--nodes", type=int, default=60, help="draft tokens of a tree")
    add("--path", type=int, default=6, help="draft tokens that are accepted, all of them to be moved")
    add("--runs", type=int, default=50, help="timed runs of each case")
    add("--json", type=Path, help="also write the document to this file")
    options = parser.parse_args(argv)
    if not 1 <= options.path <= min(DEPTH, options.nodes // 2):
        parser.error(f"--path must lie between 1 and {min(DEPTH, options.nodes // 2)} for trees of {options.nodes}")
    return options


def _groups(text: str) -> list[str]:
    for name in (names := text.split(",")):
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"there is no group {name!r}; known: {', '.join(GROUPS)}")
    return names


def computes() -> bool:
    """Whether the GPU does what it is told: a simulated one takes every call and computes nothing."""
    return bool(torch.ones(1, device="cuda").item() == 1.0)


# -- timing --------------------------------------------------------------------------------------------------------


def time_case(case: Case, runs: int) -> dict[str, float]:
    """Microseconds of a case on the device's clock, from a CUDA graph, with a cold L2 cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and lets libraries allocate what they keep
            case.run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    eraser = torch.empty(BETWEEN_RUNS, dtype=torch.int8, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs + 3)]
    for start, end in pairs:
        eraser.zero_()  # also keeps the device busy until the host has queued what follows
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 for start, end in pairs[3:])
    p90 = times[min(len(times) - 1, int(0.9 * len(times)))]
    return {"median": round(statistics.median(times), 2), "p90": round(p90, 2)}


# -- all cases -----------------------------------------------------------------------------------------------------


def all_cases(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Callable[[], Iterator[Case]]]]:
    """What rows of the document are about, and the function that makes their cases."""
    shape = SHAPES[options.shape]
    for group in options.only:
        for batch_size in options.batch_sizes:
            about = {"group": group, "batch_size": batch_size, "context": None}
            if group != "attention":
                yield about, lambda make=CASES[group], size=batch_size: make(size, shape, options)
                continue
            from tree_attention import attention_cases  # FlashAttention comes with vLLM

            for context in options.contexts:
                step = make_step(batch_size, context, options)
                yield about | {"context": context}, lambda step=step, c=context: attention_cases(step, c, shape)


def measure(options: argparse.Namespace, is_real: bool) -> list[dict[str, Any]]:
    """All rows; ``agrees`` is None where there is no truth, or where kernels compute nothing."""
    rows = []
    for about, make in all_cases(options):
        for case in make():
            times = None if case.run is None else time_case(case, options.runs)
            row = about | {"name": case.name, "us": times, **case.figures}
            row["agrees"] = case.check() if is_real and case.check is not None else None
            print(f"{case.name} {about}: {row['us']} agrees {row['agrees']}", file=sys.stderr)
            rows.append(row)
        torch.cuda.empty_cache()
    return rows


def main() -> int:
    """Run; 1 if a kernel disagrees with its twin."""
    options = arguments()
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    is_real = computes()
    kind = "gpu" if is_real else "simulated GPU"
    one = torch.zeros(1, device="cuda")
    found = {
        "meta": {
            "benchmark": "tree_kernels",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "commit": _commit(),
            "versions": {"python": platform.python_version()} | _versions("vllm", "torch", "triton"),
            "hardware": {"kind": kind, "device": torch.cuda.get_device_name(), "cpus": os.cpu_count()},
            "times_mean_something": is_real,
            "note": NOT_MEANINGFUL.get(kind),
            "shape": {"name": options.shape, **SHAPES[options.shape]._asdict()},
            "num_nodes": options.nodes,
            "path": options.path,
        },
        "floor_us": time_case(Case("floor", lambda: one.add_(1), None, {}), options.runs),
        "rows": measure(options, is_real),
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 1 if any(row["agrees"] is False for row in found["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
