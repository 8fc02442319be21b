"""ConFu (Qin et al., 2026): EAGLE-3's drafter, and a target that contemplates the future for it."""

from types import MappingProxyType

from vllm_crossspec.drafters.base import DrafterKind

KIND = DrafterKind(
    name="confu",
    vllm_method="eagle3",
    checkpoint="vllm_crossspec.drafters.confu.checkpoint",
    proposer="vllm_crossspec.engine.proposers.confu:ConfuProposer",
    tree_proposer="vllm_crossspec.engine.proposers.confu:ConfuProposer",
    reads_target_slots=True,
    reads_next_token=True,
    tree="dynamic",
    supplies="levels",
    contemplates=True,
    models=MappingProxyType({"ConfuForCausalLM": "vllm_crossspec.engine.models.confu:ConfuForCausalLM"}),
    speculators_reader="vllm_crossspec.engine.models.confu_config:read",
    check_target="vllm_crossspec.drafters.confu.checkpoint:check_target",
    marks=("confu",),
    head_states="vllm_crossspec.training.confu_head_states",
    trainer="vllm_crossspec.cli.train_drafters:CONFU",
    inflate="vllm_crossspec.drafters.confu.inflate",
)
