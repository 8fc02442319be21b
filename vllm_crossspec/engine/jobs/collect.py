"""One engine in record mode, in a process of its own: what `crossspec collect` runs.

Started as ``python -m vllm_crossspec.engine.jobs.collect JOB EVENTS``, as :mod:`vllm_crossspec.engine.jobs.offline`
is. The job has ``engine`` (arguments of vLLM's LLM), ``sampling`` (of its SamplingParams), ``chat``, ``out`` (folder
of the shards), ``max_prompt_tokens``, ``model`` (the target's name) and ``shards``: ``number``, ``file`` (its name) and
``prompts`` of each, a prompt being ``text`` (number of its first turn's text), ``category``, ``turns`` and ``where``.

Events, by their ``event``:
    ready: the engine is up; with what runs.
    progress: ``num_tokens`` generated since the last one.
    shard: ``number`` is on the disk, with ``num_texts`` answered and ``num_made`` records.
    error: ``message`` says in a sentence what the user can mend; the process ends with status 1.
"""

import sys
import time
from pathlib import Path
from typing import Any

from vllm_crossspec.config import settings_of
from vllm_crossspec.engine.jobs.client import Conversation, finished_outputs
from vllm_crossspec.engine.jobs.offline import Emit, environment, run_job, shards_of, start_engine
from vllm_crossspec.training import records
from vllm_crossspec.training.records import Answer, Facts

STEPS_PER_TRANSFER = 64
"""Engine steps between two transfers of records from the worker."""

TOO_LONG = "prompt too long"


def collect(job: dict[str, Any], emit: Emit) -> None:
    """Answer the prompts of every shard and write it."""
    started = time.perf_counter()
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
    emit("ready", seconds=time.perf_counter() - started, **environment())
    for shard in shards_of(job):
        recording = Recording(llm, job, emit, "crossspec_take_records")
        answers = recording.answer(shard["prompts"])
        tensors = records.assemble(recording.steps, answers, facts)
        records.write_shard(Path(job["out"], shard["file"]), tensors, answers, facts)
        emit("shard", number=shard["number"], num_texts=len(answers), num_made=len(tensors["entropy"]))


class Recording:
    """The answers to one shard's prompts, and what was recorded meanwhile.

    Args:
        llm: the engine.
        job: as the module's docstring says.
        emit: takes the events.
        method: the worker's, that hands out what was recorded since its last call.

    Attributes:
        steps: (request ids, tensors in safetensors' format) in the order of time.
    """

    def __init__(self, llm: Any, job: dict[str, Any], emit: Emit, method: str):
        self.llm, self.sampling, self.emit, self.method = llm, job["sampling"], emit, method
        self.chat = job["chat"]
        self.max_prompt_tokens = min(job["max_prompt_tokens"], llm.model_config.max_model_len - 1)
        self.steps: list[tuple[list[str], bytes]] = []

    def answer(self, prompts: list[dict[str, Any]]) -> dict[int, Answer]:
        """Texts by number; the first turns as one batch, then the second ones, and so on."""
        conversations = [(prompt, Conversation(self.llm, prompt, self.chat)) for prompt in prompts]
        answers: dict[int, Answer] = {}
        for turn in range(max(len(conversation) for _, conversation in conversations)):
            batch: dict[int, tuple[str, list[int], Conversation]] = {}
            for prompt, conversation in conversations:
                if len(conversation) <= turn:
                    continue
                number, category = prompt["text"] + turn, prompt["category"]
                token_ids = conversation.next_prompt(None)
                if len(token_ids) > self.max_prompt_tokens:
                    answers[number] = Answer(category, len(token_ids), [], TOO_LONG)
                    conversation.add_answer("")
                else:
                    batch[number] = (category, token_ids, conversation)
            self._generate(batch, answers)
        return answers

    def _generate(self, batch: dict[int, tuple[str, list[int], Conversation]], answers: dict[int, Answer]) -> None:
        """Answer one turn of all conversations; sampled texts draw by their number, whatever batch they are in."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        for number, (_, token_ids, _) in batch.items():
            seed = None if self.sampling.get("seed") is None else self.sampling["seed"] + number
            params = SamplingParams(**{**self.sampling, "seed": seed})
            engine.add_request(str(number), {"prompt_token_ids": token_ids}, params)
        for step, outputs in enumerate(finished_outputs(engine, self.emit), start=1):
            for output in outputs:
                number, made = int(output.request_id), output.outputs[0]
                category, token_ids, conversation = batch[number]
                answers[number] = Answer(category, len(token_ids), list(made.token_ids), made.finish_reason or "")
                conversation.add_answer(made.text)
            if step % STEPS_PER_TRANSFER == 0:
                self._take()
        self._take()

    def _take(self) -> None:
        taken = self.llm.collective_rpc(self.method)[0]
        self.steps += [(list(ids), bytes(content)) for ids, content in taken]


if __name__ == "__main__":
    sys.exit(run_job(sys.argv[1:], collect))
