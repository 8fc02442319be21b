"""DFlash (block diffusion): one non-causal pass over a block, with the target's states as key/value context."""

from vllm_crossspec.kinds.drafter import DrafterKind

KIND = DrafterKind(
    name="dflash",
    vllm_method="dflash",
    checkpoint="vllm_crossspec.drafters.dflash.checkpoint",
    proposer="vllm_crossspec.drafters.dflash.proposer:DFlashProposer",
    tree_proposer="vllm_crossspec.drafters.dflash.proposer:DFlashTreeProposer",
    tree="best_first",
    supplies="marginals",
    is_autoregressive=False,
    marks=("dflash",),
)
