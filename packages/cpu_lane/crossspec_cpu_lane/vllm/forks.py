"""Engines' processes that are forked from a server that has imported vLLM.

Importing vLLM takes ten seconds of a processor, starting an engine with a small model less than one. So the first
engine starts a server of forks, Python's own (:mod:`multiprocessing.forkserver`), and every later one begins where it
left off. Nothing here imports vLLM.
"""

import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

PRELOADED = "crossspec_cpu_lane.vllm.preload"

BOUND_CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""Environment variable: the cores that vLLM's threads keep to."""

READ_AT_IMPORT = ("TRITON_", "VLLM_", "TORCH", "HF_", "LD_", "PYTHON", "OMP_", "GLIBC_")
"""How variables begin that vLLM or what it stands on reads when it is imported: another value, another server."""

_server_environment: list[dict[str, str]] = []
"""What the server was started with, of :data:`READ_AT_IMPORT`; empty before."""

_lock = threading.Lock()
"""Around what two threads that start an engine each must not do at once: it changes this process for a moment."""


class Forked:
    """A fork of the server; as the plugin's ``cli.processes.Process``."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """The status; None while it runs."""
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """The status; None if it still runs after the timeout, in seconds."""
        self._process.join(timeout)
        status: int | None = self._process.exitcode
        return status


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether the server serves an engine with this environment: on Linux, if nothing that it has read has changed."""
    if not sys.platform.startswith("linux"):
        return False
    with _lock:
        read = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
        if not _server_environment:
            _server_environment.append(read)
        return read == _server_environment[0]


def start(
    module: str, job_file: Path, events: int, log_file: Path, environment: dict[str, str], cores: Sequence[int]
) -> Forked | None:
    """A fork that runs the module; None where this machine cannot fork. Arguments as of ``Platform.start``."""
    if not can_fork(environment):
        return None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    connection = Connection(os.dup(events), readable=False)
    arguments = (module, str(job_file), connection, str(log_file), environment, list(cores))
    process = context.Process(target=run, args=arguments)
    try:
        with _lock, _as_the_server_sees_it(environment):
            forkserver.ensure_running()
            process.start()
    except (EOFError, OSError):  # the server is gone: whatever ended it, an engine of its own says it better
        return None
    finally:
        connection.close()
    return Forked(process)


@contextmanager
def _as_the_server_sees_it(environment: Mapping[str, str]) -> Iterator[None]:
    """Hand the server, which imports vLLM, what an engine's environment has; and no fork this program's own module.

    Python imports the main module of the asking process into the fork: a script without a guard would run again.
    """
    added, main = environment.keys() - os.environ.keys(), sys.modules["__main__"]
    os.environ.update({name: environment[name] for name in added})
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name in added:
            os.environ.pop(name, None)


def run(
    module: str, job_file: str, events: Any, log_file: str, environment: dict[str, str], cores: Sequence[int]
) -> None:
    """Be the process of an engine: a session, a log, an environment and cores of its own; then run the module.

    It works in the folder ``PWD`` of the environment: the server may have been started in another one.

    Args:
        module: as ``python -m`` takes it.
        job_file: its first argument.
        events: connection to whoever reads the events; its descriptor is the second argument.
        log_file: that what it prints is appended to.
        environment: all of it.
        cores: to keep to; none for all.
    """
    os.setsid()
    os.chdir(environment["PWD"])
    log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if cores:
        os.environ[BOUND_CORES] = ",".join(map(str, cores))
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    if cores:
        import torch

        os.sched_setaffinity(0, cores)
        # What torch multiplies with has counted the server's cores: more threads than cores wait for each other.
        torch.set_num_threads(len(cores))
    # The module closes its descriptor itself.
    sys.argv = [module, job_file, str(os.dup(events.fileno()))]
    events.close()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
