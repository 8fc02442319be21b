"""The C compiler: which one, with what flags, and what to say where there is none or it fails."""

import errno
import functools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

CANDIDATES = ("cc", "gcc", "clang")
PATIENCE = 600
"""Seconds for one kernel, which takes less than one on an idle machine."""
INSTALL = "install gcc or clang (`apt-get install gcc`, `dnf install gcc`, `xcode-select --install`), or name one in CC"

# No contraction to fma and no reassociation: results equal numpy's, bit for bit where C's functions do. Not with
# -fno-trapping-math: gcc then takes a float that goes to an integer and back for its truncation, and keeps a -0.
FLAGS = (
    "-O2", "-ftree-vectorize", "-fPIC", "-shared", "-w", "-fwrapv", "-fno-strict-aliasing", "-fno-math-errno",
    "-ffp-contract=off",
)  # fmt: skip


class Compiler(NamedTuple):
    """A C compiler of this machine.

    Attributes:
        command: to start it with, flags that CC names among it.
        version: its own first line.
        flags: that kernels are compiled with.
    """

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]


def find() -> tuple[str, ...] | None:
    """The command of the C compiler: CC where it is set, else the first of `CANDIDATES` on the path; None without."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError:
        return None
    for command in (named,) if named else ((name,) for name in CANDIDATES):
        if path := shutil.which(command[0]):
            return (path, *command[1:])
    return None


def why_none() -> str:
    """What to say where `find` finds none."""
    named = os.environ.get("CC", "")
    try:
        words = shlex.split(named)
    except ValueError as problem:
        return f"CC is {named}, which names no command ({problem})"
    return f"CC is {named}, and {words[0]} is not found" if words else "no C compiler"


@functools.cache
def compiler() -> Compiler:
    """The compiler that kernels of this process are compiled with.

    Raises:
        RuntimeError: there is none, or it does not start.
    """
    command = find()
    if command is None:
        raise RuntimeError(f"the CPU lane cannot compile kernels: {why_none()}; {INSTALL}")
    try:
        asked = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as problem:
        raise RuntimeError(f"the C compiler {command[0]} does not start ({problem}): {INSTALL}") from problem
    return Compiler(command, asked.stdout.partition("\n")[0].strip(), (*FLAGS, _processor_flag()))


def _processor_flag() -> str:
    """The flag that allows all of this processor's instructions: on arm64 gcc and clang agree on another name."""
    return "-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64") else "-march=native"


@functools.cache
def fingerprint() -> str:
    """What the code of a kernel depends on beside its source: compiler, flags, processor, system.

    A cache folder that several machines share keeps one entry for each.
    """
    found = compiler()
    return "\n".join([*found.command, found.version, *found.flags, sys.platform, platform.machine(), _features()])


def _features() -> str:
    """The instruction sets of the processor, as Linux lists them; its name elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def compile_c(code: str, name: str) -> bytes:
    """The shared object of C code.

    Args:
        code: the source.
        name: of the kernel, for what is said if it fails.

    Raises:
        RuntimeError: the compiler failed, or there is no room for its output.
    """
    return _compile(code, name, ("-x", "c"), ("-lm",))


def compile_cpp(code: str, name: str, flags: tuple[str, ...], libraries: tuple[str, ...]) -> bytes:
    """The shared object of C++ code; see `compile_c`.

    Args:
        code: the source.
        name: for what is said if it fails.
        flags: beside those of kernels, which they outweigh.
        libraries: to link with.
    """
    return _compile(code, name, (*flags, "-x", "c++"), libraries)


def _compile(code: str, name: str, flags: tuple[str, ...], libraries: tuple[str, ...]) -> bytes:
    found = compiler()
    try:
        with tempfile.TemporaryDirectory(prefix="cpu-lane-") as folder:
            out = Path(folder, "kernel.so")
            command = [*found.command, *found.flags, *flags, "-", "-o", str(out), *libraries]
            done = subprocess.run(
                command, input=code, capture_output=True, encoding="utf-8", errors="replace", timeout=PATIENCE
            )
            if done.returncode == 0:
                return out.read_bytes()
            if os.strerror(errno.ENOSPC) in done.stderr:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"the C compiler {found.command[0]} has not ended on kernel {name} in {PATIENCE} s: name another in CC"
        ) from None
    except OSError as problem:
        where = f"in {tempfile.gettempdir()}" if problem.filename is None else f"at {problem.filename}"
        raise RuntimeError(
            f"kernel {name} cannot be compiled {where}: {problem.strerror}; make room there, or set TMPDIR"
        ) from problem
    said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
    said = said if len(said) < 600 else said[:300] + " ... " + said[-300:]
    how = f"ended with status {done.returncode}" if done.returncode > 0 else f"was ended by signal {-done.returncode}"
    raise RuntimeError(f"the C compiler {found.command[0]} {how} on kernel {name} ({said}): name another in CC")
