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
        kernel._cpu_lane_launch = launch = _write_launch(kernel)
    return launch


def _write_launch(kernel: jit.JITFunction) -> Callable[..., Any]:
    import torch

    compiled: dict[Any, Any] = {}
    hooks = knobs.runtime

    def slowly(grid: Any, arguments: dict[str, Any], key: Any) -> Any:
        """By Triton's own way: for a kernel not seen yet, and for whoever wants to be told of launches."""
        found = _run(kernel, grid=grid, warmup=False, **arguments)
        if key is not None and not _is_watched(kernel, hooks):
            compiled[key] = found
        return found

    names = [param.name for param in kernel.params]
    bound = ", ".join(f"{name!r}: {name}" for name in names)
    body = f"""
def launch(grid, {_parameters(kernel)}**options):
    try:
        key = ({"".join(_key(param) + ", " for param in kernel.params)}*options.items())
        kernel = compiled.get(key)
    except TypeError:  # a constant that cannot be hashed
        key = kernel = None
    if kernel is None or jit_function.pre_run_hooks or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        return slowly(grid, {{{bound}, **options}}, key)
    for (name, _), (value, read) in jit_function.used_global_vals.items():
        if read.get(name, missing) != value:
            raise RuntimeError(f"Global variable {{name}} has changed since we compiled this kernel, from {{value}}"
                               f" to {{read.get(name)}}")
    if callable(grid):
        grid = grid({{{bound}}})
    axes = len(grid)
    kernel.run(grid[0], grid[1] if axes > 1 else 1, grid[2] if axes > 2 else 1, 0, None, None, None, None, None,
               {", ".join(names)})
    return kernel
"""
    space: dict[str, Any] = {
        "Tensor": torch.Tensor,
        "compiled": compiled,
        "hooks": hooks,
        "jit_function": kernel,
        "kind": functools.partial(jit.native_specialize_impl, _backend()),
        "missing": _MISSING,
        "slowly": slowly,
    }
    space |= {f"default_{name}": param.default for name, param in kernel.signature.parameters.items()}
    exec(body, space)
    return space["launch"]


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
        text += name if param.default is param.empty else f"{name}=default_{name}"
        text += ", "
    return text


def _key(param: Any) -> str:
    """The part of a specialisation that one argument decides, as source text that is quick to evaluate."""
    name = param.name
    if param.is_constexpr:
        return name
    general = f"kind({name}, {param.is_const}, True, False)"
    small = f"type({name}) is int and -2147483648 <= {name} <= 2147483647"
    return f"({name}.dtype if type({name}) is Tensor else {name} == 1 if {small} else {general})"
