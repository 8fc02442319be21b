"""EAGLE-3 (Li et al., 2025): one layer over fused low, middle and high target states, autoregressive."""

from vllm_crossspec.drafters.base import DrafterKind

KIND = DrafterKind(
    name="eagle3",
    vllm_method="eagle3",
    checkpoint="vllm_crossspec.drafters.eagle3.checkpoint",
    proposer="vllm_crossspec.engine.proposers.eagle3:Eagle3Proposer",
    tree_proposer="vllm_crossspec.engine.proposers.eagle3_tree:Eagle3TreeProposer",
    reads_target_slots=True,
    reads_next_token=True,
    tree="dynamic",
    supplies="levels",
    marks=("eagle",),
    head_states="vllm_crossspec.training.head_states",
    trainer="vllm_crossspec.cli.train_drafters:EAGLE3",
    preloads=("vllm.model_executor.models.llama_eagle3",),
    inflate="vllm_crossspec.drafters.eagle3.inflate",
)
