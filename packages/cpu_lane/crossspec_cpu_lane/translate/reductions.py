"""Reductions, scans and histograms: loops that are written out.

Sums of floats add in numpy's order, so that they equal the interpreter's: pairwise along the axis that is innermost in
memory, one after the other along any other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from crossspec_cpu_lane.translate.layout import is_innermost, reduced
from crossspec_cpu_lane.translate.regions import region_values
from crossspec_cpu_lane.translate.registry import handles
from crossspec_cpu_lane.translate.values import Index, Value, c_type, element_count, product
from crossspec_cpu_lane.translate.writer import Writer
from crossspec_cpu_lane.ttir import Op, Type

ANY_ORDER = {"addi", "minsi", "maxsi", "minui", "maxui", "andi", "ori", "xori", "maxnumf", "minnumf"}
"""Combiners that may be applied in any order with an equal result."""
BY_NUMPY = {"addf", "addi", "minsi", "maxsi", "minui", "maxui", "maxnumf", "minnumf"}
"""Combiners for which the interpreter calls numpy, which chooses the result's layout."""
LANES = 16
PAIRWISE = ("f16", "f32", "f64")


@contextmanager
def block(w: Writer, head: str) -> Iterator[None]:
    w.emit(f"{head} {{".lstrip())
    w.depth += 1
    yield
    w.flush()
    w.depth -= 1
    w.emit("}")


class Axis:
    """An axis of tensors of one shape in arrays: how far apart its elements are, and the loops over all others."""

    def __init__(self, shape: tuple[int, ...], axis: int) -> None:
        self.size, self.inner = shape[axis], product(shape[axis + 1 :])
        self.outer = product(shape[:axis])
        self.heads = [
            f"for (int {i} = 0; {i} < {size}; {i}++)" for i, size in (("o", self.outer), ("i", self.inner)) if size > 1
        ]

    def element(self, array: str, k: str) -> str:
        row = f"(o * {self.size} + {k})" if self.outer > 1 else k
        return f"{array}[{row}]" if self.inner == 1 else f"{array}[{row} * {self.inner} + i]"

    def rest(self, array: str) -> str:
        """The element of a tensor without the axis."""
        return f"{array}[{'o' if self.outer > 1 else '0'}{f' * {self.inner} + i' if self.inner > 1 else ''}]"


def update(w: Writer, names: Sequence[str], values: Sequence[Value], kinds: Sequence[str]) -> None:
    """Assigns to all at once."""
    if len(names) == 1:
        w.emit(f"{names[0]} = {values[0].at(())};")
        return
    fresh = [w.fresh("next") for _ in names]
    for f, v, kind in zip(fresh, values, kinds, strict=True):
        w.emit(f"{kind} {f} = {v.at(())};")
    for n, f in zip(names, fresh, strict=True):
        w.emit(f"{n} = {f};")


def single_combiner(op: Op) -> str:
    """The one operation that a reduction combines with, if it is one."""
    ops = op.regions[0][0].ops
    args = [name for name, _ in op.regions[0][0].args]
    if len(op.regions[0]) == 1 and len(ops) == 2 and len(args) == 2 and sorted(ops[0].operands) == sorted(args):
        return ops[0].name.removeprefix("arith.")
    return ""


@handles("tt.reduce")
def reduce(w: Writer, op: Op, operands: list[Value]) -> Value | list[Value]:
    sources = [w.in_array(w.get(n)) for n in op.operands[: len(op.types)]]
    single, elem, shape = single_combiner(op), sources[0].type.elem, sources[0].type.shape
    axis = Axis(shape, op.int_attr("axis"))
    if single == "xori" and axis.size == 2:
        return exclusive_or_of_two(op, sources[0])
    results = [w.declared(n, t) for n, t in zip(op.results, op.types, strict=True)]
    with block(w, " ".join(axis.heads)):
        out = [axis.rest(r.array) if r.array else r.at(()) for r in results]
        if single == "addf" and elem in PAIRWISE and is_innermost(shape, sources[0].strides, op.int_attr("axis")):
            w.emit(f"{out[0]} = sum_{elem}({row_of(w, axis, sources[0])}, {axis.size});")
        elif single in ANY_ORDER and axis.inner == 1 and axis.size >= 2 * LANES:
            w.emit(f"{out[0]} = {reduce_in_lanes(w, op, sources[0], axis)};")
        else:
            for o, total in zip(out, reduce_in_order(w, op, sources, axis), strict=True):
                w.emit(f"{o} = {total};")
    if single in BY_NUMPY:
        results[0].laid_out(reduced(shape, sources[0].strides, op.int_attr("axis")))
    return results if len(results) > 1 else results[0]


def row_of(w: Writer, axis: Axis, source: Value) -> str:
    """The elements along an axis, one behind the other."""
    if axis.inner == 1:
        return f"&{axis.element(source.array, '0')}"
    row = w.fresh("row")
    w.emit(f"{c_type(source.type.elem)} {row}[{axis.size}];")
    w.emit(f"for (int k = 0; k < {axis.size}; k++) {row}[k] = {axis.element(source.array, 'k')};")
    return row


def exclusive_or_of_two(op: Op, source: Value) -> Value:
    """A view: with it a sort, which exchanges neighbours so, is one loop for each step."""
    axis, to = op.int_attr("axis"), op.types[0]

    def at(index: Index) -> str:
        a, b = (source.at((*index[:axis], k, *index[axis:])) for k in "01")
        return f"({a} ^ {b})"

    return Value(to, at)


def reduce_in_order(w: Writer, op: Op, sources: list[Value], axis: Axis) -> list[str]:
    kinds = [c_type(s.type.elem) for s in sources]
    totals = [w.fresh("total") for _ in sources]
    for total, kind, source in zip(totals, kinds, sources, strict=True):
        w.emit(f"{kind} {total} = {axis.element(source.array, '0')};")
    with block(w, f"for (int k = 1; k < {axis.size}; k++)"):
        elements = [axis.element(s.array, "k") for s in sources]
        update(w, totals, region_values(w, op.regions[0], [*totals, *elements], op.types_of_region()), kinds)
    return totals


def reduce_in_lanes(w: Writer, op: Op, source: Value, axis: Axis) -> str:
    """Several totals side by side, so that the C compiler can use vectors."""
    total, kind = w.fresh("total"), c_type(source.type.elem)

    def combine(a: str, b: str) -> str:
        return w.combined(op.regions[0][0], [a, b])[0].at(())

    w.emit(f"{kind} {total}[{LANES}];")
    w.emit(f"for (int l = 0; l < {LANES}; l++) {total}[l] = {axis.element(source.array, 'l')};")
    groups = f"for (int k = {LANES}; k < {axis.size}; k += {LANES})"
    with block(w, f"{groups} for (int l = 0; l < {LANES}; l++)"):
        w.emit(f"{total}[l] = {combine(f'{total}[l]', axis.element(source.array, 'k + l'))};")
    with block(w, f"for (int k = 1; k < {LANES}; k++)"):
        w.emit(f"{total}[0] = {combine(f'{total}[0]', f'{total}[k]')};")
    return f"{total}[0]"


@handles("tt.scan")
def scan(w: Writer, op: Op, operands: list[Value]) -> Value | list[Value]:
    sources = [w.in_array(w.get(n)) for n in op.operands[: len(op.types)]]
    axis = Axis(sources[0].type.shape, op.int_attr("axis"))
    results = [w.declared(n, s.type) for n, s in zip(op.results, sources, strict=True)]
    kinds = [c_type(s.type.elem) for s in sources]
    reverse = "reverse = true" in op.words
    start = str(axis.size - 1) if reverse else "0"
    head = f"for (int k = {axis.size - 2}; k >= 0; k--)" if reverse else f"for (int k = 1; k < {axis.size}; k++)"
    with block(w, " ".join(axis.heads)):
        totals = [w.fresh("total") for _ in sources]
        for total, kind, source, result in zip(totals, kinds, sources, results, strict=True):
            w.emit(f"{kind} {total} = {axis.element(source.array, start)};")
            w.emit(f"{axis.element(result.array, start)} = {total};")
        with block(w, head):
            elements = [axis.element(s.array, "k") for s in sources]
            update(w, totals, region_values(w, op.regions[0], [*totals, *elements], op.types_of_region()), kinds)
            for total, result in zip(totals, results, strict=True):
                w.emit(f"{axis.element(result.array, 'k')} = {total};")
    return results if len(results) > 1 else results[0]


@handles("tt.map_elementwise")
def map_elementwise(w: Writer, op: Op, operands: list[Value]) -> Value | list[Value]:
    """A scalar function of each element, or of `pack` elements that follow each other, with control flow of its own."""
    pack = op.int_attr("pack")
    sources = [w.in_array(w.get(n)) for n in op.operands]
    results = [w.declared(n, t) for n, t in zip(op.results, op.types, strict=True)]
    count = element_count(sources[0].type)
    with block(w, f"for (int k = 0; k < {count}; k += {pack})"):
        args = [f"{s.array}[k + {i}]" for s in sources for i in range(pack)]
        outs = [f"{r.array}[k + {i}]" for r in results for i in range(pack)]
        values = region_values(w, op.regions[0], args, [Type(r.type.elem) for r in results for _ in range(pack)])
        for out, value in zip(outs, values, strict=True):
            w.emit(f"{out} = {value.at(())};")
    return results if len(results) > 1 else results[0]


@handles("tt.histogram")
def histogram(w: Writer, op: Op, operands: list[Value]) -> Value:
    arrays = [w.in_array(o) for o in operands]
    result = w.declared(op.results[0], op.types[-1])
    bins, x = op.types[-1].shape[0], arrays[0].at(("k",))
    mask = f"{arrays[1].at(('k',))} && " if len(arrays) > 1 else ""
    w.emit(f"for (int k = 0; k < {bins}; k++) {result.array}[k] = 0;")
    count = arrays[0].type.shape[0]
    w.emit(f"for (int k = 0; k < {count}; k++) if ({mask}{x} >= 0 && {x} < {bins}) {result.array}[{x}]++;")
    return result
