"""One engine that answers the rows of a batch job, in a process of its own: what `crossspec batch` runs.

Started as ``python -m vllm_crossspec.engine.jobs.batch JOB EVENTS``, as :mod:`vllm_crossspec.engine.jobs.offline` is.
The job has ``engine`` (arguments of vLLM's LLM), ``sampling`` (parameters of rows that do not say their own), ``chat``,
``out`` (folder of the shards) and ``shards``: ``number``, ``file`` (its name) and ``requests`` of each, as
:mod:`vllm_crossspec.cli.batch_rows` makes them.

A shard's file has a line for itself (``number``, ``drafters``: acceptance by drafter, as the device counted it), and
one for each of its rows, in their order: what the job's output is made of. Whatever is wrong with a row is in its
``error``.

Events, by their ``event``:
    ready: the engine is up; with what runs.
    progress: ``num_tokens`` generated since the last one.
    shard: ``number`` is on the disk, with ``num_made`` rows.
    error: ``message`` says in a sentence what the user can mend; the process ends with status 1.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm_crossspec.config import settings_of
from vllm_crossspec.engine.jobs.client import finished_outputs
from vllm_crossspec.engine.jobs.offline import Emit, environment, run_job, sentence, shards_of, start_engine
from vllm_crossspec.files import replacing
from vllm_crossspec.names import nearest

Request = dict[str, Any]
Row = dict[str, Any]

OPENAI_NAMES = {"max_completion_tokens": "max_tokens", "vllm_xargs": "extra_args"}
"""Keys of a body that vLLM's sampling parameters call otherwise; other keys must be called as they are."""

HANDLED = {"stream": False, "n": 1, "logprobs": False, "echo": False, "user": None, "store": None, "metadata": None}
"""Keys of a body that say nothing, or nothing but this (None: anything)."""

COUNTS = ("rounds", "draft_tokens", "accepted_tokens")
FAILED = ("abort", "error")
"""Reasons for an end that is none of the model's."""


class RowError(ValueError):
    """What is wrong with one row."""


def answer_all(job: dict[str, Any], emit: Emit) -> None:
    """Answer the rows of every shard and write it."""
    started = time.perf_counter()
    llm = start_engine(job["engine"])
    answers = Answers(llm, job, emit)
    emit("ready", seconds=time.perf_counter() - started, **environment())
    for shard in shards_of(job):
        before = answers.counted()
        rows = answers.answer(shard["requests"])
        about = {"number": shard["number"], "drafters": answers.by_drafter(before, rows)}
        with replacing(Path(job["out"], shard["file"])) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in (about, *rows)))
        emit("shard", number=shard["number"], num_made=len(rows))


class Answers:
    """One engine's.

    Args:
        llm: vLLM's LLM.
        job: as the module's docstring says.
        emit: takes the events.
    """

    def __init__(self, llm: Any, job: dict[str, Any], emit: Emit) -> None:
        self._llm, self._job, self._emit = llm, job, emit
        self._tokenizer = llm.get_tokenizer()
        self._has_template = getattr(self._tokenizer, "chat_template", None) is not None
        if job["chat"] and not self._has_template:
            raise ValueError("this model's tokenizer has no chat template: pass --raw")
        settings = settings_of(llm.llm_engine.vllm_config)
        method = (job["engine"].get("speculative_config") or {}).get("method")
        names = [method] if settings is None else list(settings.drafters)
        self._drafter = names[0] if len(names) == 1 else None

    def answer(self, requests: list[Request]) -> list[Row]:
        """The output's rows, in the requests' order."""
        from vllm.exceptions import VLLMValidationError

        rows: dict[int, Row] = {}
        asked: dict[int, Request] = {}
        engine = self._llm.llm_engine
        for request in requests:
            number = request["row"]
            try:
                engine.add_request(str(number), {"prompt_token_ids": self._prompt(request)}, self._params(request))
                asked[number] = request
            except (VLLMValidationError, ValueError, TypeError) as problem:
                rows[number] = self._failed(request, sentence(problem))
        for outputs in finished_outputs(engine, self._emit):
            for output in outputs:
                request = asked[int(output.request_id)]
                reason = output.outputs[0].finish_reason
                failed = f"the engine ended the request ({reason})" if reason in FAILED else None
                rows[request["row"]] = self._failed(request, failed) if failed else self._answered(request, output)
        return [rows[request["row"]] for request in requests]

    def counted(self) -> dict[str, dict[str, int]]:
        """Acceptance by drafter so far, as the device counts it; empty where our proposers do not run."""
        stats = self._llm.collective_rpc("crossspec_stats")[0] or {}
        names = dict(zip(COUNTS, ("drafts", "draft_tokens", "accepted_tokens"), strict=True))
        return {drafter: {name: counts[other] for name, other in names.items()} for drafter, counts in stats.items()}

    def by_drafter(self, before: dict[str, dict[str, int]], rows: list[Row]) -> dict[str, dict[str, int]]:
        """Acceptance by drafter of these rows; of vLLM's own drafters what the rows say."""
        after = self.counted()
        if after:
            zero = dict.fromkeys(COUNTS, 0)
            return {
                drafter: {name: counts[name] - before.get(drafter, zero)[name] for name in COUNTS}
                for drafter, counts in after.items()
            }
        found = [row for row in map(acceptance_of, rows) if row is not None]
        return {self._drafter: {name: sum(one[name] for one in found) for name in COUNTS}} if self._drafter else {}

    def _prompt(self, request: Request) -> list[int]:
        """Token ids. Raises RowError."""
        prompt = request.get("prompt")
        if isinstance(prompt, list):
            return prompt
        wrapped = self._has_template if self._job["chat"] is None else self._job["chat"]
        if prompt is not None and (request["raw"] or not wrapped):
            return list(self._tokenizer.encode(prompt))
        messages = request.get("messages") or [{"role": "user", "content": prompt}]
        if not self._has_template:
            raise RowError("`messages`: this model's tokenizer has no chat template; give `prompt`")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as problem:  # a template raises what it likes
            raise RowError(f"`messages`: the chat template does not take them ({problem})") from problem
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _params(self, request: Request) -> Any:
        """vLLM's sampling parameters. Raises RowError where they are none."""
        import msgspec
        from vllm import SamplingParams

        own = request["sampling"] if request["url"] is None else _translated(request["sampling"])
        given = {**self._job["sampling"], **{name: value for name, value in own.items() if value is not None}}
        for name in given:
            if name not in SamplingParams.__struct_fields__:
                raise RowError(f"`{name}` is no sampling parameter{nearest(name, SamplingParams.__struct_fields__)}")
        if given.get("n", 1) != 1:
            raise RowError(f"`n` is {given['n']}: a row has one answer; write it as often as it is to be answered")
        if "seed" not in given and given["temperature"]:
            # By its number, so that it draws the same whichever engine answers it.
            given["seed"] = self._job["seed"] + request["row"]
        try:
            # Types, too: what the engine stumbles over ends it, and with it the answers of other rows.
            return msgspec.convert(given, SamplingParams)
        except msgspec.ValidationError as problem:
            raise RowError(str(problem)) from problem

    def _answered(self, request: Request, output: Any) -> Row:
        made, prompt_tokens = output.outputs[0], len(output.prompt_token_ids)
        acceptance = self._acceptance(made.spec_decode_metrics)
        if request["url"] is None:
            return {
                **_own_row(request),
                "text": made.text,
                "finish_reason": made.finish_reason,
                "prompt_tokens": prompt_tokens,
                "tokens": len(made.token_ids),
                "acceptance": acceptance,
            }
        is_chat = "messages" in request
        said = {"message": {"role": "assistant", "content": made.text}} if is_chat else {"text": made.text}
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request['row']}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._job["engine"]["model"],
            "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": made.finish_reason}],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(made.token_ids),
                "total_tokens": prompt_tokens + len(made.token_ids),
            },
            # Where vLLM's own server has it.
            "metrics": {"speculative_decoding": acceptance},
        }
        return _openai_row(request, 200, body, None)

    def _acceptance(self, metrics: Any) -> dict[str, Any] | None:
        """A row's rounds, by vLLM's own count; with the drafter where there is one alone."""
        if metrics is None:
            return None
        rounds = sum(metrics.histogram)
        accepted = sum(j * count for j, count in enumerate(metrics.histogram))
        return {
            "rounds": rounds,
            "draft_tokens": metrics.num_draft_tokens,
            "accepted_tokens": accepted,
            "length": round(1 + accepted / rounds, 4) if rounds else None,
            "drafter": self._drafter,
        }

    def _failed(self, request: Request, why: str) -> Row:
        if request["url"] is None:
            return {**_own_row(request), "error": why}
        error = {"message": why, "type": "invalid_request_error", "code": 400}
        return _openai_row(request, 400, {"error": error}, error)


def acceptance_of(row: Row) -> dict[str, Any] | None:
    """A row's acceptance, whichever its format."""
    if "response" in row:
        metrics = row["response"]["body"].get("metrics")
        row = {"acceptance": None if metrics is None else metrics["speculative_decoding"]}
    found: dict[str, Any] | None = row["acceptance"]
    return found


def _own_row(request: Request) -> Row:
    """All columns, so that every row of an output has the same."""
    names = ("text", "finish_reason", "prompt_tokens", "tokens", "acceptance", "error")
    return {"row": request["row"], "id": request["id"], **request["kept"], **dict.fromkeys(names)}


def _openai_row(request: Request, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> Row:
    number = f"batch_req_{request['row']}"
    response = {"status_code": status, "request_id": number, "body": body}
    return {"id": number, "custom_id": request["id"], "response": response, "error": error}


def _translated(body: dict[str, Any]) -> dict[str, Any]:
    """What a body of OpenAI's asks of the sampling, under vLLM's names. Raises RowError for what is not offered."""
    asked: dict[str, Any] = {}
    for name, value in body.items():
        if name == "response_format":
            asked |= _structure(value)
        elif name == "logit_bias" and value:
            asked[name] = {int(token): bias for token, bias in value.items()}
        elif name not in HANDLED:
            asked[OPENAI_NAMES.get(name, name)] = value
        elif HANDLED[name] is not None and value != HANDLED[name]:
            raise RowError(f"`{name}` is {value!r}: a batch job offers {HANDLED[name]!r} alone; leave it out")
    return asked


def _structure(given: Any) -> dict[str, Any]:
    """Of ``response_format``."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "json_schema" and isinstance(given.get("json_schema"), dict) and "schema" in given["json_schema"]:
        return {"structured_outputs": {"json": given["json_schema"]["schema"]}}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    if kind != "text":
        raise RowError(f"`response_format` is {given!r}: use text, json_object or json_schema with its schema")
    return {}


if __name__ == "__main__":
    sys.exit(run_job(sys.argv[1:], answer_all))
