"""Times DART's tree search (``vllm_crossspec.tree.continuity``) at the paper's sizes, by CUDA events.

    python benchmarks/tree_search.py                              # made-up n-grams of 151,936 tokens; order 3
    python benchmarks/tree_search.py --store a.safetensors --batch-sizes 1,32

Prints a table, and one JSON document as its last line; benchmarks/README.md describes it. Without a GPU it counts the
launches and times nothing.
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from launch_counts import count_launches
from round_time import numbers
from synthetic_ngrams import write_store
from tree_kernels import Case, computes, time_case

from vllm_crossspec.cli import meta
from vllm_crossspec.ngram.store import NgramStore, open_store, place
from vllm_crossspec.tree import torch_ops
from vllm_crossspec.tree.continuity import ContinuityTree, Scoring
from vllm_crossspec.types import TokenTree

LEVELS, CANDIDATES, BEAM_WIDTH, NODES = 8, 25, 20, 60
VOCAB_SIZE = 151_936
BOUND_US = {1: 300, 32: 600}
NO_GPU = "tree_search.py times nothing on this machine, which has no NVIDIA GPU; it counts the launches of a search"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--store", type=Path, help="n-gram store. Default: one of made-up text, built first")
    add("--batch-sizes", type=numbers, default=[1, 32], help="requests, comma-separated")
    add("--runs", type=int, default=50, help="timed runs of each case")
    add("--json", type=Path, help="also write the document to this file")
    return parser.parse_args(argv)


def make_search(store: NgramStore | None, batch_size: int, device: torch.device) -> tuple[Any, Any, dict[str, Any]]:
    """The search, its PyTorch twin, and what both are given."""
    vocab_size = store.header.vocab_size if store is not None else VOCAB_SIZE
    sizes = {"num_nodes": NODES, "depth": LEVELS, "top_k": CANDIDATES, "beam_width": BEAM_WIDTH}
    settings = sizes | {"max_num_reqs": batch_size, "device": device, "scoring": Scoring(), "store": store}
    generator = torch.Generator().manual_seed(batch_size)
    shape = (batch_size, LEVELS, CANDIDATES)
    scores = (torch.randn(shape, generator=generator) * 3).sort(-1, descending=True).values
    # Half of them frequent tokens, so that lookups find something.
    tokens = torch.randint(vocab_size, shape, generator=generator)
    tokens[..., ::2] = torch.rand(shape, generator=generator).argsort(-1)[..., ::2] * 7
    given = {
        "log_probs": scores.log_softmax(-1).to(device),
        "tokens": (tokens % vocab_size).to(device),
        "contexts": torch.randint(100, (batch_size, 4), generator=generator).to(device),
        "out": TokenTree(
            tokens=torch.zeros(batch_size, NODES, dtype=torch.int64, device=device),
            parents=torch.zeros(batch_size, NODES, dtype=torch.int32, device=device),
            log_probs=torch.zeros(batch_size, NODES, device=device),
            sizes=torch.zeros(batch_size, dtype=torch.int32, device=device),
        ),
    }
    twins = settings
    if store is not None and device.type == "cuda":  # PyTorch reads no host memory from there
        twins = settings | {"store": place(store, "gpu", device)}
    return ContinuityTree(**settings), torch_ops.ContinuityTree(**twins), given


def agrees(search: Any, twin: Any, given: dict[str, Any]) -> bool:
    """Whether both build the same trees."""
    search.build(**given)
    found = [t.clone() for t in given["out"]]
    twin.build(**given)
    is_same = all(torch.equal(found[i], given["out"][i]) for i in (0, 1, 3))
    return is_same and torch.allclose(found[2], given["out"].log_probs, rtol=1e-5, atol=1e-5)


def eager(search: Any, given: dict[str, Any], runs: int) -> float:
    """Median microseconds of a search whose launches the host issues one by one, from idle to done."""
    times = []
    for _ in range(runs + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        search.build(**given)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return round(statistics.median(times[3:]), 1)


def measure(store: NgramStore, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows; ``agrees`` is None where kernels compute nothing."""
    has_gpu = torch.cuda.is_available()
    is_real = has_gpu and computes()
    device, rows = torch.device("cuda" if has_gpu else "cpu"), []
    for placement in ("gpu", "host", None) if has_gpu else ("host", None):
        placed = place(store, placement, device) if placement is not None else None
        for batch_size in options.batch_sizes:
            search, twin, given = make_search(placed, batch_size, device)
            row: dict[str, Any] = {"store": placement, "batch_size": batch_size, "bound_us": BOUND_US.get(batch_size)}
            if has_gpu:
                row["agrees"] = agrees(search, twin, given) if is_real else None
                row["eager_us"] = eager(search, given, options.runs)
                case = Case("search", lambda search=search, given=given: search.build(**given), None, {})
                row["graph_us"] = time_case(case, options.runs)
            else:
                row["launches"] = count_launches(functools.partial(search.build, **given))
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table, on the error stream."""
    print(" | ".join(rows[0]), file=sys.stderr)
    for row in rows:
        print(" | ".join("-" if value is None else str(value) for value in row.values()), file=sys.stderr)


def main() -> int:
    """Measure; 1 if trees differ."""
    options = arguments()
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(options.store or write_store(Path(folder) / "made-up.safetensors", VOCAB_SIZE))
        rows = measure(store, options)
    show(rows)
    document = {
        "meta": {
            "benchmark": "tree_search",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": " ".join(sys.argv),
            "commit": meta.commit(),
            "hardware": meta.hardware()
            | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else None},
            "sizes": {"levels": LEVELS, "candidates": CANDIDATES, "beam_width": BEAM_WIDTH, "nodes": NODES},
            "store": {"nodes": store.header.num_nodes, "order": store.order, "bytes": store.header.num_bytes},
        },
        "rows": rows,
    }
    text = json.dumps(document)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    return int(any(row.get("agrees") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
