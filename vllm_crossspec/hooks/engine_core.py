"""Additions to vLLM's engine core: drafters get new weights between two steps, on all ranks or on none.

A worker that refuses returns a sentence instead of raising. After an error of one worker vLLM would leave the other
workers' answers unread, and take them for the answers to its next call.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.hooks.scheduler import forget_prefixes

SWAP = "crossspec_swap_drafter"
"""The method name that users pass to ``collective_rpc``; no worker has such a method."""
UPDATE_BEGINS, UPDATE_ENDS = "start_draft_weight_update", "finish_weight_update"  # vLLM's names
Call = Callable[..., list[Any]]
"""vLLM's ``collective_rpc`` of an engine core: method, timeout, arguments."""


def collective_rpc(core: Any, call: Call, method: Any, *rest: Any, **options: Any) -> list[Any]:
    """vLLM's ``collective_rpc`` (here ``call``), with one more method; vLLM's weight updates end in a swap.

    Raises:
        ValueError: a drafter cannot be swapped, and nothing has changed.
    """
    is_ours = settings_of(core.vllm_config) is not None
    if method == SWAP:
        given = dict(zip(("timeout", "args", "kwargs"), rest, strict=False)) | options
        return _swap(core, call, is_ours, *(given.get("args") or ()), **(given.get("kwargs") or {}))
    answers = call(method, *rest, **options)
    if is_ours and method == UPDATE_BEGINS:
        call("crossspec_begin_receiving")
    if is_ours and method == UPDATE_ENDS:
        _take_places(core, call, call("crossspec_prepare_received"))
    return answers


def _swap(core: Any, call: Call, is_ours: bool, drafter: Any = None, folder: Any = None, *rest: Any) -> list[Any]:
    if not is_ours:
        raise ValueError(f"{SWAP}: this engine has no drafters of vllm_crossspec")
    if rest or not isinstance(drafter, str) or not isinstance(folder, (str, Path)):
        raise ValueError(f"{SWAP} takes a drafter's name and the folder of a checkpoint, two texts")
    return _take_places(core, call, call("crossspec_prepare_swap", None, (drafter, str(folder))))


def _take_places(core: Any, call: Call, problems: Sequence[str | None]) -> list[Any]:
    """Commit the swap on all ranks if none reports a problem; return the names of the changed drafters."""
    if found := [problem for problem in problems if problem]:
        call("crossspec_abandon_swap")
        raise ValueError(found[0])
    names = call("crossspec_commit_swap")
    if any(names):
        forget_prefixes(core.scheduler)
    return names
