"""What a single request may ask of its drafts, and what its parameters allow."""

import difflib
import reprlib
from collections.abc import Collection, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_ALLOWED_TOKEN_IDS, MAX_NUM_LOGIT_BIAS_TOKENS

from vllm_crossspec.types import CHAIN, NO_DRAFTS, TREE

EXTRA_ARGUMENT = "crossspec"
CATEGORY = "crossspec_category"
"""Keys of a request's extra arguments (``SamplingParams.extra_args``, ``vllm_xargs`` over HTTP)."""

WARM_UP_REQUESTS = ("_warmup_", "_v2_mixed_warmup")
"""Beginnings of the names of requests that vLLM itself makes up to compile its kernels, before it captures graphs."""

OURS = ("crossspec", "crosspec")
"""How extra arguments begin that are meant for us, whatever follows."""

NEAR, LONGEST_NEAR = 0.8, 32
"""A key this similar to one of ours is taken for it, mistyped; longer keys are not compared."""

MODES = {"tree": TREE, "chain": CHAIN, "off": NO_DRAFTS}


class RequestError(VLLMValidationError, ValueError):
    """A request that cannot be served as it is: to vLLM's servers a 400, offline a ValueError like any other of ours.

    A mere ValueError would become a 500 without a word on its way through the engine, and clients would try again.
    """


def check_request(sampling_params: Any, categories: Collection[str]) -> None:
    """Refuse a request whose extra arguments of ours have a value or a name that we do not know.

    ``categories`` are those that the engine's router knows.
    """
    for key in getattr(sampling_params, "extra_args", None) or {}:
        if key not in (EXTRA_ARGUMENT, CATEGORY) and _is_meant_for_us(key):
            names = f"use {EXTRA_ARGUMENT!r} or {CATEGORY!r}"
            raise RequestError(f"there is no extra argument {reprlib.repr(key)}; {names}")
    for key, known in ((EXTRA_ARGUMENT, MODES), (CATEGORY, categories)):
        asked = _asked(sampling_params, key)
        if asked is not None and (not isinstance(asked, str) or asked not in known):
            allowed = f"use one of {', '.join(known)}" if known else "this server's router has no `by_category`"
            # Over HTTP vLLM makes 0 of false, which is what some write for "off".
            written = "0 or false" if asked == 0 and not isinstance(asked, bool) else reprlib.repr(asked)
            raise RequestError(f"the extra argument {key!r} is {written}; {allowed}")


def _is_meant_for_us(key: str) -> bool:
    """Whether an unknown extra argument begins like one of ours, or is nearly one."""
    plain = key.lower().replace("-", "_")
    near = len(key) <= LONGEST_NEAR and difflib.get_close_matches(plain, (EXTRA_ARGUMENT, CATEGORY), 1, NEAR)
    return plain.startswith(OURS) or bool(near)


def check_token_lists(sampling_params: Any) -> None:
    """Refuse lists of tokens that vLLM's sampler has no room for: its own error would end the engine."""
    limits = {"logit_bias": MAX_NUM_LOGIT_BIAS_TOKENS, "allowed_token_ids": MAX_NUM_ALLOWED_TOKEN_IDS}
    for name, limit in limits.items():
        if (count := len(getattr(sampling_params, name) or ())) > limit:
            raise RequestError(f"{name} has {count} tokens; give {limit} at most")


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
    """Whether a request's drafts may be trees, must be chains, or are not wanted, as where it generates nothing (None).

    Grammars, bad words and thinking budgets are worked out by vLLM along a chain of drafts; ``chains_only``: the engine
    has something else that asks for chains.
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
