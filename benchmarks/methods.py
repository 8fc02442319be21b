"""What the benchmarks of whole rounds run: ways to decode, and the models for them."""

import argparse
import json
from pathlib import Path
from typing import Any

from shapes import SHAPES, random_router, write_clusters, write_models
from synthetic_ngrams import write_store

from vllm_crossspec.config.schema import AdaptivePolicy
from vllm_crossspec.heterospec.calibration import BinFacts, Calibration, TreeShape, write_calibration
from vllm_crossspec.heterospec.heterospec import GAMMAS, default_alpha, make_policy
from vllm_crossspec.kinds.identity import identify
from vllm_crossspec.kinds.tree import KINDS
from vllm_crossspec.routing.checkpoint import save_router

METHODS = (
    "none", "native-eagle3", "native-dflash", "eagle3", "dflash", "dart-chain", "draft-model", "flashhead",
    "draft-model-tree", "eagle3-tree", "eagle3-heterospec", "confu", "confu-tree", "dflash-tree", "dflash-continuity",
    "dart-nongram", "dart", "whiflash-entropy", "whiflash-neural",
)  # fmt: skip
# EAGLE-3's own sizes: levels of a tree, and children of a node and nodes of a level that get some.
TREE_DEPTH, TREE_TOP_K = 8, 10
ROUTED = ("whiflash-entropy", "whiflash-neural")
# Trees of parallel drafters that a beam searches; those named here go by n-grams, too.
SEARCHED = ("dflash-continuity", "dart-nongram", "dart")
WITH_NGRAMS = ("dflash-continuity", "dart")
# A draft model of its own, with its dense head and with clusters of it.
STANDALONE = {"draft-model": "draft_model", "flashhead": "flashhead"}
SURE = 1e9
"""A Phi that every tree is below, in nats."""
# EAGLE-3's tree, sized by request and round.
ADAPTIVE = "eagle3-heterospec"
# EAGLE-3's drafts, for which the target contemplates; beside what each costs without.
CONTEMPLATING = {"confu": "eagle3", "confu-tree": "eagle3-tree"}
TREES = ("eagle3-tree", "draft-model-tree", ADAPTIVE, "confu-tree", "dflash-tree", *SEARCHED, *ROUTED)
MATCHED = (*TREES, "confu")
"""Methods that sample-and-match alone can verify: their rows are no chain's."""


def speculative_config(method: str, models: dict[str, str], options: argparse.Namespace) -> dict[str, Any] | None:
    """What a user would pass as ``--speculative-config`` for this method; None for plain decoding."""
    if method == "none":
        return None
    meta, _, name = method.removesuffix("-chain").rpartition("-")
    extra: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    if options.acceptance is not None:
        extra = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": options.acceptance}
        ours = {"verification": "rejection"}
    length = {"num_speculative_tokens": options.tokens}
    if method in STANDALONE:
        config = {"method": STANDALONE[method], "model": models["draft-model"], "tree": {"type": "chain"}, **length}
        return config | extra | ours | ({"head": models["clusters"]} if method == "flashhead" else {})
    if method in SEARCHED:  # DART's search: its appendix D has 25 candidates and a beam of 20, which are ours
        ngrams = {"ngram": {"model": models["ngram"]}} if method in WITH_NGRAMS else {}
        return _tree_config(method.partition("-")[0], models, options, "continuity") | ngrams
    if method in TREES:
        if method in ROUTED:
            return _routed_config(name, models, options)
        adaptive = {"adaptive": models["calibration"]} if method == ADAPTIVE else {}
        return _tree_config(meta, models, options) | adaptive
    if method == "confu":  # whole chains at every batch size, as EAGLE-3's are
        tree = {"type": "chain", "by_batch_size": {"1": options.tokens}}
        return {"method": method, "model": models[method], **length, "tree": tree}
    config = {"method": name, "model": models[name], **length, **extra}
    return config if meta == "native" else config | {"tree": {"type": "chain"}, **ours}


def _tree_config(
    kind: str, models: dict[str, str], options: argparse.Namespace, tree_type: str = "best_first"
) -> dict[str, Any]:
    # Whole trees at every batch size: what they cost is what is asked here.
    whole = {"num_nodes": options.nodes, "by_batch_size": {"1": options.nodes}}
    config = {"method": kind.replace("-", "_"), "model": models[kind]}
    if kind in ("eagle3", "confu", "draft-model"):
        return config | {"tree": {"type": "dynamic", "depth": TREE_DEPTH, "top_k": TREE_TOP_K, **whole}}
    return config | {"num_speculative_tokens": options.tokens, "tree": {"type": tree_type, **whole}}


def _routed_config(policy: str, models: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Both drafters with their trees, and a router; the neural one is a random one of the right size."""
    drafters = {kind: _tree_config(kind, models, options) for kind in ("eagle3", "dflash")}
    for drafter in drafters.values():
        del drafter["method"]
    router: dict[str, Any] = {"policy": policy}
    if policy == "neural":
        router["model"] = models["router"]
    if options.threshold is not None:
        router["threshold"] = options.threshold
    return {"method": "whiflash", "drafters": drafters, "router": router}


def query_lengths(method: str, options: argparse.Namespace) -> set[int]:
    """Tokens that a request has in the passes of a round: the target's, the drafter's first, the drafter's others."""
    # One token is what plain decoding and an autoregressive drafter's later passes take.
    lengths = {1, options.tokens + 1}
    if method in STANDALONE:
        lengths.add(2)  # the last accepted token and the bonus token
    if method.startswith("dart"):
        lengths.add(options.tokens)  # the last accepted entry is the first of its query rows
    if method in TREES:
        lengths |= {options.nodes + 1, TREE_TOP_K}
    if method == "draft-model-tree":
        lengths.add(TREE_DEPTH + 2)  # the longest path, the root before it and the bonus token behind
    if method in CONTEMPLATING:
        # A contemplate row for every verified one; a future beside every level's nodes.
        nodes, level = (options.nodes, TREE_TOP_K) if method in TREES else (options.tokens, 1)
        lengths = {1, 2 * nodes + 2, level + 1}
    if method == ADAPTIVE:
        lengths |= {width + 1 for width in paper_policy(options).widths}
    return lengths


def with_nodes(options: argparse.Namespace, num_nodes: int) -> argparse.Namespace:
    """The same options with trees of so many draft tokens."""
    return argparse.Namespace(**vars(options) | {"nodes": num_nodes})


def paper_policy(options: argparse.Namespace) -> AdaptivePolicy:
    """HeteroSpec's own sizes for these trees, every tree being in the surest bin: the most levels, the fewest rows.

    What a drafter with made-up weights is sure of says nothing, so that the bins are not left to it.
    """
    thresholds = [SURE + i for i in range(len(GAMMAS))]
    return make_policy(thresholds=thresholds, num_nodes=options.nodes, alpha=default_alpha(TREE_DEPTH))


def write_made_up_calibration(models: dict[str, Path], options: argparse.Namespace) -> None:
    """The file that makes the engine size its trees by :func:`paper_policy`."""
    policy = paper_policy(options)
    calibration = Calibration(
        thresholds=policy.thresholds,
        bins=(BinFacts(1.0, 1, 1, 1.0),) * len(policy.widths),
        gammas=GAMMAS,
        alpha=default_alpha(TREE_DEPTH),
        tree=TreeShape(TREE_DEPTH, TREE_TOP_K, options.nodes, KINDS["dynamic"].defaults["sharpness"]),
        target=identify(str(models["target"]), "target"),
        drafter=identify(str(models["eagle3"]), "eagle3"),
        made={"made": "up"},
    )
    write_calibration(models["calibration"], calibration)


def model_folders(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Where the models are by name: those of the user, or dummies below ``folder``.

    ``ngram``, ``clusters`` and ``calibration`` of adaptive trees are made where a method wants them.
    """
    if not options.checkpoints:
        shape = SHAPES[options.shape]
        shape = shape._replace(num_layers=options.layers or shape.num_layers)
        store = folder / "models" / "ngram" / f"{shape.vocab_size}.safetensors"
        if any(method in WITH_NGRAMS for method in options.methods or ()) and not store.is_file():
            write_store(store, shape.vocab_size)
        clusters = folder / "models" / "clusters"
        if "flashhead" in (options.methods or ()):
            write_clusters(clusters, shape)
        found = write_models(folder / "models", shape) | {"ngram": store, "clusters": clusters}
        found["calibration"] = folder / "models" / "calibration.json"
        if ADAPTIVE in (options.methods or ()):
            write_made_up_calibration(found, options)
        return {name: str(path) for name, path in found.items()}
    hidden_size = json.loads((options.checkpoints / "target" / "config.json").read_text())["hidden_size"]
    save_router(folder / "router", random_router(hidden_size))
    drafters = ("eagle3", "confu", "dflash", "dart", "draft-model")
    found = {name: options.checkpoints / name for name in ("target", *drafters)}
    found["clusters"] = options.checkpoints / "flashhead-draft-model"
    found["calibration"] = options.checkpoints / "heterospec" / "calibration.json"
    found |= {"router": folder / "router", "ngram": options.checkpoints / "ngram" / "store.safetensors"}
    return {name: str(path) for name, path in found.items()}
