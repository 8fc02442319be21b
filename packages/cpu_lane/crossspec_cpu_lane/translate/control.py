"""Control flow: structured, between blocks, and calls of device functions."""

import re
from collections.abc import Sequence

from crossspec_cpu_lane.translate.registry import handles
from crossspec_cpu_lane.translate.values import Value, c_type, integer_literal
from crossspec_cpu_lane.translate.writer import Writer
from crossspec_cpu_lane.ttir import CARRIED, NAME, Op, Type, UnsupportedError, split_types

Result = Value | list[Value] | None


def inside(w: Writer, op: Op, region: int) -> Op | None:
    """A region's operations, indented; of its last, what it hands on is left to the caller."""
    if len(op.regions[region]) > 1:
        raise UnsupportedError(f"a region of {op.name} has several blocks")
    w.depth += 1
    end = w.body(op.regions[region][0].ops)
    w.depth -= 1
    return end


def hand_over(
    w: Writer, end: Op | None, targets: Sequence[Value], parallel: bool, names: list[str] | None = None
) -> None:
    w.depth += 1
    if end is not None:
        w.assign(targets, [w.get(n) for n in (end.operands if names is None else names)], parallel)
    w.flush()
    w.depth -= 1


def result_types(op: Op) -> list[Type]:
    if "->" not in op.words:
        return []
    text = op.words.rpartition("-> ")[2].strip()
    several = re.match(r"\((.*?)\)\s*(?::|\{|$)", text)  # one alone stands without brackets after a while
    return split_types(several[1] if several else text.removesuffix("{"))


def carried(w: Writer, pairs: list[tuple[str, str]]) -> list[Value]:
    """Variables for what a loop carries, filled with the first values."""
    sources = [w.get(s) for _, s in pairs]
    w.flush()
    state = [w.declared(n, s.type) for (n, _), s in zip(pairs, sources, strict=True)]
    w.assign(state, sources, parallel=False)
    return state


def one_or_all(values: list[Value]) -> Result:
    return values if len(values) != 1 else values[0]


@handles("scf.if")
def branch(w: Writer, op: Op, operands: list[Value]) -> Result:
    w.flush()
    results = [w.declared(n, t) for n, t in zip(op.results, result_types(op), strict=True)]
    w.emit(f"if ({w.get(op.operands[0]).at(())}) {{")
    for i in range(len(op.regions)):
        if i:
            w.emit("} else {")
        hand_over(w, inside(w, op, i), results, parallel=False)
    w.emit("}")
    return one_or_all(results)


@handles("scf.for")
def count(w: Writer, op: Op, operands: list[Value]) -> Result:
    unsigned = op.words.startswith("unsigned")
    head, _, rest = op.words.partition("iter_args(")
    variable, low, high, step = re.findall(NAME, head)[:4]
    pairs = CARRIED.findall(rest.split(" -> ")[0])
    state = carried(w, pairs)
    low, high, step = (w.get(v) for v in (low, high, step))
    i, kind = w.fresh(variable), c_type(low.type.elem)
    if step.at(()) == integer_literal(1, kind):
        view = f"(u{low.type.bits})" if unsigned else ""
        w.emit(f"for ({kind} {i} = {low.at(())}; {view}{i} < {view}{high.at(())}; {i}++) {{")
    else:  # adding the step may wrap around before the end is reached
        n = w.fresh("left")
        bounds = ", ".join(v.at(()) for v in (low, high, step))
        w.emit(f"u64 {n} = {'u' if unsigned else 'i'}{low.type.bits}_steps({bounds});")
        w.emit(f"for ({kind} {i} = {low.at(())}; {n}-- > 0; {i} += {step.at(())}) {{")
    w.values[variable] = w.named(i, low.type)
    w.define([n for n, _ in pairs], state)
    hand_over(w, inside(w, op, 0), state, parallel=True)
    w.emit("}")
    return one_or_all(state)


@handles("scf.while")
def repeat(w: Writer, op: Op, operands: list[Value]) -> Result:
    pairs = CARRIED.findall(op.words.split(") : ")[0])
    state = carried(w, pairs)
    results = [w.declared(n, t) for n, t in zip(op.results, result_types(op), strict=True)]
    w.emit("for (;;) {")
    w.define([n for n, _ in pairs], state)
    end = inside(w, op, 0)
    condition = w.get(end.operands[0])
    hand_over(w, end, results, parallel=False, names=end.operands[1:])
    w.emit(f"  if (!{condition.at(())}) break;")
    after = op.regions[1][0]
    w.define([n for n, _ in after.args], results)
    hand_over(w, inside(w, op, 1), state, parallel=True)
    w.emit("}")
    return one_or_all(results)


def jump(w: Writer, text: str) -> None:
    """Hands a block its arguments; the text is `^bb1` or `^bb1(%a, %b : i32, i32)`."""
    label, args = re.match(r"\^(\w+)(?:\((.*)\))?", text).groups()
    if args:
        w.assign(w.block_args[label], [w.get(n) for n in re.findall(NAME, args)], parallel=True)
    w.flush()
    w.emit(f"goto {w.label(label)};")


@handles("cf.br")
def go(w: Writer, op: Op, operands: list[Value]) -> None:
    w.flush()
    jump(w, op.words.strip())


@handles("cf.cond_br")
def go_if(w: Writer, op: Op, operands: list[Value]) -> None:
    w.flush()
    then, other = re.findall(r"\^\w+(?:\([^()]*\))?", op.words)
    w.emit(f"if ({operands[0].at(())}) {{")
    w.depth += 1
    jump(w, then)
    w.depth -= 1
    w.emit("} else {")
    w.depth += 1
    jump(w, other)
    w.depth -= 1
    w.emit("}")


@handles("tt.return")
def leave(w: Writer, op: Op, operands: list[Value]) -> None:
    w.assign(w.returns, operands, parallel=False)
    w.flush()
    w.emit("return;")


@handles("tt.call")
def call(w: Writer, op: Op, operands: list[Value]) -> Result:
    args = [o.at(()) if o.type.shape is None else w.array_of(o) for o in operands]
    w.flush()
    results = [w.declared(n, t) for n, t in zip(op.results, op.types, strict=True)]
    places = [r.array or f"&{r.at(())}" for r in results]
    w.emit(f"{function_name(op.callee())}({', '.join(['c', *args, *places])});")
    if w.module.faults:
        w.leave_on_fault()
    return one_or_all(results)


def function_name(name: str) -> str:
    """A device function in C."""
    return "f_" + re.sub(r"\W", "_", name)
