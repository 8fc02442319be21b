"""Size and lookups a second of an n-gram store on one core, beside the trie of DART's authors.

    python benchmarks/ngram_lookup.py                                   # about 10 M nodes of synthetic tokens
    python benchmarks/ngram_lookup.py --nodes 20 --no-lookups           # the size alone
    python benchmarks/ngram_lookup.py --reference ../DART               # and their C++, compiled, over the same n-grams

Prints one JSON document as its last line; benchmarks/README.md describes it. Needs no GPU.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import numpy as np
import torch
from ngram_reference import load_reference
from synthetic_ngrams import favourites, zipf_tokens

from vllm_crossspec.cli import meta
from vllm_crossspec.ngram.build import build, make_plan
from vllm_crossspec.ngram.lookup import FLOOR, look_up, look_up_in_torch
from vllm_crossspec.ngram.store import Header, open_store
from vllm_crossspec.ngram.trie import import_trie

VOCAB_SIZE = 151_936
BEAMS, CANDIDATES = 20, 25  # of a level of the paper's search
PAPER_NODES = 1_300_000_000


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nodes", type=float, default=10.0, help="n-grams of the store, in millions, about")
    add("--order", type=int, default=3, help="longest n-gram")
    add("--rows", type=int, default=20_000, help="contexts of the large batch")
    add("--runs", type=int, default=5, help="timed runs; the median counts")
    add("--no-lookups", action="store_true", help="build and measure the size only")
    add("--reference", type=Path, help="checkout of fvliang/DART")
    add("--folder", type=Path, help="keep files here (and use what an earlier call left). Default: a temporary one")
    add("--json", type=Path, help="also write the document to this file")
    return parser.parse_args(argv)


def synthetic(num_nodes: float, seed: int = 0) -> np.ndarray:
    """Made-up text that has about so many n-grams."""
    return zipf_tokens(int(num_nodes * 0.82), VOCAB_SIZE, seed)


def questions(ids: np.ndarray, order: int, rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts from the text; candidates, half of them what came after that very token elsewhere."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(ids) - order, rows)
    contexts = np.maximum(np.stack([ids[starts + i] for i in range(order - 1)], axis=1), 0)
    likely = favourites(contexts[:, -1:].astype(np.int64), np.arange(8), VOCAB_SIZE)
    others = ids[rng.integers(0, len(ids), (rows, CANDIDATES - 8))]
    candidates = np.concatenate((likely, np.maximum(others, 0)), axis=1)
    return torch.from_numpy(contexts.astype(np.int32)), torch.from_numpy(candidates.astype(np.int32))


def timed(run: Any, runs: int) -> float:
    """Median seconds."""
    run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def lookups(path: Path, ids: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """Lookups a second of ours, in a large batch and in one level of one request."""
    start = time.perf_counter()
    store = open_store(path)
    seconds = time.perf_counter() - start
    contexts, candidates = questions(ids, options.order, options.rows)
    large = timed(lambda: look_up(store, contexts, candidates), options.runs)
    small = timed(lambda: look_up(store, contexts[:BEAMS], candidates[:BEAMS]), 20 * options.runs)
    wide = contexts.long(), candidates.long()
    plain = timed(lambda: look_up_in_torch(store, *wide, None, FLOOR), options.runs)
    matched = look_up(store, contexts, candidates).matched
    return {
        "open_ms": round(seconds * 1e3, 2),
        "lookups_per_second": round(candidates.numel() / large),
        "vectorised_lookups_per_second": round(candidates.numel() / plain),
        "one_level_us": round(small * 1e6, 1),
        "one_level_lookups_per_second": round(BEAMS * CANDIDATES / small),
        "matched_share": [round(float((matched == n).float().mean()), 3) for n in range(options.order)],
    }


def reference(path: Path, ids: np.ndarray, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Theirs over the same tokens: time, size, and whether the answers agree; and their file imported."""
    module = load_reference(options.reference, folder / "reference_build")
    theirs = folder / "reference.trie"
    trie = module.TrieNgram(options.order)
    trie.add_tokens(torch.from_numpy(ids))
    trie.save(str(theirs))
    contexts, candidates = questions(ids, options.order, options.rows)
    module.look_up(trie, contexts, candidates)
    times = [module.look_up(trie, contexts, candidates)[2] for _ in range(options.runs)]
    few = contexts[:BEAMS].clone(), candidates[:BEAMS].clone()
    small = [module.look_up(trie, *few)[2] for _ in range(20 * options.runs)]
    probabilities, matched, _ = module.look_up(trie, contexts, candidates)
    del trie
    start = time.perf_counter()
    import_trie(theirs, folder / "imported.safetensors", vocab_size=VOCAB_SIZE)
    seconds = time.perf_counter() - start
    store = open_store(folder / "imported.safetensors")
    answers = look_up(store, contexts, candidates)
    error = (answers.log_probs - (probabilities + 1e-10).log()).abs().max()
    num_bytes = theirs.stat().st_size
    theirs.unlink()
    return {
        "lookups_per_second": round(candidates.numel() / statistics.median(times)),
        "one_level_us": round(statistics.median(small) * 1e6, 1),
        "file_bytes_per_node": round(num_bytes / store.header.num_nodes, 2),
        "same_matches": bool(torch.equal(answers.matched.int(), matched)),
        "max_difference_nats": float(error),
        "import_seconds": round(seconds, 1),
        "imported_equals_built": (folder / "imported.safetensors").read_bytes() == path.read_bytes(),
    }


def calculated(header: Header) -> dict[str, Any]:
    """Size at the paper's number of nodes, with the shares of the levels that this store has."""
    seen = header.level_sizes[1:]
    factor = (PAPER_NODES - header.num_unigrams) / sum(seen)
    grown = replace(header, level_sizes=(header.vocab_size, *(round(size * factor) for size in seen)))
    # The worst case: no n-gram of two tokens or more has a second continuation.
    even = PAPER_NODES // len(seen)
    worst = replace(header, level_sizes=(header.vocab_size, *(even for _ in seen)))
    return {
        "nodes": PAPER_NODES,
        "bytes": grown.num_bytes,
        "bytes_per_node": round(grown.num_bytes / PAPER_NODES, 2),
        "worst_bytes_per_node": round(worst.num_bytes / PAPER_NODES, 2),
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    ids = synthetic(options.nodes * 1e6)
    np.save(folder / "ids.npy", ids)
    path = folder / "built.safetensors"
    start = time.perf_counter()
    header = build(make_plan([folder / "ids.npy"], order=options.order, vocab_size=VOCAB_SIZE), path)
    found: dict[str, Any] = {
        "nodes": header.num_nodes,
        "levels": [header.num_unigrams, *header.level_sizes[1:]],
        "max_children": header.max_children,
        "build_seconds": round(time.perf_counter() - start, 1),
        "bytes": path.stat().st_size,
        "bytes_per_node": round(path.stat().st_size / header.num_nodes, 2),
        "max_error_nats": header.max_error,
        "at_the_papers_size": calculated(header),
    }
    if not options.no_lookups:
        found["ours"] = lookups(path, ids, options)
    if options.reference is not None:
        found["reference"] = reference(path, ids, folder, options)
    return found


def main() -> int:
    """Measure; 1 if the reference disagrees."""
    options = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(folder, options)
    document = {
        "meta": {
            "benchmark": "ngram_lookup",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": " ".join(sys.argv),
            "commit": meta.commit(),
            "hardware": meta.hardware(),
            "load": os.getloadavg()[0],
        },
        **found,
    }
    text = json.dumps(document)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    theirs = document.get("reference")
    return int(theirs is not None and not (theirs["same_matches"] and theirs["imported_equals_built"]))


if __name__ == "__main__":
    sys.exit(main())
