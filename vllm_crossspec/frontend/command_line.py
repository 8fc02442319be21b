"""What vLLM's own commands were given, checked while they still import vLLM."""

import contextlib
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_crossspec.names import DEBUG_VARIABLE, PLUGIN

SPEC_OPTIONS = ("--speculative-config", "-sc")
READ_ELSEWHERE = ("--config-format", "--load-format", "--hf-config-path", "--hf-overrides", "--revision")
"""Options with which a target is not what its name says."""


def check_command_line() -> None:
    """End vLLM's own command with a sentence where its config is ours and wrong, before most of vLLM's imports."""
    # What cannot be read here, as options in a file, is left to the engine's own check, which sees all of it.
    is_read = multiprocessing.parent_process() is None and runs_vllms_command() and not is_switched_off()
    if not is_read or (given := read(sys.argv[1:])) is None:
        return
    spec, model = given
    from vllm_crossspec.frontend import precheck

    try:
        with contextlib.suppress(OSError):
            if settings := precheck.parse(spec):
                precheck.check_folders(settings, model)
    except ValueError as problem:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        sys.exit(f"vllm_crossspec: {problem}")


def read(words: Sequence[str]) -> tuple[dict[str, Any], str | None] | None:
    """The speculative config of a command, and the target where it is told and read by its name.

    None where there is no such config, or not all of it in one place.
    """
    options: dict[str, str] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, is_whole, value = word.partition("=")
        name = name.replace("_", "-")
        if name.startswith(("--spec-", "--speculative-config.", "-sc.")):
            return None
        options[name] = value if is_whole else following
    specs = [options[name] for name in SPEC_OPTIONS if name in options]
    try:
        spec = json.loads(specs[0]) if len(specs) == 1 else None
    except ValueError:
        return None
    if not isinstance(spec, dict):
        return None
    model = words[1] if words[0] == "serve" and not words[1].startswith("-") else options.get("--model")
    return spec, None if any(name in options for name in READ_ELSEWHERE) else model


@contextlib.contextmanager
def one_sentence_at_the_end() -> Iterator[None]:
    """Under vLLM's own commands a mistake in the config is one sentence, without sixty lines of traceback.

    Programs that use vLLM as a library get the error unchanged.
    """
    try:
        yield
    except ValueError as problem:
        if not os.environ.get(DEBUG_VARIABLE) and runs_vllms_command():
            sys.excepthook = functools.partial(_end, problem)
        raise


def _end(problem: ValueError, kind: type[BaseException], ended_by: BaseException, calls: TracebackType | None) -> None:
    """What Python calls with the exception that ends a process, in the place of its traceback."""
    if ended_by is problem:
        print(f"vllm_crossspec: {problem}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, ended_by, calls)


def is_switched_off() -> bool:
    """Whether vLLM is told to load other plugins only."""
    return PLUGIN not in os.environ.get("VLLM_PLUGINS", PLUGIN).split(",")


def runs_vllms_command() -> bool:
    """Whether this process was started as `vllm ...` or `python -m vllm....`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(*sys.argv[:1]).stem == "vllm" if spec is None else spec.name.split(".")[0] == "vllm"
