"""Translates a module of Triton's IR: its kernel, its device functions, and the function that runs the whole grid."""

import pathlib
from dataclasses import asdict, dataclass
from typing import Any

from crossspec_cpu_lane.translate import (  # noqa: F401  (these register their operations)
    arithmetic,
    control,
    conversions,
    debug,
    memory,
    products,
    reductions,
    shapes,
)
from crossspec_cpu_lane.translate.control import function_name
from crossspec_cpu_lane.translate.provenance import Provenance
from crossspec_cpu_lane.translate.values import Value, c_type, linear
from crossspec_cpu_lane.translate.writer import Module, Writer
from crossspec_cpu_lane.ttir import Block, Function, Op, UnsupportedError, parse_module

PRELUDE = pathlib.Path(__file__).with_name("prelude.h")
IDS = [f"  const int program_{d} = c->program[{i}], programs_{d} = c->programs[{i}];" for i, d in enumerate("xyz")]


MANY_FLAT_LOOPS = 16
"""A sort has hundreds, in which gcc looks for vectors for many seconds and finds none."""


@dataclass(frozen=True)
class Translation:
    """A kernel in C, and what its launcher must know."""

    name: str
    code: str
    arguments: list[str]
    sites: list[dict[str, Any]]
    faults: bool
    """`launch` is given the tensors' extents and a report that it may fill."""
    checked: bool
    prints: bool
    file: str | None
    """Where the kernel's source was read from. Another copy of the same source finds the same entry in the cache."""

    def described(self) -> dict[str, Any]:
        """As JSON can hold it, without the code."""
        return {k: v for k, v in asdict(self).items() if k != "code"}


def translate(text: str, checked: bool = False) -> Translation:
    """For the text of a module, printed with locations."""
    functions, locations = parse_module(text)
    entries = [f for f in functions if f.public]
    if len(entries) != 1:
        raise UnsupportedError(f"the CPU lane cannot compile a module of {len(entries)} kernels")
    entry = entries[0]
    module = Module(entry.name, locations, checked, {f.name: f for f in functions})
    module.faults = checked or any(op.name == "tt.assert" for f in functions for op in operations(f.blocks))
    if checked:
        module.origins = Provenance(functions, entry).known()
    device = [f for f in functions if f is not entry]
    parts = [device_function(module, f) for f in device]
    kernel = Writer(module, entry)
    fields = []
    for name, type_ in entry.args:
        if type_.shape is not None:
            raise UnsupportedError(f"the CPU lane cannot compile {entry.name}: its argument {name} is a tensor")
        c_name = kernel.fresh(name)
        fields.append((c_type(type_.elem), c_name))
        kernel.values[name] = kernel.named(c_name, type_)
    kernel.blocks(entry.blocks)
    params = ", ".join(["struct context *c", *(f"{t} {n}" for t, n in fields)])
    body = kernel.text()
    code = [
        *(['#pragma GCC optimize ("no-tree-vectorize")'] if kernel.flat_loops >= MANY_FLAT_LOOPS else []),
        PRELUDE.read_text(),
        *sorted(module.prototypes),
        *(head + ";" for head, _ in parts),
        *(line for head, body in parts for line in [head + " {", *IDS, *body, "}"]),
        f"static void program({params}) {{",
        *IDS,
        *body,
        "}",
        *launch(fields, module),
        "",
    ]
    sites = [asdict(s) for s in module.sites]
    names = [n.lstrip("%") for n, _ in entry.args]
    file = next((file for file, _ in locations.frames(entry.location)), None)
    return Translation(entry.name, "\n".join(code), names, sites, module.faults, checked, module.prints, file)


def operations(blocks: list[Block]) -> list[Op]:
    found = []
    for block in blocks:
        for op in block.ops:
            found += [op, *(inner for region in op.regions for inner in operations(region))]
    return found


def device_function(module: Module, function: Function) -> tuple[str, list[str]]:
    """A function that is not inlined: its head and body."""
    writer = Writer(module, function)
    params = ["struct context *c"]
    for name, type_ in function.args:
        c_name = writer.fresh(name)
        params.append(f"{c_type(type_.elem)} {'*' * (type_.shape is not None)}{c_name}")
        make = writer.named if type_.shape is None else writer.stored
        writer.values[name] = make(c_name, type_)
    for i, type_ in enumerate(function.results):
        params.append(f"{c_type(type_.elem)} *result{i}")
        place = f"result{i}"
        if type_.shape is None:
            writer.returns.append(writer.named(f"*{place}", type_))
        else:
            writer.returns.append(
                Value(type_, lambda index, p=place, s=type_.shape: f"{p}[{linear(s, index)}]", array=place)
            )
    writer.blocks(function.blocks)
    return f"static void {function_name(function.name)}({', '.join(params)})", writer.text()


def launch(fields: list[tuple[str, str]], module: Module) -> list[str]:
    """Runs the grid, one program after the other; answers 1 where a program stopped it."""
    more = ", const struct extent *extents, struct report *report" if module.faults else ""
    call = ", ".join(["&c", *(f"a->{n}" for _, n in fields)])
    lines = [
        "struct arguments {",
        *([f"  {t} {n};" for t, n in fields] or ["  char none;"]),
        "};",
        f"int launch(const struct arguments *a, int nx, int ny, int nz{more}) {{",
        "  struct context c = {.programs = {nx, ny, nz}};",
        *(["  c.extents = extents;", "  c.report = report;"] if module.faults else []),
        "  for (int z = 0; z < nz; z++)",
        "    for (int y = 0; y < ny; y++)",
        "      for (int x = 0; x < nx; x++) {",
        "        c.program[0] = x, c.program[1] = y, c.program[2] = z;",
        f"        program({call});",
    ]
    if module.faults:
        lines.append("        if (c.fault) return 1;")
    return [*lines, "      }", *(["  fflush(0);"] if module.prints else []), "  return 0;", "}"]
