"""Random programs, run and made smaller.

program = generate(seed)             # see random_programs.py
outcome = run(program, folder)       # compiled and interpreted, see compared.py
small = shrink(program, fails)       # the same failure in fewer lines
"""

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from compared import Outcome, launch_both
from random_programs import ATOMS, BITS, FLOATS, LENGTH, TYPES, UNSIGNED, Line, Program
from triton.runtime.jit import JITFunction

# -- running --------------------------------------------------------------------------------------------------


def inputs(seed: int) -> dict[str, torch.Tensor]:
    """One buffer for each type: random values, a quarter of them edges."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, dtype in TYPES.items():
        edge = torch.randint(0, 4, (LENGTH,), generator=generator) == 0
        if name in FLOATS:
            x = torch.randn(LENGTH, generator=generator, dtype=torch.float64) * 8
            limits = torch.finfo(dtype)
            values = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), limits.max, limits.tiny, 1e-3]
        elif name == "int1":
            found[name] = torch.randint(0, 2, (LENGTH,), generator=generator).bool()
            continue
        else:
            limits = torch.iinfo(dtype)
            bound = min(2 ** (BITS[name] - 1) - 1, 1000)
            low = 0 if name in UNSIGNED else -bound
            x = torch.randint(low, bound, (LENGTH,), generator=generator)
            values = [0, 1, 2, limits.min, limits.max, limits.max - 1]
            if name == "uint64":
                values = [0, 1, 2, 7, 2**63 - 1, 2**62]
        picked = torch.randint(0, len(values), (LENGTH,), generator=generator)
        special = torch.tensor(values, dtype=torch.float64 if name in FLOATS else torch.int64)[picked]
        found[name] = torch.where(edge, special, x).to(dtype)
    return found


def arguments(program: Program) -> list[Any]:
    """Of the kernel."""
    outputs = []
    for v in program.outputs:
        size = program.grid
        for d in v.shape:
            size *= d
        outputs.append(torch.zeros(size, dtype=TYPES[v.dtype]))
    atoms = [torch.arange(ATOMS * 32, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.float32)]
    return [*inputs(program.seed).values(), *outputs, *atoms, program.count]


def load_kernel(program: Program, folder: Path) -> JITFunction:
    """The kernel, its source written to a file, for Triton reads it."""
    name = f"random_kernel_{program.seed}_{abs(hash(program.source())):x}"
    path = Path(folder) / f"{name}.py"
    path.write_text(program.source())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module.kernel


def run(program: Program, folder: Path) -> Outcome:
    """Compiled and interpreted."""
    return launch_both(JITFunction.run, load_kernel(program, folder), (program.grid,), tuple(arguments(program)), {})


# -- shrinking ------------------------------------------------------------------------------------------------


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest program found that still fails.

    Args:
        program: one that fails.
        fails: whether a program fails as that one does.
    """
    while True:
        for smaller in _smaller(program):
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    if len(program.outputs) > 1:
        for v in program.outputs:
            yield _pruned(dataclasses.replace(program, outputs=[v]))
    if program.grid > 1:
        yield dataclasses.replace(program, grid=1)
    for lines in _changes(program.lines):
        yield _pruned(dataclasses.replace(program, lines=lines))


def _changes(lines: list[Line]) -> Iterator[list[Line]]:
    """The lines with one of them left out, made constant, or smaller inside; the last first."""
    for k in reversed(range(len(lines))):
        line = lines[k]
        before, after = lines[:k], lines[k + 1 :]
        if not line.defines:
            yield before + after
        if line.body and not line.text.startswith("while"):
            yield before + [x for x in line.body if f"{line.text.split()[1]}" not in x.text] + after
        if line.defines and not line.text.endswith(_constant_ends(line)):
            yield before + [Line([v], v.constant()) for v in line.defines] + after
        for body in _changes(line.body):
            if body:
                yield [*before, dataclasses.replace(line, body=body), *after]
        for other in _changes(line.other):
            yield [*before, dataclasses.replace(line, other=other), *after]


def _constant_ends(line: Line) -> str:
    return line.defines[0].constant().partition(" = ")[2]


def _names(lines: list[Line]) -> Iterator[str]:
    for line in lines:
        text = line.text
        for v in line.defines:
            text = re.sub(rf"^{v.name}(,| =)|, {v.name} =", " ", text)
        yield from re.findall(r"\b[vic]\d+\b", text)
        yield from _names(line.body)
        yield from _names(line.other)


def _pruned(program: Program) -> Program:
    """Without what nothing reads."""
    while True:
        used = {*_names(program.lines), *(v.name for v in program.outputs)}
        kept = _without(program.lines, used)
        if kept == program.lines:
            return program
        program = dataclasses.replace(program, lines=kept)


def _without(lines: list[Line], used: set[str]) -> list[Line]:
    kept = []
    for line in lines:
        if line.defines and not any(v.name in used for v in line.defines) and not line.body:
            continue
        body = _without(line.body, used) if line.body else []
        if line.body and not body:
            continue
        kept.append(dataclasses.replace(line, body=body, other=_without(line.other, used)))
    return kept
