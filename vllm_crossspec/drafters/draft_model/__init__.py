"""A small language model as a drafter: it reads only the text, no states of the target."""

from vllm_crossspec.kinds.drafter import DrafterKind

KIND = DrafterKind(
    name="draft_model",
    vllm_method="draft_model",
    checkpoint="vllm_crossspec.drafters.draft_model.checkpoint",
    proposer="vllm_crossspec.drafters.draft_model.proposer:DraftModelProposer",
    tree_proposer="vllm_crossspec.drafters.draft_model.tree_proposer:DraftModelTreeProposer",
    tree="dynamic",
    supplies="levels",
    ties_head=True,
    can_share=False,
    may_bring_code=True,
    check_engine="vllm_crossspec.drafters.draft_model.checkpoint:check_follows",
)
