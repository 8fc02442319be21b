"""Times FlashHead's head beside the dense one on a GPU, by CUDA events and from CUDA graphs, for batches of 1 to 32.

    python benchmarks/flashhead_gpu.py                           # V = 151,936, D = 1024, bfloat16, clusters of 16
    python benchmarks/flashhead_gpu.py --batch-sizes 1,8 --probes 256
    python benchmarks/flashhead_gpu.py --size 4096,256 --batch-sizes 2      # does it run?

The embedding and the clusters are random, as in flashhead_cpu.py. Prints a table, and one JSON document as its last
line; benchmarks/README.md describes it. Without a GPU it counts the launches and times nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import flashhead_cpu
import torch
from launch_counts import count_launches
from round_time import numbers
from tree_kernels import Case, time_case

from vllm_crossspec.cli import meta
from vllm_crossspec.heads.flashhead.head import FlashHead

TOP_K = 10
NO_GPU = "flashhead_gpu.py times nothing on this machine, which has no NVIDIA GPU; it counts the launches of a head"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", default="151936,1024", help="vocabulary and hidden size, with a comma between them")
    add("--probes", default=None, help="numbers of probes, comma-separated. Default: 256 and a 16th of the clusters")
    add("--batch-sizes", type=numbers, default=[1, 2, 4, 8, 16, 32], help="rows of a batch, comma-separated")
    add("--runs", type=int, default=50, help="timed runs of each case")
    add("--json", type=Path, help="also write the document to this file")
    options = parser.parse_args(argv)
    given = ["--size", options.size, "--dtype", "bfloat16", "--runs", str(max(options.batch_sizes))]
    options.sizes = flashhead_cpu.arguments(given + (["--probes", options.probes] if options.probes else []))
    return options


def heads(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
    """The dense head and FlashHeads of every setting, by name, and states [rows, D]."""
    weight, assets, states = flashhead_cpu.make(options.sizes)
    weight = weight.to(device)
    forms: dict[str, Any] = {"dense": None}
    for grouped in (False, True):
        for probes in options.sizes.probe_list:
            name = f"flashhead, {probes} probes" + (", grouped" if grouped else "")
            settings = {"num_probes": probes, "grouped": grouped, "top_k": TOP_K, "use_kernels": True}
            forms[name] = FlashHead(weight, assets, max_rows=max(options.batch_sizes), **settings)
    forms["dense"] = weight
    return forms, states[:, 0].to(device)


def calls(form: Any, hidden: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What a proposer asks of a head: a chain's first choice, and a tree's candidates."""
    if not isinstance(form, torch.Tensor):
        return {"choice": lambda: form.best_token(hidden), "candidates": lambda: form.top_tokens(hidden)}

    def candidates() -> torch.Tensor:
        logits = hidden @ form.t()
        top, _ = logits.topk(TOP_K, dim=-1)
        return top.float() - logits.float().logsumexp(dim=-1, keepdim=True)

    return {"choice": lambda: (hidden @ form.t()).argmax(dim=-1), "candidates": candidates}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a head, call and batch size; ``speedup`` is over the dense head."""
    has_gpu = torch.cuda.is_available()
    forms, states = heads(options, torch.device("cuda" if has_gpu else "cpu"))
    rows, dense = [], {}
    for batch_size in options.batch_sizes:
        for name, form in forms.items():
            for call, run in calls(form, states[:batch_size]).items():
                row: dict[str, Any] = {"head": name, "call": call, "batch_size": batch_size}
                if has_gpu:
                    row["graph_us"] = time_case(Case(name, run, None, {}), options.runs)
                    median = row["graph_us"]["median"]
                    row["speedup"] = round(dense.setdefault((call, batch_size), median) / median, 2)
                else:
                    row["launches"] = None if name == "dense" else count_launches(run)
                rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    options = arguments(argv)
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
    rows = measure(options)
    print(" | ".join(rows[0]), file=sys.stderr)
    for row in rows:
        print(" | ".join("-" if value is None else str(value) for value in row.values()), file=sys.stderr)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    document = {
        "meta": {
            "benchmark": "flashhead_gpu",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": " ".join(["benchmarks/flashhead_gpu.py", *(sys.argv[1:] if argv is None else argv)]),
            "commit": meta.commit(),
            "hardware": meta.hardware() | {"device": device},
            "vocab_size": options.sizes.vocab_size,
            "hidden_size": options.sizes.hidden_size,
            "top_k": TOP_K,
        },
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
