"""What the user left out, filled in from checkpoints, calibrations and the registries of trees."""

from pathlib import Path

from vllm_crossspec.adaptive.calibration import load_policy
from vllm_crossspec.config import MAX_DRAFT_TOKENS, META_METHODS, CrossSpecConfig, DrafterConfig, TreeConfig
from vllm_crossspec.drafters.base import drafter_kind
from vllm_crossspec.drafters.checkpoint import check_drafter
from vllm_crossspec.heads.flashhead.check import check_head
from vllm_crossspec.heads.flashhead.head import MAX_TOP_K
from vllm_crossspec.tree.base import tree_kind
from vllm_crossspec.types import TargetFacts

NGRAM_TOP_K = 25
"""Candidates at a position of trees that n-grams help to build, where the user names none (DART, appendix D)."""


def resolve(settings: CrossSpecConfig, target: TargetFacts, has_weights: bool = True) -> CrossSpecConfig:
    """Fill in what the checkpoints say: draft lengths and tapped layers, each checked against the target."""
    drafters = {}
    for name, drafter in settings.drafters.items():
        path = settings.path_of(name)
        revision = drafter.native.get("revision")
        facts = check_drafter(drafter.kind, drafter.model, path + "model", target, revision, has_weights)
        tree = resolve_tree(drafter)
        check_head(drafter.model_copy(update={"tree": tree}), facts, path + "head")
        wanted = tree.depth or drafter.num_speculative_tokens or settings.num_speculative_tokens
        limit = facts.max_draft_tokens
        if wanted is not None and limit is not None and wanted > limit:
            if drafter.num_speculative_tokens is None and settings.method in META_METHODS:
                wanted = limit  # the common bound is of the longest drafter; this one drafts what it can
            else:
                raise ValueError(
                    f"{path}num_speculative_tokens is {wanted}, but this drafter's block holds {limit} draft tokens; "
                    f"use {limit} or less"
                )
        num_tokens = wanted or facts.default_draft_tokens
        if not 1 <= num_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"{path}model: config.json of {drafter.model} asks for {num_tokens} draft tokens; a request has 1 to "
                f"{MAX_DRAFT_TOKENS}: give num_speculative_tokens"
            )
        if tree.is_chain and drafter_kind(drafter.kind, "").contemplates:
            # The rows of a chain are the rows of a tree in which every node has one child.
            tree = tree.model_copy(update={"type": "dynamic", "depth": num_tokens, "top_k": 1, "num_nodes": num_tokens})
        folder = Path(drafter.model).expanduser()
        drafters[name] = drafter.model_copy(
            update={
                "num_speculative_tokens": num_tokens,
                "target_layers": facts.target_layers,
                "model": str(folder) if drafter.model and folder.is_dir() else drafter.model,
                "tree": tree,
            }
        )
    longest = max(d.tree.num_nodes or d.num_speculative_tokens or 0 for d in drafters.values())
    return settings.model_copy(update={"drafters": drafters, "num_speculative_tokens": longest})


def resolve_tree(drafter: DrafterConfig) -> TreeConfig:
    """The tree with every size that the user left out; a chain stays as it is."""
    if drafter.tree.is_chain:
        return drafter.tree
    given = {k: v for k, v in drafter.tree.model_dump().items() if v is not None}
    if drafter.tree.type == "dynamic" and drafter.num_speculative_tokens is not None:
        given.setdefault("depth", drafter.num_speculative_tokens)
    defaults = dict(tree_kind(drafter.tree.type, "tree.type").defaults)
    if drafter.ngram is not None:
        defaults.setdefault("top_k", NGRAM_TOP_K)
    tree = drafter.tree.model_copy(update={**defaults, **given})
    if tree.top_k is None:  # the likeliest prefixes can all end at one position
        most = 255 if drafter.head is None else MAX_TOP_K
        tree = tree.model_copy(update={"top_k": min(tree.num_nodes or most, most)})
    return tree


def resolve_extensions(settings: CrossSpecConfig) -> CrossSpecConfig:
    """Fill in how many levels adaptive trees may grow at most, and how many nodes they may have, by their calibrations.

    A calibration that is not capped gives some trees more nodes than ``tree.num_nodes``: buffers and the scheduler's
    plan are made for those, and the bin of all others keeps to what the user wrote.
    """
    drafters = {}
    for name, drafter in settings.drafters.items():
        if drafter.adaptive is not None:
            policy = load_policy(drafter.adaptive, drafter.tree.num_nodes or 1)
            adaptive = drafter.adaptive.model_copy(update={"max_extension": policy.max_extension})
            tree = drafter.tree.model_copy(update={"num_nodes": max(policy.widths)})
            drafter = drafter.model_copy(update={"adaptive": adaptive, "tree": tree})
        drafters[name] = drafter
    longest = max([settings.num_speculative_tokens or 0, *(d.tree.num_nodes or 0 for d in drafters.values())])
    return settings.model_copy(update={"drafters": drafters, "num_speculative_tokens": longest})
