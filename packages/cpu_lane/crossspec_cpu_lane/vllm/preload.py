"""Imports what engines need, for the server of forks; importing this module is what does it.

The server is Python's own (:mod:`multiprocessing.forkserver`), and this is the one module that it imports. Threads do
not survive a fork, so nothing here may start one: no tensor is computed and no engine started.
"""

import gc
import importlib
import os

NEEDED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.compilation.backends",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.llama_eagle3",
    "vllm.model_executor.models.qwen3_dflash",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.v1.worker.gpu.spec_decode",
    "crossspec_cpu_lane.vllm.worker",
    "vllm_crossspec.runner.runner",
    "vllm_crossspec.speculator.base",
)
"""What engines import when they start."""


def preload() -> None:
    """Import them all, and keep the garbage collector from ever looking at them again.

    What cannot be imported is left to the engine, which says so better.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - a missing library is an OSError, and the server must not end
            continue
    gc.collect()
    gc.freeze()
    # Libraries have last words when the server ends, which nobody asked for; a fork writes into a log of its own.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


preload()
