"""One offline run of one engine, in a process of its own: what `crossspec demo` and `bench` measure.

Started as ``python -m vllm_crossspec.engine.jobs.offline JOB EVENTS``: JOB is the file of a job that
:mod:`vllm_crossspec.cli.runner` wrote (its :class:`~vllm_crossspec.cli.runner.Job` describes it), EVENTS the
number of an open file descriptor. Events go there as JSON lines; what vLLM logs goes to stdout and stderr. What to do,
and how often, the job says in ``orders``, or someone in the lines of the pipe that it names (:class:`Measured`).

Events, by their ``event``:
    checking: the configuration of ``method``; a job that has ``checks`` in the place of its groups is these alone.
    ready: the engine is up; with what ran (versions, device, whether kernels are interpreted).
    progress: ``num_tokens`` generated since the last one.
    group: all prompts of one category are done; one record per generation and one of its times, the target rows of all
        their rounds, and their rounds by drafter.
    shares: what of a round is whose (``engine.startup.round_shares``).
    done: an order is carried out.
    error: ``message`` says in a sentence what the user can mend; the process ends with status 1.
"""

import dataclasses
import difflib
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_crossspec.config import settings_of
from vllm_crossspec.engine.jobs.client import Client, Conversation, Generation, Timing
from vllm_crossspec.engine.requests import CATEGORY
from vllm_crossspec.twins import runs_kernels

Emit = Callable[..., None]
START_TOKENS = 4
"""Of the one answer that every engine starts with."""
WARM_UP_TOKENS = 16
"""Of the answers before a measured pass."""
SHARES_PROMPTS = 8
"""At least, while the parts of a round are measured; fewer where there are no more."""


def run_job(argv: list[str], run: Callable[[dict[str, Any], Emit], None]) -> int:
    """What every engine process does with its arguments.

    Args:
        argv: file of the job, number of the descriptor for events.
        run: does the job and emits its events.

    Returns:
        The exit status.
    """
    job = json.loads(Path(argv[0]).read_text())
    events = os.fdopen(int(argv[1]), "w", buffering=1)
    # Processes that vLLM starts must not hold the channel open after this one has died.
    os.set_inheritable(events.fileno(), False)

    def emit(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")

    try:
        run(job, emit)
    except (ValueError, OSError) as problem:
        emit("error", message=sentence(problem))
        raise
    return 0


def _run(job: dict[str, Any], emit: Emit) -> None:
    if "checks" in job:
        for check in job["checks"]:
            emit("checking", method=check["method"])
            check_engine(check["engine"])
        return
    started = time.perf_counter()
    # A request's times are vLLM's own.
    llm = start_engine({**job["engine"], "disable_log_stats": False})
    measured = Measured(llm, job, emit)
    measured.warm_up(1, START_TOKENS)
    emit("ready", seconds=time.perf_counter() - started, **environment())
    for order in job["orders"] if "orders" in job else _lines(Path(job["orders_file"])):
        measured.follow(order)
        emit("done")


def shards_of(job: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The shards of a job: those that it lists, or those that come out of the pipe that it names (``shards_file``)."""
    return job["shards"] if "shards" in job else _lines(Path(job["shards_file"]))


def _lines(pipe: Path) -> Iterator[dict[str, Any]]:
    """As they are given, until whoever gives them closes the pipe."""
    with pipe.open() as lines:
        yield from map(json.loads, lines)


class Measured:
    """An engine that answers the job's prompts as it is ordered to.

    An order has ``batch_size``, the most requests at a time, and may have ``warm_up`` (answer the first prompts before,
    which counts nowhere), ``waves`` (answer at most so many times the batch size of each category's prompts),
    ``categories`` (answer the prompts of these alone) and ``shares`` (tell what of a round is whose, over some of the
    prompts).

    Args:
        llm: vLLM's LLM.
        job: as the module's docstring says.
        emit: takes the events.

    Raises:
        ValueError: a prompt is too long for the model.
    """

    def __init__(self, llm: Any, job: dict[str, Any], emit: Emit):
        self._llm, self._job, self._emit = llm, job, emit
        self._rows = [row for group in job["groups"] for row in group["prompts"]]
        settings = settings_of(llm.llm_engine.vllm_config)
        self._categories = settings.router.by_category if settings is not None and settings.router is not None else {}
        for row in self._rows:
            Conversation(llm, row, job["chat"]).next_prompt(llm.model_config.max_model_len)

    def follow(self, order: dict[str, Any]) -> None:
        """Answer the prompts; one event a category, or one with the shares of a round."""
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
            answers = self._answer(group["prompts"][:most], batch_size, group["category"])
            seconds = time.perf_counter() - started
            generations = [generation for generation, _ in answers]
            self._emit(
                "group",
                category=group["category"],
                seconds=seconds,
                num_verified_tokens=_verified_tokens(self._llm, generations, before),
                routes={name: count - routes[name] for name, count in _routes(self._llm).items()},
                generations=[generation._asdict() for generation in generations],
                timings=[timing._asdict() for _, timing in answers],
            )

    def warm_up(self, batch_size: int, max_tokens: int) -> None:
        """Compile what is compiled when it is first needed, and wake the machine up."""
        short = {**self._job["sampling"], "max_tokens": min(max_tokens, self._job["sampling"]["max_tokens"])}
        first = [{**row, "turns": row["turns"][:1]} for row in self._some(batch_size)]
        Client(self._llm, short, batch_size, lambda num_tokens: None).answer(self._conversations(first))

    def _answer(
        self, rows: list[dict[str, Any]], batch_size: int, category: str | None = None
    ) -> list[tuple[Generation, Timing]]:
        """Requests name the category where the engine's router has thresholds of it."""

        def report(num_tokens: int) -> None:
            self._emit("progress", num_tokens=num_tokens)

        sampling = dict(self._job["sampling"])
        if category in self._categories:
            sampling["extra_args"] = {CATEGORY: category}
        return Client(self._llm, sampling, batch_size, report).answer(self._conversations(rows))

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
    """Target rows of the rounds of these generations: what the device counted, or what vLLM's own drafters must need.

    Args:
        before: of :func:`_device_rows`, taken before them.
    """
    after = _device_rows(llm)
    if after is not None and before is not None:
        return after - before
    rows = 1 + (llm.llm_engine.vllm_config.num_speculative_tokens or 0)
    return rows * sum(generation.num_target_calls - 1 for generation in generations)


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

    vLLM's three processes would each import vLLM, and spin for each other on the same cores.

    Args:
        settings: keyword arguments of vLLM's LLM; what is there stands.
    """
    settings.setdefault("enforce_eager", True)
    if (settings.get("tensor_parallel_size") or 1) == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        settings.setdefault("distributed_executor_backend", "uni")
    # vLLM collects garbage ten times while an engine starts; nothing that was imported is any.
    gc.freeze()


def environment() -> dict[str, Any]:
    """What ran: versions, device, and whether Triton's kernels were interpreted."""
    from vllm.platforms import current_platform
    from vllm.version import __version__

    names = ("torch", "transformers", "triton")
    return {
        "versions": {
            "python": platform.python_version(),
            "vllm": __version__,
            **{name: metadata.version(name) for name in names},
        },
        "device": "cpu" if current_platform.is_cpu() else current_platform.get_device_name(),
        "kernels_interpreted": not runs_kernels(),
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
    sys.exit(run_job(sys.argv[1:], _run))
