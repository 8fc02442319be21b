"""The compiler half of the backend: Python to Triton IR (Triton's own), to C (`translate`), to a shared object."""

import functools
import hashlib
import pathlib
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend, GPUTarget

from crossspec_cpu_lane import CHECK, is_asked, toolchain
from crossspec_cpu_lane.translate import translate
from crossspec_cpu_lane.translate.functions import E4B15_DECODE, E4B15_ENCODE
from crossspec_cpu_lane.ttir import UnsupportedError

FLOAT8 = ("fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16", "fp8e4b15")


def convert_custom_types(value: Any, to: Any, rounding: Any, _semantic: Any) -> Any:
    """Conversions from and to Triton's `float8e4b15`, which its IR knows as bytes."""
    import triton.language as tl

    builder = _semantic.builder
    symbol = E4B15_ENCODE if to.scalar.is_fp8e4b15() else E4B15_DECODE
    handle = builder.create_extern_elementwise("", "", symbol, [value.handle], to.to_ir(builder), True)
    return tl.tensor(handle, to)


@functools.cache
def _identity() -> str:
    """Changes with the translator, the C compiler and the processor, so that the cache never mixes them up."""
    digest = hashlib.sha256(toolchain.fingerprint().encode())
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.[ph]*")):
        if path.suffix in (".py", ".h"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def refuse_arguments(text: str) -> None:
    """Arguments that the launcher cannot pass, before anything is compiled; descriptors are pointers afterwards."""
    head = re.search(r"tt\.func public @.*", text)[0]  # type: ignore[index]
    if found := re.search(r"%([\w.$-]+): (!tt\.tensordesc<[^>]*>|f8\w+)", head):
        kernel = re.search(r"@([\w.$-]+)", head)[1]  # type: ignore[index]
        raise UnsupportedError(f"the CPU lane passes no argument of type {found[2]}: {found[1]} of {kernel}")


@dataclass(frozen=True)
class Options:
    """What Triton and its front end read; of these only `debug`, `sanitize_overflow` and `check` change the code."""

    num_warps: int = 4
    num_stages: int = 1
    num_ctas: int = 1
    warp_size: int = 1
    maxnreg: int | None = None
    debug: bool = False
    backend_name: str = "cpu"
    arch: str = "cpu"
    enable_fp_fusion: bool = False
    sanitize_overflow: bool = False
    check: bool = False
    """Loads, stores and atomics are checked against the bounds of the arguments' tensors."""
    supported_fp8_dtypes: tuple[str, ...] = FLOAT8
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3")
    max_num_imprecise_acc_default: int = 0
    extern_libs: Any = None
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    ir_override: str | None = None
    instrumentation_mode: str = ""
    fpsan_homomorphic_casts: bool = False

    def hash(self) -> str:
        return hashlib.sha256(repr(sorted(self.__dict__.items())).encode()).hexdigest()


class CBackend(BaseBackend):
    """Compiles for the processor that it runs on."""

    binary_ext = "so"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return _identity()

    def parse_options(self, options: dict[str, Any]) -> Options:
        known = {k: v for k, v in options.items() if k in Options.__dataclass_fields__ and v is not None}
        known.pop("extern_libs", None)
        return Options(**{"check": is_asked(CHECK), **known})

    def add_stages(self, stages: dict[str, Any], options: Options, language: Any) -> None:
        stages["ttir"] = self.make_ttir
        stages["c"] = self.make_c
        stages["so"] = self.make_so

    @staticmethod
    def make_ttir(module: Any, metadata: dict[str, Any]) -> Any:
        refuse_arguments(str(module))
        manager = ir.pass_manager(module.context)
        passes.common.add_inliner(manager)
        passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
        passes.ttir.add_combine(manager)
        passes.common.add_canonicalizer(manager)
        passes.common.add_cse(manager)
        passes.ttir.add_triton_licm(manager)
        passes.common.add_symbol_dce(manager)
        manager.run(module, "make_ttir")
        return module

    @staticmethod
    def make_c(module: Any, metadata: dict[str, Any]) -> str:
        found = translate(str(module), metadata["check"])
        metadata |= {"name": found.name, "shared": 0, "translation": found.described()}
        return found.code

    @staticmethod
    def make_so(code: str, metadata: dict[str, Any]) -> bytes:
        return toolchain.compile_c(code, metadata["name"])

    def pack_metadata(self, metadata: Any) -> Any:
        return metadata

    def get_codegen_implementation(self, options: Options) -> dict[str, Any]:
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1), "convert_custom_types": convert_custom_types}

    def load_dialects(self, context: Any) -> None:
        """Triton's own dialects are all that is needed."""

    def get_module_map(self) -> dict[str, ModuleType]:
        from triton.language.extra.cuda import libdevice

        return {"triton.language.extra.libdevice": libdevice}
