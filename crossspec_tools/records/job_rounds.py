"""The process of an engine whose trees are recorded: what `crossspec calibrate heterospec` runs.

Job, orders and events are those of :mod:`crossspec_tools.records.job_collect`; the speculative config has a drafter
with ``"adaptive": {"type": "record"}``.
"""

from pathlib import Path
from typing import Any

from crossspec_tools.records import rounds
from crossspec_tools.records.job_collect import Recording
from crossspec_tools.records.shards import Steps
from crossspec_tools.train.records import Answer
from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.heterospec.calibration import TreeShape
from vllm_crossspec.jobs.offline import Emit, Follow, run_job, start_engine
from vllm_crossspec.kinds.identity import identify


def collect_rounds(job: dict[str, Any], emit: Emit) -> Follow:
    """Start the engine; an order has the prompts of a shard answered and what became of their trees written."""
    llm = start_engine(job["engine"])
    settings = settings_of(llm.llm_engine.vllm_config)
    assert settings is not None
    (drafter,), target = settings.drafters.values(), llm.model_config
    tree = drafter.tree
    assert tree.depth is not None and tree.top_k is not None and tree.num_nodes is not None
    facts = rounds.RoundsFacts(
        target=identify(str(target.model), "--model", target.revision),
        drafter=identify(drafter.model, "--spec", drafter.native.get("revision")),
        tree=TreeShape(tree.depth, tree.top_k, tree.num_nodes, tree.sharpness or 1.0),
    )

    def write(file: Path, steps: Steps, answers: dict[int, Answer]) -> int:
        tensors = rounds.assemble(steps, answers, settings.max_depth)
        rounds.write_shard(file, tensors, answers, facts)
        return len(tensors["phi"])

    return Recording(llm, job, emit, "crossspec_take_rounds", write).follow


if __name__ == "__main__":
    run_job(collect_rounds)
