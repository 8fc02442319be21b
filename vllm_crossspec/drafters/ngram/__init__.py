"""Prompt lookup: continuations of the last tokens' earlier occurrences in the request's own text (Saxena, 2023)."""

from types import MappingProxyType

from vllm_crossspec.kinds.drafter import DrafterKind

KIND = DrafterKind(
    name="ngram",
    vllm_method="ngram_gpu",
    checkpoint="vllm_crossspec.drafters.ngram.checkpoint",
    proposer="vllm_crossspec.drafters.lookup.proposer:LookupProposer",
    tree_proposer="vllm_crossspec.drafters.lookup.proposer:LookupProposer",
    tree="matches",
    supplies="matches",
    is_autoregressive=False,
    has_model=False,
    has_head=False,
    can_sample=False,
    lookup=MappingProxyType({"min_match": 2, "max_match": 8, "num_matches": 8}),
)
