"""What a single request may ask of its drafts, and what its parameters allow."""

from typing import Any

from vllm_crossspec.tree.state import CHAIN, NOTHING, TREE

EXTRA_ARGUMENT = "crossspec"
"""Key of a request's extra arguments (``SamplingParams.extra_args``, ``vllm_xargs`` over HTTP)."""

MODES = {"tree": TREE, "chain": CHAIN, "off": NOTHING}


def check_request(sampling_params: Any) -> None:
    """Raise ValueError, with one sentence, where a request's extra argument is none of ours."""
    asked = (getattr(sampling_params, "extra_args", None) or {}).get(EXTRA_ARGUMENT)
    if asked is not None and asked not in MODES:
        raise ValueError(f"the extra argument {EXTRA_ARGUMENT!r} is {asked!r}; use one of {', '.join(MODES)}")


def draft_mode(sampling_params: Any, chains_only: bool = False) -> int:
    """Whether a request's drafts may be trees, must be chains, or are not wanted.

    Grammars, bad words and thinking budgets are worked out by vLLM along a chain of drafts.

    Args:
        sampling_params: of the request; None for one that generates nothing.
        chains_only: whether the engine has something else that asks for chains.
    """
    if sampling_params is None:
        return NOTHING
    asked = MODES.get((sampling_params.extra_args or {}).get(EXTRA_ARGUMENT, "tree"), TREE)
    along_a_chain = (
        chains_only
        or sampling_params.structured_outputs is not None
        or sampling_params.bad_words
        or getattr(sampling_params, "thinking_token_budget", None) is not None
    )
    return CHAIN if along_a_chain and asked == TREE else asked
