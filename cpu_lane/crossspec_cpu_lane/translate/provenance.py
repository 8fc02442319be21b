"""Which of a kernel's tensors a pointer points into.

Followed through everything that hands a pointer on: address arithmetic, moves, selections, what loops carry, blocks'
arguments and calls. A set of arguments is an integer, bit `i` for argument `i`.
"""

import re
from collections.abc import Iterator

from crossspec_cpu_lane.ttir import NAME, Block, Function, Op

UNKNOWN = 1 << 63
"""Read from memory or made of an integer: it may point anywhere."""
MAKERS = ("tt.load", "tt.atomic_load", "tt.int_to_ptr", "tt.atomic_rmw", "tt.atomic_cas", "tt.reduce", "tt.scan")
CARRIED = rf"({NAME}) = ({NAME})"


class Provenance:
    """Goes through the functions again until nothing changes."""

    def __init__(self, functions: list[Function], entry: Function) -> None:
        self.functions = {f.name: f for f in functions}
        self.sets: dict[str, dict[str, int]] = {f.name: {} for f in functions}
        self.returned: dict[str, list[int]] = {f.name: [0] * len(f.results) for f in functions}
        self.changed = True
        for i, (name, type_) in enumerate(entry.args):
            if type_.is_pointer:
                self.sets[entry.name][name] = 1 << min(i, 63)
        while self.changed:
            self.changed = False
            for function in functions:
                self.here = self.sets[function.name]
                self.name = function.name
                self.blocks(function.blocks)

    def known(self) -> dict[str, dict[str, int]]:
        """By function and value; 0 for what may point anywhere."""
        return {f: {n: 0 if s & UNKNOWN else s for n, s in sets.items()} for f, sets in self.sets.items()}

    def add(self, name: str, arguments: int, function: str | None = None) -> None:
        sets = self.here if function is None else self.sets[function]
        if arguments and sets.get(name, 0) | arguments != sets.get(name, 0):
            sets[name] = sets.get(name, 0) | arguments
            self.changed = True

    def link(self, targets: list[str], sources: list[str]) -> None:
        for target, source in zip(targets, sources, strict=False):
            self.add(target, self.here.get(source, 0))

    def blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            for op in block.ops:
                self.operation(op, {b.label: [n for n, _ in b.args] for b in blocks})

    def operation(self, op: Op, labels: dict[str, list[str]]) -> None:
        if op.name == "tt.addptr":  # an offset that was read from memory says nothing of where the pointer points
            self.add(op.results[0], self.here.get(op.operands[0], 0))
        elif op.name == "arith.select":
            self.link(op.results * 2, op.operands[1:])
        elif op.name in MAKERS:
            for name in op.results:
                self.add(name, UNKNOWN)
        elif op.name in ("cf.br", "cf.cond_br"):
            for label, args in re.findall(r"\^(\w+)\(([^()]*)\)", op.words):
                self.link(labels[label], re.findall(NAME, args))
        elif op.name == "tt.call":
            self.call(op)
        elif op.name == "tt.return":
            for i, name in enumerate(op.operands):
                self.returned[self.name][i] |= self.here.get(name, 0)
        elif op.regions:
            self.regions(op)
        else:
            for operand in op.operands:
                for name in op.results:
                    self.add(name, self.here.get(operand, 0))

    def call(self, op: Op) -> None:
        found = re.match(r'@("(\d+)"|[\w$.\-]+)', op.words)
        name = op.strings[int(found[2])] if found[2] else found[1]
        for (arg, _), operand in zip(self.functions[name].args, op.operands, strict=True):
            self.add(arg, self.here.get(operand, 0), name)
        for result, arguments in zip(op.results, self.returned[name], strict=True):
            self.add(result, arguments)

    def regions(self, op: Op) -> None:
        words = op.words.partition("iter_args(")[2] if op.name == "scf.for" else op.words
        pairs = re.findall(CARRIED, words.split(") : ")[0] if op.name == "scf.while" else words)
        state = [n for n, _ in pairs]
        self.link(state, [s for _, s in pairs])
        for region in op.regions:
            self.blocks(region)
        for end in self.ends(op):
            if end.name == "scf.condition":
                self.link([n for n, _ in op.regions[1][0].args], end.operands[1:])
                self.link(op.results, end.operands[1:])
            elif op.name in ("scf.for", "scf.while"):
                self.link(state, end.operands)
            else:
                self.link(op.results, end.operands)
        if op.name == "scf.for":
            self.link(op.results, state)

    @staticmethod
    def ends(op: Op) -> Iterator[Op]:
        for region in op.regions:
            if region[-1].ops:
                yield region[-1].ops[-1]
