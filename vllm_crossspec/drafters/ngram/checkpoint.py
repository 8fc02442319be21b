"""There is no checkpoint: what a drafter without weights is, whatever the target."""

from typing import Any

from vllm_crossspec.types import DrafterFacts, TargetFacts

DRAFT_TOKENS = 8
"""K where the user names none: a lookup costs as much for many tokens as for few."""


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """See the registry (``drafters.base``)."""
    return DrafterFacts(
        target_hidden_size=None,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_layers=(),
        max_draft_tokens=None,
        default_draft_tokens=DRAFT_TOKENS,
        mask_token_id=None,
    )
