"""How a fork of the server that :mod:`vllm_crossspec.cli.processes` keeps becomes an engine's process."""

import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any


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
