"""Engines, each in a process of its own that follows orders. Nothing here imports vLLM.

The platform starts the process, or a new Python does. The two sides talk through a job file, a pipe of orders and a
pipe of events; :mod:`vllm_crossspec.jobs.offline` is the other side, and has what they say.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from vllm_crossspec.names import DEBUG_VARIABLE
from vllm_crossspec.platform import platform

CHILD_MODULE = "vllm_crossspec.jobs.offline"
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

NO_MODEL = re.compile(
    "couldn't connect to 'https?:|not a valid model identifier|not appear to have a file named|not a local folder"
)
"""What Hugging Face's errors say of a model that is neither a folder nor to be had from the hub."""

LOG_TAIL_LINES = 15
POLL_SECONDS = 1.0

Event = dict[str, Any]
Process = Any
"""A ``subprocess.Popen``, or what stands for one on a platform: it has a ``pid``, ``poll`` and ``wait``."""


class EngineError(RuntimeError):
    """An engine process ended without its results; the message is what a user can go by."""


@contextmanager
def engine_process(
    job_file: Path, log_file: Path, module: str | None = None, cores: Sequence[int] = (), variables: Any = None
) -> Iterator[tuple[Process, Iterator[Event]]]:
    """The process and its events; on the way out the process and everything that it started are gone.

    Raises ValueError: no engine can run on this machine; the message says what to do.

    Args:
        log_file: takes what the process prints.
        module: that the process runs, with the job's file and a descriptor for its events; None is the demo's.
        cores: that the process keeps to; none for all. Where the platform's engines compute on cores only.
        variables: of its environment, by name, beside those of this process; None for none.
    """
    if problem := platform().problem():
        raise ValueError(problem)
    read_end, write_end = os.pipe()
    environment = {**CHILD_DEFAULTS, **os.environ, "PWD": os.getcwd(), **(variables or {})}
    arguments = (module or CHILD_MODULE, job_file, write_end, log_file, environment, cores)
    try:
        process = platform().start(*arguments) or _start(*arguments)
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


class Engine:
    """An engine that follows orders, by :func:`started`; ``about``: what runs, and the ``seconds`` of its start."""

    def __init__(self, name: str, orders: IO[str], events: Iterator[Event]) -> None:
        self._name, self._orders, self._events = name, orders, events
        (*_, self.about) = self._until("ready")

    def follow(self, **order: Any) -> Iterator[Event]:
        """Give an order; what the engine says until it is carried out. Raises as :func:`started`."""
        print(json.dumps(order), file=self._orders, flush=True)
        yield from self._until("done")

    def _until(self, last: str) -> Iterator[Event]:
        for event in self._events:
            yield event
            if event["event"] == last:
                return
        raise EngineError(f"{self._name}: the engine's process ended before it was through")


@contextmanager
def started(
    name: str, job: Mapping[str, Any], module: str | None = None, cores: Sequence[int] = ()
) -> Iterator[Engine]:
    """An engine in a process of its own, up until the end of the block.

    Raises ValueError: the engine refused the job; the message is its sentence. Raises EngineError: the process died;
    the message ends with the last lines of its log.

    Args:
        name: of the job in messages; an event that names another ``method`` is about that one.
        job: what the module reads; ``environment`` in it has variables for the process.
        module, cores: as of :func:`engine_process`.
    """
    with tempfile.TemporaryDirectory(prefix="crossspec-") as folder:
        job_file, log_file, pipe = (Path(folder, file) for file in ("job.json", "log.txt", "orders"))
        os.mkfifo(pipe)
        job_file.write_text(json.dumps({**job, "orders": str(pipe)}))
        # Open at both ends, or it would wait here for the engine to open the other.
        with (
            open(os.open(pipe, os.O_RDWR), "w") as orders,
            engine_process(job_file, log_file, module, cores, job.get("environment")) as (process, events),
        ):
            heard = _heard(name, process, events, log_file)
            yield Engine(name, orders, heard)
            orders.close()  # it ends by itself, with all that it started
            for _ in heard:
                pass


def _heard(name: str, process: Process, events: Iterator[Event], log_file: Path) -> Iterator[Event]:
    for event in events:
        name = event.get("method", name)
        if event["event"] == "error":
            raise ValueError(f"{name}: {event['message']}")
        yield event
    if status := process.wait():
        raise EngineError(post_mortem(name, status, log_file.read_text(errors="replace")))


_running: list[Process] = []


def end_all() -> None:
    """End every engine's process."""
    for process in list(_running):
        _end(process)


def _start(
    module: str, job_file: Path, events: int, log_file: Path, environment: dict[str, str], cores: Sequence[int]
) -> subprocess.Popen[bytes]:
    if cores:
        environment = {**environment, BOUND_CORES: ",".join(map(str, cores))}
    with log_file.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(job_file), str(events)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(events,),
            start_new_session=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )


def _events(read_end: int, process: Process) -> Iterator[Event]:
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


def _end(process: Process) -> None:
    """End the engine process's own session: vLLM's engine core and workers, if it has any, are in it."""
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:  # a fork that has not begun its session yet, or nobody
            if process.poll() is not None:
                break
            with suppress(ProcessLookupError):
                os.kill(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
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
