"""The registry of drafters: a kind of drafter is one entry here, one folder beside it, and one proposer."""

from importlib import import_module
from typing import Any, NamedTuple

from vllm_crossspec.names import look_up
from vllm_crossspec.tree.base import Supply


class DrafterKind(NamedTuple):
    """One kind of drafter.

    Attributes:
        name: as users write it.
        carrier: vLLM's own method whose configuration carries this drafter through the engine.
        checkpoint: module with ``read_facts(config: dict, folder_or_id: str, target: TargetFacts) -> DrafterFacts``.
        proposer: ``module:class`` of the proposer that drafts chains.
        tree_proposer: of the one that drafts trees.
        reads_target_slots: its first pass reads the target's slot mappings, which a later drafter may overwrite;
            such drafters run first.
        tree: the builder of trees (``tree.base``) that this drafter's candidates are for.
        supplies: what it can yield beside first choices (``tree.base``); other builders that need no more suit it, too.
        drafts_trees: whether its drafts are trees where the user says nothing of their shape.
        head: the output layer (``head.type``) that it has where the user says nothing; None for its checkpoint's own.
        shares: whether it can draft beside others in one engine.
        contemplates: whether the target runs contemplate rows for it (``contemplate.layout``).
        is_autoregressive: whether each of its tokens sees the ones before it; routers number such drafters first.
    """

    name: str
    carrier: str
    checkpoint: str
    proposer: str
    tree_proposer: str
    reads_target_slots: bool
    tree: str
    supplies: Supply
    drafts_trees: bool
    is_autoregressive: bool
    head: str | None = None
    shares: bool = True
    contemplates: bool = False

    def load_checkpoint_module(self) -> Any:
        """The module that reads this kind's checkpoints."""
        return import_module(self.checkpoint)

    def load_proposer(self, is_tree: bool = False) -> Any:
        """The proposer's class, of chains or of trees; imports vLLM."""
        module, _, name = (self.tree_proposer if is_tree else self.proposer).partition(":")
        return getattr(import_module(module), name)


_KINDS = {
    kind.name: kind
    for kind in (
        DrafterKind(
            name="eagle3",
            carrier="eagle3",
            checkpoint="vllm_crossspec.drafters.eagle3.checkpoint",
            proposer="vllm_crossspec.engine.proposers.eagle3:Eagle3Proposer",
            tree_proposer="vllm_crossspec.engine.proposers.eagle3_tree:Eagle3TreeProposer",
            reads_target_slots=True,
            tree="dynamic",
            supplies="levels",
            drafts_trees=False,
            is_autoregressive=True,
        ),
        DrafterKind(
            name="dflash",
            carrier="dflash",
            checkpoint="vllm_crossspec.drafters.dflash.checkpoint",
            proposer="vllm_crossspec.engine.proposers.dflash:DFlashProposer",
            tree_proposer="vllm_crossspec.engine.proposers.dflash:DFlashTreeProposer",
            reads_target_slots=False,
            tree="best_first",
            supplies="marginals",
            drafts_trees=False,
            is_autoregressive=False,
        ),
        DrafterKind(
            name="dart",
            carrier="dflash",
            checkpoint="vllm_crossspec.drafters.dart.checkpoint",
            proposer="vllm_crossspec.engine.proposers.dart:DartProposer",
            tree_proposer="vllm_crossspec.engine.proposers.dart:DartTreeProposer",
            reads_target_slots=False,
            tree="continuity",
            supplies="marginals",
            drafts_trees=True,
            is_autoregressive=False,
        ),
        DrafterKind(
            name="confu",
            carrier="eagle3",
            checkpoint="vllm_crossspec.drafters.confu.checkpoint",
            proposer="vllm_crossspec.engine.proposers.confu:ConfuProposer",
            tree_proposer="vllm_crossspec.engine.proposers.confu:ConfuProposer",
            reads_target_slots=True,
            tree="dynamic",
            supplies="levels",
            drafts_trees=False,
            is_autoregressive=True,
            contemplates=True,
        ),
        *(
            DrafterKind(
                name=name,
                carrier="draft_model",
                checkpoint="vllm_crossspec.drafters.draft_model.checkpoint",
                proposer="vllm_crossspec.engine.proposers.draft_model:DraftModelProposer",
                tree_proposer="",
                reads_target_slots=False,
                tree="chain",
                supplies="tokens",
                drafts_trees=False,
                is_autoregressive=True,
                head=head,
                shares=False,
            )
            for name, head in (("draft_model", None), ("flashhead", "flashhead"))
        ),
    )
}


def drafter_kinds() -> tuple[str, ...]:
    """Names of all kinds of drafter."""
    return tuple(_KINDS)


def drafter_kind(name: str, key: str) -> DrafterKind:
    """The kind called ``name``.

    Raises:
        ValueError: there is none; the sentence names ``key`` and the nearest kind.
    """
    return look_up(name, _KINDS, key, "drafter")
