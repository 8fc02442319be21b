"""What stands for a value of Triton's IR while its C code is written: types, literals, indices, values, loops."""

import functools
import operator
import re
import struct
from collections.abc import Callable, Iterable

from crossspec_cpu_lane.translate.layout import Strides, c_order
from crossspec_cpu_lane.ttir import FLOAT8, Type, UnsupportedError

C_NAMES = {"index": "i64", "f8E4M3FN": "e4m3", "f8E5M2": "e5m2", "f8E4M3FNUZ": "e4m3fnuz", "f8E5M2FNUZ": "e5m2fnuz"}
NARROW = ("f16", "bf16", *FLOAT8)
"""Kept as their bits; arithmetic on them is done in f32 and rounded after each operation."""
FLAT_RANK = 4
"""Loops over so many axes have one counter: tensors of shape 2x2x...x2 (a sort's) would be nests of ten."""

Index = tuple[str, ...]
"""One C expression for each axis."""


def c_type(elem: str) -> str:
    return "ptr" if elem.startswith("ptr") else C_NAMES.get(elem, elem)


def compute_type(elem: str) -> str:
    return "f64" if elem == "f64" else "f32"


def widened(x: str, elem: str) -> str:
    return f"{c_type(elem)}_to_f32({x})" if elem in NARROW else x


def rounded(x: str, elem: str, source: str = "f32") -> str:
    return f"{source}_to_{c_type(elem)}({x})" if elem in NARROW else x


def literal(text: str, elem: str) -> str:
    """A constant of the IR as a C expression of the same bits."""
    if elem[0] == "i":
        value = {"true": 1, "false": 0}.get(text)
        return integer_literal(int(text, 0) if value is None else value, c_type(elem))
    if elem.startswith("ptr"):
        return f"(ptr){text}"
    if elem in NARROW:
        return f"({c_type(elem)}){int(text, 16)}" if text.startswith("0x") else rounded(float(text).hex(), elem, "f64")
    size = Type(elem).bytes
    if text.startswith("0x"):
        value = struct.unpack({4: "<f", 8: "<d"}[size], int(text, 16).to_bytes(size, "little"))[0]
        if value != value:
            return f"BITCAST({elem}, u{8 * size}, {text}u{'ll' * (size == 8)})"
    else:
        value = float(text)
    if value in (float("inf"), float("-inf")):
        return f"({elem}){'-' * (value < 0)}__builtin_inf()"
    return f"({elem}){value.hex()}"


def integer_literal(value: int, kind: str) -> str:
    if value >= 2**63:
        value -= 2**64
    return f"({kind})({value}LL)" if value > -(2**63) else f"({kind})({value + 1}LL - 1)"


def dense_elements(text: str, strings: list[str], type_: Type) -> list[str] | None:
    """The elements of a constant tensor as C expressions; None where all are one."""
    if text.startswith("["):
        return [literal(part, type_.elem) for part in re.findall(r"[^\[\],\s]+", text)]
    if not text.startswith('"'):
        return None
    raw = bytes.fromhex(strings[int(text.strip('"'))].removeprefix("0x"))
    if type_.elem == "i1":  # packed, the lowest bit first
        count = element_count(type_)
        if len(raw) * 8 < count:
            raise UnsupportedError(f"a constant of {count} bits is written in {len(raw)} bytes")
        elements = [integer_literal(raw[i // 8] >> i % 8 & 1, "i1") for i in range(count)]
    else:
        size = type_.bytes
        parts = [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]
        form = hex if type_.is_float else str
        elements = [literal(form(p), type_.elem) for p in parts]
    return elements * element_count(type_) if len(elements) == 1 else elements


def element_count(type_: Type) -> int:
    return product(type_.shape or ())


def product(sizes: Iterable[int]) -> int:
    return functools.reduce(operator.mul, sizes, 1)


def linear(shape: tuple[int, ...], index: Index, loop: "Loop | None" = None) -> str:
    """The position of an element in an array; axes that a flat loop counts in a row are taken as one."""
    axes = [(size, i) for size, i in zip(shape, index, strict=True) if size > 1]
    if loop is not None and loop.flat:
        axes = loop.grouped(axes)
    expr = ""
    for size, i in axes:
        expr = f"({expr}) * {size} + {i}" if expr else i
    return expr or "0"


class Value:
    """An SSA value. `at` gives the C expression of one element; a scalar has the index ()."""

    def __init__(
        self, type_: Type, at: Callable[[Index], str], array: str | None = None, loop: "Loop | None" = None
    ) -> None:
        self.type, self.at, self.array, self.loop = type_, at, array, loop
        self.computed = False
        """Its own, not a view of another: writing to another value cannot change it."""
        self.strides: Strides = c_order(type_.shape or ())
        """As numpy would have them; the value itself is stored in C's order."""

    def laid_out(self, strides: Strides) -> "Value":
        self.strides = strides
        return self


class Loop:
    """A loop nest over `shape`, open while operations are added to it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.index: Index = tuple(f"e{d}" if size > 1 else "0" for d, size in enumerate(shape))
        self.lines: list[tuple[str, str]] = []
        self.loads = self.stores = self.faults = False
        self.open = True
        self.depth = 0
        self.saved: dict[str, Type] = {}

    @property
    def flat(self) -> bool:
        return sum(size > 1 for size in self.shape) >= FLAT_RANK

    def grouped(self, axes: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """Joins neighbouring axes that are neighbours in the loop, too: one division for all of them."""
        own = [(size, i) for size, i in zip(self.shape, self.index, strict=True) if size > 1]
        groups: list[tuple[int, str]] = []
        at = 0
        while at < len(axes):
            start = own.index(axes[at]) if axes[at] in own else -1
            count = 1
            while start >= 0 and own[start : start + count + 1] == axes[at : at + count + 1] and at + count < len(axes):
                count += 1
            if start < 0:
                groups.append(axes[at])
            else:
                size, stride = product(s for s, _ in axes[at : at + count]), product(s for s, _ in own[start + count :])
                groups.append((size, self.counter(size, stride, first=start == 0)))
            at += count
        return groups

    @staticmethod
    def counter(size: int, stride: int, first: bool) -> str:
        expr = f"e / {stride}" if stride > 1 else "e"
        return expr if first else f"{expr} % {size}"

    def heads(self) -> list[str]:
        """The `for` lines, followed by the counters that are derived from a flat loop's only one."""
        if not self.flat:
            pairs = zip(self.index, self.shape, strict=True)
            return [f"for (int {i} = 0; {i} < {size}; {i}++)" for i, size in pairs if i != "0"]
        count = element_count(Type("i1", self.shape))
        return [f"for (u32 e = 0; e < {count}; e++)"]

    def counters(self) -> list[str]:
        if not self.flat:
            return []
        lines, stride = [], 1
        used = set(re.findall(r"\be\d+\b", " ".join(text for _, text in self.lines)))
        for i, size in reversed(list(zip(self.index, self.shape, strict=True))):
            if i in used:
                lines.append(f"const int {i} = (int)({self.counter(size, stride, first=False)});")
            stride *= size
        return lines


class FlushError(Exception):
    """An element of the open loop is wanted at another index than the loop's: close the loop first."""
