"""Assertions and prints of a kernel."""

import re

from crossspec_cpu_lane.translate.registry import handles
from crossspec_cpu_lane.translate.values import Value, element_count, widened
from crossspec_cpu_lane.translate.writer import Writer
from crossspec_cpu_lane.ttir import Op, Type, unescaped


def c_string(text: str) -> str:
    """What stands between the quotes of a string in C; the code stays ASCII."""
    plain = "".join(map(chr, range(32, 127))).translate({ord(c): None for c in '\\"?'})
    return "".join(chr(b) if chr(b) in plain else f"\\{b:03o}" for b in text.encode())


@handles("tt.assert")
def assertion(w: Writer, op: Op, operands: list[Value]) -> None:
    site = w.module.site(op, "assertion", unescaped(op.strings[0]))
    w.perform(operands[0].type.shape, lambda x: f"if (!({x})) fail(c, {site});", operands[0], faults=True)


@handles("tt.print")
def show(w: Writer, op: Op, operands: list[Value]) -> None:
    """One line for each element, as on a GPU."""
    w.module.prints = True
    prefix = c_string(unescaped(op.strings[0]).replace("%", "%%"))
    signs = re.search(r"isSigned = array<i32(?:: ([\d, ]*))?>", op.words)
    signed = [bool(int(s)) for s in signs[1].split(",")] if signs and signs[1] else [True] * len(operands)
    if not operands:
        w.perform(None, lambda: f'printf({PLACE}{prefix}\\n", {PROGRAM});')
    for value, sign in zip(operands, signed, strict=True):
        show_value(w, prefix, value, sign, "hex = true" in op.words)


PLACE = '"pid (%d, %d, %d)'
PROGRAM = "c->program[0], c->program[1], c->program[2]"


def show_value(w: Writer, prefix: str, value: Value, signed: bool, as_hex: bool) -> None:
    shape = value.type.shape or ()
    form, view = form_of(value.type, signed, as_hex)
    idx = f" idx ({', '.join(['%d'] * len(shape))})" if shape else ""
    places = Value(value.type, lambda index: "".join(f", {i}" for i in index))

    def make(x: str, place: str) -> str:
        return f'printf({PLACE}{idx}{prefix}{form}\\n", {PROGRAM}{place}, {view.format(x)});'

    if element_count(value.type) and value.type.shape is not None:
        w.perform(value.type.shape, make, value, places)
    else:
        w.perform(None, lambda x: make(x, ""), value)


def form_of(type_: Type, signed: bool, as_hex: bool) -> tuple[str, str]:
    if type_.is_pointer:
        return "0x%016llx", "(u64)({})"
    if type_.is_float and not as_hex:
        return "%f", f"(f64){widened('{}', type_.elem)}"
    if type_.is_float:
        return "%a", f"(f64){widened('{}', type_.elem)}"
    if as_hex:
        return f"0x%0{max(type_.bits // 4, 1)}llx", "(u64)({})" if type_.bits in (
            1,
            64,
        ) else f"(u64)(u{type_.bits})({{}})"
    if type_.bits == 1:
        return "%d", "(int)({})"
    return ("%lld", "(i64)({})") if signed else ("%llu", f"(u64)(u{type_.bits})({{}})")
