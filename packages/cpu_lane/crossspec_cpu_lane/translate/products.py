"""Matrix products."""

from crossspec_cpu_lane.translate.registry import handles
from crossspec_cpu_lane.translate.values import NARROW, Value, c_type, rounded, widened
from crossspec_cpu_lane.translate.writer import Writer
from crossspec_cpu_lane.ttir import Op


@handles("tt.dot")
def dot(w: Writer, op: Op, operands: list[Value]) -> Value:
    """Each row is summed in the order of the inner axis, and the accumulator added last, as the interpreter does."""
    a, b, c = (w.in_array(o) for o in operands)
    (*batch, m, k), n = a.type.shape, b.type.shape[-1]
    elem = c.type.elem
    kind = "f32" if elem in NARROW else c_type(elem)
    result = w.declared(op.results[0], c.type)
    left, right = (widened(v.at((*["z"] * len(batch), *ij)), v.type.elem) for v, ij in ((a, "ik"), (b, "kj")))

    def at(v: Value) -> str:
        return v.at((*["z"] * len(batch), "i", "j"))

    heads = [f"for (int z = 0; z < {size}; z++)" for size in batch]
    w.emit(f"{' '.join([*heads, f'for (int i = 0; i < {m}; i++)'])} {{")
    w.emit(f"  {kind} row[{n}];")
    w.emit(f"  for (int j = 0; j < {n}; j++) row[j] = 0;")
    w.emit(f"  for (int k = 0; k < {k}; k++) {{")
    w.emit(f"    const {kind} x = {left};")
    w.emit(f"    for (int j = 0; j < {n}; j++) row[j] += x * {right};")
    w.emit("  }")
    w.emit(f"  for (int j = 0; j < {n}; j++) {at(result)} = {rounded(f'row[j] + {widened(at(c), elem)}', elem)};")
    w.emit("}")
    return result
