"""Writes the C code of one function.

Scalars become C variables. Elementwise operations on tensors of one shape that follow each other become one loop
nest (a `Loop`), in which each is a local variable; a value wanted outside its loop is stored to a local array as
well. Operations that only move elements (splat, broadcast, expand_dims, trans, ...) produce no code: a use of them is
rewritten to a use of what they read (`Value.at`). A load and a store never share a loop, for Triton completes the one
for all elements before it begins the other.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from crossspec_cpu_lane.translate.functions import prototype
from crossspec_cpu_lane.translate.layout import elementwise
from crossspec_cpu_lane.translate.registry import HANDLERS
from crossspec_cpu_lane.translate.values import (
    FlushError,
    Index,
    Loop,
    Value,
    c_type,
    compute_type,
    element_count,
    linear,
)
from crossspec_cpu_lane.ttir import Block, Function, Locations, Op, Type, UnsupportedError

STACK_LIMIT = 128 << 10
"""Bytes of arrays that a function keeps on the stack, which is 512 KiB for a thread on macOS; others are kept by
thread, which is safe because no kernel calls itself."""

ENDS = ("scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return")

T = TypeVar("T")


@dataclass
class Site:
    """A place in the source that can fail or print, as the launcher reports it."""

    kind: str
    where: str
    text: str = ""
    size: int = 0


@dataclass
class Module:
    """What the functions of one kernel share."""

    kernel: str
    locations: Locations
    checked: bool
    """Accesses are checked against the bounds of the arguments' tensors."""
    functions: dict[str, Function] = field(default_factory=dict)
    origins: dict[int, int] = field(default_factory=dict)
    """By operation (its `id`): the kernel's arguments that its pointer may come from, as bits."""
    faults: bool = False
    """Whether anything can stop the kernel before its end."""
    prints: bool = False
    sites: list[Site] = field(default_factory=list)
    prototypes: set[str] = field(default_factory=set)
    """C functions that the code calls."""

    def site(self, op: Op, kind: str, text: str = "", size: int = 0) -> int:
        self.sites.append(Site(kind, self.locations.source(op.location), text, size))
        return len(self.sites) - 1


class Writer:
    """Writes one function; the functions in `HANDLERS` call its methods for each operation."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module, self.function = module, function
        self.out: list[str | Loop] = []
        self.depth = 1
        self.values: dict[str, Value] = {}
        self.block_args: dict[str, list[Value]] = {}
        self.returns: list[Value] = []
        """Where a device function puts its results."""
        self.exits: list[Callable[[Op], None]] = []
        """What ends the region of several blocks that is being written."""
        self.region = 0
        """Which of those regions: each has labels of its own."""
        self.loop: Loop | None = None
        self.counter = 0
        self.stack_bytes = 0
        self.flat_loops = 0

    # ---- text ----

    def emit(self, line: str) -> None:
        self.out.append("  " * self.depth + line)

    def fresh(self, hint: str = "v") -> str:
        self.counter += 1
        stem = re.sub(r"\W", "_", hint.lstrip("%").split("#")[0])
        return f"{'v' if stem[:1].isdigit() else stem}_{self.counter}"

    def flush(self) -> None:
        if self.loop:
            self.loop.open = False
            self.loop.depth = self.depth
            self.out.append(self.loop)
            if self.loop.faults:
                self.leave_on_fault()
            self.loop = None

    def leave_on_fault(self) -> None:
        self.emit("if (c->fault) return;")

    def declaration(self, name: str, type_: Type) -> str:
        count = element_count(type_)
        keep = ""
        if self.stack_bytes + count * type_.bytes > STACK_LIMIT:
            keep = "static _Thread_local "
        else:
            self.stack_bytes += count * type_.bytes
        return f"{keep}{c_type(type_.elem)} {name}[{count}];"

    def render(self, loop: Loop) -> list[str]:
        lines = ["  " * loop.depth + self.declaration(f"{n}_a", t) for n, t in loop.saved.items()]
        self.flat_loops += loop.flat
        depth = loop.depth
        for head in loop.heads():
            lines.append("  " * depth + head)
            depth += 1
        lines.append("  " * (depth - 1) + "{")
        lines += ["  " * depth + line for line in loop.counters()]
        for name, text in loop.lines:
            lines.append("  " * depth + text)
            if name in loop.saved:
                lines.append("  " * depth + f"{name}_a[{linear(loop.shape, loop.index, loop)}] = {name};")
        return [*lines, "  " * (depth - 1) + "}"]

    def text(self) -> list[str]:
        lines: list[str] = []
        for item in self.out:
            lines += self.render(item) if isinstance(item, Loop) else [item]
        return lines

    # ---- values ----

    def get(self, name: str) -> Value:
        return self.values[name]

    def define(self, names: Sequence[str], values: Sequence[Value]) -> None:
        self.values |= dict(zip(names, values, strict=True))

    def named(self, name: str, type_: Type) -> Value:
        """A scalar variable."""
        return Value(type_, lambda index: name)

    def stored(self, array: str, type_: Type) -> Value:
        """A tensor in an array."""

        def at(index: Index) -> str:
            return f"{array}[{linear(type_.shape, index, self.loop)}]"

        return Value(type_, at, array)

    def declared(self, hint: str, type_: Type) -> Value:
        """A new variable or array, declared here."""
        name = self.fresh(hint)
        if type_.shape is None:
            self.emit(f"{c_type(type_.elem)} {name};")
            return self.named(name, type_)
        self.emit(self.declaration(name, type_))
        return self.stored(name, type_)

    def in_loop(self, loop: Loop, name: str, type_: Type) -> Value:
        array = self.stored(f"{name}_a", type_)

        def at(index: Index) -> str:
            if loop.open:
                if index != loop.index or self.loop is not loop:
                    raise FlushError
                return name
            loop.saved[name] = type_
            return array.at(index)

        return Value(type_, at, f"{name}_a", loop)

    def enter(self, shape: tuple[int, ...], loads: bool = False, stores: bool = False) -> Loop:
        loop = self.loop
        if loop and (loop.shape != shape or (loads and loop.stores) or (stores and (loop.loads or loop.stores))):
            self.flush()
        if not self.loop:
            self.loop = Loop(shape)
        self.loop.loads |= loads
        self.loop.stores |= stores
        return self.loop

    def compute(
        self,
        hint: str,
        type_: Type,
        expr: Callable[..., str],
        *operands: Value,
        loads: bool = False,
        faults: bool = False,
    ) -> Value:
        """A new value, element by element: `expr` is given the operands' elements."""
        name, kind = self.fresh(hint), c_type(type_.elem)
        if type_.shape is None:
            if loads and self.loop and self.loop.stores:
                self.flush()
            texts = self.retry(lambda: [o.at(()) for o in operands])
            self.emit(f"{kind} {name} = {expr(*texts)};")
            if faults:
                self.flush()
                self.leave_on_fault()
            value = self.named(name, type_)
        else:

            def add() -> Value:
                loop = self.enter(type_.shape, loads=loads)
                text = f"{kind} {name} = {expr(*(o.at(loop.index) for o in operands))};"
                loop.lines.append((name, text))
                loop.faults |= faults
                return self.in_loop(loop, name, type_)

            value = self.retry(add)
            if not loads:
                same = [o.strides for o in operands if o.type.shape == type_.shape]
                value.laid_out(elementwise(type_.shape, same))
        value.computed = True
        return value

    def perform(
        self, shape: tuple[int, ...] | None, statement: Callable[..., str], *operands: Value, faults: bool = False
    ) -> None:
        """A statement for its effect."""
        if shape is None:
            if self.loop and (self.loop.loads or self.loop.stores):
                self.flush()
            self.emit(statement(*self.retry(lambda: [o.at(()) for o in operands])))
            if faults:
                self.flush()
                self.leave_on_fault()
            return

        def add() -> None:
            loop = self.enter(shape, stores=True)
            loop.lines.append(("", statement(*(o.at(loop.index) for o in operands))))
            loop.faults |= faults

        self.retry(add)

    def retry(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except FlushError:
            self.flush()
            return action()

    def array_of(self, value: Value) -> str:
        """The array that holds a tensor; a view is copied to one."""
        if value.array is None:
            value = self.copy(value)
        self.flush()
        if value.loop:
            value.loop.saved[value.array.removesuffix("_a")] = value.type
        return value.array

    def in_array(self, value: Value) -> Value:
        return self.stored(self.array_of(value), value.type).laid_out(value.strides)

    def assign(self, targets: Sequence[Value], sources: Sequence[Value], parallel: bool) -> None:
        """Copy values into declared ones; in parallel where a source may read a target."""
        pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t is not s]
        if parallel:
            pairs = [(t, s if s.computed else self.copy(s)) for t, s in pairs]
        self.flush()
        for target, source in pairs:
            if target.type.shape is None:
                self.emit(f"{target.at(())} = {source.at(())};")
            else:
                loop = self.enter(target.type.shape)
                loop.lines.append(("", f"{target.at(loop.index)} = {source.at(loop.index)};"))
                self.flush()

    def copy(self, value: Value) -> Value:
        return self.compute("copy", value.type, lambda x: x, value)

    def call(self, function: str, elem: str, *args: str) -> str:
        """A call of C's mathematical library, in f32 or f64."""
        name, declaration = prototype(function, compute_type(elem))
        self.module.prototypes.add(declaration)
        return f"{name}({', '.join(args)})"

    # ---- operations ----

    def blocks(self, blocks: list[Block]) -> None:
        """Blocks that jump to each other; none of the labels may be in use already."""
        for block in blocks[1:]:
            self.block_args[block.label] = [self.declared(n, t) for n, t in block.args]
            self.define([n for n, _ in block.args], self.block_args[block.label])
        for block in blocks:
            if block is not blocks[0]:
                self.emit(f"{self.label(block.label)}:;")
            end = self.body(block.ops)
            if end is not None:
                self.exits[-1](end)

    def label(self, name: str) -> str:
        return f"{name}_{self.region}" if self.exits else name

    def body(self, ops: list[Op]) -> Op | None:
        """Translates operations; the last is handed back where the caller has to see to it (a yield)."""
        for op in ops:
            if op.name in ENDS:
                return op
            self.operation(op)
        self.flush()
        return None

    def operation(self, op: Op) -> None:
        try:
            result = self.translated(op)
        except UnsupportedError as e:
            if len(e.args) > 1:  # it says where already
                raise
            where = self.module.locations.source(op.location)
            raise UnsupportedError(f"the CPU lane cannot compile {self.module.kernel} ({where}): {e}", where) from None
        if len(op.results) == 1:
            self.values[op.results[0]] = result
        elif op.results:
            self.define(op.results, result)

    def translated(self, op: Op) -> Any:
        if op.name not in HANDLERS:
            raise UnsupportedError(f"it has no translation of the operation {op.name}")
        operands = [self.get(n) for n in op.operands] if not op.regions else []
        return HANDLERS[op.name](self, op, operands)

    def combined(self, block: Block, args: Sequence[str]) -> list[Value]:
        """What a region of one block yields for scalars."""
        self.define([n for n, _ in block.args], [self.named(a, t) for a, (_, t) in zip(args, block.args, strict=True)])
        end = self.body(block.ops)
        return [self.get(n) for n in end.operands]
