"""Random small Triton kernels, compiled against interpreted: what differs is shrunk to a small program and printed.

    python benchmarks/random_kernels.py                               # 2,000 programs, about 15 minutes of one core
    python benchmarks/random_kernels.py --programs 50 --seed 7000     # others

Each program runs in a process of its own, so that one that crashes or never ends is a result like any other. The
compiled kernels go to a folder that is removed at the end. Programs and what they leave out: tests/random_programs.py.
Prints the programs that fail, and one JSON document as its last line. Exits with 1 where a program failed. Needs no
GPU.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    _FOLDER = tempfile.TemporaryDirectory(prefix="random-kernels-")
    os.environ["TRITON_CACHE_DIR"] = _FOLDER.name
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import torch
import triton
from random_kernels import run, shrink
from random_programs import Program, generate
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_crossspec.cli import meta

PATIENCE = 120
"""Seconds for one program."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--programs", type=int, default=2000, help="how many")
    add("--seed", type=int, default=0, help="of the first; the others follow it")
    add("--no-shrink", action="store_true", help="do not look for smaller programs that fail alike")
    add("--json", type=Path, help="also write the document to this file")
    options = parser.parse_args(argv)
    if options.programs < 1:
        parser.error(f"--programs {options.programs}: give at least 1")
    return options


def attempt(program: Program, folder: Path) -> dict[str, Any]:
    """Run a program in a process of its own: its outcome, or how it failed."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        result = _attempt_here(program, folder)
        with os.fdopen(send, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        late = not select.select([pipe], [], [], PATIENCE)[0]
        if late:
            os.kill(child, signal.SIGKILL)
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if late:
        return {"kind": "hangs", "text": f"no answer in {PATIENCE} s"}
    if not content:
        return {"kind": "crashes", "text": f"the process ended with {os.waitstatus_to_exitcode(status)}"}
    return pickle.loads(content)


def _attempt_here(program: Program, folder: Path) -> dict[str, Any]:
    try:
        outcome = run(program, folder)
    except Exception as e:  # noqa: BLE001  whatever a random program meets is the result
        cause = e.__cause__ or e
        return {"kind": f"does not compile: {type(cause).__name__}", "text": str(e)[-2000:]}
    kind = "equal" if not outcome.wrong else "not interpreted" if "not interpreted" in outcome.wrong else "differs"
    if not outcome.wrong and outcome.library:
        kind = "equal with C's functions"
    return {"kind": kind, "text": outcome.wrong, **dataclasses.asdict(outcome)}


def smallest(program: Program, kind: str, folder: Path) -> Program:
    """The smallest program found that fails in the same way."""
    return shrink(program, lambda smaller: attempt(smaller, folder)["kind"] == kind)


@dataclasses.dataclass
class Tally:
    """What programs did."""

    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    elements: int = 0
    ulp: float = 0.0
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, program: Program, found: dict[str, Any]) -> None:
        self.kinds[found["kind"]] += 1
        self.elements += found.get("elements", 0)
        if not found["kind"].startswith("equal"):
            entry = {"seed": program.seed, "kind": found["kind"], "text": found["text"], "source": program.source()}
            self.failures.append(entry)
        elif math.isfinite(found["ulp"]):
            self.ulp = max(self.ulp, found["ulp"])


def run_all(options: argparse.Namespace, console: Console) -> Tally:
    """All programs, or those until Ctrl-C."""
    tally = Tally()
    columns = (TextColumn("programs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as name, Progress(*columns, console=console) as progress:
        folder = Path(name)
        try:
            for seed in progress.track(range(options.seed, options.seed + options.programs)):
                program = generate(seed)
                found = attempt(program, folder)
                if not found["kind"].startswith("equal") and not options.no_shrink:
                    program = smallest(program, found["kind"], folder)
                    found = attempt(program, folder) | {"kind": found["kind"]}
                tally.add(program, found)
                if not found["kind"].startswith("equal"):
                    kernel = program.source().split("@triton.jit")[-1]
                    text = f"--- seed {seed} {found['kind']}: {found['text']}\n{kernel}"
                    progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            progress.console.print("stopped: the document is about the programs that ran")
    return tally


def main(argv: list[str] | None = None) -> int:
    """The command: its exit code."""
    options = arguments(argv)
    torch.set_num_threads(1)
    start = time.time()
    tally = run_all(options, Console(stderr=True))
    document = {
        "programs": tally.kinds.total(),
        "seed": options.seed,
        "kinds": dict(tally.kinds),
        "elements": tally.elements,
        "largest_ulp_of_libraries": tally.ulp,
        "failures": tally.failures,
        "meta": {
            "versions": {"triton": triton.__version__, "torch": torch.__version__, "numpy": np.__version__},
            "hardware": meta.hardware(),
            "commit": meta.commit(),
            "seconds": round(time.time() - start, 1),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    }
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))
    print(json.dumps(document))
    return bool(tally.failures)


if __name__ == "__main__":
    sys.exit(main())
