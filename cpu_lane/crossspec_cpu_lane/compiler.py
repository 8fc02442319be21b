"""The compiler half of the backend: it exists so that Triton lists a backend named `cpu`.

Asked to compile, it says which setting is missing, for the interpreter never asks.
"""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget

from crossspec_cpu_lane import NOT_COMPILED


class InterpreterBackend(BaseBackend):
    """A backend without a compiler."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "crossspec-cpu-lane"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise RuntimeError(NOT_COMPILED)

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> None:
        raise RuntimeError(NOT_COMPILED)

    def load_dialects(self, context: Any) -> None:
        """No dialect is needed: nothing is compiled."""

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
