"""One engine that answers training prompts, in a process of its own: what `crossspec train generate` runs.

Started as ``python -m vllm_crossspec.engine.jobs.generate JOB EVENTS``, as :mod:`vllm_crossspec.engine.jobs.offline`
is. The job has ``engine`` (arguments of vLLM's LLM), ``out`` (folder of the shards), ``end_id`` (the token that ends a
response), ``max_new_tokens`` and ``shards``: ``number``, ``file`` (its name) and ``prompts`` of each, a prompt being
``ids``, ``category``, ``temperature`` (0 is greedy) and ``seed``.

Events, by their ``event``:
    ready: the engine is up; with what runs.
    progress: ``num_tokens`` generated since the last one.
    shard: ``number`` is on the disk, with ``num_made`` tokens of responses.
    error: ``message`` says in a sentence what the user can mend; the process ends with status 1.
"""

import sys
import time
from pathlib import Path
from typing import Any

from vllm_crossspec.engine.jobs.client import finished_outputs
from vllm_crossspec.engine.jobs.offline import Emit, environment, run_job, shards_of, start_engine
from vllm_crossspec.training.generations import Generation, write_shard


def generate(job: dict[str, Any], emit: Emit) -> None:
    """Answer the prompts of every shard and write it."""
    started = time.perf_counter()
    llm = start_engine(job["engine"])
    emit("ready", seconds=time.perf_counter() - started, **environment())
    for shard in shards_of(job):
        rows = _answer(llm, shard["prompts"], job, emit)
        write_shard(Path(job["out"], shard["file"]), rows)
        emit("shard", number=shard["number"], num_made=sum(len(row.response_ids) for row in rows))


def _answer(llm: Any, prompts: list[dict[str, Any]], job: dict[str, Any], emit: Emit) -> list[Generation]:
    """The responses to one shard's prompts, in their order; each with the token that ends it, if it was not cut."""
    from vllm import SamplingParams

    for number, prompt in enumerate(prompts):
        sampling = {name: prompt[name] for name in ("temperature", "seed")}
        params = SamplingParams(
            **sampling, max_tokens=job["max_new_tokens"], stop_token_ids=[job["end_id"]], detokenize=False
        )
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt["ids"]}, params)
    answers: dict[int, list[int]] = {}
    for outputs in finished_outputs(llm.llm_engine, emit):
        answers |= {int(output.request_id): list(output.outputs[0].token_ids) for output in outputs}
    return [
        Generation(prompt["ids"], answers[number], prompt["category"], prompt["temperature"] == 0)
        for number, prompt in enumerate(prompts)
    ]


if __name__ == "__main__":
    sys.exit(run_job(sys.argv[1:], generate))
