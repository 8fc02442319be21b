"""What a result was measured with: the `meta` part of the JSON document."""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_crossspec.cli.rows import Run

GIB = 1 << 30


def describe(runs: Sequence[Run], settings: dict[str, Any]) -> dict[str, Any]:
    """Versions, command, commit, hardware, whether kernels were interpreted, and the run's settings.

    Args:
        runs: at least one; all of them ran in the same environment.
        settings: dtype, sampling and the like, as the command chose them.
    """
    environment = runs[0].environment
    return {
        "versions": {"vllm_crossspec": metadata.version("vllm-crossspec"), **environment["versions"]},
        **origin(),
        "hardware": {**hardware(), "device": environment["device"]},
        "kernels_interpreted": environment["kernels_interpreted"],
        **settings,
    }


def origin() -> dict[str, Any]:
    """The command, the commit and the time."""
    return {
        "command": shlex.join(["crossspec", *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def hardware() -> dict[str, Any]:
    """The machine's processor, the cores that this process may use, and its memory in GiB."""
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages * page_size / GIB, 1),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def commit() -> str | None:
    """The checkout's commit, with `-dirty` where files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        # An installed copy may lie inside another project's checkout; only a tracked one is its own.
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-dirty" if changes.strip() else "")
