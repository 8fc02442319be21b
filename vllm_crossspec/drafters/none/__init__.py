"""No drafts: what a router can choose where the target alone is quicker."""

from vllm_crossspec.drafters.base import DrafterKind

KIND = DrafterKind(
    name="none",
    vllm_method="ngram_gpu",
    checkpoint="vllm_crossspec.drafters.none.checkpoint",
    proposer="vllm_crossspec.engine.proposers.nothing:NothingProposer",
    supplies="nothing",
    is_autoregressive=False,
    has_model=False,
    has_head=False,
    can_sample=False,
)
