"""Kernels in Triton's interpreter, in a process whose kernels are compiled.

A kernel that was decorated without TRITON_INTERPRET is a JITFunction, which keeps the Python function. `interpret`
runs that function as the interpreter would: while it runs, Triton's language is patched as the interpreter patches it
and device functions (`tl.sum` and its kin among them) can be called. Afterwards everything is as it was, so that the
next kernel can be compiled.

Where the interpreter is wrong it is mended for the time of the launch (`_mends`), each with its reason. A `Journal`
keeps what a launch writes, wherever that is, so that it can be taken back.
"""

import contextlib
import ctypes
import ctypes.util
import functools
import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as declared
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder
from triton.runtime.jit import JITFunction

Change = tuple[object, str, object]
_ABSENT = object()


class Written(NamedTuple):
    """Elements of one type that a launch wrote: where they are, and what was there before."""

    dtype: tl.dtype
    addresses: np.ndarray
    before: np.ndarray


class Journal:
    """What a launch has written, in order."""

    def __init__(self) -> None:
        self.entries: list[Written] = []

    def about_to_write(self, pointers: TensorHandle, mask: Any) -> None:
        """Keep what lies where a store or an atomic operation is going to write."""
        data = np.atleast_1d(pointers.data)
        addresses = data[np.broadcast_to(mask.data != 0, data.shape)]
        dtype = pointers.get_element_ty()
        self.entries.append(Written(dtype, addresses, peek(addresses, dtype)))

    def undo(self) -> None:
        """Put everything back, the newest first."""
        for dtype, addresses, before in reversed(self.entries):
            del dtype
            native.store(addresses, before, np.ones(addresses.shape, dtype=bool))

    def touched(self) -> list[tuple[tl.dtype, np.ndarray]]:
        """All addresses that were written, each once for a type."""
        found: dict[str, tuple[tl.dtype, list[np.ndarray]]] = {}
        for dtype, addresses, _ in self.entries:
            found.setdefault(dtype.name, (dtype, []))[1].append(addresses)
        return [(dtype, np.unique(np.concatenate(parts))) for dtype, parts in found.values()]


def peek(addresses: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The elements at these addresses."""
    kind = interpreter._get_np_dtype(dtype)
    return native.load(addresses, np.ones(addresses.shape, dtype=bool), np.zeros(addresses.shape, kind), kind)


def interpret(
    kernel: JITFunction, grid: Any, *args: Any, library: str = "numpy", journal: Journal | None = None, **kwargs: Any
) -> None:
    """Launch ``kernel`` in the interpreter.

    Args:
        kernel: decorated by `triton.jit`.
        grid: as in `kernel[grid]`.
        args: and ``kwargs``, as the kernel is called with; options of the compiler are ignored.
        library: whose exp, log, sin and so on: `numpy`'s, as in the interpreter, or those of the `c` library.
        journal: is told of all that is written.
    """
    known = kernel.signature.parameters
    bound = inspect.getcallargs(kernel.fn, *args, **{k: v for k, v in kwargs.items() if k in known})
    constant = {p.name for p in kernel.params if p.is_constexpr}
    if callable(grid):
        grid = grid(bound)
    grid = (*grid, *(1,) * (3 - len(grid)))
    call = _rewritten(kernel)
    with _patched(library, journal), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered")  # the largest of NaNs is NaN
        values = {k: v if k in constant else interpreter._implicit_cvt(v) for k, v in bound.items()}
        interpreter_builder.set_grid_dim(*grid)
        for place in np.ndindex(*grid):
            interpreter_builder.set_grid_idx(*place)
            call(**values)


def _rewritten(kernel: JITFunction) -> Callable[..., Any]:
    """The kernel's function as the interpreter wants its source; made once."""
    return interpreter.InterpretedFunction(kernel.fn).rewrite()


@contextlib.contextmanager
def _patched(library: str, journal: Journal | None) -> Iterator[None]:
    changes = [*_language(), *_mends(), *_mathematics(library), *(_recording(journal) if journal else [])]
    done: list[Change] = []
    try:
        for owner, name, value in changes:
            done.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(done):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_LANGUAGE: list[Change] = []


def _language() -> list[Change]:
    """What the interpreter sets in Triton's language, and what lets device functions be called."""
    if not _LANGUAGE:
        scope = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        made = {(id(owner), name): (owner, name, vars(owner)[name]) for owner, name, _ in scope._changes}
        scope.restore()
        _LANGUAGE.extend(made.values())
        _LANGUAGE.append((JITFunction, "__call__", lambda self, *args, **kwargs: _rewritten(self)(*args, **kwargs)))
        # A JITFunction is no method: x.sum() would lose its x.
        for name, member in list(vars(tl.tensor).items()):
            if isinstance(member, JITFunction):
                _LANGUAGE.append((tl.tensor, name, _as_method(member)))
    return _LANGUAGE


def _as_method(function: JITFunction) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


# -- where the interpreter is wrong ---------------------------------------------------------------------------


def _is_bfloat16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _widened(handle: TensorHandle) -> np.ndarray:
    """As float32, where the interpreter has the bits of bfloat16."""
    return (handle.data.astype(np.uint32) << 16).view(np.float32) if _is_bfloat16(handle) else handle.data


def _narrowed(data: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, to the nearest and ties to even."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16).reshape(data.shape)


_original = {
    name: getattr(InterpreterBuilder, name)
    for name in ("binary_op", "unary_op", "ternary_op", "cast_impl", "create_masked_load", "create_masked_store")
}
_original_reduce = interpreter.ReduceOps.apply_impl


def _binary(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
    """bfloat16 is computed in float32 and rounded, not computed with its bits."""
    if not (_is_bfloat16(lhs) or _is_bfloat16(rhs)):
        found = _original["binary_op"](self, lhs, rhs, op)
    else:
        out = op(_widened(lhs), _widened(rhs))
        found = TensorHandle(_narrowed(out) if out.dtype == np.float32 else out, tl.bfloat16)
    # A comparison is of one bit, whatever was compared: chained `&` of masks came out as integers.
    return TensorHandle(found.data, tl.int1) if found.data.dtype == np.bool_ else found


def _unary(self: InterpreterBuilder, arg: TensorHandle, op: Any) -> TensorHandle:
    if _is_bfloat16(arg):
        return TensorHandle(_narrowed(op(_widened(arg))), tl.bfloat16)
    return _original["unary_op"](self, arg, op)


def _ternary(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, c: TensorHandle, op: Any) -> TensorHandle:
    if op is not np.where and _is_bfloat16(c):
        return TensorHandle(_narrowed(op(*map(_widened, (a, b, c)))), tl.bfloat16)
    return _original["ternary_op"](self, a, b, c, op)


def _cast(self: InterpreterBuilder, src: TensorHandle, to: Any) -> TensorHandle:
    """To bfloat16 the interpreter cuts off where Triton rounds; from it, it knows only the way to float32."""
    source, target = src.dtype.scalar, to.scalar
    if target == tl.bfloat16 and source != tl.bfloat16 and not source.is_fp8():
        return TensorHandle(_narrowed(src.data.astype(np.float32)), target)
    if _is_bfloat16(src) and target != tl.bfloat16 and not target.is_fp8():
        return TensorHandle(_widened(src).astype(interpreter._get_np_dtype(target)), target)
    return _original["cast_impl"](self, src, to)


def _as_mask(mask: Any) -> Any:
    if mask is not None and mask.data.dtype != np.bool_:
        return TensorHandle(mask.data != 0, tl.int1)
    return mask


def _load(self: InterpreterBuilder, pointers: TensorHandle, mask: Any, *rest: Any) -> TensorHandle:
    return _original["create_masked_load"](self, pointers, _as_mask(mask), *rest)


def _store(self: InterpreterBuilder, pointers: TensorHandle, value: TensorHandle, mask: Any, *rest: Any) -> Any:
    return _original["create_masked_store"](self, pointers, value, _as_mask(mask), *rest)


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> TensorHandle:
    """Triton leaves the order of the additions open and numpy's differs by processor.

    Here it is that of the inner axis, and what the product is added to comes last.
    """
    kind = d.data.dtype
    left, right = (_widened(x).astype(kind) for x in (a, b))
    total = np.zeros(d.data.shape, kind)
    for k in range(left.shape[-1]):
        total += left[..., :, k, None] * right[..., None, k, :]
    return TensorHandle(total + d.data, d.dtype.scalar)


_CHOOSING = (
    tl.standard._argmax_combine_tie_break_left,
    tl.standard._argmax_combine_tie_break_fast,
    tl.standard._argmin_combine_tie_break_left,
    tl.standard._argmin_combine_tie_break_fast,
)


def _reduce(self: Any, values: Any) -> Any:
    """The largest and the least of bfloat16 are chosen by value, not by bits."""
    if self.combine_fn not in _CHOOSING or not _is_bfloat16(values[0].handle):
        return _original_reduce(self, values)
    shape = tl.block_type(tl.float32, list(values[0].shape))
    wide = tl.tensor(TensorHandle(_widened(values[0].handle), tl.float32), shape)
    best, index = _original_reduce(self, (wide, *values[1:]))
    narrow = TensorHandle(_narrowed(best.handle.data), tl.bfloat16)
    kind = tl.block_type(tl.bfloat16, list(best.shape)) if best.shape else tl.bfloat16
    return tl.tensor(narrow, kind), index


def _range(*limits: Any, **options: Any) -> Iterator[tl.tensor]:
    """What a loop counts with is a number of the kernel, not of Python: it has a type, and `to`."""
    values = [int(x) if not isinstance(x, tl.constexpr) else x.value for x in limits]
    for i in range(*values):
        yield interpreter.interpreter_semantic.to_tensor(i)


def _mends() -> list[Change]:
    builder = InterpreterBuilder
    return [
        (builder, "binary_op", _binary),
        (builder, "unary_op", _unary),
        (builder, "ternary_op", _ternary),
        (builder, "cast_impl", _cast),
        (builder, "create_masked_load", _load),
        (builder, "create_masked_store", _store),
        (builder, "create_dot", _dot),
        (tl, "range", _range),
        (tl.core, "range", _range),
        (interpreter.ReduceOps, "apply_impl", _reduce),
    ]


# -- functions of mathematics ---------------------------------------------------------------------------------

_C = ctypes.CDLL(ctypes.util.find_library("m"))
_SHARED = ("exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sqrt", "sin", "cos", "tan", "tanh")
_SHARED += ("floor", "ceil", "fabs", "rint", "fmod", "isnan", "isinf")
_NUMPY: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _SHARED},
    "pow": np.power,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
EXACT = {"sqrt", "floor", "ceil", "fabs", "rint", "fmod", "isnan", "isinf", "rsqrt"}
"""Functions that have one right answer, and so need no library."""


def _function(name: str, library: str) -> Callable[..., np.ndarray]:
    """A function over arrays of float32 or float64."""
    if library == "numpy" or name in EXACT:
        plain = _NUMPY[name]
        return lambda *xs: np.asarray(plain(*xs)).astype(bool if name.startswith("is") else xs[0].dtype)
    return lambda *xs: _from_c(name, xs)


def _from_c(name: str, xs: tuple[np.ndarray, ...]) -> np.ndarray:
    double = xs[0].dtype == np.float64
    function = getattr(_C, name if double else name + "f")
    function.restype = ctypes.c_double if double else ctypes.c_float
    function.argtypes = [function.restype] * len(xs)
    return np.vectorize(function, otypes=[xs[0].dtype])(*xs)


def _mathematics(library: str) -> list[Change]:
    def extern(self: Any, lib: str, path: str, symbol: str, args: list[Any], kind: Any, pure: bool) -> TensorHandle:
        name = symbol.removeprefix("__nv_")
        name = name.removesuffix("d" if name.startswith("is") else "f") if name not in _NUMPY else name
        return TensorHandle(_function(name, library)(*(a.data for a in args)), kind.scalar)

    changes: list[Change] = [(InterpreterBuilder, "create_extern_elementwise", extern)]
    for name in ("exp", "exp2", "log", "log2", "sin", "cos", "erf"):
        changes.append((InterpreterBuilder, f"create_{name}", _elementwise(_function(name, library))))
    for name in vars(libdevice):
        if (function := getattr(declared, name, None)) is not None and tl.core.is_builtin(function):
            changes.append((libdevice, name, functools.partial(function, _semantic=interpreter.interpreter_semantic)))
    return changes


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[..., TensorHandle]:
    return lambda self, arg: TensorHandle(function(arg.data), arg.dtype.scalar)


# -- what is written ------------------------------------------------------------------------------------------


def _recording(journal: Journal) -> list[Change]:
    """Tell the journal before anything is written."""
    rmw, cas = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_atomic_cas

    def store(self: Any, pointers: TensorHandle, value: TensorHandle, mask: Any, *rest: Any) -> Any:
        journal.about_to_write(pointers, _as_mask(mask))
        return _store(self, pointers, value, mask, *rest)

    def update(self: Any, op: Any, pointers: TensorHandle, value: TensorHandle, mask: Any, *rest: Any) -> Any:
        mask = _as_mask(mask)
        journal.about_to_write(pointers, mask)
        return rmw(self, op, pointers, value, mask, *rest)

    def swap(self: Any, pointers: TensorHandle, *rest: Any) -> Any:
        journal.about_to_write(pointers, types.SimpleNamespace(data=np.ones(pointers.data.shape, dtype=bool)))
        return cas(self, pointers, *rest)

    builder = InterpreterBuilder
    return [
        (builder, "create_masked_store", store),
        (builder, "create_atomic_rmw", update),
        (builder, "create_atomic_cas", swap),
    ]


assert triton.__version__.startswith("3."), "the interpreter's inside is another one"
