"""Names by which vLLM finds what is ours."""

GPU_WORKER = "vllm_crossspec.engine.worker.MatchWorker"
CPU_WORKER = "vllm_crossspec.engine.worker.MatchCPUWorker"
