"""The process of an engine that answers training prompts: what `crossspec train generate` runs.

It is run as :mod:`vllm_crossspec.jobs.offline` is. The job has ``engine`` (arguments of vLLM's LLM), ``out`` (folder of
the shards), ``end_id`` (the token that ends a response), ``max_new_tokens``, ``states`` and ``shards``. ``states`` is
None or has the ``layers`` whose states are stored and the ``target`` (its identity). A shard has ``number``, ``file``
(its name) and ``prompts``; a prompt ``ids``, ``category``, ``temperature`` (0 is greedy) and ``seed``. An order has the
place of a ``shard``. Its event ``shard`` has the ``number`` and ``num_made``, how many tokens.
"""

from pathlib import Path
from typing import Any

from crossspec_tools.train.generations import Generation, write_shard
from crossspec_tools.train.job_states import EXTENSION
from crossspec_tools.train.stored import states_path
from vllm_crossspec.jobs.client import finished_outputs
from vllm_crossspec.jobs.offline import Emit, Follow, run_job, start_engine


def generate(job: dict[str, Any], emit: Emit) -> Follow:
    """Start the engine; an order has the prompts of a shard answered and written.

    Raises ValueError: states are asked for, and vLLM does not hand them out for this target.
    """
    states = job["states"]
    recording = {"worker_extension_cls": EXTENSION, "enforce_eager": True} if states else {}
    llm = start_engine({**job["engine"], **recording})
    if states and (problem := llm.collective_rpc("crossspec_begin_states", args=(states["layers"],))[0]):
        raise ValueError(problem)

    def follow(order: dict[str, Any]) -> None:
        shard = job["shards"][order["shard"]]
        file = Path(job["out"], shard["file"])
        rows = _answer(llm, shard, job, emit)
        if states:
            lengths = {_name(shard, i): len(row.prompt_ids + row.response_ids) - 1 for i, row in enumerate(rows)}
            arguments = (str(states_path(file)), lengths, states["layers"], states["target"])
            llm.collective_rpc("crossspec_write_states", args=arguments)
        write_shard(file, rows)  # it marks the shard as done
        emit("shard", number=shard["number"], num_made=sum(len(row.response_ids) for row in rows))

    return follow


def _name(shard: dict[str, Any], number: int) -> str:
    """Of a prompt's request; no other shard has it."""
    return f"{shard['number']}.{number}"


def _answer(llm: Any, shard: dict[str, Any], job: dict[str, Any], emit: Emit) -> list[Generation]:
    """The responses to one shard's prompts, in their order; each with the token that ends it, if it was not cut."""
    from vllm import SamplingParams

    for number, prompt in enumerate(shard["prompts"]):
        sampling = {name: prompt[name] for name in ("temperature", "seed")}
        params = SamplingParams(
            **sampling, max_tokens=job["max_new_tokens"], stop_token_ids=[job["end_id"]], detokenize=False
        )
        llm.llm_engine.add_request(_name(shard, number), {"prompt_token_ids": prompt["ids"]}, params)
    answers: dict[str, list[int]] = {}
    for outputs in finished_outputs(llm.llm_engine, emit):
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return [
        Generation(prompt["ids"], answers[_name(shard, number)], prompt["category"], prompt["temperature"] == 0)
        for number, prompt in enumerate(shard["prompts"])
    ]


if __name__ == "__main__":
    run_job(generate)
