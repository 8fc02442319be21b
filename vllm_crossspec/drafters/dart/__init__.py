"""DART: logits of all draft positions from one forward of one layer (Liu et al. 2026)."""

from types import MappingProxyType

from vllm_crossspec.drafters.base import DrafterKind

_MODEL = "vllm_crossspec.engine.models.dart:DartForCausalLM"

KIND = DrafterKind(
    name="dart",
    vllm_method="dflash",
    checkpoint="vllm_crossspec.drafters.dart.checkpoint",
    proposer="vllm_crossspec.engine.proposers.dart:DartProposer",
    tree_proposer="vllm_crossspec.engine.proposers.dart:DartTreeProposer",
    reads_next_token=True,
    tree="continuity",
    supplies="marginals",
    drafts_trees=True,
    is_autoregressive=False,
    can_sample=False,
    # As the checkpoint has it, and as vLLM renames it for its block drafters.
    models=MappingProxyType({"LlamaForCausalLMDart": _MODEL, "DFlashLlamaForCausalLMDart": _MODEL}),
    marks=("dart",),
    trainer="vllm_crossspec.cli.train_drafters:DART",
    inflate="vllm_crossspec.drafters.dart.inflate",
)
