"""Facts of the drafter that drafts nothing; vLLM needs at least one draft token."""

from typing import Any

from vllm_crossspec.drafters.ngram import checkpoint
from vllm_crossspec.types import DrafterFacts, TargetFacts


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    return checkpoint.read_facts(config, key, target)._replace(max_draft_tokens=1, default_draft_tokens=1)
