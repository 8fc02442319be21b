"""DART: logits of all draft positions from one forward of one layer (Liu et al. 2026)."""

from types import MappingProxyType

from vllm_crossspec.kinds.drafter import DrafterKind

_MODEL = "vllm_crossspec.drafters.dart.model:DartForCausalLM"

KIND = DrafterKind(
    name="dart",
    vllm_method="dflash",
    checkpoint="vllm_crossspec.drafters.dart.checkpoint",
    proposer="vllm_crossspec.drafters.dart.proposer:DartProposer",
    tree_proposer="vllm_crossspec.drafters.dart.proposer:DartTreeProposer",
    reads_next_token=True,
    tree="continuity",
    supplies="marginals",
    drafts_trees=True,
    is_autoregressive=False,
    can_sample=False,
    # As the checkpoint has it, and as vLLM renames it for its block drafters.
    models=MappingProxyType({"LlamaForCausalLMDart": _MODEL, "DFlashLlamaForCausalLMDart": _MODEL}),
    marks=("dart",),
)
