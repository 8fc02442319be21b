"""Conversions between types. Each rounds once."""

import re

from crossspec_cpu_lane.translate.functions import E4B15_DECODE, E4B15_ENCODE, LIBDEVICE, expand
from crossspec_cpu_lane.translate.registry import handles
from crossspec_cpu_lane.translate.values import NARROW, Value, c_type, rounded, widened
from crossspec_cpu_lane.translate.writer import Writer
from crossspec_cpu_lane.ttir import Op, UnsupportedError


@handles("arith.extsi")
def extend_signed(w: Writer, op: Op, operands: list[Value]) -> Value:
    to = op.types[-1]
    view = "(-(i32){})" if operands[0].type.elem == "i1" else "{}"
    return w.compute(op.results[0], to, lambda x: f"({c_type(to.elem)}){view.format(x)}", *operands)


@handles("arith.extui")
def extend_unsigned(w: Writer, op: Op, operands: list[Value]) -> Value:
    to, source = op.types[-1], operands[0].type
    view = "{}" if source.elem == "i1" else f"(u{source.bits}){{}}"
    return w.compute(op.results[0], to, lambda x: f"({c_type(to.elem)}){view.format(x)}", *operands)


@handles("arith.trunci")
def truncate(w: Writer, op: Op, operands: list[Value]) -> Value:
    to = op.types[-1]
    make = (lambda x: f"{x} & 1") if to.elem == "i1" else (lambda x: f"({c_type(to.elem)}){x}")
    return w.compute(op.results[0], to, make, *operands)


@handles("arith.sitofp", "arith.uitofp")
def integer_to_float(w: Writer, op: Op, operands: list[Value]) -> Value:
    """A narrow float is made from the nearest odd f64, which rounds to the same as the integer itself."""
    to, source = op.types[-1], operands[0].type
    signed = op.name == "arith.sitofp"
    view = "{}" if signed else f"(u{source.bits}){{}}"
    if source.elem == "i1":
        view = "(-(i32){})" if signed else "{}"

    def make(x: str) -> str:
        x = view.format(x)
        if to.elem not in NARROW:
            return f"({to.elem}){x}"
        odd = f"{'i' if signed else 'u'}64_to_odd({x})" if source.bits == 64 else f"(f64)({x})"
        return rounded(odd, to.elem, "f64")

    return w.compute(op.results[0], to, make, *operands)


@handles("arith.fptosi", "arith.fptoui")
def float_to_integer(w: Writer, op: Op, operands: list[Value]) -> Value:
    """A number that the type cannot hold becomes what x86-64 makes of it, as in numpy."""
    to, source = op.types[-1], operands[0].type.elem
    bits, kind = to.bits, "f64" if source == "f64" else "f32"
    through = f"i{max(bits, 32)}" if op.name == "arith.fptosi" else {32: "i64", 64: "u64"}.get(bits, "i32")
    cast = f"({c_type(to.elem)})"
    bit = " & 1" if to.elem == "i1" else ""
    return w.compute(op.results[0], to, lambda x: f"{cast}{kind}_to_{through}({widened(x, source)}){bit}", *operands)


@handles("arith.extf", "arith.truncf", "tt.fp_to_fp", "arith.convertf")
def float_to_float(w: Writer, op: Op, operands: list[Value]) -> Value:
    to, source = op.types[-1].elem, operands[0].type.elem
    toward_zero = re.search(r"rounding = rtz|toward_zero", op.words) is not None

    def make(x: str) -> str:
        kind = "f64" if source == "f64" else "f32"
        x = widened(x, source)
        if to in NARROW:
            return f"{kind}_to_{c_type(to)}{'_rtz' * toward_zero}({x})"
        return f"f64_to_f32_rtz({x})" if toward_zero and (source, to) == ("f64", "f32") else f"({to}){x}"

    return w.compute(op.results[0], op.types[-1], make, *operands)


@handles("tt.bitcast", "arith.bitcast", "tt.int_to_ptr", "tt.ptr_to_int", "arith.index_cast", "arith.index_castui")
def bitcast(w: Writer, op: Op, operands: list[Value]) -> Value:
    source, to = operands[0].type.elem, op.types[-1].elem
    if {"f32", "f64"} & {source, to} and source != to:
        form = f"BITCAST({c_type(to)}, {c_type(source)}, {{}})"
    else:
        form = "{} & 1" if to == "i1" else f"({c_type(to)}){{}}"
    return w.compute(op.results[0], op.types[-1], form.format, *operands)


@handles("tt.extern_elementwise")
def extern(w: Writer, op: Op, operands: list[Value]) -> Value:
    symbol, result = op.string_attr("symbol"), op.types[-1]
    if symbol == E4B15_DECODE:
        return w.compute(op.results[0], result, lambda x: rounded(f"e4b15_to_f32({x})", result.elem), *operands)
    if symbol == E4B15_ENCODE:
        kind = "f64" if operands[0].type.elem == "f64" else "f32"
        source = operands[0].type.elem
        return w.compute(op.results[0], result, lambda x: f"{kind}_to_e4b15({widened(x, source)})", *operands)
    if symbol not in LIBDEVICE:
        raise UnsupportedError(f"it has no translation of the library function {symbol}")
    template = expand(*LIBDEVICE[symbol], w.module.prototypes)
    return w.compute(op.results[0], result, lambda *xs: f"({c_type(result.elem)})({template.format(*xs)})", *operands)
