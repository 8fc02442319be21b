"""Seeing kernels being launched without running them, compiled or interpreted."""

from typing import Any


def record_launches(monkeypatch: Any) -> list[str]:
    """From now on, until the test ends, a launch only adds its kernel's name to the list that is returned."""
    from triton import knobs
    from triton.runtime import interpreter, jit

    launched: list[str] = []
    if knobs.runtime.interpret:
        monkeypatch.setattr(
            interpreter.GridExecutor, "__call__", lambda self, *a, **k: launched.append(self.fn.__name__)
        )
    else:
        monkeypatch.setattr(jit.JITFunction, "run", lambda self, *a, **k: launched.append(self.fn.__name__))
    return launched
