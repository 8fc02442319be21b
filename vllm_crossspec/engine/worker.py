"""Workers whose model runner is ours; vLLM loads them by name through ``worker_cls``."""

from typing import Any


def _gpu_worker() -> type:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_crossspec.engine.runner import MatchRunner

    class MatchGPUModelRunner(MatchRunner, GPUModelRunner):
        """vLLM's runner with our verification."""

    class MatchWorker(Worker):
        """vLLM's GPU worker with our runner."""

        def _make_model_runner(self) -> Any:
            return MatchGPUModelRunner(self.vllm_config, self.device)

    return MatchWorker


def _cpu_worker() -> type:
    import vllm.v1.worker.cpu.model_runner as module
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vllm_crossspec.engine.runner import MatchRunner

    class MatchCPUModelRunner(MatchRunner, module.CPUModelRunner):
        """vLLM's runner for CPUs with our verification."""

    class MatchCPUWorker(CPUWorker):
        """vLLM's CPU worker with our runner."""

        def init_device(self) -> None:
            # CPUWorker builds its runner by a name that it imports here, not through a method of its own.
            original, module.CPUModelRunner = module.CPUModelRunner, MatchCPUModelRunner
            try:
                super().init_device()
            finally:
                module.CPUModelRunner = original

    return MatchCPUWorker


def __getattr__(name: str) -> type:
    """The two classes, made when asked for: each needs modules that the other's machine may not have."""
    makers = {"MatchWorker": _gpu_worker, "MatchCPUWorker": _cpu_worker}
    if name not in makers:
        raise AttributeError(name)
    worker = makers[name]()
    globals()[name] = worker
    return worker
