"""The worker for CPUs whose model runner is the plugin's; vLLM loads it by name through ``worker_cls``."""

import vllm.v1.worker.cpu.model_runner as module
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_crossspec.runner.runner import MatchRunner


class MatchCPUModelRunner(MatchRunner, module.CPUModelRunner):
    """vLLM's runner for CPUs with the plugin's verification."""


class MatchCPUWorker(CPUWorker):
    """vLLM's CPU worker with that runner."""

    def init_device(self) -> None:
        # CPUWorker builds its runner by a name that it imports here, not through a method of its own.
        original, module.CPUModelRunner = module.CPUModelRunner, MatchCPUModelRunner
        try:
            super().init_device()
        finally:
            module.CPUModelRunner = original
