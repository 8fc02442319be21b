"""Data-parallel ranks that share their steps."""

from typing import Any


def step_together(parallel_config: Any) -> bool:
    """Whether data-parallel ranks run every step together, with CUDA graphs that they agree on.

    Ranks of a target with experts do, because each holds some of them; so do ranks of an external launcher. vLLM makes
    every other rank an independent engine whose config says one rank.
    """
    return bool(
        parallel_config.data_parallel_size > 1
        and (
            parallel_config.is_moe_model is not False
            or parallel_config.distributed_executor_backend == "external_launcher"
        )
    )
