"""Processes that engines run in: started anew, or forked from one that has imported vLLM already.

Importing vLLM takes ten seconds of a processor, starting an engine with a small model less than one. So on a machine
without a GPU the first engine starts a server of forks (:mod:`vllm_crossspec.engine.jobs.forks`), and every later one
begins where it left off. Nothing here imports vLLM.
"""

import importlib.util
import json
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from vllm_crossspec.names import DEBUG_VARIABLE

CHILD_MODULE = "vllm_crossspec.engine.jobs.offline"
PRELOADED = "vllm_crossspec.engine.jobs.preload"
CHILD_DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_F32_DEFAULT": "ieee",
}
"""Environment of an engine process where the user set nothing.

The KV cache size, in GiB, is the CPU's. On a GPU vLLM's attention in float32 would multiply in TF32 without the last.
"""

BOUND_CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""Environment variable: the cores that vLLM's threads keep to on a CPU."""

READ_AT_IMPORT = ("TRITON_", "VLLM_", "TORCH", "HF_", "LD_", "PYTHON", "OMP_", "GLIBC_")
"""How variables begin that vLLM or what it stands on reads when it is imported: another value, another server."""

NO_MODEL = re.compile(
    "couldn't connect to 'https?:|not a valid model identifier|not appear to have a file named|not a local folder"
)
"""What Hugging Face's errors say of a model that is neither a folder nor to be had from the hub."""

LOG_TAIL_LINES = 15
POLL_SECONDS = 1.0


class EngineError(RuntimeError):
    """An engine process ended without its results; the message is what a user can go by."""


EngineProcess: TypeAlias = "_Started | _Forked"
"""An engine's process, however it was started."""

Starter = Callable[[str, Path, int, Path, dict[str, str], Sequence[int]], EngineProcess]


@contextmanager
def engine_process(
    job_file: Path, log_file: Path, module: str | None = None, cores: Sequence[int] = ()
) -> Iterator[tuple[EngineProcess, Iterator[dict[str, Any]]]]:
    """The process and its events; on the way out the process and everything that it started are gone.

    Args:
        job_file: what the module reads.
        log_file: takes what the process prints.
        module: that the process runs, with the file and a descriptor for its events; None is the demo's.
        cores: that the process keeps to; none for all. On a CPU only.
    """
    read_end, write_end = os.pipe()
    environment = {**CHILD_DEFAULTS, **os.environ, "PWD": os.getcwd()}
    if cores:
        environment[BOUND_CORES] = ",".join(map(str, cores))
    start: Starter = _fork if _can_fork() else _start
    try:
        process = start(module or CHILD_MODULE, job_file, write_end, log_file, environment, cores)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    _running.append(process)
    try:
        yield process, _events(read_end, process)
    finally:
        _running.remove(process)
        os.close(read_end)
        _end(process)


def engine_events(
    name: str, job: Mapping[str, Any], module: str | None = None, cores: Sequence[int] = ()
) -> Generator[dict[str, Any]]:
    """Run a job in a process of its own; its events.

    Args:
        name: of the job in messages; an event that names another ``method`` is about that one.
        job: what the module reads.
        module: as of :func:`engine_process`, like ``cores``.
        cores: that the process keeps to; none for all.

    Raises:
        ValueError: the engine refused the job; the message is its sentence.
        EngineError: the process died; the message ends with the last lines of its log.
    """
    with tempfile.TemporaryDirectory(prefix="crossspec-") as folder:
        job_file, log_file = Path(folder, "job.json"), Path(folder, "log.txt")
        job_file.write_text(json.dumps(job))
        with engine_process(job_file, log_file, module, cores) as (process, events):
            for event in events:
                name = event.get("method", name)
                if event["event"] == "error":
                    raise ValueError(f"{name}: {event['message']}")
                yield event
            status = process.wait()
        if status:
            raise EngineError(post_mortem(name, status, log_file.read_text(errors="replace")))


_running: list[EngineProcess] = []


def end_all() -> None:
    """End every engine's process; whoever waits for one sees it end."""
    for process in list(_running):
        _end(process)


class _Started(subprocess.Popen[bytes]):
    """A process of its own from the beginning."""

    def wait(self, timeout: float | None = None) -> int | None:  # type: ignore[override]
        """The status; None if it still runs after the timeout, in seconds."""
        try:
            return super().wait(timeout)
        except subprocess.TimeoutExpired:
            return None


def _start(
    module: str, job_file: Path, events: int, log_file: Path, environment: dict[str, str], cores: Sequence[int]
) -> EngineProcess:
    with log_file.open("ab") as log:
        return _Started(
            [sys.executable, "-m", module, str(job_file), str(events)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(events,),
            start_new_session=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )


class _Forked:
    """A fork of the server; ``poll`` and ``wait`` are as of :class:`_Started`."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        status: int | None = self._process.exitcode
        return status


_server_environment: list[dict[str, str]] = []
"""What the server of forks was started with, of :data:`READ_AT_IMPORT`; empty before."""

_lock = threading.Lock()
"""Around what two threads that start an engine each must not do at once: it changes this process for a moment."""


def _can_fork() -> bool:
    """Whether the server of forks serves an engine: on Linux without a GPU, if nothing that it has read has changed."""
    if not sys.platform.startswith("linux") or not is_cpu_lane():
        return False
    with _lock:
        whole = {**CHILD_DEFAULTS, **os.environ}
        read = {name: value for name, value in whole.items() if name.startswith(READ_AT_IMPORT)}
        if not _server_environment:
            _server_environment.append(read)
        return read == _server_environment[0]


def is_cpu_lane() -> bool:
    """Whether kernels run on this machine's processor; the lane then has set the variables that it stands on."""
    if importlib.util.find_spec("crossspec_cpu_lane") is None:
        return False
    from crossspec_cpu_lane import is_usable

    return bool(is_usable())


def _fork(
    module: str, job_file: Path, events: int, log_file: Path, environment: dict[str, str], cores: Sequence[int]
) -> EngineProcess:
    from multiprocessing.connection import Connection

    from vllm_crossspec.engine.jobs import forks

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    connection = Connection(os.dup(events), readable=False)
    arguments = (module, str(job_file), connection, str(log_file), environment, list(cores))
    process = context.Process(target=forks.run, args=arguments)
    try:
        with _lock, _as_the_server_sees_it():
            forkserver.ensure_running()
            process.start()
    except (EOFError, OSError):  # the server is gone: whatever ended it, an engine of its own says it better
        return _start(module, job_file, events, log_file, environment, cores)
    finally:
        connection.close()
    return _Forked(process)


@contextmanager
def _as_the_server_sees_it() -> Iterator[None]:
    """Hand the server, which imports vLLM, what an engine's environment has; and no fork this program's own module.

    Python imports the main module of whoever asks for a fork into the fork: a script without a guard would run again.
    """
    added, main = [name for name in CHILD_DEFAULTS if name not in os.environ], sys.modules["__main__"]
    os.environ.update({name: CHILD_DEFAULTS[name] for name in added})
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name in added:
            os.environ.pop(name, None)


def _events(read_end: int, process: EngineProcess) -> Iterator[dict[str, Any]]:
    """JSON lines until the pipe closes, or the process has ended (a child of its may hold the pipe open)."""
    pending = b""
    while True:
        readable, _, _ = select.select([read_end], [], [], POLL_SECONDS)
        if readable:
            chunk = os.read(read_end, 1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            yield from map(json.loads, lines)
        elif process.poll() is not None:
            return


def _end(process: EngineProcess) -> None:
    """End the engine process's own session: vLLM's engine core and workers, if it has any, are in it."""
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:  # a fork that has not begun its session yet, or nobody
            if process.poll() is not None:
                break
            with suppress(ProcessLookupError):
                os.kill(process.pid, sign)
        process.wait(patience)
    process.wait()


def post_mortem(method: str, status: int, log: str) -> str:
    """What to tell of an engine process that died: how, the likely cause, the end of its log."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [m.group(1) for line in lines if (m := re.search(r"\b(\w+(?:Error|Exception): .+)$", line))]
    # vLLM's front end only says that its engine core failed and points at the lines above.
    causes = [error for error in errors if "Engine core initialization failed" not in error]
    if causes and NO_MODEL.search(causes[-1]) and not os.environ.get(DEBUG_VARIABLE):
        return f"{method}: a model is neither a folder here nor found on the hub: {causes[-1].partition(': ')[2]}"
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    cause = f": {causes[-1]}" if causes else ""
    tail = "\n".join(lines[-LOG_TAIL_LINES:])
    return f"{method}: the engine's process {how}{cause}\nlast lines of its log:\n{tail}"
