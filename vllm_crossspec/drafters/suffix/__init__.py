"""SuffixDecoding: trees of the last tokens' earlier continuations, in any text (Oliaro et al., 2024)."""

from types import MappingProxyType

from vllm_crossspec.drafters import ngram

KIND = ngram.KIND._replace(
    name="suffix",
    drafts_trees=True,
    lookup=MappingProxyType({"min_match": 1, "max_match": 16, "num_matches": 16, "share": False}),
    vllm_needs="arctic_inference",
)
