"""What `crossspec train generate` does: a target's responses, by engines of vLLM."""

from pathlib import Path
from typing import Any

from vllm_crossspec.cli.sharded import Work, run_missing
from vllm_crossspec.training.generate import GenerateConfig, plan

GENERATE = Work("train generate", "vllm_crossspec.engine.jobs.generate", "tokens")


def generate(
    data: Path,
    target: Path,
    out: Path,
    config: GenerateConfig,
    *,
    engines: int = 1,
    tensor_parallel_size: int | None = None,
    gpu_memory_utilization: float | None = None,
) -> int:
    """Answer the prompts of ``data`` with ``target``; write ``train-*.jsonl.gz`` and ``dev-*.jsonl.gz`` to ``out``.

    Args:
        engines: that share the shards; more than one run on Ray.
        tensor_parallel_size: vLLM's own, as the last one.

    Returns:
        The number of response tokens written in this run (0 when every shard was already there).

    Raises:
        ValueError: as :func:`plan`, or the engine refuses the target.
        EngineError: an engine's process died.
    """
    job, shards = plan(data, target, out, config)
    engine: dict[str, Any] = {
        "model": str(target),
        "dtype": config.dtype,
        "seed": config.seed,
        "max_num_seqs": config.rows_per_batch,
        "max_model_len": config.max_prompt_tokens + config.max_new_tokens,
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    return run_missing(GENERATE, {**job, "engine": engine}, shards, config.max_new_tokens, engines)
