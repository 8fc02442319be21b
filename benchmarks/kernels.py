"""Times kernels by CUDA events, each against its plain PyTorch twin, at a public model's shapes.

    python benchmarks/kernels.py                              # Qwen3-8B shapes, trees of 60 nodes
    python benchmarks/kernels.py --only commit,attention --batch-sizes 8
    python benchmarks/kernels.py --only search --store a.safetensors
    python benchmarks/kernels.py --only head --probes 256

Prints one JSON document as its last line; benchmarks/README.md describes it. Without a GPU it counts the launches of
each case and times nothing.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from common import emit, make_parser, names_of, numbers, origin, spread
from kernel_cases import CASES, DEPTH, Case
from shapes import SHAPES
from triton.runtime import jit

BETWEEN_RUNS = 256 << 20  # bytes written before every run, more than any L2 holds
NO_GPU = "kernels.py times nothing on this machine, which has no NVIDIA GPU: it counts launches"
SIMULATED = "kernels did nothing: milliseconds mean nothing"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="8b", help="sizes of the target and its drafters")
    groups = tuple(CASES)
    add("--only", type=names_of(groups, "group"), default=groups, help="comma-separated, of: " + ", ".join(groups))
    add("--batch-sizes", type=numbers, default=[1, 8, 32], help="requests, comma-separated")
    add("--nodes", type=int, default=60, help="draft tokens of a tree")
    add("--path", type=int, default=6, help="draft tokens that are accepted, all of them to be moved")
    add("--store", type=Path, help="n-gram store of the search. Default: one of made-up text, built first")
    add("--probes", type=numbers, help="clusters that a head looks into. Default: 256 and a 16th of all")
    add("--runs", type=int, default=50, help="timed runs of each case")
    options = parser.parse_args(argv)
    if not 1 <= options.path <= min(DEPTH, options.nodes // 2):
        parser.error(f"--path must lie between 1 and {min(DEPTH, options.nodes // 2)} for trees of {options.nodes}")
    return options


def computes() -> bool:
    """Whether the GPU does what it is told: a simulated one takes every call and computes nothing."""
    return bool(torch.ones(1, device="cuda").item() == 1.0)


def count_launches(run: Callable[[], Any]) -> int:
    """Counts the launches of ``run`` and carries none out."""
    launched: list[Any] = []
    with mock.patch.object(jit.JITFunction, "run", lambda *a, **k: launched.append(a)):
        run()
    return len(launched)


def time_case(run: Callable[[], Any], runs: int) -> dict[str, float]:
    """Microseconds of a case on the device's clock, from a CUDA graph, with a cold L2 cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and lets libraries allocate what they keep
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    eraser = torch.empty(BETWEEN_RUNS, dtype=torch.int8, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs + 3)]
    for start, end in pairs:
        eraser.zero_()  # also keeps the device busy until the host has queued what follows
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return spread([start.elapsed_time(end) * 1e3 for start, end in pairs[3:]], 2)


def all_cases(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Iterator[Case]]]:
    """What rows of the document are about, and their cases."""
    for group in options.only:
        for batch_size in options.batch_sizes:
            cases = CASES[group](batch_size, SHAPES[options.shape], options)
            yield {"group": group, "batch_size": batch_size}, cases


def measure(options: argparse.Namespace, has_gpu: bool, is_real: bool) -> list[dict[str, Any]]:
    """All rows; ``agrees`` is None without a truth, or if kernels only count."""
    rows = []
    for about, cases in all_cases(options):
        medians: dict[str, float] = {}
        for case in cases:
            row = about | {"name": case.name, **case.figures}
            if has_gpu:
                row["us"] = time_case(case.run, options.runs)
                row["agrees"] = case.check() if is_real and case.check is not None else None
                medians[case.name] = row["us"]["median"]
                if "beside" in row:
                    row["speedup"] = round(medians[row["beside"]] / medians[case.name], 2)
            else:
                row["launches"] = count_launches(case.run)
            print(" ".join(f"{key}={value}" for key, value in row.items()), file=sys.stderr)
            rows.append(row)
        if has_gpu:
            torch.cuda.empty_cache()
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run; 1 if a kernel disagrees with its twin."""
    options = arguments(argv)
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    is_real = has_gpu and computes()
    if not has_gpu:
        print(NO_GPU, file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        about = {
            "device": torch.cuda.get_device_name() if has_gpu else None,
            "times_mean_something": is_real,
            "note": None if is_real else SIMULATED if has_gpu else NO_GPU,
            "shape": {"name": options.shape, **SHAPES[options.shape]._asdict()},
            "num_nodes": options.nodes,
            "path": options.path,
        }
        found: dict[str, Any] = {"meta": origin("kernels") | about, "floor_us": None}
        if has_gpu:
            one = torch.zeros(1, device="cuda")
            found["floor_us"] = time_case(lambda: one.add_(1), options.runs)
        found["rows"] = measure(options, has_gpu, is_real)
    emit(found, options.json)
    return int(any(row.get("agrees") is False for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
