"""Which data-parallel ranks are bound to each other."""

from typing import Any


def step_together(parallel_config: Any) -> bool:
    """Whether data-parallel ranks run every step at the same time, by graphs that they agree on.

    Ranks of a target with experts do, for each holds a part of them, and so do those that an external launcher starts.
    vLLM makes every other rank an engine of its own, with a config that says one rank: it may draft what it likes.
    """
    return bool(
        parallel_config.data_parallel_size > 1
        and (
            parallel_config.is_moe_model is not False
            or parallel_config.distributed_executor_backend == "external_launcher"
        )
    )
