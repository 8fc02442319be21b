"""Elementwise operations."""

import re
from collections.abc import Callable

from crossspec_cpu_lane.translate.functions import MATH
from crossspec_cpu_lane.translate.registry import handles
from crossspec_cpu_lane.translate.values import NARROW, Value, c_type, compute_type, rounded, widened
from crossspec_cpu_lane.translate.writer import Writer
from crossspec_cpu_lane.ttir import Op

INFIX = {"addi": "+", "subi": "-", "muli": "*", "andi": "&", "ori": "|", "xori": "^"}
HELPERS = {"divsi": "div i", "divui": "div u", "remsi": "rem i", "remui": "rem u", "floordivsi": "floordiv i"}
HELPERS |= {"shli": "shl i", "shrsi": "shr i", "shrui": "shr u", "ceildivsi": "ceildiv i", "ceildivui": "ceildiv u"}
MIN_MAX = {"minsi": "i <", "maxsi": "i >", "minui": "u <", "maxui": "u >"}
INFIX_FLOAT = {"arith.addf": "+", "arith.subf": "-", "arith.mulf": "*", "arith.divf": "/"}
INFIX_FLOAT |= {"tt.precise_divf": "/", "tt.approx_divf": "/"}
MIN_MAX_FLOAT = {"maxnumf": "maxnum", "minnumf": "minnum", "maximumf": "maximum", "minimumf": "minimum"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
INVERSE = {"eq": "!=", "ne": "==", "lt": ">=", "le": ">", "gt": "<=", "ge": "<"}


def integer_view(sign: str, elem: str) -> tuple[str, str]:
    """The C type in which an operation sees an integer, and how to write it; one bit with a sign is 0 or -1."""
    if elem == "i1":
        return ("i32", "(-(i32){})") if sign == "i" else ("u32", "{}")
    return (c_type(elem), "{}") if sign == "i" else (f"u{elem[1:]}", f"(u{elem[1:]}){{}}")


@handles(*(f"arith.{name}" for name in INFIX))
def infix(w: Writer, op: Op, operands: list[Value]) -> Value:
    sign = INFIX[op.name.partition(".")[2]]
    type_ = operands[0].type
    bit = " & 1" if type_.elem == "i1" else ""
    return w.compute(op.results[0], type_, lambda a, b: f"({a} {sign} {b}){bit}", *operands)


@handles(*(f"arith.{name}" for name in HELPERS))
def helper(w: Writer, op: Op, operands: list[Value]) -> Value:
    name, sign = HELPERS[op.name.partition(".")[2]].split()
    type_ = operands[0].type
    kind, view = integer_view(sign, type_.elem)
    bit = " & 1" if type_.elem == "i1" else ""

    def make(a: str, b: str) -> str:
        return f"{name}_{kind}({view.format(a)}, {view.format(b)}){bit}"

    return w.compute(op.results[0], type_, make, *operands)


@handles("tt.mulhiui")
def high_product(w: Writer, op: Op, operands: list[Value]) -> Value:
    type_ = operands[0].type
    return w.compute(op.results[0], type_, lambda a, b: f"mulhi_u{type_.bits}({a}, {b})", *operands)


@handles(*(f"arith.{name}" for name in MIN_MAX))
def least_or_greatest(w: Writer, op: Op, operands: list[Value]) -> Value:
    sign, test = MIN_MAX[op.name.partition(".")[2]].split()
    type_ = operands[0].type
    view = integer_view(sign, type_.elem)[1]

    def make(a: str, b: str) -> str:
        return f"{view.format(a)} {test} {view.format(b)} ? {a} : {b}"

    return w.compute(op.results[0], type_, make, *operands)


@handles("math.absi")
def absolute(w: Writer, op: Op, operands: list[Value]) -> Value:
    return w.compute(op.results[0], operands[0].type, lambda a: f"{a} < 0 ? -{a} : {a}", *operands)


def floating(w: Writer, op: Op, operands: list[Value], make: Callable[..., str]) -> Value:
    """An operation that computes in f32 or f64 and rounds to its operands' type."""
    type_ = operands[0].type
    return w.compute(
        op.results[0],
        type_,
        lambda *xs: rounded(make(*(widened(x, type_.elem) for x in xs)), type_.elem),
        *operands,
    )


@handles(*INFIX_FLOAT)
def infix_float(w: Writer, op: Op, operands: list[Value]) -> Value:
    return floating(w, op, operands, lambda a, b: f"{a} {INFIX_FLOAT[op.name]} {b}")


@handles(*(f"arith.{name}" for name in MIN_MAX_FLOAT))
def least_or_greatest_float(w: Writer, op: Op, operands: list[Value]) -> Value:
    function = f"{MIN_MAX_FLOAT[op.name.partition('.')[2]]}_{compute_type(operands[0].type.elem)}"
    return floating(w, op, operands, lambda a, b: f"{function}({a}, {b})")


@handles("tt.clampf")
def clamp(w: Writer, op: Op, operands: list[Value]) -> Value:
    low, high = ("minimum", "maximum") if "propagateNan = all" in op.words else ("minnum", "maxnum")
    kind = compute_type(operands[0].type.elem)
    return floating(w, op, operands, lambda x, a, b: f"{low}_{kind}({high}_{kind}({x}, {a}), {b})")


@handles("arith.negf")
def negative(w: Writer, op: Op, operands: list[Value]) -> Value:
    return floating(w, op, operands, lambda a: f"-{a}")


@handles("math.rsqrt")
def reciprocal_root(w: Writer, op: Op, operands: list[Value]) -> Value:
    elem = operands[0].type.elem
    return floating(w, op, operands, lambda a: f"1 / {w.call('sqrt', elem, a)}")


@handles("math.fma")
def fused(w: Writer, op: Op, operands: list[Value]) -> Value:
    """A product of narrow numbers is exact in f64."""
    type_ = operands[0].type
    if type_.elem not in NARROW:
        return floating(w, op, operands, lambda *xs: w.call("fma", type_.elem, *xs))

    def make(*xs: str) -> str:
        a, b, c = (f"(f64){widened(x, type_.elem)}" for x in xs)
        return rounded(f"{a} * {b} + {c}", type_.elem, "f64")

    return w.compute(op.results[0], type_, make, *operands)


@handles("arith.remf", "tt.precise_sqrt", *(f"math.{name}" for name in MATH))
def library(w: Writer, op: Op, operands: list[Value]) -> Value:
    other = {"arith.remf": "fmod", "tt.precise_sqrt": "sqrt"}
    function = other.get(op.name) or MATH[op.name.partition(".")[2]]
    elem = operands[0].type.elem
    return floating(w, op, operands, lambda *xs: w.call(function, elem, *xs))


@handles("arith.cmpi")
def compare(w: Writer, op: Op, operands: list[Value]) -> Value:
    kind = re.match(r"\w+", op.words)[0]
    type_ = operands[0].type
    view = "{}"
    if kind not in ("eq", "ne"):
        view = "{}" if type_.is_pointer else integer_view("u" if kind[0] == "u" else "i", type_.elem)[1]
        kind = kind[1:]

    def make(a: str, b: str) -> str:
        return f"{view.format(a)} {COMPARE[kind]} {view.format(b)}"

    return w.compute(op.results[0], type_.of("i1"), make, *operands)


@handles("arith.cmpf")
def compare_float(w: Writer, op: Op, operands: list[Value]) -> Value:
    """C's comparisons are false of a NaN, but for its `!=`."""
    kind = re.match(r"\w+", op.words)[0]
    elem = operands[0].type.elem

    def make(a: str, b: str) -> str:
        a, b = widened(a, elem), widened(b, elem)
        if kind in ("true", "false"):
            return str(int(kind == "true"))
        if kind in ("ord", "uno"):
            return f"{a} == {a} && {b} == {b}" if kind == "ord" else f"{a} != {a} || {b} != {b}"
        if kind in ("one", "ueq"):
            return f"{a} < {b} || {a} > {b}" if kind == "one" else f"!({a} < {b} || {a} > {b})"
        if kind[0] == "o" or kind == "une":
            return f"{a} {COMPARE[kind[1:]]} {b}"
        return f"!({a} {INVERSE[kind[1:]]} {b})"

    return w.compute(op.results[0], operands[0].type.of("i1"), make, *operands)


@handles("arith.select")
def select(w: Writer, op: Op, operands: list[Value]) -> Value:
    condition, a, b = operands
    if condition.type.shape is None and a.type.shape is not None:
        condition = Value(a.type.of("i1"), lambda index, c=condition: c.at(()))
    return w.compute(op.results[0], a.type, lambda c, x, y: f"{c} ? {x} : {y}", condition, a, b)
