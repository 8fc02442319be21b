"""`crossspec pocket`: what of the pocket models to write into a command, wherever they are installed."""

import json
from typing import Annotated

import typer
from typer import Argument

from vllm_crossspec.cli.demo import METHODS, located
from vllm_crossspec.names import look_up
from vllm_crossspec.pocket_models import find_pocket


def pocket(
    method: Annotated[
        str | None, Argument(help="One of the demo's: print its --speculative-config.", show_default=False)
    ] = None,
) -> None:
    """Print the folder of the pocket models, or what `vllm serve` takes as one method's --speculative-config.

    Example: vllm serve "$(crossspec pocket)/target" --speculative-config "$(crossspec pocket eagle3-tree)"
    """
    if method is None:
        typer.echo(find_pocket())
        return
    drafting = {name: config for name, config in METHODS.items() if config is not None}
    typer.echo(json.dumps(located(look_up(method, drafting, "METHOD", "method"), find_pocket())))
