"""The process of an engine that answers training prompts: what `crossspec train generate` runs.

It is run as :mod:`vllm_crossspec.jobs.offline` is. The job has ``engine`` (arguments of vLLM's LLM), ``out`` (folder of
the shards), ``end_id`` (the token that ends a response), ``max_new_tokens`` and ``shards``. A shard has ``number``,
``file`` (its name) and ``prompts``; a prompt ``ids``, ``category``, ``temperature`` (0 is greedy) and ``seed``. An
order has the place of a ``shard``. Its event ``shard`` has the ``number`` and ``num_made``, how many tokens.
"""

from pathlib import Path
from typing import Any

from crossspec_tools.train.generations import Generation, write_shard
from vllm_crossspec.jobs.client import finished_outputs
from vllm_crossspec.jobs.offline import Emit, Follow, run_job, start_engine


def generate(job: dict[str, Any], emit: Emit) -> Follow:
    """Start the engine; an order has the prompts of a shard answered and written."""
    llm = start_engine(job["engine"])

    def follow(order: dict[str, Any]) -> None:
        shard = job["shards"][order["shard"]]
        rows = _answer(llm, shard["prompts"], job, emit)
        write_shard(Path(job["out"], shard["file"]), rows)
        emit("shard", number=shard["number"], num_made=sum(len(row.response_ids) for row in rows))

    return follow


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
    run_job(generate)
