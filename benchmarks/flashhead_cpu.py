"""Time of FlashHead's head beside the dense one on a CPU, one hidden state at a time.

    python benchmarks/flashhead_cpu.py                        # V = 151,936, D = 1024, 16 tokens a cluster; one core
    python benchmarks/flashhead_cpu.py --dtype bfloat16 --probes 256
    python benchmarks/flashhead_cpu.py --size 4096,256 --runs 5       # does it run?

The embedding and the clusters are random: what is read and multiplied is the same as with real ones, and what is found
is not looked at here (`crossspec flashhead recall` does that). The heads take turns, and with one thread what counts is
its CPU time, so that other work on the machine does not decide.

Prints one JSON document as its last line; benchmarks/README.md describes it. Needs no GPU.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_crossspec.cli import meta
from vllm_crossspec.heads.flashhead.assets import Assets, default_probes
from vllm_crossspec.heads.flashhead.head import FlashHead

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FILL_ROWS = 8192


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", default="151936,1024", help="vocabulary and hidden size, with a comma between them")
    add("--cluster-size", type=int, default=16, help="tokens of a cluster; must divide the vocabulary")
    add("--probes", default=None, help="numbers of probes, comma-separated. Default: 256 and a 16th of the clusters")
    add("--dtype", choices=DTYPES, default="float32", help="of embedding, centroids and states")
    add("--runs", type=int, default=15, help="timed turns; the median counts")
    add("--threads", type=int, default=1, help="of PyTorch")
    add("--json", type=Path, help="also write the document to this file")
    options = parser.parse_args(argv)
    try:
        options.vocab_size, options.hidden_size = (int(part) for part in options.size.split(","))
        options.probe_list = [int(part) for part in options.probes.split(",")] if options.probes else None
    except ValueError:
        parser.error("--size is two whole numbers with a comma between them, --probes a list of them")
    if options.vocab_size % options.cluster_size:
        parser.error(f"--cluster-size {options.cluster_size} does not divide the vocabulary, {options.vocab_size}")
    num_clusters = options.vocab_size // options.cluster_size
    if options.probe_list is None:
        options.probe_list = sorted({min(256, num_clusters), default_probes(num_clusters)})
    if not all(1 <= probes <= num_clusters for probes in options.probe_list):
        parser.error(f"--probes: give numbers from 1 to {num_clusters}, the clusters")
    return options


def make(options: argparse.Namespace) -> tuple[torch.Tensor, Assets, torch.Tensor]:
    """A random embedding, random clusters of it, and states to score."""
    generator = torch.Generator().manual_seed(0)
    vocab_size, hidden_size, dtype = options.vocab_size, options.hidden_size, DTYPES[options.dtype]
    weight = torch.empty(vocab_size, hidden_size, dtype=dtype)
    block = torch.randn(FILL_ROWS, hidden_size, generator=generator)
    for part in weight.split(FILL_ROWS):
        part.copy_(block[: len(part)])
    members = torch.randperm(vocab_size, generator=generator).view(-1, options.cluster_size).sort(dim=1).values
    centroids = torch.randn(len(members), hidden_size, generator=generator)
    states = torch.randn(options.runs + 2, 1, hidden_size, generator=generator).to(dtype)
    return weight, Assets(centroids, members, (0, 1, 2), min(options.probe_list), {}), states


def take_turns(
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]], states: torch.Tensor
) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall-clock milliseconds of every form on every state but the first two, which warm up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for turn, hidden in enumerate(states):
        for name, form in forms.items():
            wall, cpu = time.perf_counter(), time.process_time()
            form(hidden)
            spent = 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)
            if turn >= 2:
                times[name].append(spent)
    return times


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a form of the head, the dense one first."""
    weight, assets, states = make(options)
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "dense": lambda hidden: (hidden @ weight.t()).argmax(dim=1)
    }
    for grouped in (False, True):
        for probes in options.probe_list:
            name = f"flashhead, {probes} probes" + (", grouped" if grouped else "")
            forms[name] = FlashHead(weight, assets, num_probes=probes, grouped=grouped).best_token
    times = take_turns(forms, states)
    cpu, wall = ({name: [pair[i] for pair in pairs] for name, pairs in times.items()} for i in (0, 1))
    counted = cpu if options.threads == 1 else wall
    dense = statistics.median(counted["dense"])
    return [
        {
            "head": name,
            "median_cpu_ms": round(statistics.median(cpu[name]), 2),
            "median_wall_ms": round(statistics.median(wall[name]), 2),
            "least_cpu_ms": round(min(cpu[name]), 2),
            "speedup": round(dense / statistics.median(counted[name]), 2),
            "speedup_of_least": round(min(counted["dense"]) / min(counted[name]), 2),
        }
        for name in forms
    ]


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    rows = measure(options)
    for row in rows:
        shown = "{head:32} {median_cpu_ms:9.2f} ms of CPU time, {median_wall_ms:9.2f} ms in all, {speedup:.2f} x"
        print(shown.format(**row))
    document = {
        "meta": {
            "versions": {"torch": torch.__version__},
            "commit": meta.commit(),
            "hardware": meta.hardware(),
            "command": " ".join(["benchmarks/flashhead_cpu.py", *(sys.argv[1:] if argv is None else argv)]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "vocab_size": options.vocab_size,
            "hidden_size": options.hidden_size,
            "cluster_size": options.cluster_size,
            "dtype": options.dtype,
            "threads": options.threads,
            "runs": options.runs,
        },
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
