"""JetSpec (hao-ai-lab, arXiv 2606.18394): DFlash with causal attention inside the block, and large trees."""

from types import MappingProxyType

from vllm_crossspec.kinds.drafter import DrafterKind

KIND = DrafterKind(
    name="jetspec",
    vllm_method="dflash",
    checkpoint="vllm_crossspec.drafters.jetspec.checkpoint",
    proposer="vllm_crossspec.drafters.dflash.proposer:DFlashProposer",
    tree_proposer="vllm_crossspec.drafters.dflash.proposer:DFlashTreeProposer",
    tree="best_first",
    tree_defaults=MappingProxyType({"num_nodes": 127}),  # its authors count the root, too
    supplies="marginals",
    drafts_trees=True,
    is_autoregressive=False,
)
