"""Launching a kernel in a few microseconds: what Triton asks anew at every launch, asked once.

`JITFunction.run` reads half a dozen environment variables, builds two strings and binds its arguments to a dictionary,
for every launch. Here one function is written for each kernel's signature. It makes a key of what a specialisation
depends on (dtypes, which integers are 1, constants, options), finds the compiled kernel under it and calls its
launcher. Triton's own `run` compiles what is not found, and serves whoever has set a hook.

Alignment is no part of the key, and is not told to the compiler either: the C code does not use it, and without it a
kernel has fewer variants to compile.
"""

import functools
from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.runtime import jit

_run = jit.JITFunction.run
_get_item = jit.JITFunction.__getitem__
_MISSING = object()


def install() -> None:
    """Make every launch of this process go through here; called when the lane becomes Triton's active driver."""
    jit.JITFunction.run = run
    jit.JITFunction.__getitem__ = get_item


def get_item(self: jit.JITFunction, grid: Any) -> Callable[..., Any]:
    """`kernel[grid]`, without a detour where nobody has wrapped `run`."""
    if type(self).run is not run:
        return _get_item(self, grid)
    return functools.partial(launch_of(self), grid)


def run(self: jit.JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """Stands for `JITFunction.run`."""
    if warmup:
        launch_of(self)
        return _run(self, *args, grid=grid, warmup=True, **kwargs)
    return launch_of(self)(grid, *args, **kwargs)


def launch_of(kernel: jit.JITFunction) -> Callable[..., Any]:
    """The function that launches this kernel: `launch(grid, *arguments, **options)`."""
    launch = kernel.__dict__.get("_cpu_lane_launch")
    if launch is None:
        for param in kernel.params:
            param.do_not_specialize_on_alignment = not param.is_constexpr
        varies = any(p.kind is p.VAR_POSITIONAL for p in kernel.signature.parameters.values())
        kernel._cpu_lane_launch = launch = _through_triton(kernel) if varies else _write_launch(kernel)
    return launch


def _through_triton(kernel: jit.JITFunction) -> Callable[..., Any]:
    """Of a kernel with `*args`: Triton's own way, always."""
    return lambda grid, /, *args, **kwargs: _run(kernel, *args, grid=grid, warmup=False, **kwargs)


def _write_launch(kernel: jit.JITFunction) -> Callable[..., Any]:
    import torch

    compiled: dict[Any, Any] = {}
    hooks = knobs.runtime

    def slowly(grid: Any, placed: tuple[Any, ...], named: dict[str, Any], key: Any) -> Any:
        """By Triton's own way: for a kernel not seen yet, and for whoever wants to be told of launches."""
        found = _run(kernel, *placed, grid=grid, warmup=False, **named)
        if key is not None and not _is_watched(kernel, hooks):
            compiled[key] = found
        return found

    # A kernel's parameters may have any name, so that all others here have a prefix.
    signature = kernel.signature.parameters.values()
    bound = ", ".join(f"{p.name!r}: {p.name}" for p in signature)
    placed = "".join(f"{p.name}, " for p in signature if p.kind is not p.KEYWORD_ONLY)
    named = "".join(f"{p.name!r}: {p.name}, " for p in signature if p.kind is p.KEYWORD_ONLY)
    body = f"""
def _lane_launch(_lane_grid, {_parameters(kernel)}**_lane_options):
    try:
        _lane_key = ({"".join(_key(param) + ", " for param in kernel.params)}*_lane_options.items())
        _lane_found = _lane_compiled.get(_lane_key)
    except _lane_TypeError:  # a constant that cannot be hashed
        _lane_key = _lane_found = None
    if (_lane_found is None or _lane_kernel.pre_run_hooks or _lane_hooks.launch_enter_hook.calls
            or _lane_hooks.launch_exit_hook.calls):
        return _lane_slowly(_lane_grid, ({placed}), {{{named}**_lane_options}}, _lane_key)
    if _lane_kernel.used_global_vals:
        _lane_check(_lane_kernel)
    if _lane_callable(_lane_grid):
        _lane_grid = _lane_grid({{{bound}}})
    _lane_axes = _lane_len(_lane_grid)
    _lane_found.run(_lane_grid[0], _lane_grid[1] if _lane_axes > 1 else 1, _lane_grid[2] if _lane_axes > 2 else 1,
                    0, None, None, None, None, None, {", ".join(p.name for p in signature)})
    return _lane_found
"""
    space: dict[str, Any] = {
        "_lane_tensor": torch.Tensor,
        "_lane_compiled": compiled,
        "_lane_hooks": hooks,
        "_lane_kernel": kernel,
        "_lane_kind": functools.partial(jit.native_specialize_impl, _backend()),
        "_lane_check": _check_globals,
        "_lane_slowly": slowly,
    }
    space |= {f"_lane_{builtin.__name__}": builtin for builtin in (callable, int, len, type, TypeError)}
    space |= {f"_lane_default_{p.name}": p.default for p in signature}
    exec(body, space)
    return space["_lane_launch"]


def _check_globals(kernel: jit.JITFunction) -> None:
    for (name, _), (value, read) in kernel.used_global_vals.items():
        if read.get(name, _MISSING) != value:
            raise RuntimeError(
                f"Global variable {name} has changed since we compiled this kernel, from {value} to {read.get(name)}"
            )


def _is_watched(kernel: jit.JITFunction, hooks: Any) -> bool:
    return bool(
        kernel.pre_run_hooks
        or hooks.launch_enter_hook.calls
        or hooks.launch_exit_hook.calls
        or hooks.jit_cache_hook is not None
        or hooks.add_stages_inspection_hook is not None
    )


def _backend() -> Any:
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver

    return make_backend(driver.active.get_current_target())


def _parameters(kernel: jit.JITFunction) -> str:
    """The kernel's parameters as source text, defaults and all; each may be given by name or by place."""
    text = ""
    for name, param in kernel.signature.parameters.items():
        if param.kind is param.KEYWORD_ONLY and "*" not in text:
            text += "*, "
        text += name if param.default is param.empty else f"{name}=_lane_default_{name}"
        text += ", "
    return text


def _key(param: Any) -> str:
    """The part of a specialisation that one argument decides, as source text that is quick to evaluate."""
    name = param.name
    if param.is_constexpr:
        return name
    general = f"_lane_kind({name}, {param.is_const}, True, False)"
    kind = f"_lane_type({name})"
    small = f"{kind} is _lane_int and -2147483648 <= {name} <= 2147483647"
    return f"({name}.dtype if {kind} is _lane_tensor else {name} == 1 if {small} else {general})"
