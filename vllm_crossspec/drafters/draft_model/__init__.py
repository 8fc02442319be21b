"""A small language model that drafts on its own: it reads the text and no states of the target."""

from vllm_crossspec.drafters.base import DrafterKind

KIND = DrafterKind(
    name="draft_model",
    vllm_method="draft_model",
    checkpoint="vllm_crossspec.drafters.draft_model.checkpoint",
    proposer="vllm_crossspec.engine.proposers.draft_model:DraftModelProposer",
    tree_proposer="vllm_crossspec.engine.proposers.draft_model_tree:DraftModelTreeProposer",
    tree="dynamic",
    supplies="levels",
    ties_head=True,
    can_share=False,
    may_bring_code=True,
    check_engine="vllm_crossspec.drafters.draft_model.checkpoint:check_follows",
    trainer="vllm_crossspec.cli.train_drafters:DRAFT_MODEL",
    inflate="vllm_crossspec.drafters.draft_model.inflate",
)
