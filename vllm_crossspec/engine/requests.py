"""What a single request may ask of its drafts, and what its parameters allow."""

import reprlib
from collections.abc import Collection, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_crossspec.types import CHAIN, NO_DRAFTS, TREE

EXTRA_ARGUMENT = "crossspec"
CATEGORY = "crossspec_category"
"""Keys of a request's extra arguments (``SamplingParams.extra_args``, ``vllm_xargs`` over HTTP)."""

WARM_UP_REQUESTS = ("_warmup_", "_v2_mixed_warmup")
"""Beginnings of the names of requests that vLLM itself makes up to compile its kernels, before it captures graphs."""

MODES = {"tree": TREE, "chain": CHAIN, "off": NO_DRAFTS}


class RequestError(VLLMValidationError, ValueError):
    """A request that cannot be served as it is: to vLLM's servers a 400, offline a ValueError like any other of ours.

    A mere ValueError would be wrapped on its way through the engine and become a 500 without a word, which clients take
    for a reason to try again.
    """


def check_request(sampling_params: Any, categories: Collection[str]) -> None:
    """Refuse a bad request, with one sentence.

    Args:
        sampling_params: of the request.
        categories: that the engine's router knows.

    Raises:
        RequestError: an extra argument is none of ours.
    """
    for key, known in ((EXTRA_ARGUMENT, MODES), (CATEGORY, categories)):
        asked = _asked(sampling_params, key)
        if asked is not None and (not isinstance(asked, str) or asked not in known):
            allowed = f"use one of {', '.join(known)}" if known else "this server's router has no `by_category`"
            raise RequestError(f"the extra argument {key!r} is {reprlib.repr(asked)}; {allowed}")


def opted_out(sampling_params: Any) -> bool:
    """Whether a request wants nothing drafted."""
    return sampling_params is None or _asked(sampling_params, EXTRA_ARGUMENT) == "off"


def category_number(sampling_params: Any, categories: Sequence[str]) -> int:
    """1 + the place of a request's category among those that the router knows; 0 where it names none."""
    asked = _asked(sampling_params, CATEGORY)
    return 0 if asked is None else 1 + categories.index(asked)


def _asked(sampling_params: Any, key: str) -> Any:
    return (getattr(sampling_params, "extra_args", None) or {}).get(key)


def draft_mode(sampling_params: Any, chains_only: bool = False) -> int:
    """Whether a request's drafts may be trees, must be chains, or are not wanted.

    Grammars, bad words and thinking budgets are worked out by vLLM along a chain of drafts.

    Args:
        sampling_params: of the request; None for one that generates nothing.
        chains_only: whether the engine has something else that asks for chains.
    """
    if sampling_params is None:
        return NO_DRAFTS
    asked = MODES.get(_asked(sampling_params, EXTRA_ARGUMENT), TREE)
    along_a_chain = (
        chains_only
        or sampling_params.structured_outputs is not None
        or sampling_params.bad_words
        or getattr(sampling_params, "thinking_token_budget", None) is not None
    )
    return CHAIN if along_a_chain and asked == TREE else asked
