"""One offline run of one engine, in a process of its own: what `crossspec demo` and `bench` measure.

Started as ``python -m vllm_crossspec.engine.jobs.offline JOB EVENTS``: JOB is the file of a job that
:mod:`vllm_crossspec.cli.runner` wrote (its :class:`~vllm_crossspec.cli.runner.Job` describes it), EVENTS the
number of an open file descriptor. Events go there as JSON lines; what vLLM logs goes to stdout and stderr.

Events, by their ``event``:
    checking: the configuration of ``method``; a job that has ``checks`` in the place of its groups is these alone.
    ready: the engine is up; with what ran (versions, device, whether kernels are interpreted).
    progress: ``num_tokens`` generated since the last one.
    group: all prompts of one category are done; one record per generation, and the target rows of all their rounds.
    error: ``message`` says in a sentence what the user can mend; the process ends with status 1.
"""

import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from vllm_crossspec.twins import runs_kernels

Emit = Callable[..., None]
WARM_UP_TOKENS = 4


class Generation(NamedTuple):
    """What the engine did for one prompt.

    Attributes:
        token_ids: the text's tokens, without the prompt's.
        text: the same as text.
        num_target_calls: target passes that gave this request tokens: one for the prompt and one a round.
        accepted_histogram: ``[j]`` is the number of rounds in which j draft tokens were accepted (vLLM's own
            count, taken before the text is cut at its end); empty without speculation.
        finish_reason: why it ended, in vLLM's word.
    """

    token_ids: list[int]
    text: str
    num_target_calls: int
    accepted_histogram: list[int]
    finish_reason: str


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
    except ValueError as problem:
        emit("error", message=_sentence(problem))
        raise
    return 0


def _run(job: dict[str, Any], emit: Emit) -> None:
    if "checks" in job:
        for check in job["checks"]:
            emit("checking", method=check["method"])
            check_engine(check["engine"])
        return
    started = time.perf_counter()
    llm = start_engine(job["engine"])
    prompts = [[Conversation(llm, row, job["chat"]) for row in group["prompts"]] for group in job["groups"]]
    limit = llm.model_config.max_model_len
    for conversation in (c for group in prompts for c in group):
        conversation.next_prompt(limit)
    generate(llm, {0: prompts[0][0].next_prompt(limit)}, {**job["sampling"], "max_tokens": WARM_UP_TOKENS}, _silent)
    emit("ready", seconds=time.perf_counter() - started, **environment())
    for group, conversations in zip(job["groups"], prompts, strict=True):
        before = _device_rows(llm)
        started = time.perf_counter()
        generations = _answer(llm, conversations, job["sampling"], emit)
        seconds = time.perf_counter() - started
        emit(
            "group",
            category=group["category"],
            seconds=seconds,
            num_verified_tokens=_verified_tokens(llm, generations, before),
            generations=[generation._asdict() for generation in generations],
        )


def _device_rows(llm: Any) -> int | None:
    """Target rows of all verifications so far: roots, draft nodes and the contemplate row of each of them, if any.

    None where our proposers do not run.
    """
    stats = llm.collective_rpc("crossspec_stats")[0]
    if stats is None:
        return None
    from vllm_crossspec.config import settings_of

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
    from vllm.platforms import current_platform

    settings = {key: value for key, value in engine.items() if value is not None}
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


class Conversation:
    """The turns of one prompt row, each a generation whose answer joins the history of the next."""

    def __init__(self, llm: Any, row: dict[str, Any], chat: bool | None) -> None:
        self._tokenizer = llm.get_tokenizer()
        template = getattr(self._tokenizer, "chat_template", None) is not None
        if chat and not template:
            raise ValueError("this model's tokenizer has no chat template: pass --raw")
        self._chat = template if chat is None else chat
        self._where, self._turns = row["where"], row["turns"]
        self._messages: list[dict[str, str]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def next_prompt(self, max_model_len: int | None) -> list[int]:
        """Token ids of the next turn's prompt. Raises ValueError where they leave no room for an answer.

        Args:
            max_model_len: tokens of prompt and answer; None where the caller looks at the length.
        """
        messages = [*self._messages, {"role": "user", "content": self._turns[len(self._messages) // 2]}]
        if self._chat:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            token_ids = self._tokenizer.encode("\n".join(message["content"] for message in messages))
        if max_model_len is not None and len(token_ids) >= max_model_len:
            raise ValueError(
                f"{self._where}: the prompt has {len(token_ids)} tokens and the model takes {max_model_len} "
                "with the answer: shorten it, or raise --max-model-len if the model allows"
            )
        return token_ids

    def add_answer(self, text: str) -> None:
        """Make the answer part of the next turn's history."""
        turn = self._turns[len(self._messages) // 2]
        self._messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": text}]


def _answer(llm: Any, conversations: list[Conversation], sampling: dict[str, Any], emit: Emit) -> list[Generation]:
    """All turns of all conversations: the first turns as one batch, then the second ones, and so on."""
    limit = llm.model_config.max_model_len
    generations: list[Generation] = []
    for turn in range(max(map(len, conversations))):
        prompts = {i: c.next_prompt(limit) for i, c in enumerate(conversations) if len(c) > turn}
        made = generate(llm, prompts, sampling, emit)
        for i, generation in made.items():
            conversations[i].add_answer(generation.text)
        generations += made.values()
    return generations


def generate(
    llm: Any,
    prompts: dict[int, list[int]],
    sampling: dict[str, Any],
    emit: Emit,
    after_step: Callable[[], None] = lambda: None,
) -> dict[int, Generation]:
    """One batch, stepped by hand: every output that a step gives a request is one target pass for it.

    Args:
        prompts: token ids of each prompt, by number; numbers are the requests' names.
        sampling: vLLM's sampling parameters; a seed in them is raised by the prompt's number, so that
            requests of a batch draw apart and a request draws the same whatever its batch.
        emit: takes the progress.
        after_step: called after every step of the engine.

    Returns:
        What became of each prompt, by number.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    for number, prompt in prompts.items():
        seed = None if sampling.get("seed") is None else sampling["seed"] + number
        params = SamplingParams(**{**sampling, "seed": seed}, output_kind=RequestOutputKind.DELTA)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    made = dict.fromkeys(prompts, Generation([], "", 0, [], ""))
    while engine.has_unfinished_requests():
        outputs = engine.step()
        for output in outputs:
            made[int(output.request_id)] = _extend(made[int(output.request_id)], output.outputs[0])
        if outputs:
            emit("progress", num_tokens=sum(len(output.outputs[0].token_ids) for output in outputs))
        after_step()
    return made


def _extend(generation: Generation, delta: Any) -> Generation:
    metrics = delta.spec_decode_metrics
    return Generation(
        token_ids=generation.token_ids + list(delta.token_ids),
        text=generation.text + delta.text,
        num_target_calls=generation.num_target_calls + bool(delta.token_ids),
        accepted_histogram=generation.accepted_histogram if metrics is None else list(metrics.histogram),
        finish_reason=delta.finish_reason or "",
    )


def _silent(event: str, **fields: Any) -> None:
    """Takes the events of the warm-up, which nobody waits for."""


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


def _sentence(problem: ValueError) -> str:
    """The first problem in one line, without pydantic's frame."""
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    return " ".join(str(problem).split())


if __name__ == "__main__":
    sys.exit(run_job(sys.argv[1:], _run))
