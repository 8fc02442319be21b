"""`crossspec costs`: what a round costs with each drafter on this machine, for routers and for what is simulated."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Option

from vllm_crossspec.cli import meta, options
from vllm_crossspec.cli.collect import drafters_of
from vllm_crossspec.cli.compare import wide_console
from vllm_crossspec.cli.processes import EngineError, engine_events
from vllm_crossspec.cli.stages import bars
from vllm_crossspec.pocket_models import find_pocket

MODULE = "vllm_crossspec.engine.jobs.costs"


@options.grouped
def costs(
    *,
    out: Annotated[Path, Option(help="File of the costs, JSON.")],
    model: options.Target = None,
    spec: options.DraftersFile = None,
    batch_size: Annotated[int, Option(min=1, help="Most requests at a time; powers of two up to it are measured.")] = 8,
    engine: options.EngineOptions,
) -> None:
    """Time what a round costs with each drafter: its draft, the target's pass over it, and a switch to it.

    It starts an engine, which times all of that itself before its first request. That takes as long as a server's start
    and needs a GPU, or a CPU for which kernels are compiled.

    Then: `crossspec oracle --costs FILE` and `crossspec calibrate --costs FILE` judge by tokens a second, and "costs":
    "FILE" in a `router` goes by the file in the place of what its own engine would time.

    Example: crossspec costs --model Qwen/Qwen3-8B --spec whiflash.json --batch-size 32 --out costs.json
    """
    options.check_file("--out", out)
    speculative = {**drafters_of(spec), "router": {"policy": "goodput"}}
    if model is None and engine.dtype == "auto":
        engine = engine._replace(dtype="float32")
    arguments = engine.arguments(model or str(find_pocket() / "target"), batch_size)
    job: dict[str, Any] = {"engine": {**arguments, "speculative_config": speculative}}
    with bars() as progress:
        progress.add_task("costs: the engine starts and times its rounds", total=None)
        found = [event for event in engine_events("costs", job, MODULE) if event["event"] == "costs"]
    if not found:
        raise EngineError("costs: the engine's process ended without a word")
    tables = found[0]["costs"]
    if tables is None:
        raise ValueError(
            "costs: nothing was timed, for kernels are interpreted here; use a GPU, or a CPU with a C compiler"
        )
    machine = {key: value for key, value in found[0].items() if key not in ("event", "costs")}
    options.write_json(out, {**tables, "meta": {**meta.origin(), **machine}})
    wide_console().print(_table(tables))
    typer.echo(f"costs in {out}")


def _table(tables: dict[str, Any]) -> Table:
    """Milliseconds, a line for each drafter and batch size."""
    table = Table(title="milliseconds of a round")
    for column in ("drafter", "requests", "draft", "verification", "switch"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for number, name in enumerate(tables["drafters"]):
        for row, size in enumerate(tables["batch_sizes"]):
            parts = (f"{1e3 * tables[key][row][number]:.2f}" for key in ("draft", "verify", "switch"))
            table.add_row(name if not row else "", str(size), *parts)
    return table
