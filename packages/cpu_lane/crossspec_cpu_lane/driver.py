"""The driver half of the backend: it loads a kernel's shared object and calls it."""

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.cache import get_cache_manager

from crossspec_cpu_lane import is_usable
from crossspec_cpu_lane.faults import Report, explain, extents_of
from crossspec_cpu_lane.ttir import UnsupportedError

# `struct` lays native types out as C does.
PACKED = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H", "u32": "I"}
PACKED |= {"u64": "Q", "fp16": "e", "bf16": "H", "fp32": "f", "fp64": "d"}


class Arguments:
    """How a kernel's arguments are packed, found by following its signature."""

    def __init__(self, kernel: str, signature: Mapping[Any, Any], names: Sequence[str]) -> None:
        self.kernel = kernel
        self.parameters = [f"a{i}" for i in range(len(signature))]
        self.labels: list[str] = []
        """What the user calls each argument: as the kernel's source does, or as its IR where that is all there is."""
        self.values: list[str] = []
        """The expression of each argument."""
        self.pointers: list[str | None] = []
        """The expression of each argument that is a pointer."""
        self.packed = ""
        for (key, kind), parameter in zip(signature.items(), self.parameters, strict=True):
            self._visit(kind, parameter, key if isinstance(key, str) else None, names)

    def _visit(self, kind: Any, expr: str, label: str | None, names: Sequence[str]) -> None:
        if isinstance(kind, tuple):  # a tuple's members are arguments of their own
            for i, member in enumerate(kind):
                self._visit(member, f"{expr}[{i}]", label and f"{label}[{i}]", names)
        elif kind != "constexpr":
            label = label or names[len(self.values)]
            pointer = kind.startswith("*")
            if not pointer and kind not in PACKED:
                raise UnsupportedError(f"the CPU lane passes no argument of type {kind}: {label} of {self.kernel}")
            self.labels.append(label)
            self.values.append(f"{expr}.data_ptr()" if pointer else f"bits({expr})" if kind == "bf16" else expr)
            self.pointers.append(expr if pointer else None)
            self.packed += "P" if pointer else PACKED[kind]

    def refused(self, *values: Any) -> ValueError:
        """What to say of values that cannot be packed."""
        for label, value, form in zip(self.labels, values, self.packed, strict=True):
            try:
                struct.pack(f"@{form}", value)
            except (struct.error, OverflowError) as problem:
                return ValueError(f"the argument {label} of {self.kernel} cannot be passed as {value!r}: {problem}")
        raise AssertionError("all of them can be packed")


def bfloat16_bits(value: float) -> int:
    """Rounded to the nearest, ties to even, as torch does from float32."""
    (bits,) = struct.unpack("@I", struct.pack("@f", value))
    return 0x7FC0 if value != value else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def make_launcher(source: Any, metadata: Any) -> Callable[..., None]:
    """What Triton calls with a grid and the kernel's arguments, constants among them.

    Written out for the signature and compiled by Python: nothing is decided at a launch.
    """
    library = _load(source.name, get_cache_manager(metadata.hash).get_file(f"{source.name[:150]}.so"))
    translation = metadata.translation
    arguments = Arguments(source.name, source.signature, translation["arguments"])
    launch = library.launch
    launch.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    launch.restype = ctypes.c_int
    values = ", ".join(arguments.values)
    space: dict[str, Any] = {
        "bits": bfloat16_bits,
        "errors": (struct.error, OverflowError),
        "launch": launch,
        "pack": struct.Struct("@" + arguments.packed).pack,
        "refused": arguments.refused,
        "sys": sys,
    }
    lines = [
        "    try:",
        f"        packed = pack({values})",
        "    except errors:",
        f"        raise refused({values}) from None",
        *(["    sys.stdout.flush()"] if translation["prints"] else []),
    ]
    if translation["faults"]:
        launch.argtypes = [*launch.argtypes, ctypes.c_char_p, ctypes.c_void_p]
        function = getattr(getattr(source, "fn", None), "fn", None)
        file = function and function.__code__.co_filename
        explained = functools.partial(explain, {**translation, "arguments": arguments.labels}, file=file)
        space |= {"Report": Report, "extents": extents_of, "explain": explained}
        tensors = f"({''.join(f'{p}, ' for p in arguments.pointers)})"
        lines += [
            "    report = Report()",
            f"    if launch(packed, x, y, z, extents({tensors}), report.address()):",
            f"        raise explain(report, {tensors})",
        ]
    else:
        lines.append("    launch(packed, x, y, z)")
    head = "x, y, z, stream, function, kernel_metadata, launch_metadata, enter, leave"
    exec(f"def launcher({', '.join([head, *arguments.parameters])}):\n" + "\n".join(lines), space)
    space["launcher"].library = library
    return space["launcher"]


def _load(kernel: str, path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as problem:
        raise RuntimeError(
            f"the compiled kernel {kernel} cannot be loaded ({problem}): delete {os.path.dirname(path)}, "
            "and it is compiled again"
        ) from problem


class Utils:
    """What Triton asks of a device; the launcher has loaded the code already."""

    @staticmethod
    def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return name, name, 0, 0, 1 << 30

    @staticmethod
    def unload_module(module: Any) -> None:
        """A library stays loaded until the process ends."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30, "multiprocessor_count": 1, "max_num_regs": 1 << 16, "warpSize": 1}


class CPUDriver(DriverBase):
    """The processor as Triton's device."""

    launcher_cls = staticmethod(make_launcher)
    utils = Utils

    def __init__(self) -> None:
        # Triton imports this module in the middle of importing what `run` needs.
        from crossspec_cpu_lane import run

        run.install()
        super().__init__()

    @classmethod
    def is_active(cls) -> bool:
        """Active only where no other driver can be: on a machine without a GPU."""
        return is_usable()

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "uint64_t" if ty.startswith("*") else ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        from triton.testing import do_bench

        return do_bench
