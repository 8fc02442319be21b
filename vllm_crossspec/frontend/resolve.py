"""Settings and the files that they name: what files say is filled in, and what does not go together is refused.

Each file is read once, here. What is wrong is a ValueError of one sentence, which names the key and the fix.
"""

from pathlib import Path
from typing import Any, NamedTuple

from vllm_crossspec.config.schema import META_METHODS, CrossSpecConfig, DrafterConfig
from vllm_crossspec.drafting.flashhead.check import check_head
from vllm_crossspec.drafting.flashhead.head import MAX_TOP_K
from vllm_crossspec.heterospec.calibration import drafter_policy
from vllm_crossspec.kinds.checkpoint import facts_of, read_config
from vllm_crossspec.kinds.identity import Target
from vllm_crossspec.kinds.registry import load
from vllm_crossspec.kinds.settings import MAX_DRAFT_TOKENS
from vllm_crossspec.kinds.tree import DynamicConfig, TreeConfig, tree_kind
from vllm_crossspec.load.costs import read_costs
from vllm_crossspec.ngram_store.store import open_store, tokenizer_hash
from vllm_crossspec.routing.checkpoint import check_router
from vllm_crossspec.types import DrafterFacts, TargetFacts

NGRAM_TOP_K = 25
"""Candidates at a position of trees that n-grams help to build, where the user names none (the paper's)."""


class ResolvedDrafter(NamedTuple):
    """A drafter whose config.json was read and fits the target's sizes.

    Attributes:
        settings: with everything filled in that was left out.
        path: how its keys begin.
        config: what config.json says; empty for a drafter without weights.
    """

    settings: DrafterConfig
    path: str
    config: dict[str, Any]

    def check_store(self, target: Target) -> None:
        """Refuse an n-gram store that is damaged, or of another tokenizer than the target's."""
        ngram = self.settings.ngram
        if ngram is None:
            return
        folder = Path(str(target.tokenizer or target.model)).expanduser()
        # A target from the hub has its tokenizer in a cache; then the vocabulary's size is all that can be compared.
        tokenizer = tokenizer_hash(folder, "tokenizer") if (folder / "tokenizer.json").is_file() else None
        path, vocab_size = Path(ngram.model).expanduser(), target.facts.vocab_size
        key = f"{self.path}ngram.model"
        open_store(path, key=key, order=ngram.order, vocab_size=vocab_size, tokenizer=tokenizer)

    def check_target(self, target: Target) -> None:
        """Refuse a drafter that was trained for another target, as far as its kind can tell."""
        if check := self.settings.traits.check_target:
            load(check)(self.config, f"{self.path}model", target)

    def sized(self, target: Target) -> DrafterConfig:
        """With what its adaptive trees are given; refuses a calibration of another target, drafter or tree.

        A calibration that is not capped gives some trees more nodes than ``tree.num_nodes``: buffers and the
        scheduler's plan are made for those, and the bin of all others keeps to what the user wrote.
        """
        if self.settings.adaptive is None:
            return self.settings
        policy = drafter_policy(self.settings, self.config, target.identity, f"{self.path}adaptive.model")
        tree = self.settings.tree.model_copy(update={"num_nodes": max(policy.widths)})
        return self.settings.model_copy(update={"policy": policy, "tree": tree})


def with_files(
    settings: CrossSpecConfig, facts: TargetFacts, target_model: Any, has_weights: bool = True
) -> CrossSpecConfig:
    """The settings with all that files say, which must fit the target.

    Args:
        target_model: has ``model``, ``tokenizer`` and ``revision`` of the target, as vLLM's ModelConfig.
        has_weights: False where dummy weights are to be made up, so that none need be there.
    """
    target = Target(facts, str(target_model.model), target_model.revision, target_model.tokenizer)
    found = {name: resolved(settings, name, facts, has_weights) for name in settings.drafters}
    for drafter in found.values():
        drafter.check_store(target)
        drafter.check_target(target)
    drafters = {name: drafter.sized(target) for name, drafter in found.items()}
    longest = max(d.tree.num_nodes or d.depth for d in drafters.values())
    settings = settings.model_copy(update={"drafters": drafters, "num_speculative_tokens": longest})
    return _with_router(settings, facts) if settings.is_routed else settings


def resolved(settings: CrossSpecConfig, name: str, target: TargetFacts, has_weights: bool = True) -> ResolvedDrafter:
    """A drafter with what its checkpoint says: draft length and tapped layers, checked against the target."""
    drafter, path = settings.drafters[name], settings.path_of(name)
    kind, key = drafter.traits, path + "model"
    config = read_config(drafter.model, key, drafter.native.get("revision")) if kind.has_model else {}
    facts = facts_of(kind, config, drafter.model, key, target, has_weights)
    tree = resolve_tree(drafter)
    check_head(drafter.model_copy(update={"tree": tree}), config, facts, path + "head")
    num_tokens = _draft_tokens(settings, drafter, tree, facts, path)
    if tree.is_chain and kind.contemplates:
        # The rows of a chain are the rows of a tree in which every node has one child.
        shape = {"depth": num_tokens, "top_k": 1, "num_nodes": num_tokens}
        tree = DynamicConfig(type="dynamic", by_batch_size=tree.by_batch_size, **shape)
    folder = Path(drafter.model).expanduser()
    update = {
        "num_speculative_tokens": num_tokens,
        "target_layers": facts.target_layers,
        "overrides": dict(facts.overrides),
        "model": str(folder) if drafter.model and folder.is_dir() else drafter.model,
        "tree": tree,
    }
    return ResolvedDrafter(drafter.model_copy(update=update), path, config)


def _draft_tokens(
    settings: CrossSpecConfig, drafter: DrafterConfig, tree: TreeConfig, facts: DrafterFacts, path: str
) -> int:
    """K: as the user says, else as the checkpoint does."""
    wanted = tree.depth or drafter.num_speculative_tokens or settings.num_speculative_tokens
    limit = facts.max_draft_tokens
    if wanted is not None and limit is not None and wanted > limit:
        if drafter.num_speculative_tokens is not None or settings.method not in META_METHODS:
            raise ValueError(
                f"{path}num_speculative_tokens is {wanted}, but this drafter's block holds {limit} draft tokens; "
                f"use {limit} or less"
            )
        wanted = limit  # the common bound is of the longest drafter; this one drafts what it can
    num_tokens = wanted or facts.default_draft_tokens
    if not 1 <= num_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(
            f"{path}model: config.json of {drafter.model} asks for {num_tokens} draft tokens; a request has 1 to "
            f"{MAX_DRAFT_TOKENS}: give num_speculative_tokens"
        )
    return num_tokens


def resolve_tree(drafter: DrafterConfig) -> TreeConfig:
    """The tree with every size that the user left out; a chain stays as it is."""
    if drafter.tree.is_chain:
        return drafter.tree
    given = {k: v for k, v in drafter.tree if v is not None}
    kind = tree_kind(drafter.tree.type, "tree.type")
    if "depth" in kind.takes and drafter.num_speculative_tokens is not None:
        given.setdefault("depth", drafter.num_speculative_tokens)
    if drafter.ngram is not None:
        given.setdefault("top_k", kind.defaults.get("top_k", NGRAM_TOP_K))
    own = drafter.traits.tree_defaults if drafter.tree.type == drafter.traits.tree else {}
    tree = drafter.tree.model_copy(update={**kind.defaults, **own, **given})
    if tree.top_k is None:  # the likeliest prefixes can all end at one position
        most = 255 if drafter.head is None else MAX_TOP_K
        tree = tree.model_copy(update={"top_k": min(tree.num_nodes or most, most)})
    return tree


def _with_router(settings: CrossSpecConfig, target: TargetFacts) -> CrossSpecConfig:
    """With what the router's files say; refuses another target's or other drafters', and a buffer without room."""
    router, order, key = settings.router, settings.routing_order, "speculative_config.router"
    assert router is not None
    if router.max_backlog <= settings.max_depth:
        needed = settings.max_depth + 1
        raise ValueError(
            f"{key}.max_backlog is {router.max_backlog}, but one round can accept {needed} tokens; use {needed} or more"
        )
    files: dict[str, Any] = {}
    if router.model is not None:
        size = target.hidden_size
        files["router_facts"] = check_router(router.model, hidden_size=size, drafters=order, key=f"{key}.model")
    if router.costs is not None:
        files["costs"] = read_costs(router.costs, order, f"{key}.costs")
    return settings.model_copy(update=files)


def resolve_schedules(settings: CrossSpecConfig, can_measure: bool) -> CrossSpecConfig:
    """Trees without a schedule get "auto"; none stays "auto" where nothing is measured or a drafter has its own.

    What drafts nothing is planned nothing.
    A router that weighs a round's tokens against its cost, and may choose not to draft, takes the place of a schedule.
    """
    every = settings.drafters.values()
    has_own = any(isinstance(d.tree.by_batch_size, dict) or d.records_trees for d in every)
    verifies_none = settings.records_drafts or all(d.traits.supplies == "none" for d in every)
    drafters = {}
    for name, drafter in settings.drafters.items():
        schedule: Any = drafter.tree.by_batch_size
        if verifies_none:
            schedule = {1: 0}  # a recording keeps drafts, and has none verified
        elif schedule == "auto" or (schedule is None and not drafter.tree.is_chain and not settings.routes_load):
            schedule = "auto" if can_measure and not has_own else None
        budget = "batch" if drafter.tree.budget == "batch" and schedule == "auto" else "request"
        tree = drafter.tree.model_copy(update={"by_batch_size": schedule, "budget": budget})
        drafters[name] = drafter.model_copy(update={"tree": tree})
    return settings.model_copy(update={"drafters": drafters})
