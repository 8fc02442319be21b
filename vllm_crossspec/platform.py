"""The differences between machines: GPUs are supported here, other platforms by entry point.

A package registers a function without arguments in the group :data:`GROUP`. It returns its :class:`Platform` if it
supports this machine, else None. vLLM is imported only inside methods, because commands without an engine call some.
"""

import functools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

GROUP = "vllm_crossspec.platforms"
# Importing the CPU worker replaces the GPU's pinned buffers with plain memory in the whole process.
CPU_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu.model_runner", "vllm.v1.attention.backends.cpu_attn")
# vLLM imports these only if there is a GPU.
CUDA_NAMES = ("flash_attn_varlen_func",)
INTERPRET = "TRITON_INTERPRET"


class Platform:
    """The platform of GPUs; another platform overrides what differs.

    Attributes:
        worker: the worker class with our runner, as ``worker_cls`` takes it.
        on_cores: whether engines run on CPU cores, and each can be given cores of its own.
        has_drafter_dtypes: whether a drafter's matrix products can have a type of their own.
        fuses_late: whether inactive drafters keep the target's states and fuse many rows at once; the states of a step
            must then not be overwritten.
        ranks_by_kernels: whether a drafter's logits are ranked by kernels of ours, not by PyTorch's operations.
    """

    worker = "vllm_crossspec.hooks.worker.MatchWorker"
    on_cores = False
    has_drafter_dtypes = False
    fuses_late = False
    ranks_by_kernels = True

    # -- whether engines run, and how their processes begin -----------------------------------------------------

    def problem(self) -> str | None:
        """Why no engine can run here, and what to do; else None."""
        if os.environ.get(INTERPRET, "").strip().lower() in ("1", "true", "yes", "on", "y"):
            return f"{INTERPRET}: engines run compiled kernels only; unset it"
        return self.missing()

    def missing(self) -> str | None:
        """What this machine lacks for an engine, in one sentence; else None."""
        try:
            is_for_cpus = "cpu" in metadata.version("vllm")
        except metadata.PackageNotFoundError:
            return None
        if not is_for_cpus:
            return None
        return "this vLLM is built for CPUs and needs the CPU lane; run `pip install --no-deps ./packages/cpu_lane`"

    def tools(self) -> list[tuple[str, str, str]]:
        """This platform's checks for `crossspec doctor`: name, finding, and remedy ("" if fine)."""
        return []

    def start(
        self,
        module: str,
        job_file: Path,
        events: int,
        log_file: Path,
        environment: dict[str, str],
        cores: Sequence[int],
    ) -> Any | None:
        """Start an engine's process faster than ``python -m module`` does; None if this platform cannot.

        Its arguments are the job's file and ``events``, the descriptor of its events' pipe. It appends its output to
        ``log_file``, has exactly this environment, and runs on ``cores``, if given.
        """
        return None

    # -- what is put into vLLM ----------------------------------------------------------------------------------

    def has(self, module: str, name: str) -> bool:
        """Whether this machine's vLLM has ``name`` in ``module``, and importing it has no side effect."""
        return module not in CPU_MODULES and (name not in CUDA_NAMES or self.missing() is None)

    def install(self) -> None:
        """Called once in every process that loads the plugin."""

    def prepare(self) -> None:
        """Called before a speculator is made, vLLM's or ours."""

    def attention(self) -> tuple[Any, str]:
        """The backend in vLLM's registry that our tree attention replaces, and our class; ValueError if unsupported."""
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if not current_platform.is_cuda():
            raise ValueError(
                f"draft trees need an NVIDIA GPU (or a CPU, for development), not {current_platform.device_name}; "
                'leave "tree" out of the speculative_config, or set it to {"type": "chain"}'
            )
        return AttentionBackendEnum.FLASH_ATTN, "vllm_crossspec.trees.attention.flash.TreeFlashBackend"

    def cache_problem(self, dtype: str, target_dtype: Any) -> str | None:
        """Why trees cannot read a KV cache in ``dtype`` (fp8), and what to do; None if they can."""
        import torch
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

        if target_dtype == torch.float32:
            return "and a target in float32 on a GPU (use --dtype bfloat16, or --kv-cache-dtype auto)"
        if FlashAttentionBackend.supports_kv_cache_dtype(dtype):
            return None
        return "on a GPU whose FlashAttention does not read it (use fp8 on Hopper, or --kv-cache-dtype auto)"

    # -- weights and products -----------------------------------------------------------------------------------

    def loading(self) -> AbstractContextManager[None]:
        """A context around the loading of models by our runner."""
        return nullcontext()

    def loading_in(self, dtype: str | None) -> AbstractContextManager[None]:
        """A context around the loading of a drafter; ``dtype`` is its own, or None."""
        return nullcontext()

    def take_products(self, layer: Any, other: Any) -> None:
        """Replace what a layer has derived from its weights with what ``other`` has derived."""

    def top(self, logits: Any, k: int) -> tuple[Any, Any]:
        """float32 [rows, k] log-probabilities and int64 [rows, k] places of the largest logits [rows, V]."""
        top, ids = logits.topk(k, dim=-1)
        return top.float() - logits.float().logsumexp(dim=-1, keepdim=True), ids


@functools.cache
def platform() -> Platform:
    """The platform of this machine."""
    answers = (entry.load()() for entry in metadata.entry_points(group=GROUP))
    return next((found for found in answers if found is not None), Platform())
