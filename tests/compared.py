"""Launches of compiled kernels, each compared with the interpreter bit for bit.

`compare` makes one launch both ways from the same memory and leaves what the compiled kernel wrote. A `Recorder` does
that to the first launches of every specialisation of every kernel that runs while it is active:

    with Recorder() as recorder:
        ...                                  # tests, engines
    print(recorder.report())

pytest's option `--shadow-interpreter[=FILE]` puts one around a whole run. Where floats differ, the launch is
interpreted once more with the C library's exp, log and so on, which the compiler calls, in the place of numpy's: if
all bits are equal then, the difference is that of the two libraries and the launch an exception, listed with its
largest distance in ulp. Any other difference is an error.
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from interpreted import Journal, interpret, peek
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

LIMIT = 256 << 20
"""Bytes of a launch's arguments up to which it is checked, too, that nothing else in them was written."""


@dataclasses.dataclass
class Outcome:
    """Of one launch."""

    elements: int = 0
    """Written ones that were compared."""
    ulp: float = 0.0
    """Largest distance from the interpreter with numpy's functions; infinite where one is NaN or an integer differs."""
    of_largest: float = 0.0
    """The same in ulp of the largest number written: what it is where numbers near 0 are sums of larger ones."""
    library: bool = False
    """Whether that distance is the libraries': with C's functions all bits are equal."""
    wrong: str = ""
    """What differs although it must not, or why the launch could not be compared."""
    interpreted: float = 0.0
    """Seconds of this thread's processor: others that run beside it do not count."""


class UnequalError(AssertionError):
    """A compiled kernel did what the interpreter does not."""


Found = list[tuple[tl.dtype, np.ndarray, np.ndarray]]


def compare(kernel: JITFunction, grid: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Launch a kernel both ways; raises UnequalError where they differ by more than the libraries."""
    outcome = launch_both(JITFunction.run, kernel, grid, args, kwargs)
    if outcome.wrong:
        raise UnequalError(f"{name_of(kernel)}: {outcome.wrong}")
    return outcome


def name_of(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__}:{kernel.fn.__qualname__}"


def launch_both(
    run: Callable[..., Any], kernel: JITFunction, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Outcome:
    """Launch a kernel both ways; what the compiled one wrote stays.

    Args:
        run: JITFunction's own `run`.
        kernel: to launch.
        grid: as in `kernel[grid]`.
        args: and ``kwargs``, as the kernel is called with.
    """
    storages = _storages((args, kwargs))
    if sum(map(len, storages)) > LIMIT:
        storages = []
    before = [s.copy() for s in storages]
    journal, outcome = Journal(), Outcome()
    try:
        start = time.thread_time()
        interpret(kernel, grid, *args, journal=journal, **kwargs)
        outcome.interpreted = time.thread_time() - start
    except Exception as e:  # noqa: BLE001  whatever a kernel raises, its compiled launch is what was asked for
        journal.undo()
        run(kernel, *args, grid=grid, warmup=False, **kwargs)
        return dataclasses.replace(outcome, wrong=f"not interpreted: {type(e).__name__}: {str(e)[:300]}")
    touched = journal.touched()
    expected = [(dtype, at, peek(at, dtype)) for dtype, at in touched]
    journal.undo()
    run(kernel, *args, grid=grid, warmup=False, **kwargs)
    found = [(dtype, at, peek(at, dtype)) for dtype, at in touched]
    outcome.elements = sum(len(at) for _, at in touched)
    outcome.ulp, outcome.wrong = difference(found, expected)
    outcome.of_largest = difference_by_largest(found, expected)
    if strays := _strays(storages, before, touched):
        return dataclasses.replace(outcome, wrong=strays)
    if outcome.wrong:
        journal.undo()
        again = Journal()
        interpret(kernel, grid, *args, library="c", journal=again, **kwargs)
        same = [(dtype, at, peek(at, dtype)) for dtype, at in again.touched()]
        again.undo()
        for _, at, values in found:
            interpreter._interpreter.store(at, values, np.ones(at.shape, dtype=bool))
        if len(same) == len(found) and not difference(found, same)[1]:
            outcome = dataclasses.replace(outcome, library=True, wrong="")
    return outcome


def _storages(value: Any) -> list[np.ndarray]:
    """The memory of all tensors among the arguments, as bytes, each storage once."""
    found: dict[int, np.ndarray] = {}

    def visit(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            if storage.nbytes() and storage.data_ptr():
                found[storage.data_ptr()] = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
        elif isinstance(x, dict):
            visit(tuple(x.values()))
        elif isinstance(x, (tuple, list)):
            for y in x:
                visit(y)

    visit(value)
    return list(found.values())


def _strays(storages: list[np.ndarray], before: list[np.ndarray], touched: list[tuple[tl.dtype, np.ndarray]]) -> str:
    """Whether the compiled kernel wrote where the interpreter did not."""
    for storage, old in zip(storages, before, strict=True):
        changed = np.flatnonzero(storage != old)
        if not len(changed):
            continue
        base, known = storage.ctypes.data, np.zeros(len(storage), dtype=bool)
        for dtype, at in touched:
            inside = at[(at >= base) & (at < base + len(storage))] - np.uint64(base)
            for byte in range(max(dtype.primitive_bitwidth // 8, 1)):
                known[inside.astype(np.int64) + byte] = True
        if not known[changed].all():
            stray = changed[~known[changed]]
            return f"{len(stray)} bytes written that the interpreter does not write, the first at {stray[0]}"
    return ""


def difference(found: Found, expected: Found) -> tuple[float, str]:
    """The largest distance in ulp, and a sentence on what differs."""
    worst, sentence = 0.0, ""
    for (dtype, _, a), (_, _, b) in zip(found, expected, strict=True):
        if dtype.is_floating() and dtype.primitive_bitwidth >= 16:
            far = ulps(a, b, dtype)
            differs = (a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")) & ~(_is_nan(a, dtype) & _is_nan(b, dtype))
        else:
            differs = a != b
            far = np.where(differs, np.inf, 0.0)
        if differs.any():
            k = int(np.flatnonzero(differs)[np.argmax(far[differs])])
            worst = max(worst, float(far[k]))
            sentence = (
                f"{int(differs.sum())} of {len(a)} elements of {dtype} differ, by {far[k]:.6g} ulp:"
                f" {_shown(a[k], dtype)} compiled, {_shown(b[k], dtype)} interpreted (element {k})"
            )
    return worst, sentence


def difference_by_largest(found: Found, expected: Found) -> float:
    """The largest distance in ulp of the largest finite number that was written as the same type.

    Infinite where one of two numbers is NaN or infinite and the other is not the same.
    """
    worst = 0.0
    for (dtype, _, a), (_, _, b) in zip(found, expected, strict=True):
        if not dtype.is_floating() or dtype.primitive_bitwidth < 16:
            continue
        x, y = (_number(values, dtype).astype(np.float64) for values in (a, b))
        finite, same = np.isfinite(x) & np.isfinite(y), (x == y) | (np.isnan(x) & np.isnan(y))
        if not (finite | same).all():
            return float("inf")
        far, largest = np.abs(x - y)[finite].max(initial=0.0), np.abs(y)[finite].max(initial=0.0)
        worst = max(worst, float(far / (largest * 2.0**-dtype.fp_mantissa_width))) if far else worst
    return worst


def _shown(x: Any, dtype: tl.dtype) -> str:
    return str(_number(np.array([x]), dtype)[0])


def _number(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == tl.bfloat16 else x


def _is_nan(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    return np.isnan(_number(x, dtype)) if dtype.is_floating() else np.zeros(x.shape, dtype=bool)


def ulps(a: np.ndarray, b: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """How many floats lie between two, elementwise: infinite where only one is NaN, none where both are."""

    def ordered(x: np.ndarray) -> np.ndarray:
        bits = x.view(f"i{x.itemsize}")
        return np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits).astype(np.int64)

    x, y = ordered(np.ascontiguousarray(a)), ordered(np.ascontiguousarray(b))
    far = np.abs(x.astype(np.longdouble) - y.astype(np.longdouble)).astype(np.float64)
    one, other = _is_nan(a, dtype), _is_nan(b, dtype)
    return np.where(one & other, 0.0, np.where(one != other, np.inf, far))


# -- all launches of a process --------------------------------------------------------------------------------


class Recorder:
    """Compares the first launches of each specialisation of every kernel while it is active.

    Args:
        launches: of each specialisation.
        seconds: of interpreting that one kernel may cost in all; one launch is always compared.
        only: takes a kernel's name and says whether it is wanted.
    """

    def __init__(self, launches: int = 3, seconds: float = 20.0, only: Callable[[str], bool] = lambda name: True):
        self.launches, self.seconds, self.only = launches, seconds, only
        self.outcomes: dict[str, list[Outcome]] = collections.defaultdict(list)
        self.launched: collections.Counter[str] = collections.Counter()
        self.specialisations: collections.Counter[tuple[str, str]] = collections.Counter()
        self._run: Callable[..., Any] | None = None

    def __enter__(self) -> "Recorder":
        original = self._run = JITFunction.run
        recorder, inside = self, [False]

        def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if warmup or inside[0] or not recorder._wants(kernel, args, kwargs):
                return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            inside[0] = True
            try:
                outcome = launch_both(original, kernel, grid, args, kwargs)
            finally:
                inside[0] = False
            recorder.outcomes[name_of(kernel)].append(outcome)
            return None

        JITFunction.run = run  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._run is not None
        JITFunction.run = self._run  # type: ignore[method-assign]

    def _wants(self, kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = name_of(kernel)
        self.launched[name] += 1
        if not self.only(name):
            return False
        constant = {p.name for p in kernel.params if p.is_constexpr}
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        key = name, repr([(k, v if k in constant else _kind(v)) for k, v in sorted(named.items())])
        self.specialisations[key] += 1
        spent = sum(o.interpreted for o in self.outcomes[name])
        return self.specialisations[key] <= self.launches and spent < self.seconds

    @property
    def wrong(self) -> dict[str, list[str]]:
        """What differs although it must not, by kernel."""
        return {name: found for name, all_ in self.outcomes.items() if (found := [o.wrong for o in all_ if o.wrong])}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each kernel that ran."""
        rows = []
        for name in sorted(self.launched):
            all_ = self.outcomes[name]
            library = [o for o in all_ if o.library]
            rows.append(
                {
                    "kernel": name,
                    "specialisations": sum(k == name for k, _ in self.specialisations),
                    "launches": self.launched[name],
                    "compared": len(all_),
                    "equal": sum(not o.library and not o.wrong for o in all_),
                    "equal_with_c_library": len(library),
                    "ulp": max((o.ulp for o in library), default=0.0),
                    "of_largest": max((o.of_largest for o in library), default=0.0),
                    "wrong": sorted({o.wrong for o in all_ if o.wrong}),
                    "elements": sum(o.elements for o in all_),
                    "interpreted_s": sum(o.interpreted for o in all_),
                }
            )
        return rows

    def report(self) -> str:
        """A table of the kernels that ran."""
        rows = self.rows()
        lines = [
            f"{'WRONG' if r['wrong'] else 'ok':5} {r['kernel']}: {r['specialisations']} specialisations,"
            f" {r['compared']} of {r['launches']} launches compared, {r['equal']} equal"
            + (
                f", {r['equal_with_c_library']} with C's functions"
                f" ({r['ulp']:.6g} ulp, {r['of_largest']:.3g} of the largest)" * bool(r["ulp"])
            )
            + "".join(f"\n      {w}" for w in r["wrong"][:3])
            for r in rows
        ]
        compared = sum(r["compared"] for r in rows)
        return "\n".join([*lines, f"{len(rows)} kernels, {compared} launches compared with the interpreter"])


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    return tuple(map(_kind, value)) if isinstance(value, tuple) else type(value).__name__
