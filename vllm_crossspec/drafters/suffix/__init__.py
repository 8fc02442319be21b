"""SuffixDecoding: trees of what followed the last tokens before, in whatever text (Oliaro et al., 2024)."""

from types import MappingProxyType

from vllm_crossspec.drafters import ngram

KIND = ngram.KIND._replace(
    name="suffix",
    drafts_trees=True,
    lookup=MappingProxyType({"min_match": 1, "max_match": 16, "num_matches": 16, "share": False}),
)
