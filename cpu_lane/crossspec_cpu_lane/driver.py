"""The driver half of the backend: it names the CPU as the device and launches nothing."""

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from crossspec_cpu_lane import NOT_COMPILED, is_usable


class InterpreterDriver(DriverBase):
    """What Triton and torch ask of a driver, answered for the CPU. Kernels never reach it: the interpreter
    runs them in Python."""

    @classmethod
    def is_active(cls) -> bool:
        """Active only where no other driver can be: on a machine without a GPU."""
        return is_usable()

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise RuntimeError(NOT_COMPILED)

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
