"""Random small Triton kernels: from a seed, a program's source text.

    program = generate(seed)

program_runs.py runs and shrinks them. A program loads from one buffer for each type, computes with vectors, matrices
and scalars of all types, and stores some of its values. Programs keep to what Triton defines:

- no division by zero and none of the least integer by -1; shifts by less than 8 bits;
- floats become integers only within the integer's range;
- stores of programs do not meet; atomic operations that meet commute, and their answers are not used.

What is left out, because one of the two sides is free or wrong:

- which of two zeros a minimum or maximum gives is open: 0.0 is added to it;
- sums of float16 and bfloat16 are made in float32, for where they are rounded is open;
- `argmax`, `argmin` and `sort` see no NaN: the interpreter skips it (and raises where all are NaN), Triton compares it;
- matrices are multiplied that hold small integers: the order of the additions is open;
- loop variables are converted to a type: to the interpreter they are Python's numbers, which promote in another way;
- `noinline`, print, assert, inline assembly, float8 and descriptors: not in the interpreter, or wrong there (float8).
"""

import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

TYPES = {
    "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
    "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64, "float16": torch.float16,
    "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64, "int1": torch.bool,
}  # fmt: skip
SIGNED = ["int8", "int16", "int32", "int64"]
UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]
INTEGERS = SIGNED + UNSIGNED
FLOATS = ["float16", "bfloat16", "float32", "float64"]
WIDE = ["float32", "float64"]
BITS = {name: int(re.search(r"\d+", name)[0]) for name in TYPES}  # type: ignore[index]
LENGTH = 4096
"""Elements of each input."""
ATOMS = 256
"""Addresses that one atomic operation has to itself."""
ATOMIC = ["add", "max", "min", "and", "or", "xor", "xchg"]
INDENT = "    "

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Var:
    """A value of the program: a scalar has the shape ()."""

    name: str
    dtype: str
    shape: Shape

    def constant(self, value: int = 1) -> str:
        """A line that gives the variable a constant, in the place of the one that computes it."""
        number = bool(value) if self.dtype == "int1" else value
        return f"{self.name} = tl.full({list(self.shape)}, {number}, tl.{self.dtype})"


@dataclasses.dataclass
class Line:
    """A statement: what it defines, its text, and what stands inside it."""

    defines: list[Var]
    text: str
    body: list["Line"] = dataclasses.field(default_factory=list)
    other: list["Line"] = dataclasses.field(default_factory=list)
    """Of an `else`."""

    def rendered(self, depth: int) -> Iterator[str]:
        yield from (INDENT * depth + row for row in self.text.split("\n"))
        if self.body:
            for line in self.body:
                yield from line.rendered(depth + 1)
        if self.other:
            yield INDENT * depth + "else:"
            for line in self.other:
                yield from line.rendered(depth + 1)


@dataclasses.dataclass
class Program:
    """A kernel: its statements, what it stores, and how it is launched."""

    seed: int
    lines: list[Line]
    outputs: list[Var]
    grid: int
    count: int
    """The kernel's argument `n`."""

    def source(self) -> str:
        """The text of a module."""
        inputs = ", ".join(f"{name}_in" for name in TYPES)
        outputs = "".join(f"out{k}, " for k in range(len(self.outputs)))
        body = [row for line in self.lines for row in line.rendered(1)]
        stores = [INDENT + _store(k, v) for k, v in enumerate(self.outputs)]
        return "\n".join(
            [
                f'"""Random program {self.seed}."""\n',
                "import triton\nimport triton.language as tl\n",
                DEVICE_FUNCTIONS,
                f"\n@triton.jit\ndef kernel({inputs}, {outputs}atoms, atoms64, fatoms, n):",
                INDENT + "pid = tl.program_id(0)",
                *body,
                *stores,
                "",
            ]
        )


DEVICE_FUNCTIONS = '''
@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _mul(a, b):
    return a * b


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _compose(a, b, c, d):
    """Functions x -> a x + b, one after the other."""
    return a * c, b * c + d


@triton.jit
def _first(a, i, b, j):
    take = (a > b) | ((a == b) & (i < j))
    return tl.where(take, a, b), tl.where(take, i, j)


@triton.jit
def _mix(a, b, flag: tl.constexpr):
    if flag:
        return a + b
    else:
        return a - b


@triton.jit
def _twice(a, b, flag: tl.constexpr):
    for k in range(2):
        a = _mix(a, b, flag)
    return a
'''


def _range(shape: Shape) -> str:
    """Numbers of a block's elements."""
    if len(shape) == 2:
        return f"tl.arange(0, {shape[0]})[:, None] * {shape[1]} + tl.arange(0, {shape[1]})[None, :]"
    return f"tl.arange(0, {shape[0]})" if shape else "0"


def _store(k: int, v: Var) -> str:
    size = 1
    for d in v.shape:
        size *= d
    return f"tl.store(out{k} + pid * {size} + {_range(v.shape)}, {v.name})"


class Generator:
    """Draws one program."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.seed = seed
        self.count = 0
        sizes = [1, 2, 4, 8, 16, 32]
        self.n, self.m = self.random.choice(sizes), self.random.choice(sizes[1:])
        self.pool: list[Var] = []
        self.lines: list[Line] = []
        self.depth = self.atomics = 0
        self.shapes: list[Shape] = [(), (self.n,), (self.m,), (self.n, self.m)]

    # -- pieces --

    def choice(self, items: Any) -> Any:
        return self.random.choice(list(items))

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def define(self, dtype: str, shape: Shape, expr: str) -> Var:
        self.count += 1
        var = Var(f"v{self.count}", dtype, shape)
        self.lines.append(Line([var], f"{var.name} = {expr}"))
        self.pool.append(var)
        return var

    def convert(self, expr: str, source: str, to: str) -> str:
        """An expression of another type; floats become integers within their range only."""
        if source == to:
            return expr
        if to == "int1":
            return f"({expr} != 0)"
        if source in FLOATS and to in INTEGERS:
            limit = min(2 ** (BITS[to] - 1) - 1, 30000)
            low = 0 if to in UNSIGNED else -limit
            return f"tl.where(({expr} > {low}) & ({expr} < {limit}), {expr}, 1.0).to(tl.{to})"
        return f"({expr}).to(tl.{to})"

    def any(self, wanted: Callable[[Var], bool] = lambda v: True) -> Var:
        found = [v for v in self.pool if wanted(v)]
        # Newer ones more often, so that programs become deep.
        return self.choice(found[-6:]) if found and self.chance(0.7) else self.choice(found) if found else self.load()

    def of(self, dtype: str, shape: Shape) -> str:
        """An expression of this type that broadcasts to this shape."""
        fitting = [v for v in self.pool if v.shape == shape or not v.shape or (len(shape) == 2 and len(v.shape) == 1)]
        fitting = [v for v in fitting if v.shape in (shape, ()) or v.shape[0] in shape]
        same = [v for v in fitting if v.dtype == dtype]
        v = self.choice(same) if same and self.chance(0.7) else self.choice(fitting) if fitting else None
        if v is None:
            v = self.load(dtype, shape)
        expr = self.convert(v.name, v.dtype, dtype)
        if len(shape) == 2 and len(v.shape) == 1:
            if v.shape[0] == shape[0] and (v.shape[0] != shape[1] or self.chance(0.5)):
                return f"({expr})[:, None]"
            return f"({expr})[None, :]"
        return expr

    def full(self, dtype: str, shape: Shape) -> str:
        """An expression of exactly this type and shape."""
        same = [v for v in self.pool if v.shape == shape]
        v = self.choice(same) if same and self.chance(0.8) else self.load(dtype, shape)
        return self.convert(v.name, v.dtype, dtype)

    def number(self, dtype: str) -> str:
        if dtype == "int1":
            return self.choice(["True", "False"])
        if dtype in FLOATS:
            return self.choice(["0.5", "-1.0", "3.0", "1e-3", "0.0", "1000.0"])
        low = 0 if dtype in UNSIGNED else -5
        return str(self.random.randint(low, 9))

    def mask(self, shape: Shape) -> str:
        """A condition for each element."""
        ranges = _range(shape) if shape else "pid"
        kind = self.random.randrange(4)
        if kind == 0:
            return f"({ranges}) < n"
        if kind == 1:
            return f"((({ranges}) % 3) != 1) & (({ranges}) < n + pid)"
        if kind == 2 and shape:
            return f"({self.of('int1', shape)}) & (({ranges}) >= 0)"
        return f"({ranges}) * 2 > n"

    def load(self, dtype: str | None = None, shape: Shape | None = None) -> Var:
        dtype = dtype or self.choice(TYPES)
        shape = self.choice(self.shapes) if shape is None else shape
        offset = self.random.randrange(0, LENGTH // 2)
        step = self.choice([1, 1, 1, 2])
        place = f"{dtype}_in + {offset} + pid * {self.choice([0, 7, 32])} + ({_range(shape)}) * {step}"
        if self.chance(0.1):
            place = f"{dtype}_in + {LENGTH - 1} - pid.to(tl.int64) - ({_range(shape)})"
        if self.chance(0.5) or not shape:
            return self.define(dtype, shape, f"tl.load({place})")
        mask = self.mask(shape)
        other = f", other={self.of(dtype, ()) if self.chance(0.3) else self.number(dtype)}" if self.chance(0.6) else ""
        return self.define(dtype, shape, f"tl.load({place}, mask={mask}{other})")

    # -- statements --

    def binary(self) -> None:
        shape, dtype = self.choice(self.shapes), self.choice(TYPES)
        a, b = self.full(dtype, shape), self.of(dtype, shape)
        if self.chance(0.15):
            b = self.number(dtype)
        if self.chance(0.3):
            a, b = (b, a) if "(" in b or b[0] == "v" else (a, b)
        if dtype == "int1":
            expr = f"({a}) {self.choice('&|^')} ({b})"
        elif dtype in FLOATS:
            op = self.choice(["+", "-", "*", "*", "/", "%"])
            expr = f"({a}) {op} ({b})"
        else:
            op = self.choice(["+", "-", "*", "&", "|", "^", "//", "%", "<<", ">>"])
            if op in ("<<", ">>"):
                b = f"(({self.of(dtype, shape)}) & 7)"
            elif op in ("//", "%"):
                b = self.divisor(self.of(dtype, shape), dtype)
                a = self.full(dtype, shape)
            expr = f"({a}) {op} ({b})"
        self.define(dtype, shape, f"tl.broadcast_to(({expr}).to(tl.{dtype}), {list(shape)})" if shape else
                    f"({expr}).to(tl.{dtype})")  # fmt: skip

    @staticmethod
    def divisor(expr: str, dtype: str) -> str:
        bad = f"({expr}) == 0" if dtype in UNSIGNED else f"(({expr}) == 0) | (({expr}) == -1)"
        return f"tl.where({bad}, 3, ({expr}))"

    def mixed(self) -> None:
        """Operands of two types, which Triton promotes."""
        shape = self.choice(self.shapes)
        kind = self.choice([SIGNED, UNSIGNED, FLOATS, INTEGERS + FLOATS])
        a, b = self.choice(kind), self.choice(kind)
        to = self.choice(FLOATS) if {a, b} & set(FLOATS) else self.choice(INTEGERS)
        expr = f"(({self.full(a, shape)}) {self.choice('+-*')} ({self.full(b, shape)}))"
        self.define(to, shape, f"{expr}.to(tl.{to})")

    def quotient(self) -> None:
        """Integers divided to a float."""
        shape, dtype = self.choice(self.shapes), self.choice(INTEGERS)
        self.define("float32", shape, f"(({self.full(dtype, shape)}) / ({self.full(dtype, shape)})).to(tl.float32)")

    def compare(self) -> None:
        shape, dtype = self.choice(self.shapes), self.choice(list(TYPES)[:-1])
        op = self.choice(["<", "<=", ">", ">=", "==", "!="])
        other = self.number(dtype) if self.chance(0.3) else self.of(dtype, shape)
        expr = f"({self.full(dtype, shape)}) {op} ({other})"
        if self.chance(0.3):
            expr = f"~({expr})"
        self.define("int1", shape, expr)

    def where(self) -> None:
        shape, dtype = self.choice(self.shapes), self.choice(TYPES)
        b = self.number(dtype) if self.chance(0.2) else self.of(dtype, shape)
        expr = f"tl.where({self.of('int1', shape)}, {self.full(dtype, shape)}, {b})"
        self.define(dtype, shape, f"({expr}).to(tl.{dtype})")

    def unary(self) -> None:
        shape = self.choice(self.shapes)
        dtype = self.choice(TYPES)
        x = self.full(dtype, shape)
        if dtype == "int1":
            expr = f"~({x})"
        elif dtype in INTEGERS:
            expr = self.choice([f"-({x})", f"~({x})", f"tl.abs({x})"])
        else:
            expr = self.choice([f"-({x})", f"tl.abs({x})"])
        self.define(dtype, shape, f"({expr}).to(tl.{dtype})")

    def mathematics(self) -> None:
        shape, dtype = self.choice(self.shapes), self.choice(WIDE)
        x = self.full(dtype, shape)
        kinds = ["exp", "exp2", "log", "log2", "sin", "cos", "erf", "sigmoid"]
        kind = self.choice([*kinds, *["sqrt", "rsqrt", "floor", "ceil", "fma", "div_rn", "sqrt_rn"] * 2])
        if kind == "fma":
            expr = f"tl.fma({x}, {self.full(dtype, shape)}, {self.full(dtype, shape)})"
        elif kind in ("div_rn", "sqrt_rn"):
            dtype = "float32"
            x = self.full(dtype, shape)
            expr = f"tl.sqrt_rn({x})" if kind == "sqrt_rn" else f"tl.div_rn({x}, {self.full(dtype, shape)})"
        elif kind in ("sin", "cos"):
            # Far from 0 the two libraries reduce the argument differently.
            expr = f"tl.{kind}(tl.where(tl.abs({x}) < 100, {x}, 1.0))"
        else:
            expr = f"tl.{kind}({x})"
        self.define(dtype, shape, expr)

    def extremes(self) -> None:
        shape, dtype = self.choice(self.shapes), self.choice(list(TYPES)[:-1])
        a, b = self.full(dtype, shape), self.full(dtype, shape)
        if dtype in FLOATS:
            if self.chance(0.4):
                low = self.choice([-2.0, 0.0, 1.0])
                nan = self.choice(["", ", propagate_nan=tl.PropagateNan.ALL"])
                expr = f"tl.clamp({a}, {low}, {low + 2}{nan})"
            else:
                nan = self.choice(["", ", propagate_nan=tl.PropagateNan.ALL"])
                expr = f"tl.{self.choice(['minimum', 'maximum'])}({a}, {b}{nan})"
            expr = f"({expr} + 0.0)"
        else:
            expr = f"tl.{self.choice(['minimum', 'maximum'])}({a}, {b})"
        self.define(dtype, shape, f"({expr}).to(tl.{dtype})")

    def cast(self) -> None:
        v, to = self.any(), self.choice(TYPES)
        equal = [t for t in TYPES if BITS[t] == BITS[v.dtype] and t != v.dtype]
        if equal and self.chance(0.3):
            to = self.choice(equal)
            self.define(to, v.shape, f"{v.name}.to(tl.{to}, bitcast=True)")
        else:
            self.define(to, v.shape, self.convert(v.name, v.dtype, to))

    def high_product(self) -> None:
        shape, dtype = self.choice(self.shapes), self.choice(["uint32", "uint64", "int32"])
        self.define(dtype, shape, f"tl.umulhi({self.full(dtype, shape)}, {self.full(dtype, shape)})")

    def without_nan(self, expr: str, dtype: str) -> str:
        return f"tl.where(({expr}) == ({expr}), ({expr}), 0.0).to(tl.{dtype})" if dtype in FLOATS else expr

    def reduce(self) -> None:
        shape = self.choice([s for s in self.shapes if s])
        dtype = self.choice(list(TYPES)[:-1])
        x = self.full(dtype, shape)
        axis = self.random.randrange(len(shape))
        rest = shape[:axis] + shape[axis + 1 :]
        kind = self.choice(["sum", "max", "min", "argmax", "argmin", "xor", "custom", "pair", "all", "keep"])
        small = dtype in INTEGERS and BITS[dtype] < 32
        if kind == "sum":
            if dtype in FLOATS:
                dtype = self.choice(WIDE)
                x = self.full(dtype, shape)
            to = ("uint32" if dtype in UNSIGNED else "int32") if small else dtype
            self.define(to, rest, f"tl.sum({x}, axis={axis})")
        elif kind in ("max", "min"):
            expr = f"tl.{kind}({x}, axis={axis})"
            self.define(
                dtype, rest, f"({expr} + 0.0).to(tl.{dtype})" if dtype in FLOATS else f"({expr}).to(tl.{dtype})"
            )
        elif kind in ("argmax", "argmin"):
            x = self.without_nan(x, dtype)
            self.define("int32", rest, f"tl.{kind}({x}, axis={axis})")
        elif kind == "xor":
            dtype = self.choice(INTEGERS)
            self.define(dtype, rest, f"tl.reduce({self.full(dtype, shape)}, {axis}, _xor)")
        elif kind == "custom":
            dtype = self.choice(INTEGERS)
            combine = self.choice(["_add", "_mul", "_larger"])
            self.define(dtype, rest, f"tl.reduce({self.full(dtype, shape)}, {axis}, {combine})")
        elif kind == "pair":
            self.pair("reduce", shape, rest, axis, "")
        elif kind == "all":
            dtype = self.choice(["int32", "int64", "float32", "float64", "uint32"])
            self.define(dtype, (), f"tl.{self.choice(['sum', 'max', 'min'])}({self.full(dtype, shape)}) + 0")
        else:
            dtype = self.choice(["int32", "float32"])
            name = self.full(dtype, shape)
            expr = f"({name}) - tl.broadcast_to(tl.max({name}, axis={axis}, keep_dims=True), {list(shape)})"
            self.define(dtype, shape, expr)

    def pair(self, what: str, shape: Shape, out: Shape, axis: int, tail: str) -> None:
        """A reduction or a scan of two values at once."""
        self.count += 2
        combine = self.choice(["_compose", "_first"])
        dtype = self.choice(["int32", "int64", "uint32"])
        index = "int32" if combine == "_first" else dtype
        a, b = Var(f"v{self.count - 1}", dtype, out), Var(f"v{self.count}", index, out)
        x = self.full(dtype, shape)
        y = f"tl.broadcast_to({_range(shape)}, {list(shape)})" if combine == "_first" else self.full(dtype, shape)
        self.lines.append(Line([a, b], f"{a.name}, {b.name} = tl.{what}(({x}, {y}), {axis}, {combine}{tail})"))
        self.pool += [a, b]

    def scan(self) -> None:
        shape = self.choice([s for s in self.shapes if s])
        axis = self.random.randrange(len(shape))
        tail = self.choice(["", ", reverse=True"])
        kind = self.choice(["cumsum", "cumprod", "custom", "pair"])
        if kind == "pair":
            self.pair("associative_scan", shape, shape, axis, tail)
        elif kind == "custom":
            dtype = self.choice(INTEGERS)
            combine = self.choice(["_add", "_mul", "_xor", "_larger"])
            expr = f"tl.associative_scan({self.full(dtype, shape)}, {axis}, {combine}{tail})"
            self.define(dtype, shape, expr)
        else:
            dtype = self.choice(["int32", "int64", "uint32", "uint64", *WIDE])
            self.define(dtype, shape, f"tl.{kind}({self.full(dtype, shape)}, axis={axis}{tail})")

    def sort(self) -> None:
        shape = self.choice([s for s in self.shapes if s])
        dtype = self.choice(["int32", "int64", "uint8", "int16", "float32", "float16"])
        if shape[-1] > 16:
            return
        expr = f"tl.sort({self.without_nan(self.full(dtype, shape), dtype)}, descending={self.chance(0.5)})"
        self.define(dtype, shape, f"({expr} + 0.0).to(tl.{dtype})" if dtype in FLOATS else expr)

    def product(self) -> None:
        """A matrix product of small integers, exact in whatever order it is made."""
        kind, to = self.choice(
            [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("int8", "int32"),
             ("float64", "float64")]
        )  # fmt: skip
        m, k, n = (self.choice([8, 16, 32]) for _ in range(3))
        parts = []
        for shape in ((m, k), (k, n)):
            x = f"tl.load(int8_in + {self.random.randrange(100)} + {_range(shape)})"
            parts.append(f"({x} & 3).to(tl.{kind})")
        extra = f", acc=tl.full([{m}, {n}], 2, tl.{to})" if self.chance(0.5) else ""
        if kind == "float32":
            extra += ', input_precision="ieee"'
        out = f", out_dtype=tl.{to}"
        v = self.define(to, (m, n), f"tl.dot({parts[0]}, {parts[1]}{extra}{out})")
        self.define(to, (m,), f"tl.sum({v.name}, axis=1)")

    def rearrange(self) -> None:
        n, m = self.n, self.m
        v = self.any(lambda v: bool(v.shape))
        kind = self.choice(
            ["trans", "flat", "unflat", "join", "split", "cat", "gather", "flip", "expand", "interleave"]
        )
        if kind == "trans" and len(v.shape) == 2:
            t = self.define(v.dtype, v.shape[::-1], f"tl.trans({v.name})")
            self.define(
                v.dtype,
                v.shape,
                f"tl.trans({t.name})" if self.chance(0.2) else f"tl.reshape({t.name}, {list(v.shape)})",
            )
        elif kind == "flat" and len(v.shape) == 2:
            size = v.shape[0] * v.shape[1]
            flat = self.define(v.dtype, (size,), f"tl.reshape({v.name}, [{size}])")
            self.define(v.dtype, (m, size // m) if size % m == 0 else (size, 1),
                        f"tl.reshape({flat.name}, {[m, size // m] if size % m == 0 else [size, 1]})")  # fmt: skip
        elif kind == "unflat" and len(v.shape) == 1 and v.shape[0] > 1:
            self.define(v.dtype, (2, v.shape[0] // 2), f"tl.reshape({v.name}, [2, {v.shape[0] // 2}])")
        elif kind == "join" and len(v.shape) == 1:
            self.define(v.dtype, (*v.shape, 2), f"tl.join({v.name}, {self.full(v.dtype, v.shape)})")
        elif kind == "interleave" and len(v.shape) == 1:
            size = 2 * v.shape[0]
            if size <= 64:
                self.define(v.dtype, (size,), f"tl.interleave({v.name}, {self.full(v.dtype, v.shape)})")
        elif kind == "split" and v.shape[-1] >= 2:
            half = (*v.shape[:-1], v.shape[-1] // 2)
            self.count += 2
            a, b = Var(f"v{self.count - 1}", v.dtype, half), Var(f"v{self.count}", v.dtype, half)
            text = f"{a.name}, {b.name} = tl.split(tl.reshape({v.name}, {[*half, 2]}))"
            self.lines.append(Line([a, b], text))
            self.pool += [a, b]
        elif kind == "cat" and len(v.shape) == 1 and v.shape[0] <= 32:
            expr = f"tl.cat({v.name}, {self.full(v.dtype, v.shape)})"
            self.define(v.dtype, (2 * v.shape[0],), expr)
        elif kind == "gather":
            axis = self.random.randrange(len(v.shape))
            index = f"(({self.full('int32', v.shape)}) & {v.shape[axis] - 1})"
            self.define(v.dtype, v.shape, f"tl.gather({v.name}, {index}, {axis})")
        elif kind == "flip" and v.shape[-1] <= 16 and v.shape[-1] > 1:
            self.define(v.dtype, v.shape, f"tl.flip({v.name}, {len(v.shape) - 1})")
        elif kind == "expand" and len(v.shape) == 1 and v.shape[0] == n:
            self.define(v.dtype, (n, m), f"tl.broadcast_to({v.name}[:, None], [{n}, {m}])")

    def call(self) -> None:
        shape, dtype = self.choice(self.shapes), self.choice(INTEGERS + WIDE)
        name = self.choice(["_mix", "_twice"])
        expr = f"{name}({self.full(dtype, shape)}, {self.full(dtype, shape)}, {self.chance(0.5)})"
        self.define(dtype, shape, expr)

    def atomic(self) -> None:
        """Each element its own address, whose old value counts; or a few addresses for all, whose do not."""
        shape = self.choice([s for s in self.shapes if len(s) == 1])
        own = self.chance(0.6)
        buffer, dtype = self.choice([("atoms", "int32"), ("atoms64", "int64"), ("fatoms", "float32")])
        ops = ["add", "max", "min"] if dtype == "float32" else ATOMIC[:-1]
        op = self.choice([*ops, "xchg"] if own and dtype != "float32" else ops)
        if not own and dtype == "float32":
            buffer, dtype = "atoms", "int32"
        if own:
            self.atomics += 1
            at = f"{buffer} + {ATOMS * self.atomics} + pid * 64 + tl.arange(0, {shape[0]})"
        else:  # operations that meet must commute: each kind has its own addresses
            at = f"{buffer} + (tl.arange(0, {shape[0]}) & 3) + {16 * ATOMIC.index(op)}"
        value = self.full(dtype, shape)
        mask = f", mask={self.mask(shape)}" if self.chance(0.5) else ""
        if own and not mask:
            self.define(dtype, shape, f"tl.atomic_{op}({at}, {value}{mask})")
        else:
            self.lines.append(Line([], f"tl.atomic_{op}({at}, {value}{mask})"))

    # -- control flow --

    def inside(self, count: int) -> list[Line]:
        """Statements of a body; what they define is not seen outside."""
        outer_lines, outer_pool = self.lines, self.pool
        self.lines, self.pool, self.depth = [], list(outer_pool), self.depth + 1
        for _ in range(count):
            self.statement()
        body, self.lines, inner = self.lines, outer_lines, self.pool
        self.pool, self.depth = outer_pool, self.depth - 1
        self.inner = inner
        return body

    def assigned(self, carried: list[Var]) -> list[Line]:
        """Statements, and at their end a new value for each carried variable."""
        body = self.inside(self.random.randint(1, 3))
        outer_lines, outer_pool = self.lines, self.pool
        self.lines, self.pool = body, self.inner
        for v in carried:
            self.lines.append(Line([], f"{v.name} = ({self.exactly(v)}).to(tl.{v.dtype})"))
        body, self.lines, self.pool = self.lines, outer_lines, outer_pool
        return body

    def exactly(self, v: Var) -> str:
        """An expression of a variable's type and shape, mostly one that uses it."""
        if v.dtype == "int1":
            return f"{v.name} ^ ({self.full('int1', v.shape)})"
        return f"{v.name} {self.choice('+-*')} ({self.full(v.dtype, v.shape)})"

    def carried(self) -> list[Var]:
        found = []
        for _ in range(self.random.randint(1, 2)):
            shape, dtype = self.choice(self.shapes), self.choice(TYPES)
            # A copy: a variable that a loop carries is assigned to.
            found.append(self.define(dtype, shape, f"({self.full(dtype, shape)}).to(tl.{dtype})"))
        return found

    def loop(self) -> None:
        carried = self.carried()
        low, high, step = self.random.choice([(0, 3, 1), (1, "n % 4", 1), (0, 5, 2), ("pid", "pid + 2", 1), (0, 0, 1)])
        if self.chance(0.3):
            high = f"(({self.full('int32', ())}) & 3)"
        name = f"k{self.count}"
        var = Var(f"i{self.count}", "int32", ())
        keyword = self.choice(["range", "range", "tl.range"])
        if isinstance(high, int) and isinstance(low, int) and self.chance(0.4):
            keyword = "tl.static_range"
        outer = self.pool
        self.pool = [*self.pool, var]
        body = [Line([var], f"{var.name} = tl.full([], 0, tl.int32) + {name}"), *self.assigned(carried)]
        self.pool = outer
        self.lines.append(Line([], f"for {name} in {keyword}({low}, {high}, {step}):", body))

    def while_(self) -> None:
        """Half of them carry nothing but what they count with."""
        carried = self.carried() if self.chance(0.5) else []
        self.count += 1
        counter = Var(f"c{self.count}", "int32", ())
        self.lines.append(Line([counter], f"{counter.name} = tl.full([], 0, tl.int32)"))
        condition = f"{counter.name} < {self.random.randint(1, 4)}"
        if self.chance(0.5):
            condition = f"({condition}) & ({self.full('int1', ())})"
        body = [*self.assigned(carried), Line([], f"{counter.name} += 1")]
        self.lines.append(Line([], f"while {condition}:", body))
        self.pool.append(counter)

    def if_(self) -> None:
        carried = self.carried()
        condition = self.choice(
            ["pid == 0", "n > 7", f"{self.full('int1', ())}", f"({self.full('int32', ())}) % 2 == 0"]
        )
        then = self.assigned(carried)
        other = self.assigned(carried) if self.chance(0.6) else []
        self.lines.append(Line([], f"if {condition}:", then, other))

    def statement(self) -> None:
        kinds = {
            self.binary: 10, self.mixed: 3, self.quotient: 1, self.compare: 3, self.where: 4, self.unary: 3,
            self.mathematics: 3, self.extremes: 3, self.cast: 5, self.high_product: 1, self.reduce: 5, self.scan: 2,
            self.rearrange: 5, self.call: 2, self.load: 3,
        }  # fmt: skip
        if self.depth == 0:
            kinds |= {self.atomic: 2, self.sort: 0.5, self.product: 0.7}
        if self.depth < 2:
            kinds |= {self.loop: 1.5, self.while_: 0.8, self.if_: 1.5}
        self.random.choices(list(kinds), list(kinds.values()))[0]()

    def program(self) -> Program:
        for _ in range(3):
            self.load()
        if self.chance(0.15):
            self.lines.append(Line([], "if pid > n % 3:\n" + INDENT + "return"))
        for _ in range(self.random.randint(4, 14)):
            self.statement()
        last = self.pool[-10:]
        outputs = self.random.sample(last, min(len(last), 6))
        grid = self.choice([1, 1, 2, 3])
        return Program(self.seed, self.lines, outputs, grid, self.random.randint(1, 40))


def generate(seed: int) -> Program:
    """The program of a seed; always the same."""
    return Generator(seed).program()
