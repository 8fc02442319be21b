"""What the engine wants of a drafter's drafts."""

from typing import NamedTuple

from vllm_crossspec.config import (
    AdaptiveConfig,
    CrossSpecConfig,
    DrafterConfig,
    HeadConfig,
    LookupConfig,
    NgramConfig,
    TreeConfig,
)


class DraftSettings(NamedTuple):
    """What the engine wants of a drafter's drafts.

    Attributes:
        num_nodes: N, draft tokens that the engine verifies of a request; rows of the proposer's trees are as wide.
        num_rows: most rows of a request in the target's step: the root, the draft nodes, and contemplate rows.
        tree_nodes: most nodes of this drafter's trees; None for a chain.
        top_k: children of a node (dynamic) or candidates at a position (best_first, continuity); None for a chain.
        depth: K, deepest level.
        is_coupled: whether candidates are ranked with the target's noise for sampled requests.
        max_accepted: most draft tokens of a round that can be accepted, whichever drafter's they are.
        from_one_row: whether a round starts from one row a request, the last accepted token, what came before it
            being in the cache already; if not, from all rows that the target verified.
        tree: all of the user's tree settings; None for a chain.
        ngram: and of the n-gram store; None without one.
        head: of the output layer; None for the checkpoint's own.
        lookup: of what a drafter without weights looks for; None for the others.
        adaptive: of what sizes trees by request and round; None: all are the same.
    """

    num_nodes: int
    num_rows: int
    tree_nodes: int | None
    top_k: int | None
    depth: int
    is_coupled: bool
    max_accepted: int
    from_one_row: bool = False
    tree: TreeConfig | None = None
    ngram: NgramConfig | None = None
    head: HeadConfig | None = None
    lookup: LookupConfig | None = None
    adaptive: AdaptiveConfig | None = None

    @property
    def sharpness(self) -> float:
        """Of the order of a tree's nodes; a chain has no order to choose."""
        return 1.0 if self.tree is None or self.tree.sharpness is None else self.tree.sharpness

    @property
    def is_chain(self) -> bool:
        """Whether this drafter drafts chains."""
        return self.tree is None


def draft_settings(settings: CrossSpecConfig, drafter: DrafterConfig) -> DraftSettings:
    """What an engine of these settings, resolved, wants of one of its drafters."""
    tree, num_nodes = drafter.tree, settings.num_speculative_tokens
    assert drafter.num_speculative_tokens is not None and num_nodes is not None
    return DraftSettings(
        num_nodes=num_nodes,
        num_rows=settings.planned(num_nodes) + 1,
        tree_nodes=tree.num_nodes,
        top_k=tree.top_k,
        depth=drafter.num_speculative_tokens,
        is_coupled=settings.verification == "match" and settings.draft_sample_method != "greedy",
        max_accepted=settings.max_depth,
        tree=None if tree.is_chain else tree,
        ngram=drafter.ngram,
        head=drafter.head,
        lookup=drafter.lookup,
        adaptive=drafter.adaptive,
        from_one_row=settings.is_routed and settings.router is not None and settings.router.policy != "record",
    )
