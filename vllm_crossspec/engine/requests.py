"""What a single request may ask of its drafts, and what its parameters allow."""

from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_crossspec.types import CHAIN, NO_DRAFTS, TREE

EXTRA_ARGUMENT = "crossspec"
"""Key of a request's extra arguments (``SamplingParams.extra_args``, ``vllm_xargs`` over HTTP)."""

WARM_UP_REQUESTS = ("_warmup_", "_v2_mixed_warmup")
"""Beginnings of the names of requests that vLLM itself makes up to compile its kernels, before it captures graphs."""

MODES = {"tree": TREE, "chain": CHAIN, "off": NO_DRAFTS}


class RequestError(VLLMValidationError, ValueError):
    """A request that cannot be served as it is: to vLLM's servers a 400, offline a ValueError like any other of ours.

    A mere ValueError would be wrapped on its way through the engine and become a 500 without a word, which clients take
    for a reason to try again.
    """


def check_request(sampling_params: Any) -> None:
    """Refuse a bad request, with one sentence.

    Raises:
        RequestError: the extra argument is none of ours.
    """
    asked = _asked(sampling_params)
    if asked is not None and (not isinstance(asked, str) or asked not in MODES):
        raise RequestError(f"the extra argument {EXTRA_ARGUMENT!r} is {asked!r}; use one of {', '.join(MODES)}")


def opted_out(sampling_params: Any) -> bool:
    """Whether a request wants nothing drafted."""
    return sampling_params is None or _asked(sampling_params) == "off"


def _asked(sampling_params: Any) -> Any:
    return (getattr(sampling_params, "extra_args", None) or {}).get(EXTRA_ARGUMENT)


def draft_mode(sampling_params: Any, chains_only: bool = False) -> int:
    """Whether a request's drafts may be trees, must be chains, or are not wanted.

    Grammars, bad words and thinking budgets are worked out by vLLM along a chain of drafts.

    Args:
        sampling_params: of the request; None for one that generates nothing.
        chains_only: whether the engine has something else that asks for chains.
    """
    if sampling_params is None:
        return NO_DRAFTS
    asked = MODES.get(_asked(sampling_params), TREE)
    along_a_chain = (
        chains_only
        or sampling_params.structured_outputs is not None
        or sampling_params.bad_words
        or getattr(sampling_params, "thinking_token_budget", None) is not None
    )
    return CHAIN if along_a_chain and asked == TREE else asked
