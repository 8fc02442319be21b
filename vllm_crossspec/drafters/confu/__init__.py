"""ConFu (Qin et al., 2026): EAGLE-3's drafter, for which the target computes a future state."""

from types import MappingProxyType

from vllm_crossspec.kinds.drafter import DrafterKind

KIND = DrafterKind(
    name="confu",
    vllm_method="eagle3",
    checkpoint="vllm_crossspec.drafters.confu.checkpoint",
    proposer="vllm_crossspec.drafters.confu.proposer:ConfuProposer",
    tree_proposer="vllm_crossspec.drafters.confu.proposer:ConfuProposer",
    reads_target_slots=True,
    reads_next_token=True,
    tree="dynamic",
    supplies="levels",
    contemplates=True,
    models=MappingProxyType({"ConfuForCausalLM": "vllm_crossspec.drafters.confu.model:ConfuForCausalLM"}),
    speculators_reader="vllm_crossspec.drafters.confu.model_config:read",
    check_target="vllm_crossspec.drafters.confu.checkpoint:check_target",
    marks=("confu",),
)
