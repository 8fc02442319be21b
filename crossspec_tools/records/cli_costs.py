"""`crossspec costs`: what a round costs with each drafter on this machine, for routers and for what is simulated."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Option

from crossspec_tools.records.cli_collect import check_job, drafters_of, make_job
from vllm_crossspec.cli import meta, options
from vllm_crossspec.cli.processes import started
from vllm_crossspec.cli.stages import bars, grid, wide_console


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

    It starts an engine, which times all of that itself before its first request. That takes as
    long as a server's start.

    Then: `crossspec oracle --costs FILE` and `crossspec calibrate --costs FILE` judge by tokens a second, and "costs":
    "FILE" in a `router` goes by the file in the place of what its own engine would time.

    Example: crossspec costs --model Qwen/Qwen3-8B --spec whiflash.json --batch-size 32 --out costs.json
    """
    options.check_file("--out", out)
    speculative = {**drafters_of(spec), "router": {"policy": "goodput"}}
    check_job(model, spec, speculative)
    job = {
        "engine": make_job(out, model, speculative, engine, batch_size)["engine"],
        "groups": [],  # nothing is asked
        "chat": None,
        "sampling": {"max_tokens": 1},
        "environment": {"CROSSSPEC_FIXED_WIDTHS": ""},  # with 1, nothing would be timed
    }
    with bars() as progress:
        progress.add_task("costs: the engine starts and times its rounds", total=None)
        with started("costs", job) as running:
            (found, _), machine = running.follow(costs=True), running.about
    tables = found["costs"]
    if tables is None:
        raise ValueError(
            "costs: nothing was timed, for ranks that step together measure none; leave out data parallelism"
        )
    environment = {key: machine[key] for key in ("versions", "device")}
    options.write_json(out, {**tables, "meta": {**meta.origin(), **environment}})
    wide_console().print(_table(tables))
    typer.echo(f"costs in {out}")


def _table(tables: dict[str, Any]) -> Table:
    """A line for each drafter and batch size."""
    table = grid("milliseconds of a round", ("drafter", "requests", "draft", "verification", "switch"), ["drafter"])
    for number, name in enumerate(tables["drafters"]):
        for row, size in enumerate(tables["batch_sizes"]):
            parts = (f"{1e3 * tables[key][row][number]:.2f}" for key in ("draft", "verify", "switch"))
            table.add_row(name if not row else "", str(size), *parts)
    return table
