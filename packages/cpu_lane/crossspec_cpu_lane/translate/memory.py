"""Loads, stores and atomics, and the check of their bounds."""

import re
from collections.abc import Callable

from crossspec_cpu_lane.translate.registry import handles
from crossspec_cpu_lane.translate.values import Value, c_type, rounded, widened
from crossspec_cpu_lane.translate.writer import Writer
from crossspec_cpu_lane.ttir import Op, UnsupportedError

ATOMIC = {"add": "{o} + {v}", "fadd": "{o} + {v}", "and": "{o} & {v}", "or": "{o} | {v}", "xor": "{o} ^ {v}"}
ATOMIC |= {"max": "{o} > {v} ? {o} : {v}", "min": "{o} < {v} ? {o} : {v}", "exch": "{v}"}
ATOMIC |= {"umax": "({u}){o} > ({u}){v} ? {o} : {v}", "umin": "({u}){o} < ({u}){v} ? {o} : {v}"}


def check(w: Writer, op: Op, kind: str, size: int) -> Callable[[str], str] | None:
    """The C condition under which an access may be made; None where there is nothing to check it against."""
    arguments = w.module.origins.get(id(op), 0)
    if not w.module.checked or arguments <= 0:
        return None
    site = w.module.site(op, kind, size=size)
    return lambda p: f"in_bounds(c, {p}, {size}, 0x{arguments:x}ull, {site})"


@handles("tt.addptr")
def add_to_pointer(w: Writer, op: Op, operands: list[Value]) -> Value:
    size = operands[0].type.pointee.bytes
    return w.compute(op.results[0], operands[0].type, lambda p, i: f"{p} + (i64){i} * {size}", *operands)


@handles("tt.load", "tt.atomic_load")
def load(w: Writer, op: Op, operands: list[Value]) -> Value:
    type_ = operands[0].type.of(operands[0].type.pointee.elem)
    t = c_type(type_.elem)
    allowed = check(w, op, "load", type_.bytes)

    def make(p: str, mask: str = "", other: str = "0") -> str:
        value = f"*(u8 *)({p}) != 0" if t == "i1" else f"*({t} *)({p})"
        if allowed:
            value = f"({allowed(p)} ? {value} : 0)"
        return f"{mask} ? {value} : ({t}){other}" if mask else value

    return w.compute(op.results[0], type_, make, *operands, loads=True, faults=allowed is not None)


@handles("tt.store", "tt.atomic_store")
def store(w: Writer, op: Op, operands: list[Value]) -> None:
    type_ = operands[0].type.pointee
    t = c_type(type_.elem)
    allowed = check(w, op, "store", type_.bytes)

    def make(p: str, value: str, mask: str = "") -> str:
        tests = [*([mask] if mask else []), *([allowed(p)] if allowed else [])]
        return (f"if ({' && '.join(tests)}) " if tests else "") + f"*({t} *)({p}) = {value};"

    w.perform(operands[0].type.shape, make, *operands, faults=allowed is not None)


@handles("tt.atomic_rmw")
def read_modify_write(w: Writer, op: Op, operands: list[Value]) -> Value:
    """One thread runs all programs, so nothing else is needed to make it atomic."""
    kind = re.match(r"\w+", op.words)[0]
    if kind not in ATOMIC:
        raise UnsupportedError(f"it has no translation of the atomic operation {kind}")
    pointee = operands[0].type.pointee
    elem, t = pointee.elem, c_type(pointee.elem)
    allowed = check(w, op, "atomic operation", pointee.bytes)

    def make(p: str, v: str, mask: str = "1") -> str:
        if kind == "exch":
            new = v
        else:
            new = ATOMIC[kind].format(o=widened("o_", elem), v=widened(f"({t}){v}", elem), u="u" + t[1:])
            new = rounded(new, elem)
        test = f"{mask} && {allowed(p)}" if allowed else mask
        return f"({{ {t} o_ = 0; if ({test}) {{ o_ = *({t} *)({p}); *({t} *)({p}) = {new}; }} o_; }})"

    return alone(w, op, operands[0].type.of(elem), make, operands, allowed is not None)


@handles("tt.atomic_cas")
def compare_and_swap(w: Writer, op: Op, operands: list[Value]) -> Value:
    type_ = operands[0].type.of(operands[0].type.pointee.elem)
    t = c_type(type_.elem)
    allowed = check(w, op, "atomic operation", type_.bytes)
    bits = f"BITCAST(u{type_.bits}, {t}, {{}})" if t in ("f32", "f64") else "{}"  # a NaN equals itself, -0 is not 0

    def make(p: str, c: str, v: str) -> str:
        test = allowed(p) if allowed else "1"
        same = " == ".join(bits.format(x) for x in ("o_", f"({t}){c}"))
        return f"({{ {t} o_ = 0; if ({test}) {{ o_ = *({t} *)({p}); if ({same}) *({t} *)({p}) = {v}; }} o_; }})"

    return alone(w, op, type_, make, operands, allowed is not None)


def alone(w: Writer, op: Op, type_: object, make: Callable[..., str], operands: list[Value], faults: bool) -> Value:
    """An operation that reads and writes shares its loop with no other that touches memory."""
    w.flush()
    result = w.compute(op.results[0] if op.results else "old", type_, make, *operands, faults=faults)
    w.flush()
    return result
