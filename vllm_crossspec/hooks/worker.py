"""The worker whose model runner is ours; vLLM loads it by name through ``worker_cls``."""

from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_crossspec.runner.runner import MatchRunner


class MatchGPUModelRunner(MatchRunner, GPUModelRunner):
    """vLLM's runner with our verification."""


class MatchWorker(Worker):
    """vLLM's GPU worker with our runner."""

    def _make_model_runner(self) -> Any:
        return MatchGPUModelRunner(self.vllm_config, self.device)
