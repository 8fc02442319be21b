"""How many kernels something launches, on a machine that need not be able to run them."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from triton import knobs
from triton.runtime import interpreter, jit


def count_launches(run: Callable[[], Any]) -> int:
    """Launches of `run`, none of which is carried out; kernels may be compiled ones or interpreted ones."""
    owner, name = (interpreter.GridExecutor, "__call__") if knobs.runtime.interpret else (jit.JITFunction, "run")
    launched: list[Any] = []
    with mock.patch.object(owner, name, lambda *a, **k: launched.append(a)):
        run()
    return len(launched)
