"""EAGLE-3 (Li et al., 2025): one layer over fused low, middle and high target states, autoregressive."""

from vllm_crossspec.kinds.drafter import DrafterKind

KIND = DrafterKind(
    name="eagle3",
    vllm_method="eagle3",
    checkpoint="vllm_crossspec.drafters.eagle3.checkpoint",
    proposer="vllm_crossspec.drafters.eagle3.proposer:Eagle3Proposer",
    tree_proposer="vllm_crossspec.drafters.eagle3.tree_proposer:Eagle3TreeProposer",
    reads_target_slots=True,
    reads_next_token=True,
    tree="dynamic",
    supplies="levels",
    marks=("eagle",),
)
