"""One engine whose trees are recorded, in a process of its own: what `crossspec calibrate heterospec` runs.

Started as ``python -m vllm_crossspec.engine.jobs.rounds JOB EVENTS``; job and events are those of
:mod:`vllm_crossspec.engine.jobs.collect`, whose speculative config has a drafter with
``"adaptive": {"type": "record"}``.
"""

import sys
import time
from pathlib import Path
from typing import Any

from vllm_crossspec.adaptive import rounds
from vllm_crossspec.adaptive.calibration import TreeShape
from vllm_crossspec.config import CrossSpecConfig, settings_of
from vllm_crossspec.drafters.identity import identify
from vllm_crossspec.engine.jobs.collect import Recording
from vllm_crossspec.engine.jobs.offline import Emit, environment, run_job, shards_of, start_engine


def collect_rounds(job: dict[str, Any], emit: Emit) -> None:
    """Answer the prompts of every shard and write what became of its trees."""
    started = time.perf_counter()
    llm = start_engine(job["engine"])
    settings = settings_of(llm.llm_engine.vllm_config)
    assert settings is not None
    facts = _facts(llm, settings)
    emit("ready", seconds=time.perf_counter() - started, **environment())
    for shard in shards_of(job):
        recording = Recording(llm, job, emit, "crossspec_take_rounds")
        answers = recording.answer(shard["prompts"])
        texts = {number: rounds.TextFacts(a.category, len(a.token_ids)) for number, a in answers.items()}
        tensors = rounds.assemble(recording.steps, texts, settings.max_depth)
        rounds.write_shard(Path(job["out"], shard["file"]), tensors, texts, facts)
        emit("shard", number=shard["number"], num_texts=len(answers), num_made=len(tensors["phi"]))


def _facts(llm: Any, settings: CrossSpecConfig) -> rounds.RoundsFacts:
    """The models, whose weights are there by now, and the tree with all its sizes."""
    name, target = next(iter(settings.drafters)), llm.model_config
    drafter = settings.drafters[name]
    depth, top_k, num_nodes = drafter.tree.depth, drafter.tree.top_k, drafter.tree.num_nodes
    assert depth is not None and top_k is not None and num_nodes is not None
    return rounds.RoundsFacts(
        target=identify(str(target.model), "--model", target.revision),
        drafter=identify(drafter.model, "--spec", drafter.native.get("revision")),
        tree=TreeShape(depth, top_k, num_nodes, drafter.tree.sharpness or 1.0),
    )


if __name__ == "__main__":
    sys.exit(run_job(sys.argv[1:], collect_rounds))
