"""Ending a training by SIGTERM or SIGINT: the step under way is finished and saved; a second signal ends at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SHOW_CURSOR = "\x1b[?25h"


class Stopped(BaseException):
    """A signal ended the training. No ``except Exception`` below it may swallow it."""

    def __init__(self, signum: int, place: str = ""):
        super().__init__(signum, place)
        self.signum, self.place = signum, place


class _Interrupted(BaseException):
    """Leaves what may be left half-way."""


class StopSignals:
    """While it is entered, the first signal sets ``caught`` and a second one ends the process.

    A thread reads the signals from a pipe: Python's own handlers wait until a torch operation returns, which takes
    minutes where steps are slow. Outside of the main thread, which alone may have handlers, nothing is caught.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._may_interrupt = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            read, write = os.pipe()
            os.set_blocking(write, False)
            self._stack.callback(os.close, read)
            watcher = threading.Thread(target=self._watch, args=(read,), daemon=True)
            self._stack.callback(watcher.join)
            self._stack.callback(os.close, write)
            self._stack.enter_context(_handled(self._note))
            self._stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
            watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """What is done within is left half-way when a signal comes, or not begun when one has come."""
        self._may_interrupt = True
        try:
            if not self.caught:
                yield
        except _Interrupted:
            pass
        finally:
            self._may_interrupt = False

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.caught = self.caught or signum
        if self._may_interrupt:
            raise _Interrupted

    def _watch(self, read: int) -> None:
        is_second = False
        while found := os.read(read, 1):
            if found[0] not in SIGNALS:
                continue
            if is_second:
                if sys.stdout.isatty():
                    os.write(sys.stdout.fileno(), SHOW_CURSOR.encode())
                os._exit(128 + found[0])
            is_second = True
            sys.stderr.write("stopping after the step under way; a second signal ends at once\n")
            sys.stderr.flush()


@contextlib.contextmanager
def stoppable(state: Path | None, resume: bool = True) -> Iterator[None]:
    """Turn a signal into one sentence that says how to resume, and the exit code that shells expect.

    Args:
        state: the file that a run resumes from; None where there is no such file.
        resume: whether the command would resume; otherwise it was given ``--restart``.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        raise Stopped(signum)

    try:
        with _handled(stop):
            yield
    except Stopped as end:
        place = f" {end.place}" if end.place else ""
        can_resume = state is not None and state.exists()
        how = "to resume" if can_resume else "to begin anew"
        again = "the same command" + (" without --restart" if can_resume and not resume else "")
        name = signal.Signals(end.signum).name
        sys.stderr.write(f"crossspec: stopped by {name}{place}; run {again} {how}\n")
        sys.exit(128 + end.signum)


@contextlib.contextmanager
def _handled(handler: object) -> Iterator[None]:
    """``handler`` for the signals, except those that are ignored, as SIGINT is for a script's background jobs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: old for signum in SIGNALS if (old := signal.getsignal(signum)) is not signal.SIG_IGN}
    try:
        for signum in before:
            signal.signal(signum, handler)  # type: ignore[arg-type]
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old or signal.SIG_DFL)
