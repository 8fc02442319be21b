"""Which of a kernel's tensors a pointer points into.

Followed through everything that hands a pointer on: address arithmetic, moves, selections, what loops carry, blocks'
arguments and calls. A set of arguments is an integer, bit `i` for argument `i`. MLIR gives the values of two regions
that stand side by side the same names, so a value is known by its name and by what defines it.
"""

import re
from collections.abc import Iterable

from crossspec_cpu_lane.ttir import CARRIED, NAME, Block, Function, Op

UNKNOWN = 1 << 63
"""Read from memory or made of an integer: it may point anywhere."""
MAKERS = ("tt.load", "tt.atomic_load", "tt.int_to_ptr", "tt.atomic_rmw", "tt.atomic_cas", "tt.reduce", "tt.scan")


class Provenance:
    """Goes through the functions again until nothing changes."""

    def __init__(self, functions: list[Function], entry: Function) -> None:
        self.functions = {f.name: f for f in functions}
        self.sets: dict[str, dict[str, int]] = {f.name: {} for f in functions}
        self.returned: dict[str, list[int]] = {f.name: [0] * len(f.results) for f in functions}
        self.accessed: dict[int, int] = {}
        """By operation that has a pointer as its first operand (its `id`)."""
        self.changed = True
        for i, (name, type_) in enumerate(entry.args):
            if type_.is_pointer:
                self.sets[entry.name][name] = 1 << min(i, 63)
        while self.changed:
            self.changed = False
            for function in functions:
                self.here = self.sets[function.name]
                self.name = function.name
                self.meant: dict[str, str] = {}
                self.blocks(function.blocks)

    def known(self) -> dict[int, int]:
        """By operation; 0 for what may point anywhere."""
        return {op: 0 if s & UNKNOWN else s for op, s in self.accessed.items()}

    def defined(self, names: Iterable[str], by: object) -> list[str]:
        """From here on, these names mean what an operation, a block or a region defines: its values."""
        values = {name: f"{name} {id(by)}" for name in names}
        self.meant |= values
        return list(values.values())

    def of(self, name: str) -> int:
        return self.here.get(self.meant.get(name, name), 0)

    def add(self, value: str, arguments: int, function: str | None = None) -> None:
        sets = self.here if function is None else self.sets[function]
        before = sets.get(value, 0)
        sets[value] = before | arguments
        self.changed |= sets[value] != before

    def join(self, values: Iterable[str], arguments: Iterable[int]) -> None:
        for value, bits in zip(values, arguments, strict=False):
            self.add(value, bits)

    def link(self, targets: Iterable[str], sources: Iterable[str]) -> None:
        """Names of values, and of what they may be."""
        self.join([self.meant[name] for name in targets], [self.of(name) for name in sources])

    def blocks(self, blocks: list[Block]) -> None:
        for block in blocks[1:]:
            self.defined([n for n, _ in block.args], block)
        labels = {b.label: [n for n, _ in b.args] for b in blocks}
        for block in blocks:
            for op in block.ops:
                self.operation(op, labels)

    def operation(self, op: Op, labels: dict[str, list[str]]) -> None:
        if op.operands:
            self.accessed[id(op)] = self.of(op.operands[0])
        results = self.defined(op.results, op)
        if op.name == "tt.addptr":  # an offset that was read from memory says nothing of where the pointer points
            self.link(op.results, op.operands)
        elif op.name == "arith.select":
            self.link(op.results * 2, op.operands[1:])
        elif op.name in MAKERS:
            self.join(results, [UNKNOWN] * len(results))
        elif op.name in ("cf.br", "cf.cond_br"):
            for label, args in re.findall(r"\^(\w+)\(([^()]*)\)", op.words):
                self.link(labels[label], re.findall(NAME, args))
        elif op.name == "tt.call":
            self.call(op)
        elif op.name == "tt.return":
            for i, name in enumerate(op.operands):
                self.returned[self.name][i] |= self.of(name)
        elif op.regions:
            self.regions(op)
        else:
            for operand in op.operands:
                self.join(results, [self.of(operand)] * len(results))

    def call(self, op: Op) -> None:
        name = op.callee()
        for (arg, _), operand in zip(self.functions[name].args, op.operands, strict=True):
            self.add(arg, self.of(operand), name)
        self.join([self.meant[result] for result in op.results], self.returned[name])

    def regions(self, op: Op) -> None:
        words = op.words.partition("iter_args(")[2] if op.name == "scf.for" else op.words
        pairs = CARRIED.findall(words.split(") : ")[0] if op.name == "scf.while" else words)
        first = [self.of(source) for _, source in pairs]
        state = self.defined([name for name, _ in pairs], op)
        self.join(state, first)
        for region in op.regions:
            self.blocks(region)
            if not region[-1].ops:
                continue
            end = region[-1].ops[-1]
            if end.name == "scf.condition":  # hands on to the other region, whose arguments may have the same names
                handed = [self.of(name) for name in end.operands[1:]]
                self.link(op.results, end.operands[1:])
                self.join(self.defined([n for n, _ in op.regions[1][0].args], op.regions[1]), handed)
            elif op.name in ("scf.for", "scf.while"):
                self.join(state, [self.of(name) for name in end.operands])
            else:
                self.link(op.results, end.operands)
        if op.name == "scf.for":
            self.join([self.meant[name] for name in op.results], [self.here[value] for value in state])
