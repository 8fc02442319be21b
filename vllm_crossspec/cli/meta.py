"""What a result was measured with: the `meta` part of the JSON document."""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_crossspec.cli.rows import Run

GIB = 1 << 30


def describe(runs: Sequence[Run], settings: dict[str, Any]) -> dict[str, Any]:
    """Versions, command, commit, hardware and the run's settings. All runs (one at least) had the same environment."""
    ran = runs[0].environment
    versions = {"vllm_crossspec": metadata.version("vllm-crossspec"), **ran["versions"]}
    return {"versions": versions, **origin(), "hardware": {**hardware(), "device": ran["device"]}, **settings}


def installed(*distributions: str) -> str | None:
    """The version of the first of these that is installed."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


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


def available_gib() -> float:
    """Of memory: what the system could give a process now."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024 / GIB
    except (OSError, KeyError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def commit() -> str | None:
    """The checkout's commit, with `-dirty` where files differ from it; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed copy may lie inside another project's checkout; only a tracked one is its own.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
