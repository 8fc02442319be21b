"""What commands share: options one by one and in groups, and the checks of what was given."""

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from typer import Option

AnswerTokens = Annotated[int, Option(min=1, help="Longest answer, in tokens.")]
Limit = Annotated[int | None, Option(min=1, help="Use this many prompts of each category.")]
Greedy = Annotated[float, Option(min=0.0, help="0 is greedy.")]
EngineBatch = Annotated[int, Option(min=1, help="Most requests at a time, of each engine.")]
Target = Annotated[
    str | None, Option(help="The target: a local folder or a hub id. Default: the pocket target, in float32.")
]
DraftersFile = Annotated[
    Path | None,
    Option(
        help="A file with the JSON of --speculative-config, method whiflash; its router is not looked at. Default: the "
        "demo's pair."
    ),
]
Engines = Annotated[int, Option(min=1, help="Engines side by side; more than one run on Ray.")]
MemoryShare = Annotated[float | None, Option(min=0.05, max=1.0, help="vLLM's own.")]
TensorParallel = Annotated[int | None, Option(min=1, help="vLLM's own.")]
TableFile = Annotated[Path | None, Option("--json", help="Write the table as one JSON document.")]


class EngineOptions(NamedTuple):
    """How an engine is to run; vLLM decides about values of None."""

    chat: Annotated[
        bool | None, Option("--chat/--raw", help="Wrap prompts in the chat template. Default: if there is one.")
    ] = None
    dtype: Annotated[
        str, Option(help="Weights' type. Texts can be expected to equal plain's to the token in float32 only.")
    ] = "auto"
    max_model_len: Annotated[int | None, Option(min=2, help="Longest prompt and answer, in tokens.")] = None
    gpu_memory_utilization: MemoryShare = None
    tensor_parallel_size: TensorParallel = None
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="vLLM's own.")] = False

    def arguments(self, model: str, batch_size: int) -> dict[str, Any]:
        """Of vLLM's LLM."""
        given = {**self._asdict(), "trust_remote_code": self.trust_remote_code or None}
        del given["chat"]
        return {"model": model, "max_num_seqs": batch_size, **given}


class Answers(NamedTuple):
    """Which texts are recorded: the answers of a target to prompts, in shards."""

    model: Target = None
    prompts: Annotated[
        list[Path] | None,
        Option(
            help="JSON lines (or .jsonl.gz) with `prompt` or `turns`, and `category`; repeatable. Default: the demo's."
        ),
    ] = None
    limit: Limit = None
    max_tokens: Annotated[int, Option(min=2, help="Longest answer, in tokens.")] = 256
    max_prompt_tokens: Annotated[
        int, Option(min=1, help="Longer prompts are left out, and those that leave the model no room for an answer.")
    ] = 2048
    seed: Annotated[int, Option(min=0, help="Of sampled answers; each text adds its number.")] = 0
    shard_prompts: Annotated[int, Option(min=1, help="Prompts of a shard: what a stop can lose.")] = 64


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters may be NamedTuples of options; typer sees the options themselves."""
    options: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind: Any = parameter.annotation
        if hasattr(kind, "_field_defaults"):
            groups[parameter.name] = kind
            for name, hint in get_type_hints(kind, include_extras=True).items():
                default = kind._field_defaults.get(name, parameter.empty)
                options.append(inspect.Parameter(name, parameter.KEYWORD_ONLY, default=default, annotation=hint))
        else:
            options.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in kind._fields})
        command(**given)

    call.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return call


def check_file(option: str, file: Path | None) -> None:
    """Find out before the work, not after it, that a file can be written. Raises ValueError."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        raise ValueError(f"{option} {file}: name a file in a folder that exists")


def parse_json(option: str, given: object, text: str) -> Any:
    """What a user wrote as JSON. Raises ValueError, which names the line that is wrong."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise ValueError(f"{option} {given} is not JSON (line {problem.lineno}: {problem.msg})") from problem


def write_json(file: Path | None, document: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(document, indent=2) + "\n")


def integers(option: str, given: str, what: str) -> list[int]:
    """Comma-separated integers. Raises ValueError."""
    try:
        return [int(part) for part in given.split(",")]
    except ValueError as problem:
        raise ValueError(f"{option} {given}: give {what} with commas between them") from problem


def name_list(given: str) -> list[str]:
    return [name.strip() for name in given.split(",")]
