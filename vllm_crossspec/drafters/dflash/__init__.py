"""DFlash (block diffusion): target states as the drafter's key/value context, one non-causal pass over a block."""

from vllm_crossspec.drafters.base import DrafterKind

KIND = DrafterKind(
    name="dflash",
    vllm_method="dflash",
    checkpoint="vllm_crossspec.drafters.dflash.checkpoint",
    proposer="vllm_crossspec.engine.proposers.dflash:DFlashProposer",
    tree_proposer="vllm_crossspec.engine.proposers.dflash:DFlashTreeProposer",
    tree="best_first",
    supplies="marginals",
    is_autoregressive=False,
    marks=("dflash",),
    trainer="vllm_crossspec.cli.train_drafters:DFLASH",
    preloads=("vllm.model_executor.models.qwen3_dflash",),
    inflate="vllm_crossspec.drafters.dflash.inflate",
)
