"""What the n-gram term of DART's trees is worth: tokens a round on held-out responses, without an engine.

    python benchmarks/dart_offline.py --responses work/responses                  # the pocket models and their store
    python benchmarks/dart_offline.py --responses work/responses --store a.safetensors --store b.safetensors
    python benchmarks/dart_offline.py --responses FOLDER --target MODEL --drafter MODEL --store FILE --weights 0,0.5

A greedy response is the target's own path: whatever a tree has of it would be accepted. The drafter says its marginals
at every place of every response once; then each tree goes through the responses round by round, all of them side by
side. Gains are beside the same tree without a store, with the 95% interval that drawing other responses (bootstrap)
would give. Prints a table, and one JSON document as its last line; benchmarks/README.md describes it. Needs no GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from intervals import Walk, gain
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.torch import load_file

from vllm_crossspec.cli import meta
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.ngram.store import NgramStore, open_store, tokenizer_hash
from vllm_crossspec.training.dart import DartConfig, DartDrafter
from vllm_crossspec.training.generations import Generation, collate, read_generations
from vllm_crossspec.training.states import FrozenTarget, load_target
from vllm_crossspec.tree.continuity import Scoring
from vllm_crossspec.tree.torch_ops import ContinuityTree
from vllm_crossspec.types import TokenTree

POCKET = Path(meta.__file__).resolve().parents[1] / "pocket"
ROWS_AT_ONCE = 8
TREES = {
    "continuity": Scoring(),
    # The paper's softmax, over the drafter's vocabulary; the authors' program and ours have it over the candidates.
    "continuity_whole": Scoring(renormalises=False),
    # The likeliest paths under ln p + weight * ln p_ngram; its beam is as wide as the tree.
    "best_first": Scoring(logit_decay=1.0, level_decay=0.0, renormalises=False),
}
SETTINGS = ("nodes", "top_k", "beam", "order", "backoff", "logit_decay", "level_decay")


class Places(NamedTuple):
    """Every place at which a round may begin: P of them, K drafted positions of C candidates, W tokens of context.

    Attributes:
        log_probs: float32 [P, K, C], falling along C.
        tokens: int64 [P, K, C], of the target's vocabulary.
        contexts: int64 [P, W], the last tokens before the draft, the latest last; -1 where there is none.
        truth: int64 [P, K], what the target went on with.
        first: int64 [B], the first place of each response, ``count`` [B] of them in a row.
        count: int64 [B].
        categories: of the B responses.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    contexts: torch.Tensor
    truth: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    categories: list[str]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--responses", type=Path, required=True, help="folder that `crossspec train generate` wrote for this target")
    add("--split", default="dev", help="its shards SPLIT-*.jsonl.gz; only greedy responses count")
    add("--target", type=Path, default=POCKET / "target", help="folder of the target")
    add("--drafter", type=Path, default=POCKET / "dart", help="folder of the DART drafter")
    add("--store", type=Path, action="append", help="n-gram store; may be repeated. Default: the pocket's")
    add("--order", type=int, help="use n-grams of up to this length. Default: the store's")
    add("--backoff", type=float, help="stupid backoff by this factor. Default: the longest match, as in the paper")
    add("--trees", default="continuity,best_first", help="kinds of tree")
    add("--weights", default="0,0.25,0.5,1.0", help="of the n-gram term; 0 is without a store. The paper has 0.5")
    add("--nodes", type=int, default=60, help="nodes of a tree")
    add("--top-k", type=int, default=25, help="candidates at a position")
    add("--beam", type=int, default=20, help="beam width of `continuity`")
    add(
        "--logit-decay", type=float, default=0.9, help="weight of the logits in `continuity`, to the power of the level"
    )
    add("--level-decay", type=float, default=0.7, help="level weight of `continuity`: (level + 1) ** -level_decay")
    add("--rows", type=int, help="at most so many responses")
    add("--threads", type=int, default=1, help="of PyTorch")
    add("--json", type=Path, help="also write the document to this file")
    options = parser.parse_args(argv)
    options.store = options.store or [POCKET / "ngram" / "store.safetensors"]
    options.trees = options.trees.split(",")
    if unknown := set(options.trees) - set(TREES):
        parser.error(f"--trees {', '.join(sorted(unknown))}: choose of {', '.join(TREES)}")
    try:
        options.weights = [float(weight) for weight in options.weights.split(",")]
    except ValueError:
        parser.error(f"--weights {options.weights}: give numbers with commas between them")
    return options


# -- the drafter ----------------------------------------------------------------------------------------------


def open_target(folder: Path, bfloat16: bool) -> FrozenTarget:
    """The target with the states that a DART drafter reads; computes under bfloat16 autocast or in float32."""
    causal_lm, _ = load_target(folder, torch.float32)
    return FrozenTarget(causal_lm, default_target_layers(causal_lm.config.num_hidden_layers), bfloat16)


def load_drafter(folder: Path, target: FrozenTarget) -> DartDrafter:
    """A drafter in the public format, as :func:`vllm_crossspec.training.dart.checkpoint` writes it."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"--drafter {folder} has no config.json; give the folder of a DART drafter")
    settings = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    kept = tensors.pop("d2t") + torch.arange(len(tensors["lm_head.weight"]))
    is_shifted = "draft_length" in settings
    config = DartConfig(
        intermediate_size=settings["intermediate_size"],
        draft_vocab_size=len(kept),
        num_drafts=settings["draft_length"] + 1 if is_shifted else settings["num_masks"],
        is_shifted=is_shifted,
    )
    model = DartDrafter(config, target.config, kept, seed=0)
    known = model.state_dict().keys()
    model.load_state_dict({name: x for name, x in tensors.items() if name in known} | {"kept": kept})
    return model.eval()


@torch.no_grad()
def marginals(
    model: DartDrafter, target: FrozenTarget, rows: Sequence[Generation], top_k: int, width: int, progress: Progress
) -> Places:
    """Let the drafter speak at every place of ``rows``; rounds that would reach past a response's end have none.

    Args:
        model: the drafter.
        target: gives it the features.
        rows: greedy responses.
        top_k: C, candidates at a position.
        width: W, tokens of context.
        progress: shows how far it is.
    """
    depth = model.num_drafts
    rows = sorted(rows, key=lambda row: len(row.prompt_ids) + len(row.response_ids))
    parts: list[tuple[torch.Tensor, ...]] = []
    bar = progress.add_task("marginals", total=len(rows))
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        group = rows[begin : begin + ROWS_AT_ONCE]
        batch = collate(group)
        count = batch.ends - batch.starts - depth
        steps = torch.arange(int(count.max()))
        is_place = steps < count[:, None]
        # The token that the target has just emitted; the draft's entry stands one position before it.
        last = batch.starts[:, None] + torch.where(is_place, steps, 0)
        with target.autocast():
            logits = model(target.states(batch.tokens), batch.tokens, target.embedding, last - 1)
        log_probs, indices = likeliest(logits[is_place].float().log_softmax(-1), min(top_k, logits.shape[-1]))
        before = _around(batch.tokens, last, torch.arange(1 - width, 1))[is_place]
        after = _around(batch.tokens, last, torch.arange(1, depth + 1))[is_place]
        parts.append((log_probs, model.kept[indices], before, after, count))
        progress.advance(bar, len(group))
    *places, counts = (torch.cat(part) for part in zip(*parts, strict=True))
    return Places(*places, counts.cumsum(0) - counts, counts, [row.category for row in rows])


def likeliest(log_probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of the last dimension, falling, the first of equals first as argmax has it, and where they are.

    Logits in bfloat16 are often equal, and which of them `topk` puts first is left open.
    """
    values, indices = log_probs.topk(count, dim=-1)
    indices, order = indices.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(-1, order)


def _around(tokens: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Tokens [B, T] at ``places`` [B, A] plus offsets [n]: [B, A, n], -1 before the beginning."""
    columns = places[..., None] + offsets
    found = tokens.gather(1, columns.clamp(0, tokens.shape[1] - 1).flatten(1)).view(columns.shape)
    return found.masked_fill(columns < 0, -1)


# -- decoding -------------------------------------------------------------------------------------------------


def accepted(tree: TokenTree, truth: torch.Tensor) -> torch.Tensor:
    """How many tokens of ``truth`` int64 [R, K] the trees have as a path from the root: int64 [R]."""
    num_reqs, num_nodes = tree.tokens.shape
    is_live = torch.arange(num_nodes) < tree.sizes[:num_reqs, None]
    at, length = torch.zeros(num_reqs, dtype=torch.int64), torch.zeros(num_reqs, dtype=torch.int64)
    goes_on = torch.ones(num_reqs, dtype=torch.bool)
    for token in truth.unbind(1):
        is_next = is_live & (tree.parents == at[:, None]) & (tree.tokens == token[:, None])
        goes_on = goes_on & is_next.any(1)
        at = torch.where(goes_on, is_next.int().argmax(1) + 1, at)
        length += goes_on
    return length


def walk(places: Places, draft: Callable[[torch.Tensor], torch.Tensor]) -> Walk:
    """Decode all responses side by side; ``draft`` maps places int64 [R] to accepted tokens [R]."""
    at = torch.zeros_like(places.count)
    tokens, rounds = torch.zeros_like(at), torch.zeros_like(at)
    while len(active := (at < places.count).nonzero()[:, 0]):
        emitted = draft(places.first[active] + at[active]) + 1
        at[active] += emitted
        tokens[active] += emitted
        rounds[active] += 1
    return Walk(tokens.numpy(), rounds.numpy())


def tree_walk(places: Places, kind: str, weight: float, store: NgramStore | None, options: argparse.Namespace) -> Walk:
    """Decode with trees of one kind; ``store`` is None exactly where ``weight`` is 0."""
    num_reqs, depth = len(places.count), places.truth.shape[1]
    scoring = TREES[kind]._replace(ngram_weight=weight)
    if kind != "best_first":
        scoring = scoring._replace(logit_decay=options.logit_decay, level_decay=options.level_decay)
    builder = ContinuityTree(
        num_nodes=options.nodes,
        depth=depth,
        top_k=places.tokens.shape[2],
        beam_width=options.nodes if kind == "best_first" else options.beam,
        max_num_reqs=num_reqs,
        device=torch.device("cpu"),
        scoring=scoring,
        store=store,
        backoff=options.backoff,
    )

    def draft(at: torch.Tensor) -> torch.Tensor:
        tree = empty_tree(len(at), options.nodes)
        builder.build(
            log_probs=places.log_probs[at],
            tokens=places.tokens[at],
            contexts=None if store is None else places.contexts[at],
            out=tree,
        )
        return accepted(tree, places.truth[at])

    return walk(places, draft)


def empty_tree(num_reqs: int, num_nodes: int) -> TokenTree:
    return TokenTree(
        torch.zeros(num_reqs, num_nodes, dtype=torch.int64),
        torch.zeros(num_reqs, num_nodes, dtype=torch.int32),
        torch.zeros(num_reqs, num_nodes),
        torch.zeros(num_reqs, dtype=torch.int32),
    )


def chain_walk(places: Places) -> Walk:
    """Decode with the first choices alone."""
    hits = (places.tokens[:, :, 0] == places.truth).long().cumprod(1).sum(1)
    return walk(places, lambda at: hits[at])


# -- figures --------------------------------------------------------------------------------------------------


def tokens_per_round(result: Walk, categories: Sequence[str]) -> dict[str, float]:
    """Over all responses, and by category."""
    names = np.array(categories)
    figures = {"all": float(result.tokens.sum() / result.rounds.sum())}
    for name in sorted(set(categories)):
        figures[name] = float(result.tokens[names == name].sum() / result.rounds[names == name].sum())
    return figures


def measure(options: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """One row of figures for the chain and for every tree, weight and store."""
    responses, digest = options.responses, tokenizer_hash(options.target, "--target")
    stores = {str(p): open_store(p, key="--store", order=options.order, tokenizer=digest) for p in options.store}
    if not list(responses.glob(f"{options.split}-*.jsonl.gz")):
        raise ValueError(f"--responses {responses}: no {options.split}-*.jsonl.gz; see `crossspec train generate`")
    target = open_target(options.target, bfloat16=True)
    model = load_drafter(options.drafter, target)
    rows = read_generations(responses, options.split, target.config.vocab_size)
    rows = [row for row in rows if row.greedy and len(row.response_ids) > model.num_drafts][: options.rows]
    if not rows:
        raise ValueError(f"--responses {responses}: no greedy response is longer than {model.num_drafts} tokens")
    width = max(store.order for store in stores.values()) - 1
    places = marginals(model, target, rows, options.top_k, width, progress)
    runs: list[tuple[str, float, str | None]] = []
    for kind in options.trees:
        runs.append((kind, 0.0, None))
        runs += [(kind, weight, path) for path in stores for weight in options.weights if weight > 0]
    bar = progress.add_task("trees", total=len(runs))
    found = [{"tree": "chain", "weight": 0.0, "store": None, **_figures(chain_walk(places), None, places)}]
    for kind, weight, path in runs:
        result = tree_walk(places, kind, weight, stores[path] if path is not None else None, options)
        if path is None:
            base = result
        found.append({"tree": kind, "weight": weight, "store": path, **_figures(result, base, places)})
        progress.advance(bar)
    return found


def _figures(result: Walk, base: Walk | None, places: Places) -> dict[str, Any]:
    is_gain = base is not None and base is not result
    return {
        "tokens_per_round": {k: round(v, 4) for k, v in tokens_per_round(result, places.categories).items()},
        "rounds": int(result.rounds.sum()),
        "responses": len(result.rounds),
        "gain_percent": [round(x, 2) for x in gain(result, base)] if is_gain else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows, to read."""
    grid = Table(title="tokens a round")
    categories = list(rows[0]["tokens_per_round"])
    for name in ("tree", "store", "weight"):
        grid.add_column(name, no_wrap=True)
    for name in (*categories, "gain", "95%"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        seen = row["gain_percent"]
        grid.add_row(
            row["tree"],
            Path(row["store"]).stem if row["store"] else "",
            f"{row['weight']:g}" if row["store"] else "",
            *(f"{row['tokens_per_round'][name]:.2f}" for name in categories),
            *((f"{seen[0]:+.1f}%", f"{seen[1]:+.1f} {seen[2]:+.1f}") if seen else ("", "")),
        )
    return grid


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 2 for what cannot be measured."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            rows = measure(options, progress)
    except ValueError as problem:
        console.print(str(problem), highlight=False)
        return 2
    Console(width=max(120, Console().width)).print(table(rows))
    document = {
        "meta": {
            "benchmark": "dart_offline",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": " ".join(sys.argv),
            "commit": meta.commit(),
            "hardware": meta.hardware(),
            **{name: getattr(options, name) for name in SETTINGS},
        },
        "rows": rows,
    }
    text = json.dumps(document)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
