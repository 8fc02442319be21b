"""Reductions, scans and histograms: loops that are written out.

Sums of floats add in numpy's order, so that they equal the interpreter's: pairwise along the last axis, one after the
other along any other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from crossspec_cpu_lane.translate.regions import region_values
from crossspec_cpu_lane.translate.registry import handles
from crossspec_cpu_lane.translate.values import Index, Value, c_type
from crossspec_cpu_lane.translate.writer import Writer
from crossspec_cpu_lane.ttir import Op, Type

ANY_ORDER = {"addi", "minsi", "maxsi", "minui", "maxui", "andi", "ori", "xori", "maxnumf", "minnumf"}
"""Combiners that may be applied in any order with an equal result."""
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


@contextmanager
def nest(w: Writer, shape: tuple[int, ...], skip: int | None = None) -> Iterator[Index]:
    """A loop over all axes but one."""
    index = []
    w.flush()
    for d, size in enumerate(shape):
        index.append("0" if d == skip or size == 1 else f"j{d}")
    heads = [f"for (int {i} = 0; {i} < {size}; {i}++)" for i, size in zip(index, shape, strict=True) if i != "0"]
    with block(w, " ".join(heads)):
        yield tuple(index)


def at_axis(values: Sequence[Value], index: Index, axis: int, k: str) -> list[str]:
    return [v.at((*index[:axis], k, *index[axis + 1 :])) for v in values]


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
    axis, shape = op.int_attr("axis"), sources[0].type.shape
    rest = shape[:axis] + shape[axis + 1 :]
    results = [w.declared(n, Type(s.type.elem, rest or None)) for n, s in zip(op.results, sources, strict=True)]
    single, elem = single_combiner(op), sources[0].type.elem
    inner = all(size == 1 for size in shape[axis + 1 :])
    with nest(w, shape, skip=axis) as index:
        out = [r.at(index[:axis] + index[axis + 1 :]) if rest else r.at(()) for r in results]
        if single == "addf" and elem in PAIRWISE and inner:
            first = at_axis(sources, index, axis, "0")[0]
            w.emit(f"{out[0]} = sum_{elem}(&{first}, {shape[axis]});")
        elif single in ANY_ORDER and inner and shape[axis] >= 2 * LANES:
            w.emit(f"{out[0]} = {reduce_in_lanes(w, op, sources[0], index, axis)};")
        else:
            for o, total in zip(out, reduce_in_order(w, op, sources, index, axis), strict=True):
                w.emit(f"{o} = {total};")
    return results if len(results) > 1 else results[0]


def reduce_in_order(w: Writer, op: Op, sources: list[Value], index: Index, axis: int) -> list[str]:
    kinds = [c_type(s.type.elem) for s in sources]
    totals = [w.fresh("total") for _ in sources]
    for total, kind, first in zip(totals, kinds, at_axis(sources, index, axis, "0"), strict=True):
        w.emit(f"{kind} {total} = {first};")
    with block(w, f"for (int k = 1; k < {sources[0].type.shape[axis]}; k++)"):
        values = region_values(w, op.regions[0], [*totals, *at_axis(sources, index, axis, "k")], op.types_of_region())
        update(w, totals, values, kinds)
    return totals


def reduce_in_lanes(w: Writer, op: Op, source: Value, index: Index, axis: int) -> str:
    """Several totals side by side, so that the C compiler can use vectors."""
    total, kind = w.fresh("total"), c_type(source.type.elem)

    def element(k: str) -> str:
        return at_axis([source], index, axis, k)[0]

    def combine(a: str, b: str) -> str:
        return w.combined(op.regions[0][0], [a, b])[0].at(())

    w.emit(f"{kind} {total}[{LANES}];")
    w.emit(f"for (int l = 0; l < {LANES}; l++) {total}[l] = {element('l')};")
    groups = f"for (int k = {LANES}; k < {source.type.shape[axis]}; k += {LANES})"
    with block(w, f"{groups} for (int l = 0; l < {LANES}; l++)"):
        w.emit(f"{total}[l] = {combine(f'{total}[l]', element('(k + l)'))};")
    with block(w, f"for (int k = 1; k < {LANES}; k++)"):
        w.emit(f"{total}[0] = {combine(f'{total}[0]', f'{total}[k]')};")
    return f"{total}[0]"


@handles("tt.scan")
def scan(w: Writer, op: Op, operands: list[Value]) -> Value | list[Value]:
    sources = [w.in_array(w.get(n)) for n in op.operands[: len(op.types)]]
    axis, shape = op.int_attr("axis"), sources[0].type.shape
    results = [w.declared(n, s.type) for n, s in zip(op.results, sources, strict=True)]
    kinds = [c_type(s.type.elem) for s in sources]
    n, reverse = shape[axis], "reverse = true" in op.words
    start = str(n - 1) if reverse else "0"
    head = f"for (int k = {n - 2}; k >= 0; k--)" if reverse else f"for (int k = 1; k < {n}; k++)"
    with nest(w, shape, skip=axis) as index:
        totals = [w.fresh("total") for _ in sources]
        firsts, outs = at_axis(sources, index, axis, start), at_axis(results, index, axis, start)
        for total, kind, first, out in zip(totals, kinds, firsts, outs, strict=True):
            w.emit(f"{kind} {total} = {first};")
            w.emit(f"{out} = {total};")
        with block(w, head):
            args = [*totals, *at_axis(sources, index, axis, "k")]
            update(w, totals, region_values(w, op.regions[0], args, op.types_of_region()), kinds)
            for total, out in zip(totals, at_axis(results, index, axis, "k"), strict=True):
                w.emit(f"{out} = {total};")
    return results if len(results) > 1 else results[0]


@handles("tt.map_elementwise")
def map_elementwise(w: Writer, op: Op, operands: list[Value]) -> Value | list[Value]:
    """A scalar function of each element, or of `pack` elements that follow each other, with control flow of its own."""
    pack = op.int_attr("pack")
    sources = [w.in_array(w.get(n)) for n in op.operands]
    results = [w.declared(n, t) for n, t in zip(op.results, op.types, strict=True)]
    count = 1
    for size in sources[0].type.shape:
        count *= size
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
