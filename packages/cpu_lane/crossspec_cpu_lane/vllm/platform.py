"""The CPU lane as the plugin's platform: all that engines do in another way without a GPU."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import crossspec_cpu_lane
from vllm_crossspec import devices
from vllm_crossspec.platform import CUDA_NAMES, Platform


class CpuPlatform(Platform):
    """Kernels and products that the lane compiles, engines in forks.

    Differences from a GPU's: `top` and attention in float32 are the lane's, states of drafters that wait are fused
    together, and layers are packed as they are loaded.
    """

    worker = "crossspec_cpu_lane.vllm.worker.MatchCPUWorker"
    on_cores = True
    has_drafter_dtypes = True
    ranks_by_kernels = False
    fuses_late = True  # a fuse of few rows takes as long as one of many: as long as its weights take to be read

    def missing(self) -> str | None:
        """A C compiler."""
        from crossspec_cpu_lane import toolchain

        if toolchain.find() is not None:
            return None
        return f"the CPU lane cannot compile kernels: {toolchain.why_none()}; {toolchain.INSTALL}"

    def tools(self) -> list[tuple[str, str, str]]:
        """The C compiler, tried on a function that does nothing."""
        from crossspec_cpu_lane import toolchain

        name = "C compiler"
        if toolchain.find() is None:
            return [(name, toolchain.why_none(), toolchain.INSTALL)]
        try:
            found = toolchain.compiler()
            toolchain.compile_c("int launch(void) { return 0; }", "doctor")
        except RuntimeError as problem:
            return [(name, "does not work", str(problem))]
        return [(name, f"{found.version} ({found.command[0]})", "")]

    def start(
        self,
        module: str,
        job_file: Path,
        events: int,
        log_file: Path,
        environment: dict[str, str],
        cores: Sequence[int],
    ) -> Any | None:
        """A fork of a server that has imported vLLM."""
        from crossspec_cpu_lane.vllm import forks

        return forks.start(module, job_file, events, log_file, environment, cores)

    def has(self, module: str, name: str) -> bool:
        """All but FlashAttention."""
        return name not in CUDA_NAMES

    def install(self) -> None:
        """The lane's products in every engine, where the user wants that; in the plugin's own its runner has them."""
        from crossspec_cpu_lane.vllm import products

        if products.choice() == "all":
            products.use_lane_everywhere()

    def prepare(self) -> None:
        """What vLLM's kernels for CPUs do wrong with drafts."""
        from crossspec_cpu_lane.vllm import patches

        patches.mend_context_norm()
        patches.mend_recurrence()

    def attention(self) -> tuple[Any, str]:
        """In the place of vLLM's for CPUs."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return AttentionBackendEnum.CPU_ATTN, "crossspec_cpu_lane.vllm.attention.TreeCpuBackend"

    def cache_problem(self, dtype: str, target_dtype: Any) -> str | None:
        """vLLM's kernel for such caches is for some processors."""
        if devices.has_avx512():
            return None
        return "on a processor without AVX-512, which vLLM's kernel needs (use --kv-cache-dtype auto)"

    def loading(self) -> AbstractContextManager[None]:
        """Layers in float32 are packed for the lane."""
        from crossspec_cpu_lane.vllm import products

        return products.lane_products()

    def loading_in(self, dtype: str | None) -> AbstractContextManager[None]:
        """A drafter's layers multiply in bfloat16."""
        from crossspec_cpu_lane.vllm import products

        return products.products_in(dtype)

    def take_products(self, layer: Any, other: Any) -> None:
        """What was packed stands beside the layer's weights."""
        if "cpu_linear" in vars(other):
            layer.cpu_linear = other.cpu_linear

    def top(self, logits: Any, k: int) -> tuple[Any, Any]:
        """In one pass over the logits, where they are in float32."""
        import torch

        from crossspec_cpu_lane.vllm import products

        if logits.dtype == torch.float32 and (lane := products.lane_ops()):
            log_probs, ids = lane.top(logits, k)
            return log_probs, ids
        return super().top(logits, k)


def here() -> CpuPlatform | None:
    """The platform, where this machine has no GPU."""
    return CpuPlatform() if crossspec_cpu_lane.is_usable() else None
