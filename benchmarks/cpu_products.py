"""Milliseconds of a target's linear layers and of a tree's attention by rows: the CPU lane's products beside others.

    python benchmarks/cpu_products.py                    # the layers of inflate's shape 0.2b, two threads
    python benchmarks/cpu_products.py --shape 0.6b --threads 1

Linear layers beside oneDNN's, which vLLM takes, with any weights and with weights that bfloat16 holds exactly, as those
of most checkpoints; attention beside PyTorch's operations. By turns, each figure the median; with random weights, and
every layer's own, so that they are read from memory as in an engine.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

ROWS = (1, 2, 4, 6, 8, 9, 12, 16, 17, 24, 25, 32, 48, 96, 256)
TREE_ROWS, KEYS, BLOCK = (9, 17, 61), (128, 512, 2048), 128
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""What engines that the lane starts have, and a process must have before it starts."""


def medians(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Of each call, milliseconds; a first turn is not counted."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + turns):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.2b", help="of crossspec inflate")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args(argv)
    if os.environ.get("GLIBC_TUNABLES") is None:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": HUGE_PAGES})

    import torch
    from crossspec_cpu_lane import products
    from vllm import _custom_ops as vllm_ops

    from vllm_crossspec.engine.attention.cpu import _Request, _spans, attend
    from vllm_crossspec.shapes.growth import SHAPES

    products.load()
    ops = torch.ops.crossspec_cpu_lane
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    heads, kv_heads, width, size = shape.heads, shape.kv_heads, shape.hidden, 64
    one = [((heads + 2 * kv_heads) * size, width), (width, heads * size)]
    one += [(2 * shape.mlp, width), (width, shape.mlp)]
    weights = [torch.randn(outputs, inputs) / 32 for _ in range(shape.layers) for outputs, inputs in one]
    mine = [ops.pack(weight) for weight in weights]
    halves = [ops.pack(weight.bfloat16().float()) for weight in weights]
    theirs = [vllm_ops.create_onednn_mm(weight.t(), 32) for weight in weights]

    def linear_calls(rows: int) -> dict[str, Callable[[], object]]:
        x = {inputs: torch.randn(rows, inputs) for _, inputs in one}

        def of_onednn() -> None:
            for weight, handler in zip(weights, theirs, strict=True):
                vllm_ops.onednn_mm(handler, x[weight.shape[1]], None)

        def of_the_lane(all_packed: list[torch.Tensor]) -> None:
            for weight, packed in zip(weights, all_packed, strict=True):
                ops.linear(x[weight.shape[1]], packed, weight.shape[0], None)

        return {"oneDNN": of_onednn, "lane": lambda: of_the_lane(mine), "halves": lambda: of_the_lane(halves)}

    def attention_calls(rows: int, keys: int) -> dict[str, Callable[[], object]]:
        cache = torch.randn(keys // BLOCK, kv_heads, BLOCK, 2 * size)
        line = torch.arange(keys // BLOCK, dtype=torch.int32)
        request = _Request(slice(0, rows), keys, line.tolist(), line)
        query, hidden = torch.randn(rows, heads, size), torch.zeros(rows, rows)
        output, scale = torch.empty_like(query), size**-0.5
        return {
            "PyTorch": lambda: attend(query, _spans(cache, request, keys), hidden, scale),
            "lane": lambda: ops.attend(query, cache, line, keys, hidden, scale, output),
        }

    print(f"{options.shape}: {sum(w.numel() for w in weights) / 1e6:.0f} M weights, {options.threads} threads\n")
    print("| rows | oneDNN, ms | lane, ms | lane, weights of a bfloat16 checkpoint, ms |\n|---|---|---|---|")
    for rows in ROWS:
        found = medians(linear_calls(rows), options.turns)
        print(f"| {rows} | {found['oneDNN']:.1f} | {found['lane']:.1f} | {found['halves']:.1f} |", flush=True)
    print("\n| rows of a tree, keys | PyTorch, ms a layer | lane, ms a layer |\n|---|---|---|")
    for rows, keys in itertools.product(TREE_ROWS, KEYS):
        found = medians(attention_calls(rows, keys), 20 * options.turns)
        print(f"| {rows}, {keys} | {found['PyTorch']:.2f} | {found['lane']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
