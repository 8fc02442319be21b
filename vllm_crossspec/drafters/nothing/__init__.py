"""No drafts: a router chooses it if the target alone is faster."""

from vllm_crossspec.kinds.drafter import DrafterKind

KIND = DrafterKind(
    name="nothing",
    vllm_method="ngram_gpu",
    checkpoint="vllm_crossspec.drafters.nothing.checkpoint",
    proposer="vllm_crossspec.drafters.nothing.proposer:NothingProposer",
    supplies="none",
    is_autoregressive=False,
    has_model=False,
    has_head=False,
    can_sample=False,
)
