"""No drafts: what a router can choose where the target alone is quicker."""

from vllm_crossspec.drafters.base import DrafterKind

KIND = DrafterKind(
    name="nothing",
    vllm_method="ngram_gpu",
    checkpoint="vllm_crossspec.drafters.nothing.checkpoint",
    proposer="vllm_crossspec.engine.proposers.nothing:NothingProposer",
    supplies="none",
    is_autoregressive=False,
    has_model=False,
    has_head=False,
    can_sample=False,
)
