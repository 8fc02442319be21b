"""What is added to vLLM's engine core: drafters get new weights between two steps, on all ranks or on none.

A worker answers with a sentence where it refuses, and raises nothing: of several workers vLLM would read the first
one's error, and take the others' answers for those to its next question.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_crossspec.config import settings_of
from vllm_crossspec.engine.scheduler import forget_prefixes

SWAP = "crossspec_swap_drafter"
"""What users ask ``collective_rpc`` for; no worker has a method of this name."""
UPDATE_BEGINS, UPDATE_ENDS = "start_draft_weight_update", "finish_weight_update"
"""vLLM's own names."""

Call = Callable[..., list[Any]]
"""vLLM's ``collective_rpc`` of an engine core: method, timeout, arguments."""


def collective_rpc(core: Any, call: Call, method: Any, *rest: Any, **options: Any) -> list[Any]:
    """vLLM's ``collective_rpc``, which knows one method more, and swaps drafters at the end of vLLM's weight updates.

    Args:
        core: vLLM's engine core.
        call: its own ``collective_rpc``.
        method: by name, or a function.
        rest, options: as vLLM takes them: timeout, positional and named arguments.

    Raises:
        ValueError: one sentence: a drafter cannot be swapped, and nothing has changed.
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
    """What all ranks have prepared becomes what they draft with, if none has a problem; the changed drafters' names."""
    if found := [problem for problem in problems if problem]:
        call("crossspec_abandon_swap")
        raise ValueError(found[0])
    names = call("crossspec_commit_swap")
    if any(names):
        forget_prefixes(core.scheduler)
    return names
