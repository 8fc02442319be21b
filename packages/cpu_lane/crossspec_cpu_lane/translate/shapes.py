"""Constants, program ids, and operations that only move elements."""

import re

from crossspec_cpu_lane.translate.registry import handles
from crossspec_cpu_lane.translate.values import (
    Index,
    Value,
    dense_elements,
    element_count,
    linear,
    literal,
)
from crossspec_cpu_lane.translate.writer import Writer
from crossspec_cpu_lane.ttir import Op, Type


@handles("arith.constant")
def constant(w: Writer, op: Op, operands: list[Value]) -> Value:
    type_ = op.types[-1] if op.types else Type("i1")
    text = re.sub(r"^(\{[^}]*\}\s*)?", "", op.words)
    text = text.rpartition(" : ")[0].strip() if op.types else text.strip()
    if text.startswith("dense<"):
        text = text[len("dense<") : -1]
    elements = dense_elements(text, op.strings, type_)
    if elements is None:
        expr = literal(text, type_.elem)
        return Value(type_, lambda index: expr)
    result = w.declared(op.results[0], type_)
    for i, element in enumerate(elements):
        w.emit(f"{result.array}[{i}] = {element};")
    return result


@handles("ub.poison")
def poison(w: Writer, op: Op, operands: list[Value]) -> Value:
    return Value(op.types[-1], lambda index: "0")


@handles("tt.get_program_id")
def program_id(w: Writer, op: Op, operands: list[Value]) -> Value:
    return w.named(f"program_{op.words[0]}", Type("i32"))


@handles("tt.get_num_programs")
def program_count(w: Writer, op: Op, operands: list[Value]) -> Value:
    return w.named(f"programs_{op.words[0]}", Type("i32"))


@handles("tt.make_range")
def make_range(w: Writer, op: Op, operands: list[Value]) -> Value:
    start = op.int_attr("start")
    return Value(op.types[-1], lambda index: f"({index[0]} + {start})" if start else index[0])


@handles("tt.splat")
def splat(w: Writer, op: Op, operands: list[Value]) -> Value:
    return Value(op.types[-1], lambda index: operands[0].at(()))


@handles("tt.unsplat")
def unsplat(w: Writer, op: Op, operands: list[Value]) -> Value:
    source = operands[0]
    w.flush()
    element = Value(Type(source.type.elem), lambda index: source.at(("0",) * len(source.type.shape)))
    return w.compute(op.results[0], element.type, lambda x: x, element)


@handles("tt.expand_dims")
def expand_dims(w: Writer, op: Op, operands: list[Value]) -> Value:
    axis = op.int_attr("axis")
    strides = operands[0].strides
    value = Value(op.types[-1], lambda index: operands[0].at(index[:axis] + index[axis + 1 :]))
    return value.laid_out((*strides[:axis], 0, *strides[axis:]))


@handles("tt.broadcast")
def broadcast(w: Writer, op: Op, operands: list[Value]) -> Value:
    shape = operands[0].type.shape

    def at(index: Index) -> str:
        return operands[0].at(tuple("0" if d == 1 else i for i, d in zip(index, shape, strict=True)))

    strides = zip(operands[0].strides, shape, strict=True)
    return Value(op.types[-1], at).laid_out(tuple(0 if d == 1 else s for s, d in strides))


@handles("tt.reshape")
def reshape(w: Writer, op: Op, operands: list[Value]) -> Value:
    """A view where only axes of size 1 come or go, as in a sort; else the elements' order in an array is the same."""
    to, source = op.types[-1], operands[0]
    if to.shape == source.type.shape:
        return source
    if [size for size in to.shape if size > 1] != [size for size in source.type.shape if size > 1]:
        return w.stored(w.array_of(source), to)

    def at(index: Index) -> str:
        moved = iter([i for i, size in zip(index, to.shape, strict=True) if size > 1])
        return source.at(tuple(next(moved) if size > 1 else "0" for size in source.type.shape))

    return Value(to, at)


@handles("tt.trans")
def transpose(w: Writer, op: Op, operands: list[Value]) -> Value:
    order = [int(d) for d in re.search(r"order = array<i32: ([\d, ]+)>", op.words)[1].split(",")]

    def at(index: Index) -> str:
        source = [""] * len(order)
        for i, axis in zip(index, order, strict=True):
            source[axis] = i
        return operands[0].at(tuple(source))

    return Value(op.types[-1], at).laid_out(tuple(operands[0].strides[axis] for axis in order))


@handles("tt.join")
def join(w: Writer, op: Op, operands: list[Value]) -> Value:
    a, b = operands
    type_ = Type(a.type.elem, (*a.type.shape, 2))
    return Value(type_, lambda index: f"({index[-1]} ? {b.at(index[:-1])} : {a.at(index[:-1])})")


@handles("tt.split")
def split(w: Writer, op: Op, operands: list[Value]) -> list[Value]:
    source = operands[0]
    type_ = Type(source.type.elem, source.type.shape[:-1])
    halves = (Value(type_, lambda index, k=k: source.at((*index, k))) for k in ("0", "1"))
    return [half.laid_out(source.strides[:-1]) for half in halves]


@handles("tt.cat")
def concatenate(w: Writer, op: Op, operands: list[Value]) -> Value:
    """Copied piece by piece: one expression would read beyond the end of either."""
    result = w.declared(op.results[0], op.types[-1])
    offset = 0
    for source in (w.in_array(o) for o in operands):
        count = element_count(source.type)
        w.flush()
        target = w.stored(f"({result.array} + {offset})", source.type)
        w.assign([target], [source], parallel=False)
        offset += count
    return result


@handles("tt.gather")
def gather(w: Writer, op: Op, operands: list[Value]) -> Value:
    axis = op.int_attr("axis")
    source = w.in_array(operands[0])
    type_ = operands[1].type.of(source.type.elem)
    size = source.type.shape[axis]

    def at(index: Index) -> str:
        i = f"gather_index({operands[1].at(index)}, {size})"
        return f"{source.array}[{linear(source.type.shape, (*index[:axis], i, *index[axis + 1 :]))}]"

    return w.compute(op.results[0], type_, lambda x: x, Value(type_, at))
