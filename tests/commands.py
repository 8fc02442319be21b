"""Running `crossspec` in the tests' own process: engines are forks of one server, which has imported vLLM for all."""

import contextlib
import io
import signal
import sys
from unittest import mock

from vllm_crossspec.cli import app


def crossspec(*arguments: object) -> str:
    """What a command printed to stdout; raises AssertionError with what it said where it failed."""
    out, err, handler = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    with (
        mock.patch.object(sys, "argv", ["crossspec", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            app.main()
            status = None
        except SystemExit as end:
            status = end.code
        finally:
            signal.signal(signal.SIGTERM, handler)
    assert not status, f"status {status}:\n{out.getvalue()}{err.getvalue()}"
    return out.getvalue()
