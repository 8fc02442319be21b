"""Damaged files for everything that reads one: each is refused in one sentence, or read; nothing crashes or grows.

    pip install atheris
    python benchmarks/fuzz.py trie --runs 1000000 --corpus work/fuzz/trie
    python benchmarks/fuzz.py --list

Inputs are made by atheris (libFuzzer), which changes good files and keeps what reaches new lines of ours; a later run
resumes the corpus folder. An input fails if it ends in anything else than a ValueError of one line, or takes more than
10 seconds of a core or 2 GiB. It is written to the folder, and the command exits with libFuzzer's status.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_crossspec.pocket_models import find_pocket
from vllm_crossspec.types import TargetFacts

POCKET = find_pocket()
SECONDS, MEBIBYTES = 10, 2048
HANGS = 300
"""Seconds by the clock, which a shared machine may stand still for."""
VOCAB_SIZE = 40
HEAD = "flashhead-eagle3"
NATIVE_METHODS = ("eagle3", "dflash", "draft_model", "ngram")
NATIVE_KEYS = ("model", "num_speculative_tokens", "draft_tensor_parallel_size", "quantization")
SPEC = {
    "method": "whiflash",
    "drafters": {
        "eagle3": {"model": "a", "tree": {"num_nodes": 20, "depth": 3, "by_batch_size": {"1": 20, "8": 0}}},
        "dart": {"model": "b", "ngram": {"model": "c", "order": 3}, "tree": {"type": "continuity", "beam_width": 4}},
        "suffix": {"lookup": {"share": True}},
    },
    "router": {"policy": "entropy", "threshold": [1.5, 0.5]},
}


class Target(NamedTuple):
    """One reader.

    Attributes:
        description: one line.
        seeds: good files.
        read: reads what is at this path.
        watched: modules whose new lines count.
    """

    description: str
    seeds: Callable[[], list[bytes]]
    read: Callable[[Path], Any]
    watched: tuple[str, ...]


def _tiny_trie() -> list[bytes]:
    """Of the text 1 2 1 2 3, in DART's format."""
    import struct

    ngrams = {(): 0, (1,): 2, (2,): 2, (3,): 1, (1, 2): 2, (2, 1): 1, (2, 3): 1, (1, 2, 1): 1, (1, 2, 3): 1}
    numbers = {ngram: number for number, ngram in enumerate(ngrams)}
    data = struct.pack("<QQ", 3, len(ngrams))
    for ngram, count in ngrams.items():
        children = [child for child in ngrams if len(child) == len(ngram) + 1 and child[:-1] == ngram]
        token, parent = (ngram[-1], numbers[ngram[:-1]]) if ngram else (-1, 0)
        data += struct.pack("<iQiQ", token, parent, count, len(children))
        data += b"".join(struct.pack("<iQ", child[-1], numbers[child]) for child in children)
    return [data]


def _read_trie(path: Path) -> None:
    from crossspec_tools.ngram.trie import import_trie

    out = path.with_suffix(".store")
    import_trie(path, out, vocab_size=VOCAB_SIZE)
    _read_store(out)


def _tiny_store() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.trie"
        path.write_bytes(_tiny_trie()[0])
        _read_trie(path)
        return [path.with_suffix(".store").read_bytes()]


def _read_store(path: Path) -> None:
    from crossspec_tools.ngram.check import check_contents
    from crossspec_tools.ngram.lookup import look_up
    from vllm_crossspec.ngram_store.store import open_store

    store = open_store(path, vocab_size=VOCAB_SIZE)
    check_contents(store, "the store")
    look_up(store, torch.tensor([[1, 2], [2, 1]]), torch.tensor([[1, 2, 3], [0, 5, 9]]))


def _read_spec(path: Path) -> None:
    from vllm_crossspec.config.parse import is_ours, parse

    raw = _json(path)
    if isinstance(raw, dict) and is_ours(raw, NATIVE_METHODS, NATIVE_KEYS):
        parse(raw, NATIVE_KEYS)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # whoever hands us an object has read it
        return None


def _beside(path: Path, ending: str, name: str) -> Path:
    """A folder with this input as its file ``name``."""
    folder = path.with_suffix(ending)
    folder.mkdir(exist_ok=True)
    shutil.copy(path, folder / name)
    return folder


def _read_calibration(path: Path) -> None:
    from vllm_crossspec.heterospec.calibration import read_calibration

    read_calibration(path, "adaptive.model")


def _read_router(path: Path) -> None:
    from vllm_crossspec.routing.checkpoint import read_router

    folder = _beside(path, ".router", "router.json")
    shutil.copy(POCKET / "router" / "model.safetensors", folder)
    read_router(folder, hidden_size=256, drafters=("eagle3", "dflash"), key="router.model")


def _read_config(path: Path) -> None:
    from vllm_crossspec.kinds.checkpoint import check_drafter
    from vllm_crossspec.kinds.drafter import drafter_kinds

    folder = _beside(path, ".drafter", "config.json")
    target = TargetFacts("the target", hidden_size=256, vocab_size=4096, num_layers=8)
    for kind in drafter_kinds():
        try:
            check_drafter(kind, str(folder), "model", target, has_weights=False)
        except ValueError as problem:
            one_line(problem)


def _clusters() -> list[bytes]:
    from crossspec_tools.flashhead.files import save_assets
    from vllm_crossspec.drafting.flashhead.assets import TENSORS_FILE, Assets

    with tempfile.TemporaryDirectory() as folder:
        centroids = torch.tensor([[1.0, 2.0, 0.5], [0.1, 1.0, 3.0]])
        save_assets(folder, Assets(centroids, torch.arange(8).view(2, 4), (0, 3), 1, {}))
        return [next(Path(folder).rglob(TENSORS_FILE)).read_bytes()]


def _read_clusters(path: Path) -> None:
    from vllm_crossspec.drafting.flashhead.assets import TENSORS_FILE, read_assets

    read_assets(_beside(path, ".clusters", TENSORS_FILE))


def _read_heads(path: Path) -> None:
    from vllm_crossspec.drafting.flashhead.assets import CONFIG_FILE, read_assets

    folder = path.with_suffix(".head")
    shutil.copytree(POCKET / HEAD, folder, dirs_exist_ok=True)
    read_assets(_beside(path, ".head", CONFIG_FILE))


def _costs() -> list[bytes]:
    table = [[0.1, 0.2], [0.3, 0.4]]
    costs = {"drafters": ["a", "b"], "owners": ["a", "a"], "batch_sizes": [1, 8]}
    return [json.dumps(costs | dict.fromkeys(("draft", "verify", "switch"), table)).encode()]


def _read_costs(path: Path) -> None:
    from vllm_crossspec.load.costs import read_costs

    read_costs(path, ("a", "b"), "router.costs")


def _rows() -> list[bytes]:
    rows = [{"prompt": "a", "id": 1, "seed": 3}, {"messages": [{"role": "user", "content": "b"}], "sampling": {}}]
    return ["\n".join(map(json.dumps, rows)).encode()]


def _read_rows(path: Path) -> None:
    from vllm_crossspec.cli.batch import read_requests

    read_requests(path)


def _read_request(path: Path) -> None:
    from vllm import SamplingParams

    from vllm_crossspec.step.requests import category_number, check_request, draft_mode, opted_out

    asked = _json(path)
    if not isinstance(asked, dict):
        return
    sampling, categories = SamplingParams(extra_args=asked), ("law", "math")
    check_request(sampling, categories)
    draft_mode(sampling)
    opted_out(sampling)
    category_number(sampling, categories)


def _files(*names: str) -> Callable[[], list[bytes]]:
    """Of the pocket models."""
    return lambda: [(POCKET / name).read_bytes() for name in names]


def one_line(problem: ValueError) -> None:
    if "\n" in str(problem) or not str(problem):
        raise AssertionError(f"not one sentence: {problem!r}") from problem


REQUESTS = ({"crossspec": "off"}, {"crossspec_category": "law"})
CONFIGS = _files(*(f"{name}/config.json" for name in ("eagle3", "dflash", "dart", "confu", "draft-model")))
TARGETS = {
    name: Target(description, seeds, read, (f"vllm_crossspec.{watched}",))
    for name, description, seeds, read, watched in (
        ("trie", "a .trie of DART's, imported and looked up", _tiny_trie, _read_trie, "ngram_store"),
        ("store", "an n-gram store, opened and looked up", _tiny_store, _read_store, "ngram_store"),
        ("spec", "a speculative_config", lambda: [json.dumps(SPEC).encode()], _read_spec, "config.parse"),
        ("calibration", "HeteroSpec's", _files("heterospec/calibration.json"), _read_calibration, "heterospec"),
        ("router", "a router's router.json", _files("router/router.json"), _read_router, "routing.checkpoint"),
        ("clusters", "FlashHead's clusters", _clusters, _read_clusters, "drafting.flashhead"),
        ("head", "FlashHead's config.json", _files(f"{HEAD}/config.json"), _read_heads, "drafting.flashhead"),
        ("costs", "a router's costs", _costs, _read_costs, "load.costs"),
        ("rows", "rows of `crossspec batch`", _rows, _read_rows, "cli"),
        (
            "request",
            "a request's extra arguments",
            lambda: [json.dumps(asked).encode() for asked in REQUESTS],
            _read_request,
            "step.requests",
        ),
        ("config", "a drafter's config.json, by every kind", CONFIGS, _read_config, "drafters"),
    )
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=TARGETS, help="what is read")
    parser.add_argument("--runs", type=int, default=100_000, help="inputs (default: 100000)")
    parser.add_argument("--seed", type=int, default=1, help="libFuzzer's (default: 1)")
    parser.add_argument("--corpus", type=Path, help="folder of inputs (default: a temporary one)")
    parser.add_argument("--list", action="store_true", help="say what there is to read, and end")
    return parser.parse_args(argv)


def main() -> None:
    given = arguments()
    if given.list or given.target is None:
        for name, target in TARGETS.items():
            print(f"{name:12} {target.description}")
        return
    try:
        import atheris
    except ModuleNotFoundError:
        sys.exit("fuzz.py: this needs atheris: pip install atheris")
    target = TARGETS[given.target]
    with atheris.instrument_imports(include=list(target.watched)):
        for seed in target.seeds():  # imports what is watched
            path = Path(tempfile.mkdtemp(prefix="crossspec-fuzz-")) / "input"
            path.write_bytes(seed)
            target.read(path)
    corpus = given.corpus or path.parent / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"good-{number}").write_bytes(seed)

    def one(data: bytes) -> None:
        path.write_bytes(data)
        began = time.process_time()
        try:
            target.read(path)
        except ValueError as problem:
            one_line(problem)
        if (took := time.process_time() - began) > SECONDS:
            raise AssertionError(f"it took {took:.1f} seconds of a core")

    limits = [f"-timeout={HANGS}", f"-rss_limit_mb={MEBIBYTES}", f"-artifact_prefix={corpus}/"]
    atheris.Setup([sys.argv[0], f"-runs={given.runs}", f"-seed={given.seed}", *limits, str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
