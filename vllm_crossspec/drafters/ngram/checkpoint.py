"""Facts of drafters without weights, which have no checkpoint."""

from typing import Any

from vllm_crossspec.types import DrafterFacts, TargetFacts

DRAFT_TOKENS = 8
"""K if the user sets none: a lookup costs the same for many tokens as for few."""


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """Facts of a drafter that taps nothing and drafts the target's tokens."""
    return DrafterFacts(None, target.vocab_size, target.vocab_size, (), default_draft_tokens=DRAFT_TOKENS)
