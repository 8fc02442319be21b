"""The process of an engine: it starts one and follows orders, until there are none left.

Started as ``python -m MODULE JOB EVENTS``, by :mod:`vllm_crossspec.cli.processes`. JOB is a file of JSON, whose
``orders`` name a pipe: each of its lines is an order. EVENTS is the number of an open file descriptor, for events as
JSON lines. What vLLM logs goes to stdout and stderr. Every module has these events, by their ``event``:

    ready: the engine is up; with what runs (versions, device) and the ``seconds`` that it took.
    progress: ``num_tokens`` generated since the last one.
    done: an order is carried out.
    error: ``message`` says in a sentence what the user can mend; the process ends with status 1.

This module is what `crossspec demo`, `bench` and `costs` run. Its job is a :class:`vllm_crossspec.cli.runner.Job`, its
orders are :class:`Measured`'s, and it has more events:

    checking: the configuration of ``method``; a job of ``checks`` is these alone.
    text: what a step added to the answer that is shown, ``drafted`` and then the target's ``own``; ``num_tokens`` and
        ``step`` count from 1, ``seconds`` since it was asked for.
    group: all prompts of one category are done; one record per generation, the target rows of all their rounds, and
        their rounds by drafter.
    shares: what of a round is whose (``load.round_shares``).
    costs: what rounds cost (``load.costs.as_json``); None where nothing was timed.
"""

import dataclasses
import difflib
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.jobs.client import Conversation, Generation, answer
from vllm_crossspec.step.requests import CATEGORY

Emit = Callable[..., None]
Follow = Callable[[dict[str, Any]], None]
START_TOKENS, WARM_UP_TOKENS = 4, 16
"""Of the one answer that every engine starts with, and of the answers before a measured pass."""
SHARES_PROMPTS = 8
"""At least, while the parts of a round are measured; fewer where there are no more."""


def run_job(start: Callable[[dict[str, Any], Emit], Follow]) -> None:
    """What every engine's process does; ``start`` gets a job's engine up and answers with what follows an order."""
    job = json.loads(Path(sys.argv[1]).read_text())
    events = os.fdopen(int(sys.argv[2]), "w", buffering=1)
    # Processes that vLLM starts must not hold the channel open after this one has died.
    os.set_inheritable(events.fileno(), False)

    def emit(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")

    try:
        # Opened while the other side holds it open: once that has closed it, opening would wait for ever.
        with open(job["orders"]) as orders:
            started = time.perf_counter()
            follow = start(job, emit)
            emit("ready", seconds=time.perf_counter() - started, **environment())
            for order in map(json.loads, orders):
                follow(order)
                emit("done")
    except (ValueError, OSError) as problem:
        emit("error", message=sentence(problem))
        raise


def start(job: dict[str, Any], emit: Emit) -> Follow:
    """Check configurations, or start an engine that is measured."""
    for check in job.get("checks", ()):
        emit("checking", method=check["method"])
        check_engine(check["engine"])
    if "checks" in job:
        return lambda order: None  # it gets none
    # A request's times are vLLM's own.
    measured = Measured(start_engine({**job["engine"], "disable_log_stats": False}), job, emit)
    measured.warm_up(1, START_TOKENS)
    return measured.follow


class Measured:
    """An engine that answers the job's prompts as it is ordered to.

    An order has ``batch_size``, the most requests at a time. With ``warm_up`` it first answers some prompts that do not
    count. ``waves`` bounds each category's prompts to so many times the batch size, ``categories`` chooses some, and
    ``number`` one prompt of each. With ``shares`` the parts of a round are measured, over some of the prompts.

    An order of ``costs`` tells what rounds cost, as timed at the start. An order to ``show`` tells the first prompt's
    answer step by step. Raises ValueError: a prompt is too long for the model.
    """

    def __init__(self, llm: Any, job: dict[str, Any], emit: Emit):
        self._llm, self._job, self._emit = llm, job, emit
        self._rows = [row for group in job["groups"] for row in group["prompts"]]
        settings = settings_of(llm.llm_engine.vllm_config)
        self._categories = settings.router.by_category if settings is not None and settings.router is not None else {}
        for conversation in self._conversations(self._rows):
            conversation.next_prompt(llm.model_config.max_model_len)

    def follow(self, order: dict[str, Any]) -> None:
        """Answer the prompts; one event a category, or one with the shares of a round, or with the costs."""
        if order.get("costs"):
            self._emit("costs", costs=self._llm.collective_rpc("crossspec_round_costs")[0])
            return
        if order.get("show"):
            self._show()
            return
        batch_size = order["batch_size"]
        self._llm.reset_prefix_cache()  # for who turned it on: a repeat must not find the prompts of the last
        if order.get("warm_up"):
            self.warm_up(batch_size, WARM_UP_TOKENS)
        if order.get("shares"):
            self._llm.collective_rpc("crossspec_begin_shares")
            self._answer(self._some(max(batch_size, SHARES_PROMPTS)), batch_size)
            self._emit("shares", shares=self._llm.collective_rpc("crossspec_end_shares")[0])
            return
        most = waves * batch_size if (waves := order.get("waves")) else None
        for group in self._job["groups"]:
            if group["category"] not in order.get("categories", [group["category"]]):
                continue
            before, routes = _device_rows(self._llm), _routes(self._llm)
            started = time.perf_counter()
            generations = self._answer(group["prompts"][:most], batch_size, group["category"], order.get("number"))
            seconds = time.perf_counter() - started
            self._emit(
                "group",
                category=group["category"],
                seconds=seconds,
                num_verified_tokens=_verified_tokens(self._llm, generations, before),
                routes={name: count - routes[name] for name, count in _routes(self._llm).items()},
                generations=[generation._asdict() for generation in generations],
            )

    def _show(self) -> None:
        """Tell every step of the first prompt's answer: all of its tokens but the last were drafted.

        The end may cut a step short. vLLM's count of accepted drafts comes with the last step, and says so.
        """
        self.warm_up(1, WARM_UP_TOKENS)
        tokenizer, begun, steps, drafted = self._llm.get_tokenizer(), time.perf_counter(), 0, 0

        def tell(before: Generation, after: Generation) -> None:
            nonlocal steps, drafted
            count = max(len(after.token_ids) - len(before.token_ids) - 1, 0)
            if after.accepted_histogram:
                accepted = sum(number * rounds for number, rounds in enumerate(after.accepted_histogram))
                count = min(accepted - drafted, len(after.token_ids) - len(before.token_ids))
            steps, drafted = steps + 1, drafted + count
            known = tokenizer.decode(after.token_ids[: len(before.token_ids) + count], skip_special_tokens=True)
            cut = max(len(known.rstrip("\ufffd")) if count else 0, len(before.text))
            told = {"drafted": after.text[len(before.text) : cut], "own": after.text[cut:], "step": steps}
            self._emit("text", **told, num_tokens=len(after.token_ids), seconds=time.perf_counter() - begun)

        answer(self._llm, self._conversations(self._rows[:1]), self._job["sampling"], 1, tell=tell)

    def warm_up(self, batch_size: int, max_tokens: int) -> None:
        """Compile what is compiled when it is first needed, and wake the machine up."""
        short = {**self._job["sampling"], "max_tokens": min(max_tokens, self._job["sampling"]["max_tokens"])}
        first = [{**row, "turns": row["turns"][:1]} for row in self._some(batch_size)]
        answer(self._llm, self._conversations(first), short, batch_size)

    def _answer(
        self, rows: list[dict[str, Any]], batch_size: int, category: str | None = None, number: int | None = None
    ) -> list[Generation]:
        sampling = dict(self._job["sampling"])
        if number is not None:
            rows = [rows[number]]
            if "seed" in sampling:  # a prompt's own, whatever is answered beside it
                sampling["seed"] += number
        if category in self._categories:  # the engine's router has thresholds of it
            sampling["extra_args"] = {CATEGORY: category}
        conversations = self._conversations(rows)
        return answer(self._llm, conversations, sampling, batch_size, lambda n: self._emit("progress", num_tokens=n))

    def _conversations(self, rows: list[dict[str, Any]]) -> list[Conversation]:
        return [Conversation(self._llm, row, self._job["chat"]) for row in rows]

    def _some(self, count: int) -> list[dict[str, Any]]:
        """As many prompts, spread over the categories."""
        return self._rows[:: max(len(self._rows) // count, 1)][:count]


def _routes(llm: Any) -> dict[str, int]:
    """Rounds of requests so far by the drafter that they were routed to; empty where nothing is routed."""
    routing = llm.collective_rpc("crossspec_routing")[0]
    return {} if routing is None else {name: one["decisions"] for name, one in routing["drafters"].items()}


def _device_rows(llm: Any) -> int | None:
    """Target rows of all verifications so far: roots, draft nodes and the contemplate row of each of them, if any.

    None where our proposers do not run.
    """
    stats = llm.collective_rpc("crossspec_stats")[0]
    if stats is None:
        return None
    settings = settings_of(llm.llm_engine.vllm_config)
    rows = 1 if settings is None else settings.rows_per_node
    return sum(rows * (s["drafts"] + s["draft_tokens"]) for s in stats.values())


def _verified_tokens(llm: Any, generations: list[Generation], before: int | None) -> int:
    """Target rows of all rounds of these generations: the device counts those with drafts; others have a row each.

    Of vLLM's own drafters it is what the scheduler planned. ``before`` are the :func:`_device_rows` before them.
    """
    after = _device_rows(llm)
    rounds = sum(generation.num_target_calls - 1 for generation in generations)
    if after is None or before is None:
        return rounds + sum(generation.num_draft_tokens for generation in generations)
    drafted = sum(sum(generation.accepted_histogram) for generation in generations)
    return after - before + rounds - drafted


def check_engine(engine: dict[str, Any]) -> None:
    """All that vLLM and this project find wrong with these arguments before any weight is loaded."""
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    EngineArgs(**_arguments(engine)).create_engine_config(usage_context=UsageContext.LLM_CLASS)


def start_engine(engine: dict[str, Any]) -> Any:
    """vLLM's LLM with these arguments, as fits the machine and the counting of rounds."""
    from vllm import LLM

    return LLM(**_arguments(engine))


def _arguments(engine: dict[str, Any]) -> dict[str, Any]:
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    settings = {key: value for key, value in engine.items() if value is not None}
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in settings:
        if name not in known:
            (close,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(f"--engine-args {name}: vLLM's EngineArgs has no such field; did you mean {close!r}?")
    if current_platform.is_cpu():
        keep_to_one_process(settings)
    if "speculative_config" in settings:
        settings["per_request_spec_decode_metrics"] = "summary"
    # A prompt that is found in the prefix cache starts with a round of placeholder drafts, which would count
    # as rejected.
    return {"enable_prefix_caching": False, "disable_log_stats": True, **settings}


def keep_to_one_process(settings: dict[str, Any]) -> None:
    """Fill in what makes an engine on a CPU start in a second: one process, and nothing compiled by torch.

    vLLM's three processes would each import vLLM, and spin for each other on the same cores. What is there stands.
    """
    settings.setdefault("enforce_eager", True)
    if (settings.get("tensor_parallel_size") or 1) == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        settings.setdefault("distributed_executor_backend", "uni")
    # vLLM collects garbage ten times while an engine starts; nothing that was imported is any.
    gc.freeze()


def environment() -> dict[str, Any]:
    """What ran: versions and device."""
    from vllm.platforms import current_platform
    from vllm.version import __version__

    versions = {"python": platform.python_version(), "vllm": __version__}
    versions |= {name: metadata.version(name) for name in ("torch", "transformers", "triton")}
    return {
        "versions": versions,
        "device": "cpu" if current_platform.is_cpu() else current_platform.get_device_name(),
    }


def sentence(problem: Exception) -> str:
    """The first problem in one line, without pydantic's frame."""
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    return " ".join(str(problem).split())


if __name__ == "__main__":
    run_job(start)
