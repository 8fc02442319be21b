"""The process of an engine in record mode: what `crossspec collect` runs, as :mod:`vllm_crossspec.jobs.offline` is run.

The job has ``engine`` (arguments of vLLM's LLM), ``sampling`` (of its SamplingParams), ``chat``, ``out`` (folder of the
shards), ``max_prompt_tokens``, ``model`` (the target's name) and ``shards``. A shard has ``number``, ``file`` (its
name) and ``prompts``; a prompt ``text`` (number of its first turn's text), ``category``, ``turns`` and ``where``. An
order has the place of a ``shard``. Its event ``shard`` has the ``number`` and ``num_made``, how many records.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossspec_tools.records.shards import Steps
from crossspec_tools.train import records
from crossspec_tools.train.records import Answer, Facts
from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.jobs.client import Conversation, finished_outputs
from vllm_crossspec.jobs.offline import Emit, Follow, run_job, start_engine

STEPS_PER_TRANSFER = 64
"""Engine steps between two transfers of records from the worker."""

TOO_LONG = "prompt too long"

Write = Callable[[Path, Steps, dict[int, Answer]], int]
"""Writes a shard's file, of what was recorded and the answers; how many records it has."""


def collect(job: dict[str, Any], emit: Emit) -> Follow:
    """Start the engine; an order has the prompts of a shard answered and what was recorded written."""
    llm = start_engine(job["engine"])
    config = llm.llm_engine.vllm_config
    settings = settings_of(config)
    assert settings is not None
    order = settings.routing_order
    facts = Facts(
        model=job["model"],
        hidden_size=config.model_config.get_hidden_size(),
        drafters=order,
        depths=tuple(settings.drafters[name].num_speculative_tokens or 0 for name in order),
    )

    def write(file: Path, steps: Steps, answers: dict[int, Answer]) -> int:
        tensors = records.assemble(steps, answers, facts)
        records.write_shard(file, tensors, answers, facts)
        return len(tensors["entropy"])

    return Recording(llm, job, emit, "crossspec_take_records", write).follow


class Recording:
    """An engine that answers shards of prompts, and what was recorded meanwhile.

    ``method``: the worker's, that hands out what was recorded since its last call.
    """

    def __init__(self, llm: Any, job: dict[str, Any], emit: Emit, method: str, write: Write) -> None:
        self._llm, self._job, self._emit, self._method, self._write = llm, job, emit, method, write
        self._max_prompt_tokens = min(job["max_prompt_tokens"], llm.model_config.max_model_len - 1)
        self._steps: list[tuple[list[str], bytes]] = []

    def follow(self, order: dict[str, Any]) -> None:
        """Answer the prompts of a shard and write it."""
        shard, self._steps = self._job["shards"][order["shard"]], []
        answers = self._answer(shard["prompts"])
        num_made = self._write(Path(self._job["out"], shard["file"]), self._steps, answers)
        self._emit("shard", number=shard["number"], num_made=num_made)

    def _answer(self, prompts: list[dict[str, Any]]) -> dict[int, Answer]:
        """Texts by number; the first turns as one batch, then the second ones, and so on.

        Sampled texts draw by their number, whatever batch they are in.
        """
        from vllm import SamplingParams

        engine, sampling = self._llm.llm_engine, self._job["sampling"]
        conversations = [(prompt, Conversation(self._llm, prompt, self._job["chat"])) for prompt in prompts]
        answers: dict[int, Answer] = {}
        for turn in range(max(len(conversation) for _, conversation in conversations)):
            batch: dict[int, tuple[str, int, Conversation]] = {}
            for prompt, conversation in conversations:
                if len(conversation) <= turn:
                    continue
                number, category = prompt["text"] + turn, prompt["category"]
                token_ids = conversation.next_prompt(None)
                if len(token_ids) > self._max_prompt_tokens:
                    answers[number] = Answer(category, len(token_ids), [], TOO_LONG)
                    conversation.add_answer("")
                    continue
                seed = None if sampling.get("seed") is None else sampling["seed"] + number
                params = SamplingParams(**{**sampling, "seed": seed})
                engine.add_request(str(number), {"prompt_token_ids": token_ids}, params)
                batch[number] = category, len(token_ids), conversation
            for step, outputs in enumerate(finished_outputs(engine, self._emit), start=1):
                for output in outputs:
                    number, made = int(output.request_id), output.outputs[0]
                    category, length, conversation = batch[number]
                    answers[number] = Answer(category, length, list(made.token_ids), made.finish_reason or "")
                    conversation.add_answer(made.text)
                if step % STEPS_PER_TRANSFER == 0:
                    self._take()
            self._take()
        return answers

    def _take(self) -> None:
        taken = self._llm.collective_rpc(self._method)[0]
        self._steps += [(list(ids), bytes(content)) for ids, content in taken]


if __name__ == "__main__":
    run_job(collect)
