"""`crossspec check`: what is wrong with speculative configs. Commands that start an engine begin with it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Option

from vllm_crossspec.cli.options import parse_json
from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.config.summary import summary
from vllm_crossspec.frontend import precheck
from vllm_crossspec.model_names import folder_of, require_target
from vllm_crossspec.names import DEBUG_VARIABLE

if TYPE_CHECKING:  # torch takes seconds to import, and keys need none of it
    from vllm_crossspec.types import TargetFacts

NATIVE = "vLLM's own: it has no key of vllm_crossspec's, and vLLM checks it when it starts"

_CHANGING = ("hf_overrides", "hf_config_path", "config_format", "load_format")
"""Arguments of vLLM's engine with which a target or a drafter is not what its folder says."""


class Target(NamedTuple):
    """The target as vLLM's ModelConfig names it: a folder or hub id, as the tokenizer's (None: the same)."""

    model: str
    tokenizer: str | None = None
    revision: str | None = None


def check(
    spec: Annotated[
        list[str],
        Option("--spec", help="What --speculative-config takes, or a file with it; repeatable.", show_default=False),
    ],
    model: Annotated[
        str | None,
        Option(help="The target: a local folder or a hub id. Without it drafters are not compared with a target."),
    ] = None,
) -> None:
    """Say what is wrong with speculative configs, or what they mean, without starting an engine.

    Keys, values and folders take half a second. With --model the drafters' checkpoints are read, too, which takes a few
    seconds: whether they are whole, and of this target. `crossspec bench`, `batch`, `collect`, `costs` and `calibrate
    heterospec` begin with the same check, `vllm serve` and `LLM` with its first half.

    A config that is right is told in a line for each drafter. One that is wrong is told in one sentence, and the exit
    code is 2. What only vLLM can tell, as whether the target has layers that hold draft trees, it tells at its start.

    Example: crossspec check --model Qwen/Qwen3-8B --spec configs/qwen3-8b-eagle3-tree.json
    """
    if model is not None:
        require_target(model, "--model")
    problems = 0
    for given in spec:
        try:
            settings = checked(read_spec(given), Target(model) if model else None)
        except (ValueError, OSError) as problem:
            if os.environ.get(DEBUG_VARIABLE):
                raise
            typer.secho(f"{_name(given)}: {problem}", fg=typer.colors.RED, err=True)
            problems += 1
        else:
            typer.echo(f"{_name(given)}: " + "\n  ".join([NATIVE] if settings is None else summary(settings)))
    if problems:
        raise typer.Exit(2)


def checked_first(engine: Mapping[str, Any], specs: Mapping[str, Any]) -> None:
    """What a command asks before it imports anything heavy: whether its target and its configs can be meant.

    Raises ValueError: one sentence that names the config, the key and the fix.

    Args:
        engine: arguments of vLLM's LLM; ``model`` is as it was given to --model.
        specs: speculative configs by the names that messages give them; None is plain generation.
    """
    model, revision = str(engine["model"]), engine.get("revision")
    require_target(model, "--model", revision)
    targets: list[Target | None] = [None]  # keys of all come before any checkpoint
    if not any(engine.get(name) for name in _CHANGING):
        targets.append(Target(model, engine.get("tokenizer"), revision))
    for target in targets:
        for name, spec in specs.items():
            try:
                if spec is not None:
                    checked(spec, target)
            except ValueError as problem:
                raise ValueError(f"{name}: {problem}") from problem


def checked(raw: Mapping[str, Any], target: Target | None) -> CrossSpecConfig | None:
    """Settings of a speculative config that is found to be right; None for vLLM's own.

    Without a target, which the drafters must fit, keys and folders alone are looked at. Raises ValueError: one sentence
    that names the key and the fix.
    """
    settings = precheck.parse(raw)
    if settings is None:
        return None
    precheck.check_folders(settings)
    if target is None or (facts := target_facts(target)) is None:
        return settings
    from vllm_crossspec.frontend.resolve import with_files

    return with_files(settings, facts, target)


def target_facts(target: Target) -> "TargetFacts | None":
    """What config.json says of a target; None where it says it in a way that vLLM alone reads."""
    folder = folder_of(target.model, "--model", "target") if Path(target.model).is_dir() else None
    if folder is not None and not (folder / "config.json").is_file():
        return None
    from vllm_crossspec.kinds.checkpoint import read_config
    from vllm_crossspec.types import TargetFacts

    config = read_config(target.model, "--model", target.revision)
    text = config.get("text_config", config)
    sizes = [text.get(name) for name in ("hidden_size", "vocab_size", "num_hidden_layers")]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return TargetFacts(target.model, *sizes)


def read_spec(given: str) -> dict[str, Any]:
    """The config that an option names: JSON, or a file of it. Raises ValueError where it is no JSON object."""
    text = given if given.lstrip().startswith("{") else Path(given).read_text()
    config = parse_json("--spec", given, text)
    if not isinstance(config, dict):
        raise ValueError(f"--spec {given} is not an object: write what --speculative-config takes")
    return config


def _name(given: str) -> str:
    return "--spec" if given.lstrip().startswith("{") else given
